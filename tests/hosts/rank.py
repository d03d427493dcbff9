"""What one rank of `test_two_hosts.py` does. Run by torchrun on each host, as `-m tests.hosts.rank OUT`.

The first time, it trains every variant without a store and with one. The daemon of the second host is killed twice.
Then the ranks of the second host are killed in the midst of a step. Started again, each goes on from the checkpoint.
What it found is in OUT/first-rank-N.json and OUT/rank-N.json; the test judges it.
"""

import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.hosts.training import NUM_STEPS, VARIANTS, Outcome, Training, train_alone
from tierstore import TierStore
from tierstore.base.address import default_address
from tierstore.rules import windows

LIMIT_SECONDS = 200
"""A rank that lives longer is ended by SIGALRM, whatever has become of those that started it."""
DISTURBED = "FSDP2"
RESUMED = "FSDP2, replicated over hosts"
KILLED_STEP = 2


def is_on_second_host() -> bool:
    return os.environ["GROUP_RANK"] == "1"


def open_store() -> TierStore:
    return TierStore.connect(host_bytes=0, name=f"rank {dist.get_rank()}")


def compare(name: str, store: TierStore, disturb: Callable[[Training], None]) -> dict[str, Any]:
    """One variant without a store, with one, and in this process alone."""
    variant = VARIANTS[name]
    plain = Training(variant).run(None)
    before = store.stats().restored_bytes
    training = Training(variant)
    disturb(training)
    report = judged(name, training.run(store), plain)
    return report | {"restored_bytes": store.stats().restored_bytes - before}


def judged(name: str, found: Outcome, plain: Outcome) -> dict[str, Any]:
    """How the outcome under a store stands to that without one, and to that of one process."""
    variant = VARIANTS[name]
    alone = None if variant.reduced is None else train_alone(variant, variant.reduced)
    return {
        "num_losses": len(found.losses),
        "num_parameters": len(found.parameters),
        "are_finite": all(bool(one.isfinite().all()) for one in found.parameters),
        "unlike_plain": found.differing(plain),
        "unlike_alone": None if alone is None else found.differing(alone),
    }


def kill_daemon() -> None:
    """That of this host, by SIGKILL. The kernel says who listens (SO_PEERCRED, unix(7))."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.fspath(default_address()))
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    os.kill(struct.unpack("3i", credentials)[0], signal.SIGKILL)


def kill_daemon_in_two_steps(training: Training) -> None:
    """In the midst of one forward, and of the backward of the next step."""

    def half_way(middle: Tensor) -> None:
        if training.step == 1:
            kill_daemon()
        elif training.step == 2:
            middle.register_hook(lambda _: kill_daemon())

    if is_on_second_host() and os.environ["LOCAL_RANK"] == "0":
        training.net.half_way = half_way


def kill_ranks_of_second_host(training: Training) -> None:
    """Both at once, in the midst of a forward, with bytes on the drive."""
    ranks: list[tuple[str, int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (os.environ["GROUP_RANK"], os.getpid()))

    def half_way(_: Tensor) -> None:
        if training.step == KILLED_STEP:
            for host, pid in sorted(filter(None, ranks), key=lambda rank: rank[1] == os.getpid()):  # itself last
                if host == os.environ["GROUP_RANK"]:
                    os.kill(pid, signal.SIGKILL)

    if is_on_second_host():
        training.net.half_way = half_way


class Checkpoints:
    """Keeps the state of a training after each step in a folder that all hosts share."""

    def __init__(self, folder: Path, training: Training) -> None:
        self._folder, self._training = folder, training

    def save(self) -> None:
        checkpoint.save(self._state(), checkpoint_id=self._folder / str(self._training.step))

    def load_latest(self) -> bool:
        """False: there is none."""
        steps = sorted(int(path.parent.name) for path in self._folder.glob("*/.metadata"))
        if not steps:
            return False
        state = self._state()
        checkpoint.load(state, checkpoint_id=self._folder / str(steps[-1]))
        training = self._training
        set_state_dict(
            training.model,
            training.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        training.step, training.losses = steps[-1], state[self._losses]
        return True

    @property
    def _losses(self) -> str:
        return f"losses of rank {dist.get_rank()}"

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._training.model, self._training.optimizer)
        return {"model": model, "optimizer": optimizer, self._losses: list(self._training.losses)}


def main() -> None:
    out = Path(sys.argv[1])
    signal.alarm(LIMIT_SECONDS)
    torch.set_num_threads(1)
    windows.MOST_NOTED_BYTES = 0  # what is packed has to leave, however small
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_SECONDS))
    training = Training(VARIANTS[RESUMED])
    checkpoints = Checkpoints(out / "checkpoints", training)
    with open_store() as store:
        is_resumed = checkpoints.load_latest()
        if not is_resumed:
            disturbances = {DISTURBED: kill_daemon_in_two_steps}
            reports = {name: compare(name, store, disturbances.get(name, lambda _: None)) for name in VARIANTS}
            write(out / f"first-rank-{dist.get_rank()}.json", reports)
            kill_ranks_of_second_host(training)
        resumed_at = training.step
        found = training.run(store, checkpoints.save)
        report = judged(RESUMED, found, Training(VARIANTS[RESUMED]).run(None))
    write(out / f"rank-{dist.get_rank()}.json", report | {"resumed_at": resumed_at, "num_steps": NUM_STEPS})
    dist.destroy_process_group()


def write(path: Path, report: dict[str, Any]) -> None:
    path.write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
