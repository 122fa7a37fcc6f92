"""Options drawn on images of episodes, with Pillow (``pip install 'claw-lightning[video]'``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

#: Colours that people of all kinds of colour vision tell apart (Okabe and Ito 2008, and four more), then the same
#: darker; those of scripts/report.py.
PALETTE = (
    (0, 114, 178), (230, 159, 0), (0, 158, 115), (204, 121, 167), (86, 180, 233), (213, 94, 0),
    (201, 180, 0), (140, 140, 140), (170, 68, 153), (17, 119, 51), (153, 153, 51), (166, 94, 46),
)  # fmt: skip
#: Pixels: height of the band with the option's name, of the time line, and the sizes that videos are filled up to.
BAND, LINE, MULTIPLE = 16, 8, 16
BACKGROUND = (32, 32, 32)
#: Images in a film strip, at most, and the least width of one in pixels.
STRIP_IMAGES, STRIP_WIDTH = 8, 320


def colour(option: int) -> tuple[int, int, int]:
    """RGB of an option, 0 to 255."""
    red, green, blue = PALETTE[option % len(PALETTE)]
    shade = 0.6 ** (option // len(PALETTE))
    return int(red * shade), int(green * shade), int(blue * shade)


def time_line(options: np.ndarray, length: int, width: int, height: int = LINE) -> np.ndarray:
    """The options [T] of an episode's first T steps, of ``length``, as a coloured line [height, width, 3] uint8."""
    columns = np.arange(width) * length // width
    colours = np.array([colour(int(option)) for option in options], np.uint8).reshape(-1, 3)
    row = np.full((width, 3), BACKGROUND, np.uint8)
    row[columns < len(options)] = colours[columns[columns < len(options)]]
    return np.repeat(row[None], height, 0)


def annotated(arrays: Mapping[str, Any], episode: int) -> np.ndarray:
    """The images of an episode below a band in the colour of the running option, above the time line so far.

    Args:
        arrays: as :class:`callbacks.EpisodeVideo` writes them.
        episode: its number.

    Returns:
        [F, H, W, 3] uint8; height and width are multiples of 16, as video codecs like them.
    """
    from PIL import Image, ImageDraw

    options = arrays["option"][arrays["episode"] == episode]
    chosen = arrays["frame_episode"] == episode
    frames, steps = arrays["frames"][chosen], arrays["frame_step"][chosen]
    height, width = (-(-size // MULTIPLE) * MULTIPLE for size in (BAND + frames.shape[1] + LINE, frames.shape[2]))
    made = np.empty((len(frames), height, width, 3), np.uint8)
    made[:] = BACKGROUND
    left = (width - frames.shape[2]) // 2
    for canvas, frame, step in zip(made, frames, steps, strict=True):
        fill = colour(int(options[step]))
        band = Image.new("RGB", (width, BAND), fill)
        ink = "black" if sum(fill) > 300 else "white"
        ImageDraw.Draw(band).text((4, 2), f"option {options[step]}   step {step}", fill=ink)
        canvas[:BAND] = np.asarray(band)
        canvas[BAND : BAND + len(frame), left : left + frame.shape[1]] = frame
        canvas[-LINE:] = time_line(options[: step + 1], len(options), width)
    return made


def film_strip(arrays: Mapping[str, Any], episode: int = 0) -> np.ndarray:
    """Up to eight images of an episode in a row, each framed by its option's colour, above the whole time line.

    Without images the time line alone. Arguments as of :func:`annotated`; [H, W, 3] uint8.
    """
    options = arrays["option"][arrays["episode"] == episode]
    chosen = np.flatnonzero(arrays["frame_episode"] == episode)
    picked = chosen[np.unique(np.linspace(0, len(chosen) - 1, STRIP_IMAGES).round().astype(int))] if len(chosen) else []
    tiles = []
    for index in picked:
        frame = arrays["frames"][index]
        small = frame[:: -(-len(frame) // 120), :: -(-len(frame) // 120)]
        tile = np.empty((small.shape[0] + 2 * LINE, small.shape[1] + 2 * LINE, 3), np.uint8)
        tile[:] = colour(int(options[arrays["frame_step"][index]]))
        tile[LINE:-LINE, LINE:-LINE] = small
        tiles.append(tile)
    width = sum(tile.shape[1] for tile in tiles) or STRIP_WIDTH
    line = time_line(options, len(options), width, 2 * LINE)
    gap = np.zeros((LINE // 2, width, 3), np.uint8)
    return np.concatenate([np.concatenate(tiles, 1), gap, line]) if tiles else line
