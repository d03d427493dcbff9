"""Each recipe of docs/trainers_recipes.md, taken from the page: the same bits as without a store, and nothing left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.conftest import StartDaemon, short_directory, start_daemon
from tests.hooks.test_distributed import Launch, launch
from tests.integrations.recipe_programs import NUM_STEPS, Lesson, paste, recipes
from tests.integrations.recipe_worker import NUM_MICRO_BATCHES, RUNS
from tierstore import StoreStats
from tierstore.sidecar.inspection import inspect_daemon

__all__ = ["short_directory", "start_daemon"]

pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own

RECIPES = recipes()
PACKED = "tierstore/packed_gib"


def test_page_recipes_short_enough_to_paste() -> None:
    assert all(0 < len(code.splitlines()) <= 8 for code in RECIPES.values())
    assert all(len(line) <= 120 for code in RECIPES.values() for line in code.splitlines())


def assert_stored(stats: StoreStats) -> None:
    assert stats.packed_bytes > 0
    assert stats.spilled_bytes >= stats.restored_bytes > 0  # what is asked for soon need not be read
    assert stats.live_handles == 0


def scalars(directory: Path, name: str) -> list[float]:
    """What TensorBoard finds under that name in the only file there is."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (file,) = directory.rglob("events.out.tfevents.*")
    events = accumulator.EventAccumulator(str(file))
    events.Reload()
    return [event.value for event in events.Scalars(name)] if name in events.Tags()["scalars"] else []


@pytest.mark.parametrize("each_step", [False, True])
def test_accelerate(tmp_path: Path, store_directory: Path, each_step: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    pytest.importorskip("tensorboard")
    code = RECIPES["accelerate"]
    if each_step:
        *lines, _ = code.splitlines()
        each = RECIPES["accelerate, totals of each step"].splitlines()
        code = "\n".join(["since = None", *lines, *(f"        {line}" for line in each)])

    def run(*, offloads: bool) -> list[Any]:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        logs = tmp_path / f"logs-{offloads}"
        accelerator = accelerate.Accelerator(cpu=True, log_with="tensorboard", project_dir=logs)
        accelerator.init_trackers("recipe")
        lesson = Lesson()
        names = lesson.names() | {"accelerator": accelerator, "path": store_directory}
        for name in ("model", "optimizer", "loader"):
            names[name] = accelerator.prepare(names[name])
        program = paste(code, names, offloads=offloads)
        accelerator.end_training()
        assert len(lesson.losses) == NUM_STEPS
        logged = scalars(logs, PACKED)
        assert len(logged) == (NUM_STEPS if offloads else 0)
        if offloads:
            stats = program["store"].stats()
            assert_stored(stats)
            found = sum(logged) if each_step else logged[-1]
            assert found == pytest.approx(stats.packed_bytes / 2**30)
        return lesson.outcome()

    assert run(offloads=True) == run(offloads=False)


@pytest.mark.parametrize("name", ["ignite", "ignite, own update function"])
def test_ignite(store_directory: Path, name: str) -> None:
    engine = pytest.importorskip("ignite.engine")

    def run(*, offloads: bool) -> list[Any]:
        lesson = Lesson()
        names = lesson.names() | {"path": store_directory, "Engine": engine.Engine}
        program = paste(RECIPES[name], names, offloads=offloads)
        if offloads:
            stats = program["store"].stats()
            assert_stored(stats)
            if name == "ignite":
                assert program["trainer"].state.metrics[PACKED] == stats.packed_bytes / 2**30
        assert len(lesson.losses) == NUM_STEPS
        return lesson.outcome()

    assert run(offloads=True) == run(offloads=False)


@pytest.mark.parametrize("name", ["ignite", "ignite, own update function"])
def test_ignite_training_that_fails_closes_the_store(store_directory: Path, name: str) -> None:
    engine = pytest.importorskip("ignite.engine")
    lesson = Lesson()
    names = lesson.names() | {"path": store_directory, "Engine": engine.Engine}

    def fail(*tensors: Any) -> Any:
        if len(lesson.losses) == 1:
            raise RuntimeError("as asked for")
        return lesson.loss_fn(*tensors)

    with pytest.raises(RuntimeError, match="as asked for"):
        paste(RECIPES[name], names | {"loss_fn": fail}, offloads=True)


def test_fabric(tmp_path: Path, store_directory: Path) -> None:
    fabrics = pytest.importorskip("lightning.fabric")
    loggers = pytest.importorskip("lightning.fabric.loggers")
    pytest.importorskip("tensorboard")

    def run(*, offloads: bool) -> list[Any]:
        logs = tmp_path / f"logs-{offloads}"
        logger = loggers.TensorBoardLogger(logs)
        fabric = fabrics.Fabric(accelerator="cpu", devices=1, loggers=logger)
        lesson = Lesson()
        program = paste(RECIPES["fabric"], lesson.names() | {"path": store_directory, "fabric": fabric}, offloads=offloads)
        if offloads:
            stats = program["store"].stats()
            assert_stored(stats)
            logger.finalize("success")
            assert scalars(logs, PACKED) == pytest.approx([stats.packed_bytes / 2**30])
        assert len(lesson.losses) == NUM_STEPS
        return lesson.outcome()

    assert run(offloads=True) == run(offloads=False)


def test_two_ranks_with_stores_of_their_own_and_with_a_daemon(
    store_directory: Path, tmp_path: Path, start_daemon: StartDaemon
) -> None:
    """All recipes for ranks in one launch, since an import of torch takes seconds."""
    daemon = start_daemon(tmp_path / "of the daemon")
    arguments = ["-m", "tests.integrations.recipe_worker", store_directory, daemon.socket, tmp_path]
    found = launch([str(argument) for argument in arguments], store_directory, tmp_path)
    assert found.returncode == 0, found.err
    assert len(found.reports) == 2
    for rank, reports in enumerate(found.reports):
        assert list(reports) == list(RUNS)
        for name, report in reports.items():
            assert report["same"], name
            of_a_pipeline = NUM_MICRO_BATCHES * NUM_STEPS * rank  # rank 1 has the last part
            assert report["num_losses"] == (of_a_pipeline if "pipelining" in name else NUM_STEPS), name
            assert report["packed_bytes"] > 0, name
            assert report["spilled_bytes"] >= report["restored_bytes"] > 0, name
            assert report["left"] == [], name
    assert found.out.count("tierstore: ") == 2 * len(RUNS)
    of_daemon = json.loads(inspect_daemon(daemon.socket))
    assert of_daemon["num_sessions_opened"] == 2
    assert of_daemon["disk"]["num_records"] == 0
