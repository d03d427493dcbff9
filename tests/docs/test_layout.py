"""The pages keep their layout: users' pages stay short, links lead somewhere."""

import os
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MOST_WORDS, MOST_WORDS_OF_BENCHMARKS = 20_000, 2_500
BENCHMARKS = DOCS / "project" / "benchmarks.md"
NOT_OURS = re.compile(r"\..*|build|dist|site|wheels|.*\.egg-info")  # folders that are made, not written

SOURCES = (".py", ".toml", ".yml", ".yaml", ".json", ".sh", ".service", ".html", ".c")


def pages_below(folder: Path) -> Iterator[Path]:
    """All Markdown files, without those of environments and builds."""
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not NOT_OURS.fullmatch(name)]
        yield from (Path(place, name) for name in files if name.endswith(".md"))


PAGES = sorted(pages_below(ROOT))


def words_of(page: Path) -> int:
    """Words, figures and names; lines of tables and other marks do not count."""
    return sum(any(map(str.isalnum, word)) for word in page.read_text(encoding="utf-8").split())


def links_of(page: Path) -> Iterator[str]:
    """The targets of all links and pictures."""
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8")):
        for child in token.children or ():
            target = child.attrGet("href") or child.attrGet("src")
            if target:
                yield unquote(str(target))


@cache
def anchors_of(page: Path) -> frozenset[str]:
    """What code hosts make of the headings: small letters, hyphens for spaces, no other marks."""
    tokens = MarkdownIt("commonmark").parse(page.read_text(encoding="utf-8"))
    titles = [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]
    return frozenset(re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", title).lower()).replace(" ", "-") for title in titles)


def leads_nowhere(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    place = page.parent / path if path else page
    if not place.exists():
        return True
    if not anchor or place.suffix != ".md" or "{include}" in (text := place.read_text(encoding="utf-8")):
        return False
    return anchor not in anchors_of(place.resolve()) and f"({anchor})=" not in text


def test_pages_of_users_are_short_enough_to_read() -> None:
    pages = [page for page in PAGES if DOCS in page.parents and DOCS / "project" not in page.parents]
    words = {page: words_of(page) for page in (ROOT / "README.md", BENCHMARKS, *pages)}
    assert len(words) > 20
    assert words[BENCHMARKS] <= MOST_WORDS_OF_BENCHMARKS
    assert sum(words.values()) <= MOST_WORDS, sorted(words.items(), key=lambda item: -item[1])[:5]


def test_pages_named_in_sources_and_settings_exist() -> None:
    """Messages, docstrings and comments name pages by their paths from the repository's root."""
    folders = ("tierstore", "daemon", "hooks", "deploy", "examples", "native", "tests", ".github")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*") if file.suffix in SOURCES]
    named: dict[str, list[str]] = {}
    for file in [*files, ROOT / "Makefile", ROOT / "Dockerfile", ROOT / "pyproject.toml"]:
        for page in re.findall(r"(?<![\w/.])docs/[\w/]+\.(?:md|py|json)", file.read_text(encoding="utf-8")):
            named.setdefault(page, []).append(str(file.relative_to(ROOT)))
    assert len(named) > 10
    assert {page: files for page, files in named.items() if not (ROOT / page).is_file()} == {}


def test_relative_links_lead_somewhere() -> None:
    nowhere = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in links_of(page)
        if not re.match(r"[a-z]+:", target) and leads_nowhere(page, target)
    ]
    assert nowhere == []
