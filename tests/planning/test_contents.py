"""Which sample data stands for what is saved."""

from __future__ import annotations

import pytest

from tests.planning.made_up import chain
from tierstore.doctor.samples import SAMPLE_KINDS
from tierstore.planning.contents import sample_data_of, sample_data_of_kind


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("float32", "activations, float32"),
        ("bfloat16", "activations, bfloat16"),
        ("float16", "activations, bfloat16"),
        ("float32, many zeros", "relu outputs"),
        ("bool, many zeros", "masks"),
        ("float32 ReluBackward0, many zeros", "relu outputs"),
        (", many zeros", "relu outputs"),
        ("bool", "masks"),
        ("float64, all zeros", "zeros"),
        ("int64", "noise"),
        ("", "noise"),
    ],
)
def test_kind_of_content_has_sample_data_that_a_doctor_knows(kind: str, data: str) -> None:
    assert sample_data_of_kind(kind) == data
    assert data in SAMPLE_KINDS


def test_workload_has_sample_data_for_every_kind() -> None:
    assert sample_data_of(chain(kind="bool")) == {"bool": "masks"}
