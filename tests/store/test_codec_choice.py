"""The choice of "auto": plain figures in, a decision out."""

from __future__ import annotations

import pytest

from tierstore.disk.codec.choice import CodecChooser, candidates
from tierstore.disk.codec.codec import BITS, CONSTANT, NO_CODEC, Codec
from tierstore.disk.codec.figures import UNKNOWN_LOAD, Load, Sample
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
    if write_gbps:
        made.learn_write_speed(write_gbps * GB)
    if read_gbps:
        made.learn_read_speed(read_gbps * GB)
    for kind in (MASK, FLOAT):
        made.learn_written(kind, RECORD, NO_CODEC, RECORD, 0.1 * RECORD / GB)
        made.learn_read(kind, RECORD, NO_CODEC, 0.1 * RECORD / GB)
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


def test_unknown_disk_speed_is_none() -> None:
    assert choose(chooser(None, None, ZEROS)) == NO_CODEC


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


def test_a_disk_that_is_idle_most_of_the_time_is_not_relieved() -> None:
    """Training hides the moves: making them shorter gains nothing, even if half a core is free for it."""
    for demand, expected in ((1.0, FAST), (0.1, NO_CODEC)):
        assert choose(chooser(measured=RELU), load=Load(demand, 1.5)) == expected


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


def test_short_space_does_not_encode_what_does_not_shrink() -> None:
    made = chooser(measured=((ZSTD, 1.0, 0.5, 1.0), (SHUFFLE, 0.97, 0.5, 1.0)))
    assert choose(made, short=True) == NO_CODEC


@pytest.mark.parametrize(("kind", "expected"), [(FLOAT, SHUFFLE), (MASK, ZSTD)])
def test_short_space_tries_the_strongest_on_what_is_unknown(kind: Kind, expected: Codec) -> None:
    assert choose(CodecChooser(), kind, short=True) == expected


def test_what_was_seen_overrules_the_probe() -> None:
    made = chooser(0.2, 0.2, ((ZSTD, 0.5, 1.0, 1.0),))
    assert choose(made) == ZSTD
    for _ in range(20):
        made.learn_written(FLOAT, RECORD, ZSTD, RECORD, RECORD / GB)
    assert choose(made) == NO_CODEC


def test_slow_decoding_overrules_the_probe() -> None:
    made = chooser(0.2, 0.2, ((ZSTD, 0.5, 1.0, 1.0),))
    assert choose(made) == ZSTD
    for _ in range(60):
        made.learn_read(FLOAT, RECORD, ZSTD, RECORD / 0.01 / GB)
    assert choose(made) == NO_CODEC


HALVED = ((ZSTD, 0.5, 1.0, 1.0),)  # with four lanes on a disk of `chooser`: 0.73 of the time of moving it as it is


