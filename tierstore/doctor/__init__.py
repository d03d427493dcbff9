"""`tierstore doctor`: how fast a machine is for a store, what is wrong with it, and which settings fit.

Three independent steps. `examine.py` measures and fills the records of `measurements.py`. `findings.py` and
`settings.py` judge them, purely. `views.py` shows both. Start reading at `examine.py`.
"""

from __future__ import annotations

__all__: list[str] = []
