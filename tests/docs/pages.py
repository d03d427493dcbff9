"""The pages of the documentation: their blocks of code, and their tables."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

__all__ = ["ALL_PAGES", "DOCS", "ROOT", "Block", "blocks_of", "commands_of", "first_cells", "section_of"]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ALL_PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").glob("*.md")])
"""Everything that people read; pages of measurements in `bench` are written by programs."""


class Block(NamedTuple):
    """A fenced block of code.

    Attributes:
        language: what stands behind the fence, such as "python"; "" if nothing does.
        code: its lines.
        line: the number of the line of its fence.
        before: the text or comment right before it.
    """

    language: str
    code: str
    line: int
    before: str


def blocks_of(page: Path) -> Iterator[Block]:
    """All fenced blocks of a page, those in lists included."""
    before = ""
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type == "fence":
            yield Block(token.info.strip(), token.content, (token.map or [0])[0] + 1, before)
        if token.type in ("inline", "html_block", "fence"):
            before = "" if token.type == "fence" else token.content.strip()


def commands_of(console: str) -> list[tuple[str, str]]:
    """(command, the output that the page shows) for each prompt of a console block. Lines that end in "\\" go on."""
    found = re.findall(r"^\$ ((?:.*\\\n)*.*)\n?((?:(?!\$ ).*(?:\n|\Z))*)", console, re.MULTILINE)
    return [(command.replace("\\\n", " "), output) for command, output in found]


def section_of(page: Path, heading: str) -> str:
    """What stands under a heading, up to the next one of any level."""
    text = "\n" + page.read_text(encoding="utf-8")
    _, _, after = text.partition(f"\n{heading}\n")
    assert after, f"{page} has no heading {heading}"
    return re.split(r"^#+ ", after, maxsplit=1, flags=re.MULTILINE)[0]


def first_cells(text: str) -> list[str]:
    """The names in the first column of the tables in a text: what is in backticks there."""
    rows = re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
