"""Images: how they are compressed in replay.

An image is uint8 [C, H, W] (channels, height, width) everywhere: simulator, ring, batch, network.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import numpy as np

#: ``none`` keeps pixels in the rows; the others put compressed images into the ring's arena.
CODECS = ("none", "zlib", "lz4")


class ImageCodec(NamedTuple):
    """Lossless compression of single images.

    What would not become shorter is kept as it is: a stored image is never longer than ``size``, and one of exactly
    this length is not compressed.

    Attributes:
        size: bytes of an image.
    """

    size: int
    compress: Callable[[bytes], bytes]
    decompress: Callable[[bytes], bytes]

    def encode(self, image: np.ndarray) -> bytes:
        """Stored form of uint8 [C, H, W]."""
        raw = image.tobytes()
        packed = self.compress(raw)
        return packed if len(packed) < self.size else raw

    def decode(self, stored: bytes) -> np.ndarray:
        """Inverse of :meth:`encode`, uint8 [``size``]."""
        return np.frombuffer(stored if len(stored) == self.size else self.decompress(stored), np.uint8)


def make_codec(name: str, size: int) -> ImageCodec:
    """Codec for images of ``size`` bytes.

    Raises:
        EnvError: lz4 is not installed in this interpreter.
        ValueError: no such codec.
    """
    if name == "zlib":
        import zlib

        # The fastest level: the higher ones take several times as long for a tenth of the bytes.
        return ImageCodec(size, lambda raw: zlib.compress(raw, 1), zlib.decompress)
    if name == "lz4":
        try:
            import lz4.block as lz4
        except ImportError as error:
            # Not at the top: whoever only reads rings needs no simulators.
            from claw_lightning.rollout.envs.base import EnvError

            raise EnvError(
                "data.image_codec: lz4 needs the package lz4 in the interpreters of learner and workers; pip install "
                "lz4, or set data.image_codec zlib"
            ) from error
        block: Any = lz4
        return ImageCodec(
            size,
            lambda raw: block.compress(raw, store_size=False),
            lambda packed: block.decompress(packed, uncompressed_size=size),
        )
    raise ValueError("image codec '%s' is unknown; use %s" % (name, ", ".join(CODECS)))
