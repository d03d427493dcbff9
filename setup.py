"""The page that a package index shows: README.md, with links that lead to the repository. An index follows no others.

`address` in `pyproject.toml` says where that is. Without one, the page has no links of ours and no pictures.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
_LINK = re.compile(r"(!?)\[([^]]*)\]\((?![a-z]+:)([^)]+)\)")
_PLACEHOLDER = "`ADDRESS` is that of this repository. "


def page_of(readme: str, address: str, tag: str) -> str:
    """README for an index: links are absolute, and what only a reader of the sources needs to be told is not there."""

    def led(link: re.Match[str]) -> str:
        is_picture, text, target = link.groups()
        if not address:
            return "" if is_picture else text
        return f"{is_picture}[{text}]({address}/{'raw' if is_picture else 'blob'}/{tag}/{target})"

    page = _LINK.sub(led, readme)
    if not address:
        return page
    page = page.replace(_PLACEHOLDER, "").replace("git clone ADDRESS", f"git clone {address}")
    return page.replace("\n## ", "\n```console\n$ pip install tierstore\n```\n\n## ", 1)


def urls_of(address: str, tag: str) -> dict[str, str]:
    """What an index lists beside the page."""
    if not address:
        return {}
    files = {"Documentation": "docs/index.md", "Changes": "CHANGELOG.md"}
    return {"Source": address} | {name: f"{address}/blob/{tag}/{file}" for name, file in files.items()}


if __name__ == "__main__":
    address = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["tierstore"]["address"]
    package = (ROOT / "tierstore" / "__init__.py").read_text(encoding="utf-8")
    tag = "v" + re.findall(r'^__version__ = "(.+)"', package, re.MULTILINE)[0]
    setup(
        long_description=page_of((ROOT / "README.md").read_text(encoding="utf-8"), address, tag),
        long_description_content_type="text/markdown",
        project_urls=urls_of(address, tag),
    )
