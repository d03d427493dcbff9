"""Each recipe of docs/how_to/recipes.md, taken from the page: the same bits as without a store, and nothing left."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from tests.daemon.conftest import StartDaemon, environment_of_tests, short_directory, start_daemon
from tests.docs.pages import blocks_of
from tests.hooks.programs import all_bits
from tests.hooks.test_distributed import launch
from tests.integrations.recipe_programs import NUM_STEPS, PAGE, Lesson, SpillingStore, is_closed, paste, recipes
from tests.integrations.recipe_worker import NUM_MICRO_BATCHES, RUNS
from tierstore import StoreStats, TierStore
from tierstore.sidecar.inspection import inspect_daemon

__all__ = ["short_directory", "start_daemon"]

pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own

RECIPES = recipes()
PACKED = "tierstore/packed_gib"
END_SECONDS = 60.0


def test_page_recipes_short_enough_to_paste() -> None:
    lines = {name: list(filter(None, code.splitlines())) for name, code in RECIPES.items()}
    most = 8 - len(lines["imports"])  # with which all of them begin
    assert {name: len(those) for name, those in lines.items() if not 0 < len(those) <= most} == {}
    assert max(len(line) for those in lines.values() for line in those) <= 120


def stats_of_closed(store: TierStore) -> StoreStats:
    """Its counters, which show that it had work to do."""
    assert is_closed(store)
    stats = store.stats()
    assert stats.packed_bytes > 0
    assert stats.restored_bytes + stats.forwarded_bytes > 0  # read, or asked for before it was written
    return stats


def scalars(directory: Path, name: str) -> list[float]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (file,) = directory.rglob("events.out.tfevents.*")
    events = accumulator.EventAccumulator(str(file))
    events.Reload()
    return [event.value for event in events.Scalars(name)] if name in events.Tags()["scalars"] else []


def compare(store_directory: Path, run: Callable[[TierStore | None], list[Any]]) -> None:
    """For recipes that open no store: `run` takes steps, with an open store and without."""
    with SpillingStore(store_directory) as store:
        assert run(store) == run(None)
    stats_of_closed(store)


def test_forces(store_directory: Path) -> None:
    def run(store: TierStore | None) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 256), nn.Tanh(), nn.Linear(256, 1))
        names = {"store": store, "model": model, "torch": torch, "loss_fn": nn.functional.mse_loss}
        paste(RECIPES["forces"], names, offloads=store is not None)
        for _ in range(NUM_STEPS):
            names["train_step"](torch.randn(4096, 3), torch.randn(4096, 3))
        return all_bits(parameter.grad for parameter in model.parameters())

    compare(store_directory, run)


def test_rnn_stores_what_is_small(store_directory: Path) -> None:
    def run(store: TierStore | None) -> list[Any]:
        torch.manual_seed(0)
        cell = nn.GRUCell(64, 64)  # saves tensors of 32 KiB
        names = {"store": store, "cell": cell, "initial": torch.zeros(128, 64), "sequence": torch.randn(6, 128, 64)}
        names |= {"loss_fn": nn.functional.mse_loss, "targets": torch.randn(128, 64)}
        for _ in range(NUM_STEPS):
            paste(RECIPES["rnn"], names, offloads=store is not None)
        return all_bits(parameter.grad for parameter in cell.parameters())

    compare(store_directory, run)


def test_report(tmp_path: Path, store_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("tensorboard")
    from tests.integrations.language import Tokens, tiny_model

    monkeypatch.chdir(tmp_path)
    short = f"max_steps={NUM_STEPS}, logging_steps=1, save_strategy='no', use_cpu=True, disable_tqdm=True, report_to="
    # What this model saves is small.
    where = {"store": {"path": str(store_directory)}, "offload": {"min_bytes": 0}}
    names = {"model": tiny_model(), "data": Tokens(8), "path": where}
    exec(RECIPES["report"].replace("report_to=", short), names)
    found = scalars(tmp_path / "out", f"train/{PACKED}")
    assert len(found) == NUM_STEPS
    assert min(found) > 0


def test_report_of_lightning(tmp_path: Path, store_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    pytest.importorskip("tensorboard")
    from tests.integrations.test_lightning import NUM_BATCHES, Module, batches

    short = {"max_epochs": 1, "log_every_n_steps": 1, "accelerator": "cpu", "enable_progress_bar": False}
    monkeypatch.setattr(lightning, "Trainer", partial(lightning.Trainer, enable_checkpointing=False, **short))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"path": {"store": {"path": str(store_directory)}, "offload": {"min_bytes": 0}}}
    exec(RECIPES["report, lightning"], names)
    names["trainer"].fit(Module(), batches())
    found = scalars(tmp_path / "out", PACKED)
    assert len(found) == NUM_BATCHES
    assert min(found) > 0


def test_preemption_ends_after_the_step(store_directory: Path) -> None:
    before, steps = signal.getsignal(signal.SIGTERM), []

    def train_step() -> None:
        if len(steps) == 1:
            signal.raise_signal(signal.SIGTERM)
        steps.append(len(steps))

    names = {"path": store_directory, "train_step": train_step}
    try:
        paste(RECIPES["preemption"], names, offloads=True)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert steps == [0, 1]
    assert is_closed(names["store"])


SRUN = """
ranks=$SLURM_NTASKS_PER_NODE
while [[ $1 == --* ]]; do [[ $1 == --ntasks-per-node=1 ]] && ranks=1; shift; done
for ((rank = 0; rank < ranks; rank++)); do "$@" & done
wait
"""
"""What Slurm does on one node."""

TRAIN = """
import os, torch
from tierstore import TierStore, tiered_offload
with TierStore.connect(host_bytes=0) as store:
    with tiered_offload(store):
        loss = torch.randn(512, 512, requires_grad=True).exp().mean()
    loss.backward()
    print("rank of", os.environ["LOCAL_WORLD_SIZE"], store.stats().packed_bytes > 0)
