"""README's links. In the repository they are relative; on a package index they have to be absolute. Pure."""

import re

__all__ = ["relative_links", "with_absolute_links"]

_CODE = r"```.*?```|`[^`\n]*`"
_TARGET = r"(?!\w+:|#)(?P<target>[^)\s#]+)"
_BEFORE = r"(?P<before>(?P<image>!?)\[[^\]`]*\]\(|^\[[^\]]+\]: )"
_LINK = re.compile(rf"{_CODE}|{_BEFORE}{_TARGET}", re.DOTALL | re.MULTILINE)


def relative_links(text: str) -> list[str]:
    """Paths of files that a Markdown text links to, links in code left out."""
    return [match["target"] for match in _LINK.finditer(text) if match["target"]]


def with_absolute_links(text: str, repository: str, tag: str) -> str:
    """The same text with each relative link to `repository` at `tag`, as code hosts lay out their addresses.

    Args:
        text: Markdown.
        repository: such as "https://host/owner/name".
        tag: of the release.
    """
    base = repository.rstrip("/")

    def absolute(match: re.Match[str]) -> str:
        if not match["target"]:
            return match[0]
        view = "raw" if match["image"] else "blob"
        return f"{match['before']}{base}/{view}/{tag}/{match['target']}"

    return _LINK.sub(absolute, text)
