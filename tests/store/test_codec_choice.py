"""The choice of "auto": plain figures in, a decision out."""

import pytest

from tierstore.disk.codec.choice import UNKNOWN_LOAD, CodecChooser, Load, Sample
from tierstore.disk.codec.codec import BITS, CONSTANT, NO_CODEC, Codec
from tierstore.disk.tier import Kind

MASK = Kind("bool", 1, "DropoutBackward0")
FLOAT = Kind("bfloat16", 2, "MulBackward0")
FAST, ZSTD, SHUFFLE = Codec("zstd", -3), Codec("zstd", 1), Codec("shuffle-zstd", 1)
RECORD = 16 * 2**20
GB = 1e9

MOVING_ALONE = Load(demand=1.0, free_cores=4.0)
BESIDE_TRAINING = Load(demand=0.5, free_cores=0.2)
"""Training keeps all cores busy, and moving unencoded bytes takes half of its time."""

# Measured: ratios, and gigabytes per second of one core
ACTIVATIONS = ((FAST, 1.0, 2.0, 9.0), (ZSTD, 1 / 1.32, 0.84, 1.43), (SHUFFLE, 1 / 1.73, 0.54, 1.4))
RELU = ((FAST, 1 / 6.0, 1.6, 3.9), (ZSTD, 1 / 7.7, 1.0, 2.9), (SHUFFLE, 1 / 6.5, 0.6, 1.3))
MASKS = ((BITS, 1 / 8, 20.0, 13.0), (ZSTD, 1 / 8, 0.46, 0.9))
ZEROS = ((CONSTANT, 0.0001, 17.0, 9.5), (FAST, 0.001, 7.8, 29.0), (ZSTD, 0.001, 6.0, 28.0), (SHUFFLE, 0.001, 2.2, 3.1))
NOISE = ((FAST, 1.0, 6.9, 30.0), (ZSTD, 1.0, 6.2, 30.0), (SHUFFLE, 1.0, 2.1, 30.0))

Measured = tuple[tuple[Codec, float, float, float], ...]


def sample(codec: Codec, ratio: float, encode_gbps: float, decode_gbps: float) -> Sample:
    raw = 256 * 1024
    return Sample(codec, raw, int(raw * ratio), raw / encode_gbps / GB, raw / decode_gbps / GB)


def chooser(write_gbps: float | None = 2.5, read_gbps: float | None = 2.2, measured: Measured = ()) -> CodecChooser:
    """One that knows a disk, and what `measured` says of all kinds."""
    made = CodecChooser(num_lanes=4)
    if write_gbps and read_gbps:
        made.learn_speed("write", write_gbps * GB)
        made.learn_speed("read", read_gbps * GB)
    for kind in (MASK, FLOAT):
        made.learn_samples(kind, RECORD, [sample(*each) for each in measured])
    return made


def choose(
    made: CodecChooser,
    kind: Kind = FLOAT,
    load: Load = MOVING_ALONE,
    *,
    short: bool = False,
    num_bytes: int = RECORD,
) -> Codec:
    return made.choose(kind, num_bytes, load, is_space_short=short).codec


def test_nothing_known_is_none_and_probed_once() -> None:
    made = CodecChooser()
    first, second = (made.choose(FLOAT, RECORD, UNKNOWN_LOAD, is_space_short=False) for _ in range(2))
    assert (first.codec, first.probe) == (NO_CODEC, True)
    assert (second.codec, second.probe) == (NO_CODEC, False)


@pytest.mark.parametrize("load", [MOVING_ALONE, BESIDE_TRAINING, UNKNOWN_LOAD])
@pytest.mark.parametrize(
    ("measured", "expected"),
    [(NOISE, {NO_CODEC}), (ACTIVATIONS, {NO_CODEC}), (ZEROS, {CONSTANT}), (MASKS, {BITS})],
    ids=["noise", "activations", "zeros", "masks"],
)
def test_on_a_fast_disk_most_kinds_have_one_answer(measured: Measured, expected: set[Codec], load: Load) -> None:
    assert choose(chooser(measured=measured), load=load) in expected


@pytest.mark.parametrize(("load", "expected"), [(MOVING_ALONE, FAST), (BESIDE_TRAINING, NO_CODEC)])
def test_what_is_cheap_on_idle_cores_is_dear_beside_training(load: Load, expected: Codec) -> None:
    assert choose(chooser(measured=RELU), load=load) == expected


def test_slow_disk_takes_what_is_fastest_overall() -> None:
    """On 0.2 GB/s every byte that is not moved counts, on idle cores and even beside training that waits for it."""
    assert choose(chooser(0.2, 0.2, ACTIVATIONS)) == SHUFFLE
    assert choose(chooser(0.1, 0.1, ACTIVATIONS), load=Load(1.0, 0.0)) == SHUFFLE


def test_free_cores_decide_between_strong_and_fast() -> None:
    """At 0.7 GB/s one core cannot keep up with byte planes, four can; nor is a core and a half enough for the last."""
    assert choose(chooser(0.7, 0.7, ACTIVATIONS), load=Load(1.0, 4.5)) == SHUFFLE
    assert choose(chooser(0.7, 0.7, ACTIVATIONS), load=Load(1.0, 1.0)) == NO_CODEC
    slow_to_encode = ((ZSTD, 0.7, 1 / 1.6, 100.0),)
    assert choose(chooser(1.0, 1.0, slow_to_encode), load=Load(1.0, 4.5)) == ZSTD
    assert choose(chooser(1.0, 1.0, slow_to_encode), load=Load(1.0, 1.5)) == NO_CODEC


