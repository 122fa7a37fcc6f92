"""Pictures of the page's parts, taken by the Chromium of the system."""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from reporting.runs import ReportError

#: Parts of the page that can be had as a picture; each is an element, or what follows a heading up to the next one.
PARTS = (
    "headline",
    "curves",
    "comparison",
    "episode",
    "options",
    "usage",
    "termination",
    "values",
    "lag",
    "machine",
    "events",
)
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
#: Milliseconds for anything that the browser does: a machine that also trains may be slow.
PATIENCE = 120_000
#: Between headings there is no element around a part; this makes one.
WRAP = """name => {
  const section = document.getElementById(name);
  if (section) return section;
  const head = [...document.querySelectorAll(`[data-part="${name}"]`)].find((each) => each.offsetParent !== null);
  if (!head) return null;
  const box = document.createElement("div");
  head.before(box);
  box.style.padding = "4px 0 12px";
  for (let next = head; next && (next === head || !next.matches("[data-part]"));) {
    const after = next.nextElementSibling;
    box.append(next);
    next = after;
  }
  return box;
}"""


def find_chromium() -> str | None:
    """The browser's program; None where there is none."""
    return next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser with a profile of its own, driven by playwright.

    Raises:
        ReportError: there is no playwright, or no Chromium.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise ReportError("--png needs playwright: pip install 'claw-lightning[report-png]'") from error
    program = find_chromium()
    if program is None:
        raise ReportError("--png needs Chromium: apt-get install --no-install-recommends chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=list(ARGUMENTS), headless=True, timeout=PATIENCE
        )
        try:
            yield browser
        finally:
            browser.close()


def take_pictures(
    browser: Any, html: str, folder: Path, parts: Sequence[str], width: int = 1080, is_dark: bool = False
) -> list[Path]:
    """Write ``<part>.png`` for every part that the page has; files of these names are replaced.

    Args:
        browser: of :func:`chromium`.
        html: the page.
        folder: is made if need be.
        parts: of :data:`PARTS`.
        width: px.
        is_dark: in the dark scheme.

    Raises:
        ReportError: the folder cannot be written.
    """
    written = []
    with tempfile.TemporaryDirectory() as name:
        page_file = Path(name) / "report.html"
        page_file.write_text(html)
        page = browser.new_page(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if is_dark else "light",
            reduced_motion="reduce",
        )
        page.set_default_timeout(PATIENCE)
        page.goto(page_file.as_uri())
        page.evaluate("drawAll()")
        page.add_style_tag(content="nav { display: none !important; } h2, h3 { margin-top: 0; border: 0; padding: 0; }")
        for part in parts:
            element = page.evaluate_handle(WRAP, part).as_element()
            if element is None:
                continue
            file = folder / f"{part}.png"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                shrink(element.screenshot()).save(file, optimize=True)
            except OSError as error:
                raise ReportError(f"--png {folder} cannot be written: {error.strerror or error}") from error
            written.append(file)
        page.close()
    return written


def shrink(png: bytes) -> Image.Image:
    """The same picture in 256 colours, which keep rare ones (a legend's) what they are: a third of the size."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    return picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
