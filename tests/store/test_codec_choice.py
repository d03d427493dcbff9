"""The choice of "auto": plain figures in, a decision out."""

from __future__ import annotations

import pytest

from tierstore.codec import NO_CODEC, Codec
from tierstore.codec_choice import CodecChooser, Sample, candidates
from tierstore.disk.tier import Kind

MASK = Kind("bool", 1, "DropoutBackward0")
FLOAT = Kind("bfloat16", 2, "MulBackward0")
ZSTD, SHUFFLE = Codec("zstd", 1), Codec("shuffle-zstd", 1)
RECORD = 16 * 2**20
GB = 1e9


def sample(codec: Codec, ratio: float, encode_gbps: float, decode_gbps: float) -> Sample:
    raw = 256 * 1024
    return Sample(codec, raw, int(raw * ratio), raw / encode_gbps / GB, raw / decode_gbps / GB)


def chooser(write_gbps: float | None = 2.0, read_gbps: float | None = 1.5) -> CodecChooser:
    made = CodecChooser()
    if write_gbps:
        made.learn_write_speed(RECORD, RECORD / write_gbps / GB, 1)
    if read_gbps:
        made.learn_read_speed(RECORD, RECORD / read_gbps / GB, 1)
    return made


def choose(made: CodecChooser, kind: Kind, *, short: bool = False, num_bytes: int = RECORD) -> Codec:
    return made.choose(kind, num_bytes, is_space_short=short).codec


def test_nothing_known_is_none_and_probed_once() -> None:
    made = CodecChooser()
    first, second = (made.choose(FLOAT, RECORD, is_space_short=False) for _ in range(2))
    assert (first.codec, first.probe) == (NO_CODEC, True)
    assert (second.codec, second.probe) == (NO_CODEC, False)


def test_unknown_disk_speed_is_none() -> None:
    made = chooser(None, None)
    made.learn_samples(MASK, RECORD, [sample(ZSTD, 0.05, 5, 5)])
    assert choose(made, MASK) == NO_CODEC


def test_trained_activations_on_a_fast_disk_stay_raw() -> None:
    made = chooser(2.5, 2.0)
    made.learn_samples(FLOAT, RECORD, [sample(ZSTD, 1 / 1.31, 0.9, 1.0), sample(SHUFFLE, 1 / 1.56, 0.44, 1.0)])
    assert choose(made, FLOAT) == NO_CODEC


def test_masks_are_encoded() -> None:
    made = chooser(1.0, 1.0)
    made.learn_samples(MASK, RECORD, [sample(ZSTD, 1 / 13.8, 3.0, 4.0)])
    assert choose(made, MASK) == ZSTD


def test_slow_disk_takes_what_is_fastest_overall() -> None:
    made = chooser(0.05, 0.05)
    made.learn_samples(FLOAT, RECORD, [sample(ZSTD, 1 / 1.31, 0.9, 1.0), sample(SHUFFLE, 1 / 1.56, 0.44, 1.0)])
    assert choose(made, FLOAT) == SHUFFLE


def test_many_at_once_share_the_disk() -> None:
    """One transfer of eight at 0.25 GB/s each means a disk of 2 GB/s, on which encoding does not pay."""
    figures = [sample(ZSTD, 0.5, 1.0, 1.0)]
    for num_at_once, expected in ((1, ZSTD), (8, NO_CODEC)):
        made = CodecChooser()
        made.learn_write_speed(RECORD, RECORD / 0.25 / GB, num_at_once)
        made.learn_samples(FLOAT, RECORD, figures)
        assert choose(made, FLOAT) == expected


def test_short_space_takes_the_best_ratio_whatever_it_costs() -> None:
    made = chooser()
    made.learn_samples(FLOAT, RECORD, [sample(ZSTD, 0.8, 0.5, 1.0), sample(SHUFFLE, 0.6, 0.1, 0.1)])
    assert choose(made, FLOAT) == NO_CODEC
    assert choose(made, FLOAT, short=True) == SHUFFLE


def test_short_space_does_not_encode_what_does_not_shrink() -> None:
    made = chooser()
    made.learn_samples(FLOAT, RECORD, [sample(ZSTD, 1.0, 0.5, 1.0), sample(SHUFFLE, 0.97, 0.5, 1.0)])
    assert choose(made, FLOAT, short=True) == NO_CODEC


def test_short_space_tries_what_is_unknown() -> None:
    assert choose(CodecChooser(), FLOAT, short=True) == ZSTD


def test_what_was_seen_overrules_the_probe() -> None:
    made = chooser(0.2, 0.2)
    made.learn_samples(FLOAT, RECORD, [sample(ZSTD, 0.5, 1.0, 1.0)])
    assert choose(made, FLOAT) == ZSTD
    for _ in range(20):
        made.learn_written(FLOAT, RECORD, ZSTD, RECORD, RECORD / GB)
    assert choose(made, FLOAT) == NO_CODEC


def test_slow_decoding_overrules_the_probe() -> None:
    made = chooser(0.2, 0.2)
    made.learn_samples(FLOAT, RECORD, [sample(ZSTD, 0.5, 1.0, 1.0)])
    for _ in range(20):
        made.learn_decoded(FLOAT, RECORD, ZSTD, RECORD / 0.05 / GB)
    assert choose(made, FLOAT) == NO_CODEC


def test_a_choice_near_the_line_does_not_flap() -> None:
    made = chooser(1.0, 1.0)
    made.learn_samples(MASK, RECORD, [sample(ZSTD, 0.5, 4.0, 4.0)])  # 1.5 of 2.0 s/GB
    assert choose(made, MASK) == ZSTD
    for _ in range(30):
        made.learn_written(MASK, RECORD, ZSTD, int(0.6 * RECORD), RECORD / 4 / GB)  # 1.7 of 2.0
    assert choose(made, MASK) == ZSTD
    fresh = chooser(1.0, 1.0)
    fresh.learn_samples(MASK, RECORD, [sample(ZSTD, 0.6, 4.0, 4.0)])
    assert choose(fresh, MASK) == NO_CODEC


def test_probes_come_back_but_seldom() -> None:
    made = chooser()
    probes = [made.choose(FLOAT, RECORD, is_space_short=False).probe for _ in range(1000)]
    assert probes[0]
    assert 3 <= sum(probes) <= 5


def test_small_records_are_never_probed() -> None:
    made = chooser()
    choice = made.choose(FLOAT, 10_000, is_space_short=False)
    assert (choice.codec, choice.probe) == (NO_CODEC, False)


def test_size_classes_and_kinds_are_apart() -> None:
    made = chooser(0.1, 0.1)
    made.learn_samples(FLOAT, RECORD, [sample(ZSTD, 0.3, 1.0, 1.0)])
    assert choose(made, FLOAT) == ZSTD
    assert choose(made, FLOAT, num_bytes=RECORD // 8) == NO_CODEC
    assert choose(made, MASK) == NO_CODEC


def test_short_transfers_say_nothing_of_the_disk() -> None:
    made = CodecChooser()
    made.learn_write_speed(4096, 1.0, 1)
    made.learn_samples(FLOAT, RECORD, [sample(ZSTD, 0.3, 1.0, 1.0)])
    assert choose(made, FLOAT) == NO_CODEC


@pytest.mark.parametrize(("itemsize", "expected"), [(1, (ZSTD,)), (2, (ZSTD, SHUFFLE))])
def test_planes_are_a_candidate_for_wide_elements_only(itemsize: int, expected: tuple[Codec, ...]) -> None:
    assert candidates(itemsize) == expected
