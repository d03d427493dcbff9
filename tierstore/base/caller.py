"""The user's line of code, which a warning names."""

from __future__ import annotations

import sys
from types import FrameType


def stacklevel_of_user() -> int:
    """For a warning of the caller: its first frame that belongs neither to tierstore nor to torch."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("tierstore", "torch"):
        frame, level = frame.f_back, level + 1
    return level
