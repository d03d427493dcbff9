"""One target under libFuzzer: `python -m tests.fuzz.process TARGET [what libFuzzer takes]`. It never returns."""

from __future__ import annotations

import sys
import zlib

import atheris

with atheris.instrument_imports(include=["tierstore"]):
    from tests.fuzz.target import Target, check, warm
    from tests.fuzz.targets import TARGETS

_BOUNDED_ONE_IN = 32
"""Counting lines and memory costs more than the run; which inputs are counted depends on their bytes alone."""


def _one_input(target: Target, data: bytes) -> None:
    if zlib.crc32(data) % _BOUNDED_ONE_IN:
        target.run(data)
    else:
        check(target, data)


def main() -> None:
    name, *options = sys.argv[1:]
    target = TARGETS[name]
    warm(target)
    atheris.Setup([sys.argv[0], *options], lambda data: _one_input(target, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
