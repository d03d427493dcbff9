"""A step on an accelerator, tuned whole, in virtual time: recorded, simulated, measured by turns, and written down."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from tests.hooks.virtual_accelerator import VirtualAccelerator, forward_through
from tests.inspect_store import inspect_scope
from tests.tuning.conftest import HARDWARE
from tierstore import ConfigError, TierStore, tiered_offload
from tierstore.hardware import AcceleratorLink, Hardware, hardware_text
from tierstore.hooks import owners, recorded
from tierstore.residency import graph_times, guard
from tierstore.residency.device import DeviceTier
from tierstore.simulator.rank import Rank
from tierstore.tracing import recorder
from tierstore.tuning import TrialSettings, Tuned, tune_loop

KIB, MIB = 2**10, 2**20
NUM_LAYERS, LAYER_BYTES, LAYER_SECONDS = 32, 64 * KIB, 0.01
SAVED_BYTES = NUM_LAYERS * LAYER_BYTES
FORWARD_SECONDS = NUM_LAYERS * LAYER_SECONDS
STEP_SECONDS = 3 * FORWARD_SECONDS
"""Of computing alone."""
NEEDED = SAVED_BYTES / FORWARD_SECONDS
"""Bytes per second of a link that carries everything while forward runs."""
HOST_BYTES = 40 * MIB

pytestmark = pytest.mark.slow

Make = Callable[[float], VirtualAccelerator]
TuneOn = Callable[..., Tuned]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Of torch: what is really computed here is next to nothing, and threads that wait for each other take time."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes the one of this process, with a link of that speed, and windows as small as what is saved here.

    Traces have its host's time, of which an event takes a microsecond.
    """

    def make(bytes_per_second: float) -> VirtualAccelerator:
        engine = VirtualAccelerator(bytes_per_second)

        def now() -> int:
            engine.host_seconds += 1e-6
            return round(engine.host_seconds * 1e9)

        small = {"flight_bytes": SAVED_BYTES // 16, "reload_bytes": SAVED_BYTES // 16}
        monkeypatch.setattr(guard, "AcceleratorCopies", lambda: engine)
        monkeypatch.setattr(guard, "DeviceTier", partial(DeviceTier, **small))
        monkeypatch.setattr(sys.modules["tierstore.simulator.simulate"], "Rank", partial(Rank, **small))
        monkeypatch.setattr(owners, "time", SimpleNamespace(perf_counter_ns=now))
        monkeypatch.setattr(graph_times, "perf_counter", lambda: 0.0)  # the host takes no time
        monkeypatch.setattr(recorded, "_now", now)
        monkeypatch.setattr(recorder, "_now", now)
        return engine

    return make


def _hardware(link_speed: float | None) -> Hardware:
    """A drive so slow that nothing is sent there, whose time would be real."""
    slow = [
        (msgspec.structs.replace(each, bytes_per_second=1e5),)
        for each in (*HARDWARE.drive.writes, *HARDWARE.drive.reads)
    ]
    drive = msgspec.structs.replace(HARDWARE.drive, writes=slow[0], reads=slow[1])
    links: tuple[AcceleratorLink, ...] = ()
    if link_speed is not None:
        links = (
            AcceleratorLink(
                name="virtual",
                memory_bytes=0,
                host_memory="pinned",
                to_host_bytes_per_second=link_speed,
                to_device_bytes_per_second=link_speed,
            ),
        )
    return msgspec.structs.replace(HARDWARE, drive=drive, accelerators=links)


@pytest.fixture
def tune_on(accelerator: Make, tmp_path: Path, store_directory: Path) -> TuneOn:
    """Tunes a step on an accelerator with a link so many times as fast as it would have to be."""

    def tune(speed: float, *, described: float | None = None, **options: object) -> Tuned:
        engine = accelerator(speed * NEEDED)

        def step(scope: tiered_offload) -> None:
            start = torch.zeros(LAYER_BYTES // 4, requires_grad=True)
            with scope:
                loss = forward_through(engine, [LAYER_SECONDS] * NUM_LAYERS, start).sum()
            loss.backward()

        file = tmp_path / "machine.toml"
        file.write_text(hardware_text(_hardware(NEEDED * (speed if described is None else described) or None)))
        settings: dict[str, object] = {"min_bytes": 0, "steps": 3, "rounds": 3}
        return tune_loop(step, store_directory, hardware=file, **(settings | options))  # type: ignore[arg-type]

    return tune


def _devices(tuned: Tuned) -> set[int]:
    """The sizes that were simulated."""
    return {each.simulated.device_bytes for each in tuned.found.predicted if each.device_bytes != "auto"}


def _predicted(tuned: Tuned, device_bytes: int) -> float:
    """With all of the host memory. Virtual time is a sum of floats; a nanosecond is far below any of its parts."""
    with_device = [each for each in tuned.found.predicted if each.device_bytes == device_bytes]
    most = max(with_device, key=lambda each: each.host_bytes)
    return round(tuned.found.predicted[most] or 0.0, 9)


def _as_measured(tuned: Tuned, file: Path) -> None:
    """The file opens a store and a scope with what was chosen."""
    file.write_text(tuned.toml)
    with TierStore.from_config(file) as store:
        scope = tiered_offload.from_config(store, file)
        device_bytes = tuned.chosen.settings.device_bytes
        assert inspect_scope(scope).device_bytes == (None if device_bytes == "auto" else device_bytes)
        assert store.host_bytes == tuned.chosen.settings.host_bytes


def test_slow_link_more_stays_on_the_device_up_to_what_it_needs(tune_on: TuneOn, tmp_path: Path) -> None:
    tuned = tune_on(0.5, host_bytes=HOST_BYTES, device_bytes="4MiB")
    own = tuned.candidates[0]
    assert (own.name, own.settings.device_bytes) == ("as it is", 0)
    assert own.median_seconds == pytest.approx(own.predicted_seconds, rel=0.01)
    assert own.median_seconds > 1.2 * STEP_SECONDS
    assert tuned.chosen.median_seconds == pytest.approx(STEP_SECONDS, rel=0.01)
    assert SAVED_BYTES // 4 <= tuned.chosen.device_bytes <= SAVED_BYTES < 4 * MIB
    assert "auto" in [each.name for each in tuned.candidates]
    assert "back at" in (tuned.link or "")
    by_device = {device: _predicted(tuned, device) for device in sorted(_devices(tuned))}
    seconds = list(by_device.values())
    assert seconds == sorted(seconds, reverse=True), "never slower with more"
    assert seconds[0] > 1.2 * seconds[-1]
    _as_measured(tuned, tmp_path / "tierstore.toml")


def test_limit_that_binds_is_used_up_and_not_exceeded(tune_on: TuneOn, tmp_path: Path) -> None:
    limit_bytes = SAVED_BYTES // 4
    tuned = tune_on(0.25, host_bytes=HOST_BYTES, device_bytes=limit_bytes)
    assert tuned.chosen.settings.device_bytes == limit_bytes
    assert max(_devices(tuned)) == limit_bytes
    (found,) = [each for each in tuned.candidates if each.settings.device_bytes == "auto"]
    assert found.found_bytes > limit_bytes, "it knows nothing of a limit"
    assert found.median_seconds < tuned.chosen.median_seconds
    assert not found.is_allowed
    _as_measured(tuned, tmp_path / "tierstore.toml")


def test_program_with_auto_and_no_limit_may_keep_what_that_finds(tune_on: TuneOn, tmp_path: Path) -> None:
    tuned = tune_on(0.5, start=TrialSettings(8 * MIB, 32 * MIB, device_bytes="auto"))
    own, defaults = tuned.candidates[:2]
    assert (own.settings.device_bytes, own.predicted_seconds, own.is_allowed) == ("auto", None, True)
    assert 0 < own.found_bytes < SAVED_BYTES
    assert defaults.settings.device_bytes == max(_devices(tuned))
    assert abs(own.found_bytes - max(_devices(tuned))) < LAYER_BYTES
    _as_measured(tuned, tmp_path / "tierstore.toml")


def test_link_that_nobody_has_measured_is_refused(tune_on: TuneOn) -> None:
    with pytest.raises(ConfigError, match="link"):
        tune_on(16.0, described=0.0, host_bytes=HOST_BYTES)
