"""What one rank of `test_distributed.py` does. Run by torchrun, as `-m tests.hooks.distributed_worker PLAY PATH OUT`.

Each rank opens a store of its own under PATH, and writes what it found to OUT/rank-N.json; the tests judge it.
"""

import gc
import hashlib
import json
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.descriptors import descriptors_of
from tests.hooks.distributed_variants import RESHARDING, SHAPE, VARIANTS, Net, Training, Variant, Wrap, ddp
from tests.hooks.programs import Bits, all_bits, bits, forget_after_error, run_offloaded, run_plain, training
from tierstore import TierStore, offload_module, tiered_offload

LIMIT_SECONDS = 280
"""A rank that lives longer is ended by SIGALRM, whatever has become of those that started it."""

STORE_OPTIONS: dict[str, Any] = {"host_bytes": 0, "disk_bytes": "2GiB", "codec": "none"}


def train_all(directory: Path, store: TierStore) -> dict[str, Any]:
    """Every variant, plainly, and offloaded twice: with all on disk before backward, and with writes in flight."""
    return {name: compare(variant, store) for name, variant in VARIANTS.items()}


def compare(variant: Variant, store: TierStore) -> dict[str, Any]:
    expected = run_plain(Training(variant))
    gc.collect()
    before = store.stats()
    offload = partial(offload_module, store=store, min_bytes=0)
    found = run_offloaded(Training(variant, offload), store)
    gc.collect()  # models under FSDP and DDP are in reference cycles, and the last graph hangs on them
    after = store.stats()
    torch.manual_seed(0)
    in_flight = Training(variant, offload)(lambda: tiered_offload(store, min_bytes=0), lambda: None)
    found_in_flight = all_bits(in_flight)
    gc.collect()
    last = store.stats()
    return {
        "num_tensors": 2 * sum(one is not None for one in expected),
        "differing": differing(found, expected) + differing(found_in_flight, expected),
        "parameters": digest(expected),
        "spilled_bytes": after.spilled_bytes - before.spilled_bytes,
        "restored_bytes": after.restored_bytes - before.restored_bytes,
        "kept_bytes": {reason: after.kept_bytes[reason] - before.kept_bytes[reason] for reason in after.kept_bytes},
        "left": [last.live_handles, last.disk_bytes, last.lent_bytes],
    }


def digest(results: list[Bits]) -> str:
    """Of what is last in the results of a training: as many parameters as a `Net` has."""
    last = results[-len(list(Net().parameters())) :]
    return hashlib.sha256(b"".join(one[2] for one in last if one is not None)).hexdigest()


def differing(found: list[Bits], expected: list[Bits]) -> list[int]:
    pairs = enumerate(zip(found, expected, strict=True))
    return [number for number, (one, other) in pairs if one != other]


class LocalGraph:
    """A graph of this rank alone, whose saved tensors are on disk."""

    def __init__(self, store: TierStore) -> None:
        self._weight = torch.randn(100, 100, requires_grad=True)
        with tiered_offload(store, min_bytes=0):
            self._loss = (self._weight.exp() * self._weight.sin()).tanh().sum()
        store.flush()
        self.disk_bytes = store.stats().disk_bytes
        other = self._weight.detach().clone().requires_grad_()
        (other.exp() * other.sin()).tanh().sum().backward()
        self.expected = bits(other.grad)

    def gradient(self) -> Bits:
        self._loss.backward()
        return bits(self._weight.grad)


def lose_a_rank(directory: Path, store: TierStore, *, wrap: Wrap, ending: str) -> dict[str, Any]:
    """Rank 1 ends in the middle of the second step's forward; rank 0 goes on alone."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends those that are left: not before they are done
    processes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(processes, os.getpid())
    peer = os.pidfd_open(processes[1 - dist.get_rank()])
    torch.manual_seed(0)
    net = Net()
    model = wrap(net)
    graph = LocalGraph(store)
    step(model, store)
    dist.barrier()
    num_holders = len(holders_of(directory))
    dist.barrier()
    if dist.get_rank() == 1:
        net.blocks[2].register_forward_pre_hook(lambda *_: end(ending, directory, store))
    error = None
    try:
        step(model, store)
    except RuntimeError as raised:
        if dist.get_rank() == 1:
            raise
        error = str(raised)
    forget_after_error()
    is_over = bool(select.select([peer], [], [], 30)[0])  # a descriptor of a process can be read once it has ended
    os.close(peer)
    report = {"error": error, "num_holders": num_holders, "peer is over": is_over}
    return report | go_on_alone(directory, store, graph)


def step(model: nn.Module, store: TierStore) -> None:
    with tiered_offload(store, min_bytes=0):
        loss = model(torch.randn(SHAPE))
    loss.backward()


def end(ending: str, directory: Path, store: TierStore) -> None:
    """End this process here, with bytes on disk, on their way there, and in a graph that is being made."""
    stats = store.stats()
    write_report({"disk_bytes": stats.disk_bytes, "live_handles": stats.live_handles, "files": num_files(directory)})
    if ending == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("this rank is meant to fail")


def go_on_alone(directory: Path, store: TierStore, graph: LocalGraph) -> dict[str, Any]:
    from_disk = graph.gradient()
    program = training("transformer")
    differing_old_store = differing(run_offloaded(program, store), run_plain(program))
    with TierStore(directory, **STORE_OPTIONS) as another:
        differing_new_store = differing(run_offloaded(program, another), run_plain(program))
        new_spilled_bytes = another.stats().spilled_bytes
    holders = sorted(holders_of(directory))
    before = num_files(directory)
    gc.collect()
    live_handles = store.stats().live_handles
    store.close()
    return {
        "graph on disk": graph.disk_bytes,
        "graph": "bitwise the same" if from_disk == graph.expected else "other bits",
        "differing": differing_old_store + differing_new_store,
        "spilled_bytes": new_spilled_bytes,
        "live_handles": live_handles,
        "held by others": [process for process in holders if process != os.getpid()],
        "files": [before, num_files(directory)],
        "names": os.listdir(directory),
    }


def files_of(process: int | str, directory: Path) -> list[str]:
    """What a process has open under the directory, files without a name included."""
    return [target for target in descriptors_of(process).values() if target.startswith(f"{directory}/")]


def holders_of(directory: Path) -> set[int]:
    found = set()
    for process in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if files_of(process, directory):
                found.add(int(process))
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            pass  # it has ended, or is somebody else's
    return found


def num_files(directory: Path) -> int:
    return len(files_of("self", directory))


def write_report(report: dict[str, Any]) -> None:
    path = Path(sys.argv[3], f"rank-{dist.get_rank()}.json")
    path.write_text(json.dumps(report | {"process": os.getpid()}), encoding="utf-8")


PLAYS: dict[str, Callable[[Path, TierStore], dict[str, Any]]] = {
    "train": train_all,
    "ddp, raises": partial(lose_a_rank, wrap=ddp, ending="raises"),
    "fsdp, killed": partial(lose_a_rank, wrap=RESHARDING, ending="killed"),
}


def main() -> None:
    signal.alarm(LIMIT_SECONDS)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_SECONDS))
    warnings.simplefilter("error")
    directory = Path(sys.argv[2]).resolve()
    with TierStore(directory, **STORE_OPTIONS) as store:
        write_report(PLAYS[sys.argv[1]](directory, store))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
