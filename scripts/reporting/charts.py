"""What all charts of the page share: their frame, colours and the numbering of options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import plotly.graph_objects as go

#: One colour per option, everywhere on the page: Okabe and Ito (2008), then Tol's muted ones. Told apart with the usual
#: kinds of colour blindness, and visible on light and on dark.
OPTION_COLORS = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#C9B400", "#8C8C8C",
    "#AA4499", "#117733", "#999933", "#A65E2E",
)  # fmt: skip
#: Whatever is no option (groups of runs, processes): other colours, and a dash of its own.
LINE_COLORS = ("#7B68EE", "#C2185B", "#9A6B3F", "#7D8790")
DASHES = ("solid", "dash", "dot", "dashdot")
#: Between the chart's left edge and its axis, in px: the same in charts that lie above one another.
LEFT, RIGHT = 62, 14
_numbers = count()


@dataclass(frozen=True)
class Chart:
    """A figure with what a reader needs beside it.

    Attributes:
        title: over it.
        how: one sentence: how to read it; empty where it is said once above several charts.
        alt: what it shows, for those who cannot see it.
        figure: of plotly.
        height: px.
        identity: unique on the page.
    """

    title: str
    how: str
    alt: str
    figure: go.Figure
    height: int = 300
    identity: str = field(default_factory=lambda: f"chart-{next(_numbers)}")

    @property
    def json(self) -> str:
        """For a script element of the page: no ``</`` may end it early."""
        return str(self.figure.to_json()).replace("</", "<\\/")


def option_color(option: int) -> str:
    """Colours repeat after the twelfth; the numbers beside them do not."""
    return OPTION_COLORS[option % len(OPTION_COLORS)]


def text_color(background: str) -> str:
    """Black or white, whichever is easier to read on it."""
    red, green, blue = (int(background[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return "#000000" if 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 > 0.18 else "#ffffff"


def faded(color: str, opacity: float) -> str:
    """The colour as rgba()."""
    return f"rgba({','.join(str(int(color[i : i + 2], 16)) for i in (1, 3, 5))},{opacity})"


def line_style(number: int) -> dict[str, Any]:
    """Colour and dash of the n-th line that is no option."""
    return {
        "color": LINE_COLORS[number % len(LINE_COLORS)],
        "dash": DASHES[(number // len(LINE_COLORS) + number) % len(DASHES)],
        "width": 2,
    }


def new_figure(x: str = "", y: str = "", **layout: Any) -> go.Figure:
    """An empty figure with the titles of its axes; colours of text and grid come with the page's scheme."""
    figure = go.Figure()
    settings: dict[str, Any] = {
        "template": None,
        "margin": {"l": LEFT, "r": RIGHT, "t": 10, "b": 46},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        "hovermode": "closest",
        "xaxis": {"title": {"text": x}},
        "yaxis": {"title": {"text": y}},
    }
    for key, value in layout.items():
        settings[key] = {**settings[key], **value} if isinstance(settings.get(key), dict) else value
    figure.update_layout(settings)
    return figure


def numbers(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Single precision: half the page."""
    return np.asarray(values, np.float32)


def percent(share: float) -> str:
    """For sentences and tables."""
    return f"{100 * share:.0f}\N{NO-BREAK SPACE}%"


def number(value: float, digits: int = 3) -> str:
    """For sentences and tables: significant digits, thousands separated, without an exponent."""
    if not np.isfinite(value):
        return "unknown"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    text = np.format_float_positional(value, digits, unique=False, fractional=False, trim="-")
    return "0" if text in ("-0", "0.") else text
