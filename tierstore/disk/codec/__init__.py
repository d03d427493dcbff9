"""How the bytes of a record are encoded, and which codec each record gets.

Here: the codecs, block by block (`codec`), the choice of one under "auto" (`choice`, from `figures`), and where its
figures come from (`probing`, `load`). Not here: files and the index; the disk tier writes what is encoded here.
The disk tier calls `policy`; the simulator and the doctor call `choice` and `codec`. Nothing here knows tensors.
Start at `policy.py` (the option at work), then `choice.py` (the decision), then `codec.py` (the bytes).
"""

from __future__ import annotations

__all__: list[str] = []
