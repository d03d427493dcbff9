"""What is measured, the most important first: when time runs short, it is the last that are left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

from tierstore.base.config import available_host_bytes

from .targets import covered_fraction

Found = Mapping[str, Mapping[str, Any]]
Options = dict[str, Any]
_HOST_SHARE = 0.6
"""Of the memory that is available: a pinned slab is taken whole."""


class CaseLeftOutError(Exception):
    pass


def _of_workload(found: Found, workload: str) -> Mapping[str, Any]:
    none = found.get(f"{workload}: none")
    if none is None:
        raise CaseLeftOutError("what is saved is not known: the plain step was not measured")
    return none


def _host_only(found: Found, workload: str) -> Options:
    saved_bytes = _of_workload(found, workload)["saved_bytes"]
    return {"host_bytes": int(min(1.15 * saved_bytes, _HOST_SHARE * available_host_bytes()))}


def _keeping(share: float) -> Callable[[Found, str], Options]:
    def options(found: Found, workload: str) -> Options:
        kept_bytes = int(share * _of_workload(found, workload)["saved_bytes"])
        return _host_only(found, workload) | {"device_bytes": kept_bytes}

    return options


def _covered(found: Found, workload: str) -> Options:
    if "floors" not in found:
        raise CaseLeftOutError("the bandwidth was not measured")
    fraction = covered_fraction(_of_workload(found, workload), found["floors"])
    return _keeping(1 - fraction)(found, workload)


def _found_by_the_store(found: Found, workload: str) -> Options:
    return _host_only(found, workload) | {"device_bytes": "auto"}


def _planned(share: float) -> Callable[[Found, str], Options]:
    def options(found: Found, workload: str) -> Options:
        limit_bytes = int(share * _of_workload(found, workload)["peak_bytes"])
        if not limit_bytes:
            raise CaseLeftOutError("a share of a device's memory, and there is no device")
        return _host_only(found, workload) | {"limit": limit_bytes}

    return options


def _all_stays(found: Found, workload: str) -> Options:
    """From the ninth step on, its scope takes the hooks off."""
    device_bytes = 2 * _of_workload(found, workload)["saved_bytes"]
    return _host_only(found, workload) | {"device_bytes": device_bytes, "num_warm_up": 10}


def _offload_activations(found: Found, workload: str) -> Options:
    if find_spec("torchtune") is None and find_spec("trl") is None:
        raise CaseLeftOutError("neither torchtune nor TRL is installed")
    return {}


class Case(NamedTuple):
    """One run in a process of its own, of a workload and a variant. `label`: of the variant with its options.
    `options`: from what was found before; may raise `CaseLeftOutError`. `expected_seconds`: for the whole process on a
    data-centre GPU of 2023. `num_steps`: measured, if not as many as of the others."""

    workload: str
    variant: str = ""
    label: str = ""
    options: Callable[[Found, str], Options] = lambda found, workload: {}
    expected_seconds: float = 30
    num_steps: int | None = None

    @property
    def name(self) -> str:
        return f"{self.workload}: {self.label or self.variant}" if self.variant else self.workload


def _cases(
    resnet: str, decoder: str, others: tuple[str, ...], small: str, grouped: str, short: str, long: tuple[str, ...]
) -> tuple[Case, ...]:
    """`others`: decoders beside. `small`: one whose step is as long as the host takes to queue it. `grouped`, `short`:
    with checkpoints, for time and for memory. `long`: with checkpoints, as they do not fit otherwise."""
    covered, auto = "tierstore, as much as compute covers", 'tierstore, device_bytes="auto"'
    little = {"host_bytes": 2**30, "staging_bytes": 2**30}  # together less than what the inputs take
    return (
        Case("floors", expected_seconds=10),
        Case("saved tensor", expected_seconds=10),
        *(
            case
            for each in (decoder, *others)
            for case in (
                Case(each, "none", expected_seconds=10),
                Case(each, "tierstore", covered, _covered, 12),
                Case(each, "tierstore", auto, _found_by_the_store, 14),
            )
        ),
        Case(grouped, "checkpoint", expected_seconds=18),
        Case(grouped, "tierstore, checkpoint", options=lambda *_: {"host_bytes": 4 * 2**30}, expected_seconds=20),
        Case(grouped, "checkpoint, save_on_cpu", expected_seconds=22),
        Case(short, "checkpoint", expected_seconds=10),
        Case(short, "tierstore, checkpoint", options=lambda *_: {"host_bytes": 4 * 2**30}, expected_seconds=12),
        Case(short, "checkpoint, save_on_cpu", expected_seconds=12),
        Case(small, "none", expected_seconds=8),
        Case(small, "tierstore", "tierstore, everything stays", _all_stays, 9),
        Case(decoder, "tierstore", options=_host_only, expected_seconds=14),
        Case(decoder, "checkpoint", expected_seconds=14),
        *(
            Case(decoder, "tierstore, plan", f"tierstore, plan for {share} %", _planned(share / 100), 25)
            for share in (75, 50, 35)
        ),
        Case(resnet, "none", expected_seconds=10),
        Case(resnet, "tierstore", options=_host_only, expected_seconds=38),
        *(
            case
            for each in long
            for case in (
                Case(each, "checkpoint", expected_seconds=60, num_steps=2),
                Case(each, "tierstore, checkpoint", "tierstore, checkpoint to disk", lambda *_: little, 65, 2),
            )
        ),
        Case(decoder, "tierstore, checkpoint", options=lambda *_: {"host_bytes": 4 * 2**30}, expected_seconds=17),
        Case(resnet, "checkpoint", expected_seconds=15),
        Case(resnet, "tierstore", auto, _found_by_the_store, 40),
        Case(decoder, "OffloadActivations", options=_offload_activations, expected_seconds=20),
        Case(resnet, "OffloadActivations", options=_offload_activations, expected_seconds=50),
        Case(resnet, "save_on_cpu", expected_seconds=80),
        Case(resnet, "tierstore", "tierstore, half stays", _keeping(0.5), 25),
    )


CASES = _cases(
    "resnet152",
    "decoder 2048 wide, 8k tokens",
    ("decoder 4096 wide, 8k tokens", "decoder 2048 wide, 4k tokens"),
    "decoder 2048 wide, 512 tokens",
    "Qwen3-like, 24 layers, 32k tokens",
    "Qwen3-like, 8 layers, 8k tokens",
    ("decoder 4096 wide, 131k tokens", "decoder 4096 wide, 262k tokens"),
)
TINY_CASES = _cases(
    "tiny resnet",
    "tiny decoder",
    (),
    "tiny small decoder",
    "tiny grouped decoder",
    "tiny short decoder",
    ("tiny long decoder",),
)
