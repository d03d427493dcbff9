"""The messages on the page of symptoms are those that the code prints."""

import ast
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.test_layout import DOCS, ROOT
from tierstore import (
    ConfigError,
    CorruptDataError,
    DaemonUnavailableError,
    ModifiedInPlaceError,
    StoreClosedError,
    StoreFullError,
)
from tierstore.base.address import find_address
from tierstore.base.config import check_directory
from tierstore.returning.advice import why_memory_stays

PAGE = (DOCS / "help" / "troubleshooting.md").read_text(encoding="utf-8")
SHOWN = " ".join(" ".join(re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)).split())
MIB = 2**20


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


def test_messages_are_shown_as_they_are_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of errors, and the beginning of a warning; places are those of the page."""
    monkeypatch.delenv("TIERSTORE_SOCKET", raising=False)
    own, of_system = f"{tmp_path}/a.sock", f"{tmp_path}/b.sock"
    monkeypatch.setattr("tierstore.base.address.places_to_look", lambda: (own, of_system))
    monkeypatch.setattr("tierstore.base.address.default_address", lambda: own)
    with pytest.raises(ConfigError) as no_directory:
        check_directory(tmp_path / "missing")
    with pytest.raises(DaemonUnavailableError) as no_daemon:
        find_address()
    places = {
        str(tmp_path / "missing"): "/nvme",
        own: "/run/user/1000/tierstore/tierstore.sock",
        of_system: "/run/tierstore/tierstore.sock",
    }
    forked = StoreClosedError("/nvme", "it belongs to the process that this one was forked from")
    printed = [
        f"StoreFullError: {StoreFullError(16777216, 1056964608, 1073741824, 134217728, 134217728)}",
        f"ModifiedInPlaceError: {ModifiedInPlaceError('float32 tensor of shape [64, 128]', 1, 2)}",
        f"CorruptDataError: {CorruptDataError(812, 'segment 3 at offset 4096', '…', '…')}",
        str(forked).partition(";")[0],
        str(no_directory.value),
        str(no_daemon.value),
        str(why_memory_stays(1229 * MIB, 900 * MIB, "auto", "")).partition(". Memory")[0],
    ]
    for text in printed:
        for here, there in places.items():
            text = text.replace(here, there)
        assert text in SHOWN
