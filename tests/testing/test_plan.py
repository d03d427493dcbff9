"""Plans of faults: what they refuse, how they travel, and what they draw."""

from __future__ import annotations

import errno
import os
import signal
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.processes import output_of
from tierstore import ConfigError
from tierstore.testing import Bandwidth, Fails, FaultPlan, Faults, Late, Latency, Rule, Short, Signal, Torn
from tierstore.testing.faults import Drawn

ALL_FAULTS = FaultPlan.of(
    Rule("write", Latency(0.25, "exponential"), probability=0.5),
    Rule(("read", "write"), Bandwidth(1e6)),
    Rule("discard", Fails(errno.ENOSPC), occurrences=(2, 3)),
    Rule("read", Late(3)),
    Rule("preadv", Short(512)),
    Rule("pwritev", Torn(4096)),
    Rule("close", Signal(4711, signal.SIGSTOP)),
    seed=7,
)


@pytest.mark.parametrize("text", ["", "[]", '{"rules": [{"operations": "write", "fault": {"type": "Rust"}}]}'])
def test_plan_as_json_comes_back_the_same_and_what_is_none_is_refused(text: str) -> None:
    assert FaultPlan.from_json(ALL_FAULTS.to_json()) == ALL_FAULTS
    with pytest.raises(ConfigError, match="plan"):
        FaultPlan.from_json(text)


@pytest.mark.parametrize(
    ("operation", "fault", "more"),
    [
        (("write", "pwritev"), Fails(), {"under": "/nvme"}),
        ("write", Latency(1.0), {"probability": 1.5}),
        ("write", Short(), {}),
        ("preadv", Torn(), {}),
        ("fallocate", Late(), {}),
        ("discard", Bandwidth(1.0), {}),
        ("remember", Latency(0.0), {}),
        ("write", Latency(-1.0), {}),
        ("write", Latency(float("nan")), {}),
        ("read", Bandwidth(0.0), {}),
        ("read", Fails(4711), {}),
    ],
)
def test_rule_that_cannot_be_is_refused(operation: Any, fault: Any, more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Rule(operation, fault, **more)


def test_rule_for_one_drive_spares_the_files_of_others(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    (tmp_path / "nvme1").mkdir()
    faults = Faults(FaultPlan.of(Rule("pwritev", Fails(), under=str(tmp_path / "nvme"))))
    errors = {}
    for name in ("nvme", "nvme1"):
        file = os.open(tmp_path / name, os.O_TMPFILE | os.O_RDWR)
        errors[name] = faults.draw("pwritev", 1, file).error
        os.close(file)
    assert errors == {"nvme": errno.EIO, "nvme1": None}


def test_occurrences_are_counted_for_each_operation_from_when_the_plan_was_set() -> None:
    faults = Faults()
    faults.draw("write")
    faults.set(FaultPlan.of(Rule(("write", "read"), Fails(errno.EIO), occurrences=(2,))))
    drawn = [faults.draw(operation).error for operation in ("write", "read", "write", "write", "read")]  # type: ignore[arg-type]
    assert drawn == [None, None, errno.EIO, None, errno.EIO]
    assert faults.injected == {"write Fails": 1, "read Fails": 1}


def test_same_seed_draws_the_same_and_another_does_not_within_the_spread() -> None:
    def draws(seed: int) -> list[Drawn]:
        rules = Rule("write", Latency(1.0, "exponential")), Rule("write", Fails(), probability=0.3)
        faults = Faults(FaultPlan.of(*rules, seed=seed))
        return [faults.draw("write") for _ in range(400)]

    assert draws(1) == draws(1) != draws(2)
    assert 80 < Counter(drawn.error for drawn in draws(1))[errno.EIO] < 160
    assert 0.8 < statistics.mean(drawn.delay_seconds for drawn in draws(1)) < 1.2


def test_bandwidth_is_shared_by_the_operations_of_a_rule_and_kept_over_time() -> None:
    now = [100.0]
    faults = Faults(FaultPlan.of(Rule(("write", "read"), Bandwidth(1000.0))), clock=lambda: now[0])
    assert faults.draw("write", 500).least_seconds == 0.5
    assert faults.draw("read", 500).least_seconds == 1.0, "after the write"
    now[0] += 0.75
    assert faults.draw("read", 250).least_seconds == 0.5
    now[0] += 60
    assert faults.draw("write", 100).least_seconds == pytest.approx(0.1), "nothing was saved up meanwhile"


def test_import_without_torch() -> None:
    program = "import sys, tierstore.testing.faulty_daemon, tierstore.testing as t; t.Rule, t.FaultyDisk, t.Faults\n"
    program += "assert 'torch' not in sys.modules"
    output_of(program)
