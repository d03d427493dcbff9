"""The text that the demo trains on, as bytes."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError

__all__ = ["DEFAULT_TEXT", "load_text"]

DEFAULT_TEXT = "CPython's own documentation (pydoc_data.topics)"


def load_text(file: str | None, at_least_bytes: int) -> bytes:
    """Read `file`, or, for `None`, the language reference that CPython installs for `help()`.

    Raises:
        ConfigError: the file cannot be read, or is shorter than one sequence and its next byte.
    """
    text = _documentation() if file is None else _read(Path(file))
    if len(text) < at_least_bytes:
        raise ConfigError(
            "--text",
            file or DEFAULT_TEXT,
            f"it holds {len(text)} bytes, and one sequence needs {at_least_bytes}",
        )
    return text


def _documentation() -> bytes:
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError("--text", str(file), f"give a readable file ({reason.lower()})") from error