def test_short_space_takes_the_best_ratio_whatever_it_costs() -> None:
    made = chooser(measured=((ZSTD, 0.8, 0.5, 1.0), (SHUFFLE, 0.6, 0.1, 0.1)))
    assert choose(made) == NO_CODEC
    assert choose(made, short=True) == SHUFFLE
    in_vain = chooser(measured=((ZSTD, 1.0, 0.5, 1.0), (SHUFFLE, 0.97, 0.5, 1.0)))
    assert choose(in_vain, short=True) == NO_CODEC
    assert choose(CodecChooser(), FLOAT, short=True) == SHUFFLE  # nothing is known: the strongest is tried


def test_what_was_seen_overrules_the_probe() -> None:
    made = chooser(0.2, 0.2, ((ZSTD, 0.5, 1.0, 1.0),))
    assert choose(made) == ZSTD
    for _ in range(20):
        made.learn_written(FLOAT, RECORD, ZSTD, RECORD)
    assert choose(made) == NO_CODEC


@pytest.mark.parametrize("measured", [ZEROS, MASKS, RELU], ids=["zeros", "masks", "relu outputs"])
@pytest.mark.parametrize("lane_gbps", [3.5, 1.0, 0.02])
@pytest.mark.parametrize("write_gbps", [2.5, 0.5])
def test_waits_on_the_way_overrule_even_the_cheapest_codec(
    measured: Measured, lane_gbps: float, write_gbps: float
) -> None:
    """Threads wait for cores, and for the interpreter. One stall does not count, and waits are forgotten by and by."""
    made = chooser(write_gbps, write_gbps, measured)
    codec, ratio, _, _ = next(each for each in measured if each[0] == choose(made))
    made.learn_written(FLOAT, RECORD, codec, int(RECORD * ratio), 60.0)
    assert choose(made) == codec
    for _ in range(40):
        if choose(made) != NO_CODEC:
            made.learn_written(FLOAT, RECORD, codec, int(RECORD * ratio), 4 * RECORD / lane_gbps / GB)
    assert (choose(made) != NO_CODEC) == (lane_gbps > write_gbps)
    for _ in range(30):
        made.learn_samples(FLOAT, RECORD, [sample(*each) for each in measured])
    assert choose(made) != NO_CODEC


def test_a_choice_near_the_line_does_not_flap() -> None:
    """Between 0.9 and 1 of the cost of raw bytes, whatever was chosen before stays."""
    assert choose(chooser(1.0, 1.0, ((ZSTD, 0.93, 20.0, 20.0),))) == NO_CODEC
    made = chooser(1.0, 1.0, ((ZSTD, 0.5, 20.0, 20.0),))
    for ratio, expected in ((0.5, ZSTD), (0.93, ZSTD), (1.0, NO_CODEC)):
        for _ in range(30):
            made.learn_written(FLOAT, RECORD, ZSTD, int(ratio * RECORD))
        assert choose(made) == expected


def test_encoding_stops_where_a_record_is_unlike_its_kind() -> None:
    """Half-way between what the kind shrinks to and nothing; a sixteenth at least; not where space is short."""
    made = chooser(measured=((FAST, 0.2, 8.0, 8.0),))
    choice = made.choose(FLOAT, RECORD, MOVING_ALONE, is_space_short=False)
    assert choice.codec == FAST
    assert choice.worst_ratio == pytest.approx(0.6, abs=0.01)
    for each in (made, CodecChooser()):
        assert each.choose(FLOAT, RECORD, MOVING_ALONE, is_space_short=True).worst_ratio == 15 / 16


def test_raw_records_show_now_and_then_whether_the_disk_is_still_slow() -> None:
    """Four in 64, so that a disk that was slow at first is not taken for slow for ever."""
    made = chooser(2.2, 2.2, RELU)
    load = Load(1.0, 2.0)
    raw = [number for number in range(150) if choose(made, load=load) == NO_CODEC]
    assert raw == [*range(63, 67), *range(127, 131)]
    for _ in range(10):
        made.learn_speed("write", 20 * GB)
        made.learn_speed("read", 20 * GB)
    assert choose(made, load=load) == NO_CODEC


def test_more_kinds_than_are_remembered_are_learned_afresh() -> None:
    made = chooser(0.1, 0.1, ((ZSTD, 0.3, 1.0, 1.0),))
    for number in range(1024):
        assert choose(made, FLOAT._replace(origin=str(number))) == NO_CODEC
    assert choose(made) == NO_CODEC


def test_size_classes_kinds_and_contents_are_apart() -> None:
    made = chooser(0.1, 0.1)
    made.learn_samples(FLOAT, RECORD, [sample(ZSTD, 0.3, 1.0, 1.0)])
    assert choose(made) == ZSTD
    assert choose(made, num_bytes=RECORD // 8) == NO_CODEC
    assert choose(made, MASK) == NO_CODEC
    assert choose(made, FLOAT._replace(content="many zeros")) == NO_CODEC
