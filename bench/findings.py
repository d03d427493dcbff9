"""What the plot of each benchmark says: its title, from the figures that it shows, and words under its axes. Pure.

A title is a sentence with the finding. It is made of the medians of the run that is drawn, so it is true of them. Where
a run lacks a figure that the sentence needs, the benchmark's question is the title.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from .goals import figures_by_round
from .harness import Benchmark, Results

__all__ = ["PICTURES", "Medians", "Picture", "picture_of", "title_of"]

_MIB = 2**20


class Medians:
    """The median of each figure of each variant; of two variants, that of what they have in the same rounds.

    Args:
        results: of one benchmark.
    """

    def __init__(self, results: Results) -> None:
        self._rounds = figures_by_round([(each.round, each.variant, each.figures) for each in results.records])
        self._variants = dict.fromkeys(each.variant for each in results.records)

    def of(self, variant: str, figure: str) -> float:
        """One figure of one variant. Raises LookupError: the run does not have it."""
        return self._median([figures[variant][figure] for figures in self._rounds_with(figure, variant)])

    def ratio(self, figure: str, variant: str, other: str) -> float:
        """A variant's figure, of another variant's, as goals are judged. Raises LookupError: as in `of`."""
        rounds = self._rounds_with(figure, variant, other)
        return self._median([figures[variant][figure] / figures[other][figure] for figures in rounds])

    def beyond(self, figure: str, variant: str, other: str) -> float:
        """What a variant's figure is beyond another variant's. Raises LookupError: as in `of`."""
        rounds = self._rounds_with(figure, variant, other)
        return self._median([figures[variant][figure] - figures[other][figure] for figures in rounds])

    def all(self, figure: str, among: Callable[[str], bool] = lambda variant: True) -> list[float]:
        """A figure of all variants that have it. Raises LookupError: none does."""
        having = [each for each in self._variants if among(each) and self._rounds_with(figure, each)]
        if not having:
            raise LookupError(figure)
        return [self.of(variant, figure) for variant in having]

    def _rounds_with(self, figure: str, *variants: str) -> list[Mapping[str, Mapping[str, float]]]:
        return [each for each in self._rounds.values() if all(figure in each.get(name, {}) for name in variants)]

    @staticmethod
    def _median(values: list[float]) -> float:
        if not values:
            raise LookupError("the run does not have the figure")
        return statistics.median(values)


@dataclass(frozen=True)
class Picture:
    """How a plot speaks.

    Attributes:
        finding: the title; may raise LookupError.
        axes: what is said under the axis of a figure, with its unit.
        ours: which variants have a store; they are drawn in colour.
    """

    finding: Callable[[Medians], str]
    axes: Mapping[str, str] = field(default_factory=dict)
    ours: Callable[[str], bool] = lambda variant: variant.startswith("tierstore")


def _from_to(values: Collection[float], form: str = ".2f") -> str:
    """Such as "1.10 to 1.25", or one number if they look alike."""
    least, most = (format(value, form) for value in (min(values), max(values)))
    return least if least == most else f"{least.removesuffix('%')} to {most}".replace("%", " %")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _all_ours(variant: str) -> bool:
    return True


def _memory_limit(run: Medians) -> str:
    if not run.of("plain, limited", "out_of_memory_kills"):
        raise LookupError("plain training was not killed")
    seconds, ratio = (run.of("tierstore, limited", name) for name in ("step_seconds", "step_to_unlimited"))
    return (
        f"Limited to 1000 MiB, plain training is killed; with tierstore a step takes {seconds:.1f} s, "
        f"{ratio:.2f} times as long as without a limit"
    )


def _freed_memory(run: Medians) -> str:
    slower = _from_to(run.all("step_of_plain", lambda variant: variant.endswith("limited")))
    return f"Limited to 0.55 of what plain training adds, a step takes {slower} times as long as plain's"


def _trainers(run: Medians) -> str:
    def with_store(variant: str) -> bool:
        return variant.endswith("with the store") and "checkpoints" not in variant

    def without(variant: str) -> bool:
        return "with the store" not in variant and "checkpoints" not in variant

    added, plain = (
        _from_to([value / _MIB for value in run.all("added_bytes", among)], ".0f") for among in (with_store, without)
    )
    libraries = ("transformers", "TRL's SFT", "Lightning", "accelerate")
    slower = [run.ratio("step_seconds", f"{each} with the store", each) for each in libraries]
    return f"With the store, trainers add {added} MiB instead of {plain}; a step takes {_from_to(slower)} times as long"


def _training_step(run: Medians) -> str:
    ours = "tierstore, freed memory returned"
    added, plain = (run.of(variant, "peak_memory_bytes") / _MIB for variant in (ours, "plain"))
    slower = run.ratio("step_seconds", ours, "plain")
    return (
        f"With freed memory returned, a step adds {added:.0f} MiB instead of {plain:.0f}, "
        f"and takes {slower:.2f} times as long"
    )


def _memory_plan(run: Medians) -> str:
    slower, trained = run.all("step_to_best", _is_plan), run.all("trains", _is_plan)
    num_alone = trained.count(1) - len(slower)
    alone = f"; {num_alone} plans train where none of these does" if num_alone else ""
    killed = f"; {trained.count(0)} of {len(trained)} plans were killed" if 0 in trained else ""
    whole = f"Within the same limit a plan's step takes {_from_to(slower)} times that of the best single strategy"
    return whole + alone + killed


def _is_plan(variant: str) -> bool:
    return variant.endswith(": plan")


def _lowest_limit(run: Medians) -> str:
    plan = _from_to(run.all("lowest_to_plain", _is_plan))
    offload = _from_to(run.all("lowest_to_plain", lambda variant: variant.endswith(": offload")))
    return f"Plans train within {plan} of what plain training takes, and offloading everything within {offload}"


def _record_cost(run: Medians) -> str:
    names = ("put_cpu_microseconds", "get_cpu_microseconds", "raw_write_cpu_microseconds", "raw_read_cpu_microseconds")
    down, up, *raw = (run.of("128 of 4 MiB", name) / 1000 for name in names)
    return f"4 MiB cost {down:.2f} ms of CPU time down and {up:.2f} ms up; the bytes alone {_from_to(raw)} ms each way"


def _disk_layouts(run: Medians) -> str:
    shares = []
    for size in (4, 16, 32, 64, 128, 256, 1024, 16384):
        name = f"round_trip_{size}_KiB_gb_per_second"
        best = max(run.of(layout, name) for layout in ("LMDB only", "extents only"))
        shares.append(run.of("default", name) / best)
    return f"At every size the default is {_from_to(shares)} times as fast as the better layout"


def _sidecar_throughput(run: Medians) -> str:
    spill, restore = (_percent(run.of("one client", f"{name}_to_embedded")) for name in ("spill", "restore"))
    return f"One client of the daemon spills at {spill} of an embedded store's speed, and restores at {restore}"


def _sidecar_training(run: Medians) -> str:
    sidecar, embedded = (_from_to(run.all(f"{name}_step_to_plain")) for name in ("sidecar", "embedded"))
    return f"A step takes {sidecar} times as long as plain's through the daemon, {embedded} times embedded"


def _shared_pages(run: Medians) -> str:
    huge, small = (
        [run.of(pages, f"{name}_to_small_pages") for name in ("write", "read")]
        for pages in ("huge pages", "small pages")
    )
    return (
        f"Shared memory in huge pages is written {huge[0]:.2f} and read {huge[1]:.2f} times as fast as in small pages; "
        f"these, beside themselves, {small[0]:.2f} and {small[1]:.2f} times"
    )


def _steady_state(run: Medians) -> str:
    shares = run.all("spilled_of_saved_beyond_budget_percent", lambda variant: not variant.endswith("at once"))
    return f"Once the graph is known, a step writes {_from_to(shares, '.0f')} % of what the budget cannot hold"


def _prefetch_tuning(run: Medians) -> str:
    saved = []
    for model in ("transformer", "convolutional", "branching"):
        for drive in ("drive as it is", "drive that keeps up", "drive too slow"):
            prefix = f"{model}, {drive}: "
            saved.append(1 - run.ratio("step_seconds", f"{prefix}learned, automatic", f"{prefix}none"))
    return f"Reading ahead in the learned order, as far as there is room, makes a step {_from_to(saved, '.0%')} shorter"


def _data_plane(run: Medians) -> str:
    put, get, native_put, native_get = (
        _percent(run.of(variant, f"{way}_to_floor")) for variant in ("1 MiB", "1 MiB, native") for way in ("put", "get")
    )
    return (
        f"Where the drive takes no time, 1 MiB is put at {put} and got at {get} of bare threads' speed; "
        f"with the threads in C at {native_put} and {native_get}"
    )


PICTURES: Mapping[str, Picture] = {
    "pack_cost": Picture(
        lambda run: (
            "A saved tensor that stays in memory takes the training thread "
            f"{run.beyond('forward_microseconds', 'tierstore', 'no hooks'):.1f} µs "
            "more in forward than without hooks"
        )
    ),
    "live_handles": Picture(
        lambda run: (
            "With a million handles alive, put and release take "
            f"{run.ratio('any_microseconds', 'a million', 'a thousand'):.2f} times as long as with a thousand"
        ),
        axes={
            "oldest_microseconds": "the oldest handle goes (µs)",
            "oldest_when_frozen_microseconds": "the same, after gc.freeze() (µs)",
            "any_microseconds": "any handle goes (µs)",
        },
        ours=lambda variant: "tensors" not in variant,
    ),
    "disk_throughput": Picture(
        lambda run: (
            f"Saved tensors are written at {_percent(run.of('tierstore', 'spill_to_raw'))} of the raw device's speed "
            f"and read at {_percent(run.of('tierstore', 'restore_to_raw'))}"
        ),
        axes={
            "spill_to_raw": "writing: share of the raw device's speed",
            "restore_to_raw": "reading: share of the raw device's speed",
            "cpu_above_raw_cpu_seconds_per_gb": "CPU time beyond the raw device's (s per GB)",
        },
    ),
    "record_cost": Picture(
        _record_cost,
        axes={
            "put_cpu_microseconds": "down, by the store: CPU time (µs)",
            "raw_write_cpu_microseconds": "the bytes alone, written (µs)",
            "get_cpu_microseconds": "up, by the store: CPU time (µs)",
            "raw_read_cpu_microseconds": "the bytes alone, read (µs)",
        },
        ours=_all_ours,
    ),
    "disk_layouts": Picture(
        _disk_layouts,
        axes={
            f"round_trip_{size}_KiB_gb_per_second": f"values of {words}, put and got (GB/s)"
            for size, words in {16: "16 KiB", 64: "64 KiB", 256: "256 KiB", 16384: "16 MiB"}.items()
        },
        ours=lambda variant: variant == "default",
    ),
    "fragmentation": Picture(
        lambda run: f"A store takes at most {max(run.all('allocated_to_live')):.2f} times the space that is in use",
        axes={
            "most_live_bytes": "most in use at once (MiB)",
            "most_allocated_bytes": "most space taken (MiB)",
            "allocated_to_live": "space taken, of that in use",
            "light_allocated_bytes": "taken when little is in use (MiB)",
        },
        ours=_all_ours,
    ),
    "prefetch": Picture(
        lambda run: (
            f"{min(run.all('hits_percent')):.0f} % of what backward asks for is back in time; it waits for "
            f"{max(run.all('unpack_waits_percent')):.0f} % of the step"
        ),
        axes={
            "asked_for_from_disk": "tensors that were on disk, of a step",
            "hits_percent": "back when asked for (%)",
            "unpack_waits_percent": "backward waits (% of the step)",
            "pack_waits_percent": "forward waits (% of the step)",
        },
        ours=_all_ours,
    ),
    "large_tensors": Picture(
        lambda run: (
            "With saved tensors larger than the window, forward takes "
            f"{run.ratio('forward_seconds', 'default', 'no store'):.2f} times as long as compute alone"
        ),
        ours=lambda variant: variant != "no store",
    ),
    "data_plane": Picture(
        _data_plane,
        axes={
            "put_to_floor": "put, of bare threads",
            "get_to_floor": "get, of bare threads",
            "put_beyond_floor_cpu_microseconds": "CPU of a put beyond theirs (µs)",
            "get_beyond_floor_cpu_microseconds": "CPU of a get beyond theirs (µs)",
        },
        ours=_all_ours,
    ),
    "two_drives": Picture(
        lambda run: (
            f"Two equal drives are written {run.ratio('write_gb_per_second', 'two equal drives', 'one drive'):.2f} "
            f"and read {run.ratio('read_gb_per_second', 'two equal drives', 'one drive'):.2f} times as fast as one"
        ),
        ours=_all_ours,
    ),
    "steady_state": Picture(
        _steady_state,
        axes={
            "saved_bytes": "saved by a step (MiB)",
            "spilled_bytes": "written by a step (MiB)",
            "spilled_of_saved_beyond_budget_percent": "written, of what the budget cannot hold (%)",
            "queued_when_backward_began_bytes": "queued when backward begins (MiB)",
        },
        ours=_all_ours,
    ),
    "training_step": Picture(_training_step, axes={"peak_memory_bytes": "memory added at the peak (MiB)"}),
    "larger_than_memory": Picture(
        lambda run: (
            "With 50 GiB of saved tensors, forward takes "
            f"{run.ratio('forward_seconds', 'tierstore', 'compute beside bare threads'):.2f} times as long as compute "
            "beside bare threads"
        ),
    ),
    "many_ranks": Picture(
        lambda run: (
            "Eight processes on one drive write "
            f"{run.of('embedded', 'spill_to_one'):.2f} and read {run.of('embedded', 'restore_to_one'):.2f} times as "
            "fast as one"
        ),
        axes={
            f"{way}_{figure}": words
            for way, done in (("spill", "write"), ("restore", "read"))
            for figure, words in (
                ("to_one", f"{done}, all together, of one"),
                ("slowest_to_fastest", f"{done}, the slowest, of the fastest"),
            )
        },
        ours=_all_ours,
    ),
    "memory_limit": Picture(_memory_limit, axes={"peak_memory_bytes": "peak, with the page cache (MiB)"}),
    "freed_memory": Picture(
        _freed_memory,
        axes={"added_of_plain": "memory added, of plain's", "step_of_plain": "time of a step, of plain's"},
        ours=lambda variant: not variant.endswith("plain"),
    ),
    "host_peak": Picture(
        lambda run: (
            f"A store held at most {_percent(max(run.all('held_of_promised')))} of the host memory that it may hold"
        ),
        axes={
            "promised_bytes": "promised at most (MiB)",
            "held_bytes": "held at most (MiB)",
            "process_added_bytes": "the process grew by (MiB)",
        },
        ours=_all_ours,
    ),
    "codec_choice": Picture(
        lambda run: f'Codec "auto" takes {_from_to(run.all("auto_to_best"))} times as long as the best fixed codec',
        axes={
            "auto_to_best": "time, of the best fixed codec's",
            "auto_to_none": "time, of no codec's",
            "same_to_same": "no codec, of no codec again: the spread",
            "auto_encoded_share": "share of records that were encoded",
        },
        ours=_all_ours,
    ),
    "sidecar_throughput": Picture(
        _sidecar_throughput,
        axes={
            "spill_to_embedded": "writing: share of an embedded store's speed",
            "restore_to_embedded": "reading: share of an embedded store's",
            "spill_to_raw": "writing: share of the raw device's",
            "restore_to_raw": "reading: share of the raw device's",
        },
        ours=_all_ours,
    ),
    "sidecar_training": Picture(
        _sidecar_training,
        axes={
            "embedded_step_to_plain": "embedded: time of a step, of plain's",
            "sidecar_step_to_plain": "daemon: time of a step, of plain's",
            "embedded_cpu_to_plain": "embedded: trainer's CPU time, of plain's",
            "sidecar_cpu_to_plain": "daemon: trainer's CPU time, of plain's",
        },
        ours=_all_ours,
    ),
    "trace_cost": Picture(
        lambda run: f"A trace makes a step at most {100 * (max(run.all('time_ratio')) - 1):.1f} % longer",
        axes={
            "traced_step_seconds": "a traced step (s)",
            "untraced_step_seconds": "an untraced step (s)",
            "time_ratio": "time, of an untraced step's",
            "cpu_time_ratio": "CPU time, of an untraced step's",
        },
        ours=_all_ours,
    ),
    "trainers": Picture(
        _trainers,
        axes={"added_bytes": "memory added to the loaded model (MiB)"},
        ours=lambda variant: variant.endswith("with the store"),
    ),
    "memory_plan": Picture(
        _memory_plan,
        axes={"step_to_plain": "time of a step, of plain's"},
        ours=_is_plan,
    ),
    "lowest_limit": Picture(
        _lowest_limit,
        axes={"lowest_to_plain": "the lowest limit that trains, of what plain training takes"},
        ours=_is_plan,
    ),
    "shared_pages": Picture(
        _shared_pages,
        axes={
            "write_to_small_pages": "writing: speed, of small pages'",
            "read_to_small_pages": "reading: speed, of small pages'",
        },
        ours=lambda variant: variant == "huge pages",
    ),
    "simulator_accuracy": Picture(
        lambda run: (
            "Simulated steps are "
            f"{run.of('simulator, held-out models', 'median_error_percent'):.1f} % off in the median, "
            "for models that the simulator was not fitted to"
        ),
        axes={"step_seconds": "real step (s)", "simulated_seconds": "simulated step (s)"},
    ),
    "io_depth": Picture(
        lambda run: (
            "On a drive that answers 50 ms later, a step is "
            f"{_percent(1 - run.ratio('step_seconds', '50 ms later, depth 8', '50 ms later, depth 4'))} "
            "shorter at depth 8 than at depth 4"
        ),
        axes={"step_seconds": "real step (s)", "simulated_seconds": "simulated step (s)"},
        ours=_all_ours,
    ),
    "prefetch_tuning": Picture(_prefetch_tuning),
    "tuned_settings": Picture(
        lambda run: (
            "Tuned settings make a step on a slow drive "
            f"{_percent(1 - run.of('transformer, slow drive', 'time_ratio'))} shorter than the defaults"
        ),
        axes={"step_seconds_before": "with the settings before (s)", "tuned_step_seconds": "with tuned settings (s)"},
        ours=_all_ours,
    ),
}


def picture_of(benchmark: Benchmark) -> Picture:
    """How its plot speaks; one that nobody wrote words for has its question as title."""
    return PICTURES.get(benchmark.name, Picture(lambda run: benchmark.question))


def title_of(benchmark: Benchmark, results: Results) -> str:
    """The finding; the benchmark's question where the results do not have what the finding needs."""
    try:
        return picture_of(benchmark).finding(Medians(results))
    except (LookupError, ZeroDivisionError):
        return benchmark.question
