"""Measures how fast the store's codecs are on this machine, on generated data that resembles what training saves.

The speeds belong to the machine. The ratios belong to the generated data. Real tensors shrink more or less, so a store
with codec "auto" tries codecs on each kind of content that it sees.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy

from ..disk.codec.codec import Codec
from ..disk.codec.figures import Sample
from ..disk.codec.probing import probe
from ..disk.scratch import Scratch
from ..hardware import CodecSpeed
from .samples import SAMPLE_KINDS

__all__ = ["measure_codecs"]

_SAMPLE_BYTES = 2 * 2**20
_FEATURES = 256  # of a generated layer; each has its own scale, as in trained layers
_LEAST_SECONDS = 1e-9  # the clock of a thread's CPU time may not advance for so little work

_Generator = numpy.random.Generator
_Array = numpy.ndarray[Any, Any]


def _activations(source: _Generator, mean: float = 0.0) -> _Array:
    """Normally distributed values, each feature with a scale of its own; `mean` in standard deviations."""
    scales = numpy.exp(source.normal(0, 1, _FEATURES)).astype(numpy.float32)
    values = source.standard_normal((_SAMPLE_BYTES // 4 // _FEATURES, _FEATURES), dtype=numpy.float32)
    return (values + numpy.float32(mean)) * scales


def _halves(source: _Generator) -> _Array:
    """Activations in bfloat16, the upper half of float32: twice the elements in the same bytes."""
    return numpy.concatenate([_activations(source), _activations(source)]).view(numpy.uint16)[:, 1::2]


_MAKERS: Mapping[str, Callable[[_Generator], _Array]] = {
    "noise": lambda source: source.integers(0, 256, _SAMPLE_BYTES, dtype=numpy.uint8),
    "activations, bfloat16": _halves,
    "activations, float32": _activations,
    "relu outputs": lambda source: _activations(source, mean=-1.0).clip(min=0),
    "masks": lambda source: (source.random(_SAMPLE_BYTES) > 0.1).view(numpy.uint8),
    "zeros": lambda source: numpy.zeros(_SAMPLE_BYTES, numpy.uint8),
}


def measure_codecs(seconds: float, kind_done: Callable[[], None]) -> tuple[CodecSpeed, ...]:
    """Try the codecs that "auto" would try on each kind, in the same way; return medians. Blocks.

    Each kind gets an equal part of the time. `kind_done`: called after each kind.
    """
    scratch = Scratch()
    speeds: list[CodecSpeed] = []
    for number, (name, kind) in enumerate(SAMPLE_KINDS.items()):
        made = _MAKERS[name](numpy.random.default_rng(number))
        data = memoryview(made.tobytes())
        speeds += _speeds_of(name, data, kind.itemsize_bytes, seconds / len(SAMPLE_KINDS), scratch)
        kind_done()
    return tuple(speeds)


def _speeds_of(name: str, data: memoryview, itemsize_bytes: int, seconds: float, scratch: Scratch) -> list[CodecSpeed]:
    samples: defaultdict[Codec, list[Sample]] = defaultdict(list)
    ends_at = time.monotonic() + seconds
    while not samples or time.monotonic() < ends_at:
        for sample in probe(data, itemsize_bytes, scratch):
            samples[sample.codec].append(sample)
    return [_speed(name, codec, found) for codec, found in samples.items()]


def _speed(name: str, codec: Codec, samples: list[Sample]) -> CodecSpeed:
    encode_seconds = statistics.median(each.encode_seconds for each in samples)
    decode_seconds = statistics.median(each.decode_seconds for each in samples)
    return CodecSpeed(
        data=name,
        codec=str(codec),
        ratio=samples[0].encoded_bytes / samples[0].raw_bytes,
        encode_bytes_per_second=samples[0].raw_bytes / max(encode_seconds, _LEAST_SECONDS),
        decode_bytes_per_second=samples[0].raw_bytes / max(decode_seconds, _LEAST_SECONDS),
    )
