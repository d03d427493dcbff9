"""Measures how fast the store's codecs are on this machine, on generated data that resembles what training saves: the
speeds belong to the machine, the ratios to the data."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy

from ..disk.codec.choice import Sample
from ..disk.codec.codec import Codec
from ..disk.codec.probing import probe
from ..disk.scratch import Scratch
from .measurements import CodecSpeed

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


SAMPLES: Mapping[str, tuple[int, Callable[[_Generator], _Array]]] = {
    "noise": (4, lambda source: source.integers(0, 256, _SAMPLE_BYTES, dtype=numpy.uint8)),
    "activations, bfloat16": (2, _halves),
    "activations, float32": (4, _activations),
    "relu outputs": (4, lambda source: _activations(source, mean=-1.0).clip(min=0)),
    "masks": (1, lambda source: (source.random(_SAMPLE_BYTES) > 0.1).view(numpy.uint8)),
    "zeros": (4, lambda source: numpy.zeros(_SAMPLE_BYTES, numpy.uint8)),
}
"""By name: bytes of an element, and what generates the sample."""


def measure_codecs(seconds: float) -> tuple[CodecSpeed, ...]:
    """Try the codecs that "auto" would try on each sample, in the same way, for an equal part of the time; return
    medians. Blocks."""
    scratch = Scratch()
    speeds: list[CodecSpeed] = []
    for number, (name, (itemsize_bytes, make)) in enumerate(SAMPLES.items()):
        data = memoryview(make(numpy.random.default_rng(number)).tobytes())
        found: defaultdict[Codec, list[Sample]] = defaultdict(list)
        ends_at = time.monotonic() + seconds / len(SAMPLES)
        while not found or time.monotonic() < ends_at:
            for sample in probe(data, itemsize_bytes, scratch):
                found[sample.codec].append(sample)
        for codec, samples in found.items():
            raw_bytes = samples[0].raw_bytes
            encode_seconds = statistics.median(each.encode_seconds for each in samples)
            decode_seconds = statistics.median(each.decode_seconds for each in samples)
            speeds.append(
                CodecSpeed(
                    data=name,
                    codec=str(codec),
                    ratio=samples[0].encoded_bytes / raw_bytes,
                    encode_bytes_per_second=raw_bytes / max(encode_seconds, _LEAST_SECONDS),
                    decode_bytes_per_second=raw_bytes / max(decode_seconds, _LEAST_SECONDS),
                )
            )
    return tuple(speeds)