"""


def script_of(recipe: str) -> str:
    (script,) = [block.code for block in blocks_of(PAGE) if block.before == f"<!-- recipe: {recipe} -->"]
    return script


@pytest.mark.slow
def test_script_for_slurm_serves_all_ranks_of_a_node(short_directory: Path) -> None:
    python = f'exec {sys.executable} "$@"'
    stand_ins = {"srun": SRUN, "python": python, "tierstore": python.replace('"$@"', '-m tierstore.cli "$@"')}
    for name in ("bin", "scratch"):
        (short_directory / name).mkdir(mode=0o700)
    for name, code in stand_ins.items():
        (short_directory / "bin" / name).write_text(f"#!/bin/bash\n{code}\n", encoding="utf-8")
        (short_directory / "bin" / name).chmod(0o755)
    (short_directory / "train.py").write_text(TRAIN, encoding="utf-8")
    job = f"test-{os.getpid()}"
    environment = environment_of_tests(
        PATH=f"{short_directory}/bin:{os.environ['PATH']}",
        TMPDIR=str(short_directory / "scratch"),
        SLURM_JOB_ID=job,
        SLURM_NNODES="1",
        SLURM_NTASKS_PER_NODE="2",
    )
    with (short_directory / "out").open("wb") as out:
        running = subprocess.Popen(
            ["bash", "-c", script_of("slurm")],
            cwd=short_directory,
            env=environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        code = running.wait(120)
    served = [process for process in psutil.process_iter() if os.getsid(process.pid) == running.pid]
    os.killpg(running.pid, signal.SIGTERM)  # as Slurm ends a job
    assert psutil.wait_procs(served, timeout=END_SECONDS)[1] == []
    said = (short_directory / "out").read_text(encoding="utf-8")
    assert (code, said.count("rank of 2 True")) == (0, 2), said
    assert served
    assert not Path(f"/tmp/tierstore-{job}.sock").exists()


@pytest.mark.parametrize("each_step", [False, True])
def test_accelerate(tmp_path: Path, store_directory: Path, each_step: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    pytest.importorskip("tensorboard")
    log = RECIPES["accelerate, totals of each step" if each_step else "accelerate, totals"]
    code = "since = None\n" + RECIPES["accelerate"] + indent(log, " " * 8)

    def run(*, offloads: bool) -> list[Any]:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        logs = tmp_path / f"logs-{offloads}"
        accelerator = accelerate.Accelerator(cpu=True, log_with="tensorboard", project_dir=logs)
        accelerator.init_trackers("recipe")
        lesson = Lesson()
        names = lesson.names() | {"accelerator": accelerator, "path": store_directory}
        for name in ("model", "optimizer", "loader"):
            names[name] = accelerator.prepare(names[name])
        paste(code, names, offloads=offloads)
        accelerator.end_training()
        assert len(lesson.losses) == NUM_STEPS
        logged = scalars(logs, PACKED)
        assert len(logged) == NUM_STEPS
        assert (sum(logged) > 0) == offloads
        if offloads:
            stats = stats_of_closed(names["store"])
            found = sum(logged) if each_step else logged[-1]
            assert found == pytest.approx(stats.packed_bytes / 2**30)
        return lesson.outcome()

    assert run(offloads=True) == run(offloads=False)


OWN_UPDATE = """
def update(engine, batch):
    optimizer.zero_grad()
    with tiered_offload(store):
        loss = loss_fn(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()

with TierStore(path) as store:
    Engine(update).run(loader)
"""


def ignite_program(name: str) -> str:
    """The blocks of the page put together, as it says."""
    if name == "own update function":
        return OWN_UPDATE
    *lines, run = RECIPES[name].splitlines(keepends=True)
    return "".join([*lines, indent(RECIPES["ignite, log"], " " * 4), run])


@pytest.mark.parametrize("name", ["ignite", "own update function"])
def test_ignite_same_bits_and_a_training_that_fails_closes_the_store(store_directory: Path, name: str) -> None:
    engine = pytest.importorskip("ignite.engine")

    def program(**changes: Any) -> tuple[Lesson, dict[str, Any]]:
        lesson = Lesson()
        return lesson, lesson.names() | {"path": store_directory, "Engine": engine.Engine} | changes

    def fail(*_: Any) -> Any:
        raise RuntimeError("as asked for")

    stored, names = program()
    paste(ignite_program(name), names, offloads=True)
    stats = stats_of_closed(names["store"])
    if name == "ignite":
        assert names["trainer"].state.metrics[PACKED] == stats.packed_bytes / 2**30
    assert len(stored.losses) == NUM_STEPS
    plain, names = program()  # a lesson seeds the generators as it is made
    paste(ignite_program(name), names, offloads=False)
    assert stored.outcome() == plain.outcome()
    _, names = program(loss_fn=fail)
    with pytest.raises(RuntimeError, match="as asked for"):
        paste(ignite_program(name), names, offloads=True)
    assert is_closed(names["store"])


def test_fabric(tmp_path: Path, store_directory: Path) -> None:
    fabrics = pytest.importorskip("lightning.fabric")
    loggers = pytest.importorskip("lightning.fabric.loggers")
    pytest.importorskip("tensorboard")

    def run(*, offloads: bool) -> list[Any]:
        logs = tmp_path / f"logs-{offloads}"
        logger = loggers.TensorBoardLogger(logs)
        fabric = fabrics.Fabric(accelerator="cpu", devices=1, loggers=logger)
        lesson = Lesson()
        names = lesson.names() | {"path": store_directory, "fabric": fabric}
        paste(RECIPES["fabric"], names, offloads=offloads)
        if offloads:
            stats = stats_of_closed(names["store"])
            logger.finalize("success")
            assert scalars(logs, PACKED) == pytest.approx([stats.packed_bytes / 2**30])
        assert len(lesson.losses) == NUM_STEPS
        return lesson.outcome()

    assert run(offloads=True) == run(offloads=False)


@pytest.mark.slow
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
            assert report["given_back_bytes"] > 0, name
            assert report["is_closed"], name
            assert report["left"] == [], name
    assert found.out.count("tierstore: ") == 4 * len(RUNS)
    of_daemon = json.loads(inspect_daemon(daemon.socket))
    assert of_daemon["num_sessions_opened"] == 4
    assert of_daemon["disk"]["num_records"] == 0


@pytest.mark.many
def test_ray_train(store_directory: Path, short_directory: Path) -> None:
    """In a program of its own, which ends with all that Ray has started. `short_directory`: Ray has sockets."""
    pytest.importorskip("ray.train.torch")
    out = short_directory / "r"
    out.mkdir()
    environment = environment_of_tests(
        RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled", RAY_TMPDIR=str(out), HOME=str(out)
    )
    words = [sys.executable, "-m", "tests.integrations.recipe_in_ray", str(store_directory), str(out)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    left = psutil.wait_procs(processes_about(out), timeout=END_SECONDS)[1]
    for process in left:
        process.kill()
    assert done.returncode == 0, done.stdout + done.stderr
    assert left == []
    for rank in range(2):
        lines = (out / f"rank-{rank}").read_text(encoding="utf-8").splitlines()
        stored, left_of_store, plain = map(json.loads, lines)
        assert stored == plain
        assert len(stored[0]) == NUM_STEPS
        assert left_of_store == []
    for metrics in json.loads((out / "metrics.json").read_text(encoding="utf-8")):
        assert metrics[PACKED] > 0
        assert metrics["tierstore/restored_gib"] + metrics["tierstore/forwarded_gib"] > 0


def processes_about(folder: Path) -> list[psutil.Process]:
    """Those in whose environment the folder is named, as in that of all that Ray has started there."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is somebody else's
            if process.environ().get("RAY_TMPDIR") == str(folder):
                found.append(process)
    return found


def plugin_of_axolotl(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The page's module, loaded by its name as Axolotl does, with a stand-in for the class that it is made of."""
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["axolotl.integrations.base"].BasePlugin = type("BasePlugin", (), {})  # type: ignore[attr-defined]
    (folder / "tierstore_axolotl.py").write_text(RECIPES["axolotl"], encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "tierstore_axolotl", raising=False)
    (named,) = re.findall(r"^plugins:\n  - (\S+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    module, name = named.rsplit(".", 1)
    plugin = getattr(importlib.import_module(module), name)()
    monkeypatch.delitem(sys.modules, "tierstore_axolotl")
    return plugin


def test_axolotl_stand_in_with_a_real_trainer(
    tmp_path: Path, store_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    from tests.integrations.language import Tokens, tiny_model

    monkeypatch.chdir(tmp_path)
    Path("tierstore.toml").write_text(
        f'[store]\npath = "{store_directory}"\nhost_bytes = 0\nstaging_bytes = 0\n[offload]\nmin_bytes = 0\n',
        encoding="utf-8",
    )

    def run(*, offloads: bool) -> tuple[list[Any], list[dict[str, float]]]:
        arguments = transformers.TrainingArguments(
            "out", max_steps=NUM_STEPS, logging_steps=1, report_to="none", save_strategy="no", use_cpu=True, seed=1
        )
        trainer = transformers.Trainer(tiny_model(), arguments, train_dataset=Tokens(32))
        if offloads:
            plugin_of_axolotl(tmp_path, monkeypatch).post_trainer_create({}, trainer)
        trainer.train()
        logs = [log for log in trainer.state.log_history if "loss" in log]
        return [*(log["loss"] for log in logs), *all_bits(trainer.model.parameters())], logs

    stored, logs = run(offloads=True)
    assert stored == run(offloads=False)[0]
    assert len(logs) == NUM_STEPS
    assert min(log[PACKED] for log in logs) > 0
