"""What the figures of one run of the benchmarks have to keep to. Pure: figures in, verdicts out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

Figures = Mapping[str, Any]
Found = Mapping[str, Figures]
"""By the name of the case; "floors" among them."""


_COVERED = "tierstore, as much as compute covers"
_BESIDE = (
    (_COVERED, "none", "as much as compute covers, step beside none", 1.02),
    ('tierstore, device_bytes="auto"', "none", 'device_bytes="auto", step beside none', 1.02),
    ("tierstore, everything stays", "none", "everything stays, step beside none", 1.05),
    ("tierstore, checkpoint", "checkpoint", "checkpointing with its inputs offloaded, step beside without", 1.02),
    ("tierstore, checkpoint to disk", "checkpoint", "checkpointing with its inputs on disk, step beside without", 1.02),
)
"""A step of a variant, of another's: what it may be at most."""


class Verdict(NamedTuple):
    goal: str
    value: float
    at_most: float

    @property
    def is_met(self) -> bool:
        return self.value <= self.at_most


def floor_seconds(none: Figures, floors: Figures, moved_bytes: float) -> float:
    """The least that a step can take which moves so many bytes out in forward and back in backward: copies and compute
    run side by side at best, so the slower of the two decides each way."""
    out_seconds = moved_bytes / floors["copy_out_bytes_per_second"]
    in_seconds = moved_bytes / floors["copy_in_bytes_per_second"]
    return max(none["forward_seconds"], out_seconds) + max(none["backward_seconds"], in_seconds)


def covered_fraction(none: Figures, floors: Figures) -> float:
    """How much of what is saved can be moved both ways in the time that compute takes."""
    out_bytes = none["forward_seconds"] * floors["copy_out_bytes_per_second"]
    in_bytes = none["backward_seconds"] * floors["copy_in_bytes_per_second"]
    return min(1.0, out_bytes / none["saved_bytes"], in_bytes / none["saved_bytes"])


def verdicts(found: Found, window_bytes: int) -> Iterator[Verdict]:
    """Every goal whose figures were measured. `window_bytes`: of device memory for what is on its way, both ways."""
    if saved := found.get("saved tensor"):
        yield Verdict("saved tensor: microseconds of a pack that stays on the device", saved["stays_pack_us"], 12)
        yield Verdict("saved tensor: microseconds of a pack that leaves it", saved["leaves_pack_us"], 45)
        yield Verdict("saved tensor: microseconds of an unpack that brings it back", saved["back_unpack_us"], 50)
    for workload in sorted({name.partition(": ")[0] for name in found if ": " in name}):
        of_workload = {
            name.partition(": ")[2]: figures for name, figures in found.items() if name.startswith(f"{workload}: ")
        }
        yield from _of_workload(workload, of_workload, found.get("floors"), window_bytes)


def _of_workload(workload: str, found: Found, floors: Figures | None, window_bytes: int) -> Iterator[Verdict]:
    none, everything = found.get("none"), found.get("tierstore")
    if none and everything and floors:
        floor = floor_seconds(none, floors, everything["offloaded_bytes"])
        bound = 1.1 if "tokens_per_second" in none else 1.15
        yield Verdict(f"{workload}: all offloaded, step beside the floor", everything["step_seconds"] / floor, bound)
        if peer := found.get("save_on_cpu"):
            reached = peer["step_seconds"] / everything["step_seconds"]
            possible = peer["step_seconds"] / floor
            yield Verdict(
                f"{workload}: possible speed-up over save_on_cpu beside reached", possible / reached, 1 / 0.85
            )
            allowed = peer["peak_bytes"] + window_bytes + 3 * none["largest_saved_bytes"]
            yield Verdict(
                f"{workload}: peak beside save_on_cpu's and what is in flight", everything["peak_bytes"], allowed
            )
    for variant, other, what, at_most in _BESIDE:
        if (ours := found.get(variant)) and (theirs := found.get(other)):
            yield Verdict(f"{workload}: {what}", ours["step_seconds"] / theirs["step_seconds"], at_most)
    if (ours := found.get("tierstore, checkpoint")) and (theirs := found.get("checkpoint, save_on_cpu")):
        what = f"{workload}: resident bytes of checkpoints offloaded, beside save_on_cpu's"
        if "resident_bytes" in ours and "resident_bytes" in theirs:
            yield Verdict(what, ours["resident_bytes"], theirs["resident_bytes"])
    singles = [found[name] for name in ("checkpoint", "tierstore") if name in found]
    for name in found:
        limit_bytes = found[name].get("limit_bytes")
        fitting = [each["step_seconds"] for each in singles if each["peak_bytes"] <= limit_bytes] if limit_bytes else []
        if fitting:
            ours_beside = found[name]["step_seconds"] / min(fitting)
            yield Verdict(f"{workload}: {name}, step beside the best single strategy", ours_beside, 1.02)
            yield Verdict(f"{workload}: {name}, peak of the limit", found[name]["peak_bytes"] / limit_bytes, 1)
    if none and (covered := found.get(_COVERED)):
        added_seconds = covered["forward_queueing_seconds"] - none["forward_queueing_seconds"]
        share = added_seconds / none["forward_seconds"]
        yield Verdict(f"{workload}: as much as compute covers, packs beside the device's forward", share, 0.05)
