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


def _sharing(host_share: float, device_share: float) -> Callable[[Found, str], Options]:
    def options(found: Found, workload: str) -> Options:
        saved_bytes = _of_workload(found, workload)["saved_bytes"]
        return {"host_bytes": int(host_share * saved_bytes), "device_bytes": int(device_share * saved_bytes)}

    return options


def _offload_activations(found: Found, workload: str) -> Options:
    if find_spec("torchtune") is None and find_spec("trl") is None:
        raise CaseLeftOutError("neither torchtune nor TRL is installed")
    return {}


class Case(NamedTuple):
    """One run in a process of its own, of a workload and a variant. `label`: of the variant with its options.
    `options`: from what was found before; may raise `CaseLeftOutError`. `expected_seconds`: for the whole process on a
    data-centre GPU of 2023."""

    workload: str
    variant: str = ""
    label: str = ""
    options: Callable[[Found, str], Options] = lambda found, workload: {}
    expected_seconds: float = 30

    @property
    def is_peer(self) -> bool:
        """Whether it is others' code that is measured, whose failure is none of ours."""
        return self.variant in ("save_on_cpu", "OffloadActivations", "checkpoint")

    @property
    def name(self) -> str:
        return f"{self.workload}: {self.label or self.variant}" if self.variant else self.workload


def _cases(resnet: str, decoder: str, others: tuple[str, ...], long: str) -> tuple[Case, ...]:
    """`others`: decoders beside. `long`: one that is trained with checkpoints only, as it does not fit otherwise."""
    covered = "tierstore, as much as compute covers"
    little = {"host_bytes": 2 * 2**30, "staging_bytes": 2**30}  # together less than what the inputs take
    return (
        Case("floors", expected_seconds=20),
        Case("saved tensor", expected_seconds=25),
        Case(resnet, "none"),
        Case(resnet, "tierstore", options=_host_only, expected_seconds=45),
        Case(resnet, "save_on_cpu", expected_seconds=60),
        Case(decoder, "none", expected_seconds=20),
        Case(decoder, "tierstore", covered, _covered, 25),
        Case(decoder, "tierstore", 'tierstore, device_bytes="auto"', _found_by_the_store, 25),
        Case(decoder, "tierstore", options=_host_only, expected_seconds=25),
        Case(decoder, "checkpoint", expected_seconds=20),
        Case(decoder, "tierstore, checkpoint", options=_host_only, expected_seconds=25),
        Case(resnet, "tierstore", "tierstore, half stays", _keeping(0.5), 40),
        Case(decoder, "tierstore", "tierstore, beyond device and host", _sharing(0.25, 0.25), 45),
        *(() if long == decoder else (Case(long, "checkpoint", expected_seconds=60),)),
        Case(long, "tierstore, checkpoint", "tierstore, checkpoint to disk", lambda *_: little, 60),
        Case(resnet, "checkpoint"),
        Case(resnet, "OffloadActivations", options=_offload_activations, expected_seconds=45),
        Case(decoder, "OffloadActivations", options=_offload_activations, expected_seconds=25),
        *(Case(other, "none", expected_seconds=20) for other in others),
        *(Case(other, "tierstore", "tierstore, a third leaves", _keeping(0.67), 25) for other in others),
        *(Case(other, "tierstore", covered, _covered, 25) for other in others),
        *(Case(other, "tierstore", options=_host_only, expected_seconds=25) for other in others),
        Case(resnet, "tierstore", "tierstore, a quarter stays", _keeping(0.25), 40),
        Case(resnet, "tierstore", "tierstore, three quarters stay", _keeping(0.75), 40),
        Case(decoder, "save_on_cpu", expected_seconds=30),
        Case(decoder, "tierstore, sidecar", options=_sharing(0.25, 0.25), expected_seconds=60),
        Case(resnet, "tierstore", "tierstore, half to disk", _sharing(0.5, 0.0), 90),
    )


CASES = _cases(
    "resnet152",
    "decoder 2048 wide, 8k tokens",
    ("decoder 4096 wide, 8k tokens", "decoder 2048 wide, 4k tokens"),
    "decoder 4096 wide, 64k tokens",
)
TINY_CASES = _cases("tiny resnet", "tiny decoder", (), "tiny decoder")