def wait_on_the_way(made: CodecChooser, way: str, lane_gbps: float, *, times: int = 30) -> None:
    """Records of `HALVED`, which four lanes together wrote, or read, at so many GB/s."""
    cpu_seconds, lane_seconds = RECORD / GB, 4 * RECORD / lane_gbps / GB
    for _ in range(times):
        if way == "write":
            made.learn_written(FLOAT, RECORD, ZSTD, RECORD // 2, cpu_seconds, lane_seconds)
        else:
            made.learn_read(FLOAT, RECORD, ZSTD, cpu_seconds, lane_seconds)


@pytest.mark.parametrize("way", ["write", "read"])
def test_waits_on_the_way_overrule_the_probe(way: str) -> None:
    """CPU seconds on free cores are not all: threads wait for cores, and for the interpreter."""
    made = chooser(measured=HALVED)
    assert choose(made) == ZSTD
    wait_on_the_way(made, way, 3.5)
    assert choose(made) == ZSTD
    wait_on_the_way(made, way, 1.5)
    assert choose(made) == NO_CODEC


@pytest.mark.parametrize("measured", [ZEROS, MASKS, RELU], ids=["zeros", "masks", "relu outputs"])
@pytest.mark.parametrize("lane_gbps", [1.0, 0.02])
@pytest.mark.parametrize("write_gbps", [2.5, 0.5])
def test_waits_that_go_on_overrule_even_the_cheapest_codec(
    measured: Measured, lane_gbps: float, write_gbps: float
) -> None:
    """However long they are, and however little a stall may count; where the disk is slower still, they do not."""
    made = chooser(write_gbps, 2.2, measured)
    first = choose(made)
    for _ in range(100):
        for codec, ratio, encode_gbps, _ in measured:
            if codec == choose(made):
                cpu_seconds, lane_seconds = RECORD / encode_gbps / GB, 4 * RECORD / lane_gbps / GB
                made.learn_written(FLOAT, RECORD, codec, int(RECORD * ratio), cpu_seconds, lane_seconds)
    assert first != NO_CODEC
    assert (choose(made) == NO_CODEC) == (lane_gbps < write_gbps)


@pytest.mark.parametrize("measured", [ZEROS, MASKS, RELU, HALVED], ids=["zeros", "masks", "relu outputs", "halved"])
def test_a_stall_overrules_no_codec(measured: Measured) -> None:
    made = chooser(measured=measured)
    codec, ratio, encode_gbps, _ = next(each for each in measured if each[0] == choose(made))
    made.learn_written(FLOAT, RECORD, codec, int(RECORD * ratio), RECORD / encode_gbps / GB, 60.0)
    assert choose(made) == codec


@pytest.mark.parametrize("way", ["write", "read"])
def test_waits_are_forgotten_by_and_by(way: str) -> None:
    """A codec that is not used shows no waits: each probe takes some of them for gone."""
    made = chooser(measured=HALVED)
    assert choose(made) == ZSTD
    wait_on_the_way(made, way, 1.5)
    assert choose(made) == NO_CODEC
    probes = 0
    while choose(made) == NO_CODEC:
        made.learn_samples(FLOAT, RECORD, [sample(*HALVED[0])])
        probes += 1
    assert 1 < probes < 10


@pytest.mark.parametrize("way", ["write", "read"])
def test_a_record_that_met_a_stall_does_not_overrule_the_probe(way: str) -> None:
    made = chooser(measured=HALVED)
    assert choose(made) == ZSTD
    wait_on_the_way(made, way, 0.001, times=1)
    assert choose(made) == ZSTD


@pytest.mark.parametrize("way", ["write", "read"])
def test_a_record_that_is_alone_has_not_waited(way: str) -> None:
    """It is on its way for less than a fourth of what four of them take; later ones may wait all the same."""
    made, slow = chooser(measured=HALVED), chooser(measured=HALVED)
    for each in (made, slow):
        assert choose(each) == ZSTD
    wait_on_the_way(made, way, 100.0)
    assert choose(made) == ZSTD
    for each in (made, slow):
        wait_on_the_way(each, way, 1.5)
        assert choose(each) == NO_CODEC


def test_times_do_not_overrule_what_is_known_to_be_cheaper() -> None:
    """Whole records come from memory, a sample is in the cache: whatever has not been used seems to be faster."""
    made = chooser(measured=ZEROS)
    for _ in range(20):
        made.learn_written(FLOAT, RECORD, CONSTANT, RECORD // 10_000, RECORD / 5.0 / GB)
        assert choose(made) == CONSTANT


def test_more_that_is_saved_overrules_what_is_cheaper() -> None:
    half_constant = ((CONSTANT, 0.5, 17.0, 9.5), (FAST, 0.4, 8.0, 16.0))
    assert choose(chooser(0.5, 0.5, half_constant)) == FAST


def test_one_read_into_fresh_pages_does_not_overrule_the_probe() -> None:
    made = chooser(measured=MASKS)
    assert choose(made, MASK, BESIDE_TRAINING) == BITS
    for _ in range(2):
        made.learn_read(MASK, RECORD, BITS, RECORD / 0.2 / GB)
    assert choose(made, MASK, BESIDE_TRAINING) == BITS


def test_only_what_encoding_adds_counts() -> None:
    """A record as it is takes CPU time too, for its checksum; the least of late, not a read into fresh pages."""
    made = chooser(measured=((BITS, 1 / 8, 4.0, 4.0),))
    beside = Load(0.4, 0.0)
    assert choose(made, MASK, beside) == NO_CODEC
    for _ in range(80):
        made.learn_written(MASK, RECORD, NO_CODEC, RECORD, 0.2 * RECORD / GB)
        made.learn_read(MASK, RECORD, NO_CODEC, 0.2 * RECORD / GB)
    assert choose(made, MASK, beside) == BITS
    made.learn_read(FLOAT, RECORD, NO_CODEC, 0.1 * RECORD / GB)
    made.learn_read(FLOAT, RECORD, NO_CODEC, 5.0 * RECORD / GB)
    made.learn_written(FLOAT, RECORD, NO_CODEC, RECORD, 0.1 * RECORD / GB)
    assert choose(made, FLOAT, beside) == NO_CODEC


def test_a_choice_near_the_line_does_not_flap() -> None:
    """Between 0.9 and 1 of the cost of raw bytes, whatever was chosen before stays."""
    disk = 2.0  # seconds per gigabyte
    near = ((ZSTD, 0.93, 20.0, 20.0),)
    fresh = chooser(2 / disk, 2 / disk, near)
    assert choose(fresh) == NO_CODEC
    made = chooser(2 / disk, 2 / disk, ((ZSTD, 0.5, 20.0, 20.0),))
    assert choose(made) == ZSTD
    for _ in range(30):
        made.learn_written(FLOAT, RECORD, ZSTD, int(0.93 * RECORD), 0.05 * RECORD / GB)
    assert choose(made) == ZSTD
    for _ in range(30):
        made.learn_written(FLOAT, RECORD, ZSTD, int(1.0 * RECORD), 0.05 * RECORD / GB)
    assert choose(made) == NO_CODEC


def test_encoding_stops_where_a_record_is_unlike_its_kind() -> None:
    """Half-way between what the kind shrinks to and nothing; a sixteenth at least; not where space is short."""
    made = chooser(measured=((FAST, 0.2, 8.0, 8.0),))
    choice = made.choose(FLOAT, RECORD, MOVING_ALONE, is_space_short=False)
    assert choice.codec == FAST
    assert choice.worst_ratio == pytest.approx(0.6, abs=0.01)
    assert made.choose(FLOAT, RECORD, MOVING_ALONE, is_space_short=True).worst_ratio == 15 / 16
    assert CodecChooser().choose(FLOAT, RECORD, MOVING_ALONE, is_space_short=True).worst_ratio == 15 / 16


def test_raw_records_show_now_and_then_whether_the_disk_is_still_slow() -> None:
    """Four of them, ever more seldom, so that one disk that was slow at first is not taken for slow for ever."""
    made = chooser(2.2, 2.2, RELU)
    load = Load(1.0, 2.0)
    raw = [number for number in range(400) if choose(made, load=load) == NO_CODEC]
    assert raw == [*range(15, 19), *range(82, 86), *range(341, 345)]
    for _ in range(10):
        made.learn_write_speed(20 * GB)
        made.learn_read_speed(20 * GB)
    assert choose(made, load=load) == NO_CODEC


@pytest.mark.parametrize("measured", [ZEROS, MASKS], ids=["zeros", "masks"])
def test_no_raw_records_are_spent_where_encoding_pays_on_any_disk(measured: Measured) -> None:
    made = chooser(measured=measured)
    assert NO_CODEC not in {choose(made) for _ in range(1000)}


def test_probes_come_back_ever_more_seldom() -> None:
    made = chooser()
    probes = [made.choose(FLOAT, RECORD, MOVING_ALONE, is_space_short=False).probe for _ in range(1000)]
    assert [number for number, probe in enumerate(probes) if probe] == [0, 4, 20, 84, 340, 596, 852]


def test_probes_of_short_records_are_further_apart() -> None:
    """A probe costs the same for a short record, so it is weighed against bytes too: one in 64 MiB."""
    made = chooser()
    probes = [made.choose(FLOAT, 2**20, MOVING_ALONE, is_space_short=False).probe for _ in range(300)]
    assert [number for number, probe in enumerate(probes) if probe] == [0, 64, 128, 192]


def test_small_records_are_never_probed() -> None:
    choice = chooser().choose(FLOAT, 10_000, MOVING_ALONE, is_space_short=False)
    assert (choice.codec, choice.probe) == (NO_CODEC, False)


def test_size_classes_kinds_and_contents_are_apart() -> None:
    made = chooser(0.1, 0.1)
    made.learn_samples(FLOAT, RECORD, [sample(ZSTD, 0.3, 1.0, 1.0)])
    assert choose(made) == ZSTD
    assert choose(made, num_bytes=RECORD // 8) == NO_CODEC
    assert choose(made, MASK) == NO_CODEC
    assert choose(made, FLOAT._replace(content="many zeros")) == NO_CODEC


def test_a_lower_bound_raises_the_disk_speed_and_never_lowers_it() -> None:
    made = chooser(1.0, 1.0)
    made.learn_write_speed(0.1 * GB, is_lower_bound=True)
    made.learn_read_speed(0.1 * GB, is_lower_bound=True)
    assert made.disk_seconds(10**9, 10**9) == pytest.approx(2.0)
    made.learn_write_speed(5.0 * GB, is_lower_bound=True)
    assert made.disk_seconds(10**9, 0) == pytest.approx(0.5)
    unknown = CodecChooser()
    unknown.learn_write_speed(GB, is_lower_bound=True)
    assert unknown.disk_seconds(1, 1) is None


@pytest.mark.parametrize(("itemsize", "expected"), [(1, {CONSTANT, BITS, ZSTD}), (2, {CONSTANT, FAST, ZSTD, SHUFFLE})])
def test_bits_are_for_bytes_and_planes_for_wider_elements(itemsize: int, expected: set[Codec]) -> None:
    assert set(candidates(itemsize)) == expected
