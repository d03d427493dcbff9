"""`tierstore doctor`: what a machine can do for a store, what is wrong with it, and what should be set.

Three steps that know nothing of each other's ways: `examine.py` measures and fills `measurements.py`'s records;
`findings.py` and `settings.py` judge those, purely; `views.py` shows both. Start reading at `examine.py`.
"""

from __future__ import annotations

__all__: list[str] = []
