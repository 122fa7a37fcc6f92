"""The documentation's pages as tests read them: blocks of code, and the command lines in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(
    r"(?:^<!-- not executed: (?P<reason>[^\n]+?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.S | re.M
)
_NAME = re.compile(r"# (\S+\.(?:py|yaml))\n")
_COMMAND = re.compile(r"^(?:\$ |srun |[A-Z_]+=\S+ )*lightning (?:fit|validate|test|predict)\b")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: README.md or docs/<page>.md.
        line: of the page, where it opens.
        name: the file that its first line names, or None.
        reason: why it is not executed, from the comment ``<!-- not executed: reason -->`` above it, or None.
    """

    page: str
    line: int
    language: str
    text: str
    name: str | None
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> list[Block]:
    """All fenced blocks of all pages."""
    found = []
    for path in PAGES:
        text = path.read_text()
        for each in _BLOCK.finditer(text):
            name = _NAME.match(each["text"])
            line = text[: each.start("language")].count("\n") + 1
            page = path.relative_to(ROOT).as_posix()
            found.append(Block(page, line, each["language"], each["text"], name and name[1], each["reason"]))
    return found


def commands() -> list[tuple[str, list[str]]]:
    """Every ``lightning ...`` line of fenced and indented blocks: where, and its arguments."""
    found = []
    for path in PAGES:
        reason, fenced = "", False
        lines = iter(enumerate(path.read_text().splitlines(), 1))
        for number, line in lines:
            if line.startswith("```"):
                fenced = not fenced
                reason = reason if fenced else ""
            elif line.startswith("<!-- not executed: "):
                reason = line
            elif (fenced or line.startswith("    ")) and _COMMAND.match(line.strip()) and not reason:
                text = line.strip()
                while text.endswith("\\"):
                    text = text[:-1] + next(lines)[1].strip()
                words = shlex.split(text, comments=True)
                found.append((f"{path.relative_to(ROOT)}:{number}", words[words.index("lightning") + 1 :]))
    return found


def write_named(folder: Path) -> None:
    """The blocks that name a file, into a folder."""
    for each in blocks():
        if each.name is not None:
            (folder / each.name).write_text(each.text)
