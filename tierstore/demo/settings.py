"""The demo's settings and text, checked before anything starts, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError

HEAD_WIDTH = 64
"""Features of one attention head."""
DEFAULT_TEXT = "CPython's own documentation (pydoc_data.topics)"


@dataclass(frozen=True)
class DemoSettings:
    """One training run, the same for both variants. With the defaults the saved tensors take a gigabyte, parameters,
    gradients and optimizer state a tenth of that. Raises ConfigError: a number is out of range."""

    steps: int = 6
    layers: int = 8
    width: int = 256
    context: int = 512
    batch: int = 16
    text: str | None = None
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for option in ("steps", "layers", "width", "context", "batch"):
            if (given := getattr(self, option)) < 1:
                raise ConfigError(f"--{option}", given, "give a number of 1 or more")
        if self.width % HEAD_WIDTH:
            raise ConfigError("--width", self.width, f"give a multiple of {HEAD_WIDTH}, the width of an attention head")
        if not -(2**63) <= self.seed < 2**64:
            raise ConfigError("--seed", self.seed, "give a whole number from -2**63 to 2**64 - 1, as torch takes them")


def load_text(file: str | None, at_least_bytes: int) -> bytes:
    """Read `file`, or, for None, the language reference that CPython installs for `help()`. Raises ConfigError if the
    file cannot be read, or is shorter than one sequence and its next byte."""
    if file is None:
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics)).encode()
    else:
        try:
            text = Path(file).read_bytes()
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError("--text", file, f"give a readable file ({reason.lower()})") from error
    if len(text) < at_least_bytes:
        what = f"it holds {len(text)} bytes, and one sequence needs {at_least_bytes}"
        raise ConfigError("--text", file or DEFAULT_TEXT, what)
    return text
