"""A saved tensor makes no more calls than it did. Their number is the same everywhere, as long as no call waits."""

import json
import subprocess
import sys
from pathlib import Path

from bench.calls import (
    DECODER,
    FLOOR,
    MOST_OF_THE_DECODER,
    MOST_OF_THE_WHOLE_DECODER,
    NUM_TENSORS,
    WHOLE_DECODER,
    round_trip,
)
from tierstore.disk.native import is_native

MOST = {
    "host": (11, 4, 3),
    "stays on the device": (15, 5, 3),
    "buffer on the device": (15, 5, 3),
    "leaves the device": (18, 24, 8),
    "leaves in batches": (60, 40, 3),
    "leaves the device, late": (20, 25, 8),
    "leaves in batches, late": (60, 30, 3),
    "leaves alone, late": (200, 90, 3),
    "half of them leave, late": (28, 20, 3),
    "parameter": (3, 3, 3),
    "view of a parameter": (4, 3, 3),
    "small": (8, 3, 3),
}
"""Packs, unpacks, and at the end of the scope, beyond hooks that do nothing."""
MOST_ASKED = {
    "leaves the device, late": 0.1,
    "leaves in batches, late": 0.25,
    "leaves alone, late": 0.25,
    "half of them leave, late": 0.1,
}
"""How often the driver is asked whether a copy is over, which none is, for each tensor."""
_IN_A_NEW_PROCESS = "import bench.calls, json, pathlib, sys; \
print(json.dumps(bench.calls.packs(pathlib.Path(sys.argv[1]), is_timed=False)))"
"""A graph that was compiled in this one has each pack do more: NOTE [Layouts for traces] in `hooks/living.py`."""


def test_saved_tensor_makes_no_more_calls_than_it_did(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _IN_A_NEW_PROCESS, str(tmp_path)]
    figures = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    for name, most in MOST.items():
        found = [figures[name][what] - figures[FLOOR][what] for what in ("packs", "unpacks", "ends")]
        assert all(number <= bound for number, bound in zip(found, most, strict=True)), f"{name}: {found}"
    for name, most_calls in ((DECODER, MOST_OF_THE_DECODER), (WHOLE_DECODER, MOST_OF_THE_WHOLE_DECODER)):
        assert figures[name]["steps"] - figures[FLOOR]["steps"] <= most_calls
    for name, bound in MOST_ASKED.items():
        assert figures[name]["asked"] <= bound, f"{name}: {figures[name]['asked']}"


def test_round_trip_over_the_drive_makes_no_more_calls_than_it_did(tmp_path: Path) -> None:
    """A tensor of 4 MiB has a record of its own; one of 256 KiB leaves in a group. On all threads, and on that which
    trains, in which no unpack waits."""
    alone = round_trip(tmp_path, 2**22, NUM_TENSORS // 12, rest_seconds=0.02)
    most, most_own = (250, 120) if is_native() else (350, 150)  # how many turns the worker takes differs
    assert most > alone["round_trip"] > 100
    assert most_own > alone["training_thread"] > 80
    together = round_trip(tmp_path, 2**18, NUM_TENSORS // 4)
    assert 60 > together["round_trip"] > 30
    assert 51 > together["training_thread"] > 25
