"""One page of runs, to look at: how far they got, what each option does and when it switches.

    python scripts/report.py runs/version_0 --output report.html
    python scripts/report.py runs/version_*          # several seeds and configurations, compared
    python scripts/report.py runs/version_0 --png pictures --parts curves episode

Reads run folders (TensorBoard events, config.yaml and, where they are, episodes/ of EpisodeVideo and worker_events.csv)
and writes HTML that needs nothing else: it opens from disk without a network. Runs that differ in their seed alone are
one group. What a run does not have is left out. How to read it: docs/report.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

try:
    from reporting.browser import PARTS, chromium, take_pictures
    from reporting.page import render
    from reporting.runs import ReportError, group_runs, read_run
except ImportError as error:  # one of the extra's libraries
    if error.name is None or error.name.startswith("reporting"):
        raise
    sys.exit(f"report: {error.name} is missing: pip install 'claw-lightning[report]'")


def write_page(html: str, file: Path) -> None:
    """Write all of it or nothing: a page that was there stays until the new one is whole.

    Raises:
        ReportError: the file cannot be written.
    """
    name, file = file, file.resolve()  # of a link, what it points to is replaced
    if file.exists() and not file.is_file():
        raise ReportError(f"--output {name} is no file that could be replaced; name one, such as report.html")
    try:
        if file.exists() and not _is_page(file):
            raise ReportError(f"--output {name} is there, and no page; give another name, such as report.html")
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}.", delete=False) as stream:
            try:
                stream.write(html)
                stream.close()
                Path(stream.name).chmod(0o666 & ~_umask())  # temporary files are their owner's alone
                Path(stream.name).replace(file)
            except BaseException:
                Path(stream.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise ReportError(f"--output {name} cannot be written: {error.strerror or error}") from error


def _is_page(file: Path) -> bool:
    """Whether a file may be replaced: a page, or nothing yet. A checkpoint or a config.yaml may not."""
    with file.open("rb") as stream:
        return stream.read(64).lstrip()[:9].lower() in (b"", b"<!doctype")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders, such as runs/version_0")
    parser.add_argument(
        "--output", type=Path, default=Path("report.html"), help="the page (default: report.html); replaced"
    )
    parser.add_argument(
        "--moments", type=int, default=5, help="recorded evaluations to show, first and last among them (default: 5)"
    )
    parser.add_argument(
        "--png", type=Path, metavar="FOLDER", help="also write parts of the page as pictures (needs Chromium)"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="which ones (default: all)")
    parser.add_argument("--width", type=int, default=1080, help="of the pictures, in px (default: 1080)")
    parser.add_argument("--dark", action="store_true", help="pictures in the dark scheme")
    args = parser.parse_args(arguments)
    if args.moments < 1:
        parser.error(f"--moments {args.moments}: give 1 or more")
    if not 300 <= args.width <= 4000:
        parser.error(f"--width {args.width}: give 300 to 4000 px")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Read, write, say where; exit status 1 where it cannot be done."""
    args = parse(arguments)
    try:
        # The same folder twice would be two seeds that agree.
        folders = list({folder.resolve(): folder for folder in args.runs}.values())
        groups = group_runs([read_run(folder) for folder in folders])
        html = render(groups, args.moments)
        write_page(html, args.output)
        print(f"{args.output}: {len(folders)} run(s) in {len(groups)} group(s), {len(html.encode()) / 2**20:.1f} MiB")
        if args.png is not None:
            with chromium() as browser:
                for file in take_pictures(browser, html, args.png, args.parts, args.width, args.dark):
                    print(file)
    except ReportError as error:
        print(f"report: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
