"""Are floats packed near the speed of memory, and does a step on a slow drive gain by it?

Real saved tensors (`trained_tensors.py`) pass block by block through each codec, as in a job of the store: from memory
into its chunk, and from the chunk into memory again. One thread; codecs take turns with a copy of the same tensors, and
the least time of each counts. "Of a copy": the speed in bytes of tensor, divided by that of the copy.

"Step" moves the tensors down to a drive that is slowed down to 0.5 GB/s each way, and up again. "Beside compute", every
core multiplies matrices meanwhile, for half the time that the drive needs for unencoded bytes if nobody else wants the
cores. Codecs have a store each and take turns; the least time of each counts. "Compute" is the same without a store.

It needs `tierstore-native` (`pip install ./native`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tierstore import TierStore
from tierstore.disk.codec import floats
from tierstore.disk.codec.codec import BlockDecoder, Codec, blocks_of, encode_block, parse_codec
from tierstore.disk.scratch import Scratch
from tierstore.testing import Bandwidth, FaultPlan, FaultyStore, Rule

from .codec_choice import Seconds, Turns, compute, move_beside_compute
from .goals import Goal
from .harness import Benchmark, Figures
from .parties import lap_of
from .trained_tensors import tensors_of_kind

ACTIVATIONS, RELU = "activations, bfloat16", "relu outputs"
KINDS = (ACTIVATIONS, "activations, float32", RELU, "noise")
STEPS = tuple(f"{kind}: step {scene}" for kind in (ACTIVATIONS, RELU) for scene in ("alone", "beside compute"))
OTHERS = ("none", "zstd:1", "shuffle-zstd:1")
OWN = ("floats", "auto")
WAYS = ("encode", "decode")
ROUNDS = 7
TURNS = 11
DRIVE_BYTES_PER_SECOND = 500 * 10**6
COMPUTE_SHARE = 0.5
SETTLING_STEPS = 3

BENCHMARK = Benchmark(
    name="packed_floats",
    question="Packed floats: ratio, speed of one core beside a copy in memory, and a step on a drive of 0.5 GB/s",
    variants=(*KINDS, *STEPS),
    plotted=("floats_ratio", "floats_encode_of_copy", "floats_decode_of_copy", "floats_to_best"),
    timeout_seconds=600,  # the first of some kinds trains the model that they are from
    goals=(
        Goal("ratio", "floats_ratio", ACTIVATIONS, at_least=1.3),
        Goal("ratio", "floats_ratio", RELU, at_least=2.0),
        *(Goal("encoding, of a copy", "floats_encode_of_copy", kind, at_least=0.35) for kind in (ACTIVATIONS, RELU)),
        *(Goal("decoding, of a copy", "floats_decode_of_copy", kind, at_least=0.45) for kind in (ACTIVATIONS, RELU)),
        *(Goal("step, of the best other codec's", "floats_to_best", step, at_most=0.8) for step in STEPS),
    ),
)


def measure(variant: str, scratch: Path) -> Figures:
    os.environ[floats.SWITCH] = "1"
    if not floats.has_native():
        raise ModuleNotFoundError("tierstore-native is not installed: python -m pip install ./native")
    kind, _, scene = variant.partition(": step ")
    tensors = tensors_of_kind(kind, scratch.parent)
    return step_figures(tensors, scratch, scene) if scene else codec_figures(tensors)


def codec_figures(tensors: Sequence[Tensor]) -> Figures:
    torch.set_num_threads(1)
    codecs = {name: codec for name in ("floats", *OTHERS[1:]) if (codec := parse_codec(name)) is not None}
    sources = [tensor.view(torch.uint8).numpy() for tensor in tensors]
    targets = [np.zeros_like(source) for source in sources]
    whole = sum(len(source) for source in sources)
    scratch, encoded = Scratch(), dict.fromkeys(codecs, 0)
    seconds: dict[str, list[float]] = {f"{name}_{way}": [] for name in codecs for way in WAYS}
    copy_seconds = []
    for _ in range(ROUNDS):
        started = time.thread_time()
        for source, target in zip(sources, targets, strict=True):
            np.copyto(target, source)
        copy_seconds.append(time.thread_time() - started)
        for name, codec in codecs.items():
            *spent, encoded[name] = pass_through(sources, targets, codec, tensors[0].itemsize, scratch)
            for way, each in zip(WAYS, spent, strict=True):
                seconds[f"{name}_{way}"].append(each)
    copy = min(copy_seconds)
    figures = {f"{name}_ratio": whole / encoded[name] for name in codecs}
    figures |= {f"{name}_of_copy": copy / min(spent) for name, spent in seconds.items()}
    return figures | {"copy_gigabytes_per_second": whole / copy / 1e9}


def pass_through(
    sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], codec: Codec, itemsize: int, scratch: Scratch
) -> tuple[float, float, int]:
    """Encode and decode everything; returns the seconds of each, and the encoded bytes."""
    encode_seconds, decode_seconds, encoded_bytes = 0.0, 0.0, 0
    for source, target in zip(sources, targets, strict=True):
        decoder = BlockDecoder(memoryview(target), codec, itemsize, scratch.workspace)
        for block in blocks_of(memoryview(source)):
            started = time.thread_time()
            length = encode_block(block, scratch.chunk, codec, itemsize, scratch.workspace)
            halfway = time.thread_time()
            decoder.feed(scratch.chunk[:length])
            decode_seconds += time.thread_time() - halfway
            encode_seconds += halfway - started
            encoded_bytes += length
        if not np.array_equal(source, target):
            raise AssertionError(f"{codec} gave other bytes back")
    return encode_seconds, decode_seconds, encoded_bytes


def step_figures(tensors: list[Tensor], scratch: Path, scene: str) -> Figures:
    num_products = products_for(tensors) if scene == "beside compute" else 0
    names = (*OWN, *OTHERS)
    slowed = FaultPlan.of(*(Rule(call, Bandwidth(DRIVE_BYTES_PER_SECOND)) for call in ("pwritev", "preadv")))
    seconds: Seconds = {name: [] for name in (*names, "compute")}

    def step(store: TierStore) -> None:
        move_beside_compute(store, tensors, num_products)

    with ExitStack() as opened:
        codecs = {name: name for name in names}
        turns = Turns(codecs, lambda codec: FaultyStore(scratch, slowed, host_bytes=0, codec=codec), opened)
        for name in (*names, *["auto"] * SETTLING_STEPS):
            turns.step(name, step)
        for _ in range(TURNS):
            turns.take(names, step, seconds)
            with turns.clocks.stopped():
                seconds["compute"].append(lap_of(lambda: compute(num_products))["seconds"])
    return compared(seconds)


def compared(seconds: Seconds) -> Figures:
    """The least of all turns, and how ours stand to the best of the others."""
    least = {name: min(taken) for name, taken in seconds.items()}
    best = min(least[name] for name in OTHERS)
    return {f"{name}_to_best": least[name] / best for name in OWN} | {
        f"{name}_seconds": taken for name, taken in least.items()
    }


def products_for(tensors: Sequence[Tensor]) -> int:
    """How many matrix products take as long as the drive does with COMPUTE_SHARE of the unencoded bytes."""
    compute(5)
    started = time.perf_counter()
    compute(20)
    moving_seconds = 2 * sum(tensor.nbytes for tensor in tensors) / DRIVE_BYTES_PER_SECOND
    return int(COMPUTE_SHARE * moving_seconds * 20 / (time.perf_counter() - started))
