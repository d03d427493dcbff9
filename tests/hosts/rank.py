"""What one rank of `test_two_hosts.py` does. Run by torchrun on each host, as `-m tests.hosts.rank OUT`.

The first time, it trains every variant without a store and with one. The daemon of the second host is killed twice.
Then the ranks of the second host are killed in the midst of a step. Started again, each goes on from the checkpoint.
What it found is in OUT/first-rank-N.json and OUT/rank-N.json; the test judges it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tierstore import TierStore, tiered_offload
from tierstore.base.address import default_address

LIMIT_SECONDS = 200
"""A rank that lives longer is ended by SIGALRM, whatever has become of those that started it."""
NUM_STEPS, KILLED_STEP = 4, 2
DISTURBED, RESUMED = "FSDP2", "FSDP2, replicated over hosts"
WIDTH = 128


class Net(nn.Module):
    """The same weights every time. `half_way`: called with what the first half gives, whenever it gives something."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)
        )
        self.half_way: Callable[[Tensor], None] = lambda _: None

    def forward(self, batch: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            batch = batch + block(batch)
            if number == 1:
                self.half_way(batch)
        return batch.square().mean()


def sharded(net: Net, *shape: int) -> nn.Module:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("hosts", "ranks")[-len(shape) :])
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


VARIANTS: dict[str, Callable[[Net], nn.Module]] = {
    "DDP": nn.parallel.DistributedDataParallel,
    DISTURBED: lambda net: sharded(net, 4),
    RESUMED: lambda net: sharded(net, 2, 2),
}


class Training:
    """One variant on this rank. `step`: the next one. `losses`: of this rank, step by step."""

    def __init__(self, name: str) -> None:
        self.net = Net()
        self.model = VARIANTS[name](self.net)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.step = 0
        self.losses: list[float] = []

    def run(self, store: TierStore | None, after_step: Callable[[], None] = lambda: None) -> list[Any]:
        """The steps that are left. This rank's losses, and all parameters, whole. Blocks until all ranks have come."""
        while self.step < NUM_STEPS:
            torch.manual_seed(1 + 4 * self.step + dist.get_rank())
            with nullcontext() if store is None else tiered_offload(store, min_bytes=0):
                loss = self.model(torch.randn(64, WIDTH))
            if store is not None:
                store.flush()  # else backward would find most of it in memory still
            loss.backward()
            self.losses.append(loss.item())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            after_step()
        whole = [getattr(one, "full_tensor", lambda one=one: one)() for one in self.model.parameters()]
        return [*self.losses, *(one.detach().clone() for one in whole)]


def compare(name: str, store: TierStore, training: Training, after_step: Callable[[], None] = lambda: None) -> Any:
    """A training under the store, and the same without one."""
    before = store.stats().restored_bytes
    found, plain = training.run(store, after_step), Training(name).run(None)
    pairs = enumerate(zip(found, plain, strict=True))
    return {
        "num_losses": len(training.losses),
        "num_parameters": len(found) - len(training.losses),
        "are_finite": all(torch.as_tensor(one).isfinite().all().item() for one in found),
        "unlike_plain": [at for at, (one, other) in pairs if not torch.equal(*map(torch.as_tensor, (one, other)))],
        "restored_bytes": store.stats().restored_bytes - before,
    }


def kill_daemon() -> None:
    """That of this host, by SIGKILL. The kernel says who listens (SO_PEERCRED, unix(7))."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.fspath(default_address()))
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    os.kill(struct.unpack("3i", credentials)[0], signal.SIGKILL)


def kill_daemon_in_two_steps(training: Training, middle: Tensor) -> None:
    """In the midst of one forward, and of the backward of the next step."""
    if training.step == 1:
        kill_daemon()
    elif training.step == 2:
        middle.register_hook(lambda _: kill_daemon())


class Checkpoints:
    """Keeps the state of a training after each step in a folder that all hosts share."""

    def __init__(self, folder: Path, training: Training) -> None:
        self._folder, self._training = folder, training
        self._losses = f"losses of rank {dist.get_rank()}"

    def save(self) -> None:
        checkpoint.save(self._state(), checkpoint_id=self._folder / str(self._training.step))

    def load_latest(self) -> bool:
        """False: there is none."""
        steps = sorted(int(path.parent.name) for path in self._folder.glob("*/.metadata"))
        if not steps:
            return False
        state, training = self._state(), self._training
        checkpoint.load(state, checkpoint_id=self._folder / str(steps[-1]))
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(training.model, training.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        training.step, training.losses = steps[-1], state[self._losses]
        return True

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._training.model, self._training.optimizer)
        return {"model": model, "optimizer": optimizer, self._losses: list(self._training.losses)}


def main() -> None:
    out = Path(sys.argv[1])
    signal.alarm(LIMIT_SECONDS)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_SECONDS))
    rank, is_on_second_host = dist.get_rank(), os.environ["GROUP_RANK"] == "1"
    resumed = Training(RESUMED)
    checkpoints = Checkpoints(out / "checkpoints", resumed)
    with TierStore.connect(host_bytes=0, name=f"rank {rank}") as store:
        if not checkpoints.load_latest():
            trainings = {name: Training(name) for name in VARIANTS}
            if is_on_second_host and os.environ["LOCAL_RANK"] == "0":
                disturbed = trainings[DISTURBED]
                disturbed.net.half_way = lambda middle: kill_daemon_in_two_steps(disturbed, middle)
            reports = {name: compare(name, store, training) for name, training in trainings.items()}
            (out / f"first-rank-{rank}.json").write_text(json.dumps(reports), encoding="utf-8")
            processes: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(processes, os.getpid())

            def kill_both(_: Tensor) -> None:
                """The other one first, with bytes on the drive."""
                if resumed.step == KILLED_STEP:
                    for process in sorted(processes[2:], key=lambda process: process == os.getpid()):
                        os.kill(process, signal.SIGKILL)

            if is_on_second_host:
                resumed.net.half_way = kill_both
        resumed_at = resumed.step
        report = compare(RESUMED, store, resumed, checkpoints.save)
    report |= {"resumed_at": resumed_at}
    (out / f"rank-{rank}.json").write_text(json.dumps(report), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
