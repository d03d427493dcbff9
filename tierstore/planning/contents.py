"""Maps the contents of a trace's tensors to the sample data of hardware files."""

from __future__ import annotations

from ..simulator import Workload

__all__ = ["sample_data_of", "sample_data_of_kind"]

_MASKS, _ZEROS, _MANY_ZEROS, _NOISE = "masks", "zeros", "relu outputs", "noise"
_DATA_OF_DTYPES = {
    "float16": "activations, bfloat16",
    "bfloat16": "activations, bfloat16",
    "float32": "activations, float32",
    "float64": "activations, float32",
    "bool": _MASKS,
    "uint8": _MASKS,
}


def sample_data_of(workload: Workload) -> dict[str, str]:
    """The sample data for each kind of content that the workload saves."""
    return {saved.kind: sample_data_of_kind(saved.kind) for saved in workload.saved}


def sample_data_of_kind(kind: str) -> str:
    """The sample data, as `tierstore doctor` names it, for a kind as traces name it ("float32, many zeros").

    An unknown kind counts as noise, which no codec shrinks.
    """
    name, _, content = kind.partition(", ")
    dtype = name.partition(" ")[0]
    data = _DATA_OF_DTYPES.get(dtype, _NOISE)
    if content == "all zeros":
        return _ZEROS
    return _MANY_ZEROS if content == "many zeros" and data != _MASKS else data
