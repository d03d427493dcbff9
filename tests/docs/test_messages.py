"""The messages on the page of symptoms are those that the code prints."""

import ast
import errno
import os
import re
from collections.abc import Iterator

from tests.docs.test_layout import DOCS, ROOT

PAGE = (DOCS / "help" / "troubleshooting.md").read_text(encoding="utf-8")


def quoted_in_tables() -> list[str]:
    """What a reader looks for: the phrases in quotation marks in the first columns."""
    rows = [row for row in PAGE.splitlines() if row.startswith("| ")]
    return [phrase for row in rows for phrase in re.findall(r'"([^"]+)"', row.split("|")[1])]


def texts_of_code() -> Iterator[str]:
    """All texts in the code of the product, with "…" for what is filled in."""
    for folder in ("tierstore", "hooks", "daemon"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_phrases_in_tables_are_in_the_code() -> None:
    texts = "\n".join(texts_of_code())
    words_of_system = [os.strerror(number) for number in (errno.ENOENT, errno.ECONNREFUSED, errno.EACCES)]
    phrases = [phrase for phrase in quoted_in_tables() if phrase not in words_of_system]
    assert len(phrases) > 15
    for phrase in phrases:
        pieces = re.split(r"…|\[Errno.*|KeyboardInterrupt", phrase)
        assert [piece for piece in pieces if piece.strip(" :") not in texts] == [], phrase
