"""What one rank of `test_recipes.py` does. Run by torchrun, as `-m tests.integrations.recipe_worker PATH SOCKET OUT`.

A rank runs each recipe with a store and without one, and writes what it found to OUT/rank-N.json. PATH is the directory
that all ranks' stores share, SOCKET that of a daemon.
"""

import json
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.integrations.recipe_programs import ROWS, Lesson, files_left, is_closed, paste, recipes, threads_left

LIMIT_SECONDS = 280
NUM_MICRO_BATCHES = 4

PARTS = {"block": "fully_shard(offload_module(block, store=store))", "store": "TierStore(path)"}

Run = Callable[[dict[str, Any], bool], tuple[Lesson, dict[str, Any]]]


def sharded(**changes: str) -> Run:
    """`changes`: what the page says in words, names of recipes' parts and their replacements."""

    def run(places: dict[str, Any], offloads: bool) -> tuple[Lesson, dict[str, Any]]:
        lesson = Lesson(dist.get_rank())
        program = lesson.names() | places
        code = recipes()["fsdp2"]
        for part, other in changes.items():
            assert PARTS[part] in code
            code = code.replace(PARTS[part], other)
        paste(code, program, offloads=offloads)
        return lesson, program

    return run


def pipelined(schedule: str) -> Run:
    """Each rank has one block of the model."""

    def run(places: dict[str, Any], offloads: bool) -> tuple[Lesson, dict[str, Any]]:
        rank = dist.get_rank()
        lesson = Lesson(rows=NUM_MICRO_BATCHES * ROWS)
        part = lesson.model.blocks[rank]
        optimizer = torch.optim.Adam(part.parameters(), lr=0.01)

        def train(schedule: Any) -> None:
            torch.manual_seed(1 + rank)
            losses: list[torch.Tensor] = []
            for inputs, targets in lesson.loader:
                if rank == 0:
                    schedule.step(inputs)
                else:
                    schedule.step(target=targets, losses=losses)
                lesson.losses += [loss.item() for loss in losses]
                optimizer.step()
                optimizer.zero_grad()

        program = lesson.names() | places | {"part": part, "rank": rank, "world_size": dist.get_world_size()}
        program |= {"device": torch.device("cpu"), "train": train, "loss_fn": torch.nn.functional.mse_loss}
        code = recipes()["pipelining"].replace("ScheduleGPipe", schedule)
        paste(code, program, offloads=offloads)
        return lesson, program

    return run


RUNS: dict[str, Run] = {
    "fsdp2": sharded(),
    "fsdp2, sharded first": sharded(block="offload_module(fully_shard(block), store=store)"),
    "daemon": sharded(store="TierStore.connect(socket)"),
    "pipelining, ScheduleGPipe": pipelined("ScheduleGPipe"),
    "pipelining, Schedule1F1B": pipelined("Schedule1F1B"),
}


def compare(run: Run, places: dict[str, Any]) -> dict[str, Any]:
    lesson, program = run(places, True)
    plain, _ = run(places, False)
    stats = program["store"].stats()
    return {
        "same": lesson.outcome() == plain.outcome(),
        "num_losses": len(lesson.losses),
        "packed_bytes": stats.packed_bytes,
        "given_back_bytes": stats.restored_bytes + stats.forwarded_bytes,
        "is_closed": is_closed(program["store"]),
        "left": threads_left() + files_left(places["path"]),
    }


def main() -> None:
    signal.alarm(LIMIT_SECONDS)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_SECONDS))
    path, socket, out = map(Path, sys.argv[1:])
    places = {"path": path.resolve(), "socket": socket}
    report = {name: compare(run, places) for name, run in RUNS.items()}
    (out / f"rank-{dist.get_rank()}.json").write_text(json.dumps(report), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
