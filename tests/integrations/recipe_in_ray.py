"""The recipe for Ray Train, in a program of its own.

    python -m tests.integrations.recipe_in_ray PATH OUT SOCKET SOCKET

It runs on a cluster of two nodes with a worker on each: with a store for each worker, as the page has it, then with the
daemon of the worker's node. The first time, the worker on the second node is killed in the midst of a step with the
daemon, and Ray starts the training again.

Each worker writes lines of JSON to OUT/rank-N: its node, what came of the training with a store of its own, with the
daemon, and without either, and what is left of the stores. The controller writes the numbers that all workers report to
OUT/metrics.json: a list for each report.
"""

import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import ray
import ray.train
import ray.train.torch
import torch
from ray.cluster_utils import Cluster
from ray.train.torch import TorchTrainer
from torch import nn

from tests.integrations.recipe_programs import Lesson, Net, SpillingStore, files_left, paste, recipes, threads_left

Loop = Callable[[dict[str, Any]], None]


def file_of_rank(out: Path) -> Path:
    return out / f"rank-{ray.train.get_context().get_world_rank()}"


def write_line(out: Path, value: object) -> None:
    with file_of_rank(out).open("a") as file:
        print(json.dumps(value), file=file)


def train(model: nn.Module, *, out: Path) -> None:
    torch.set_num_threads(1)
    rank = ray.train.get_context().get_world_rank()
    lesson = Lesson(rank)
    lesson.model = model.module
    if rank == 1 and os.environ.get("KILLED_BY_TEST"):
        lesson.model.blocks[1].register_forward_hook(lambda *_: kill_once(lesson, out))
    lesson.train(model)
    write_line(out, [lesson.losses, hashlib.sha256(repr(lesson.outcome()).encode()).hexdigest()])


def kill_once(lesson: Lesson, out: Path) -> None:
    """This worker, in its second step."""
    killed = out / "killed"
    if len(lesson.losses) == 1 and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Numbers(ray.train.UserCallback):
    """Takes what the workers report, as the page says."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.reports: list[list[dict[str, Any]]] = []

    def after_report(self, run_context: object, metrics: list[dict[str, Any]], checkpoint: object) -> None:
        self.reports.append(metrics)
        (self.out / "metrics.json").write_text(json.dumps(self.reports), encoding="utf-8")


def trainer(loop: Loop, *, out: Path, **options: Any) -> TorchTrainer:
    """Its workers train three times: by the recipe, with their node's daemon, and without a store."""

    def all_loops(config: dict[str, Any]) -> None:
        file_of_rank(out).unlink(missing_ok=True)  # of a start before this one
        write_line(out, ray.get_runtime_context().get_node_id())
        loop(config)
        loop.__globals__["TierStore"] = lambda _: SpillingStore.connect()  # as the page says
        os.environ["KILLED_BY_TEST"] = "1"
        loop(config)
        del os.environ["KILLED_BY_TEST"]
        left = threads_left() + files_left(config["path"])
        train(ray.train.torch.prepare_model(Net()), out=out)
        write_line(out, left)

    run = ray.train.RunConfig(
        storage_path=str(out / "results"),
        callbacks=[Numbers(out)],
        failure_config=ray.train.FailureConfig(max_failures=1),
    )
    return TorchTrainer(all_loops, run_config=run, **options)


def main() -> None:
    path, out, sockets = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    names = {"path": path, "make_model": Net, "train": partial(train, out=out)}
    nodes = [{"num_cpus": 1, "env_vars": {"TIERSTORE_SOCKET": socket}} for socket in sockets]
    cluster = Cluster(initialize_head=True, head_node_args=nodes[0] | {"include_dashboard": False})
    try:
        cluster.add_node(**nodes[1])
        ray.init(address=cluster.address)
        with mock.patch("ray.train.torch.TorchTrainer", partial(trainer, out=out)):
            paste(recipes()["ray"], names, offloads=True)
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
