"""Ctrl-C at random moments of training: `python -m tests.reliability.interrupted (embedded DIRECTORY | sidecar SOCKET)
SEED NUM_INTERRUPTS`.

Prints a line of JSON: a `Tally`. Each interrupt is followed by a step whose gradients must be right; at the end nothing
may be held.
"""

import gc
import random
import signal
import sys
import time

import msgspec
import torch

from tests.daemon.training import make_model
from tests.reliability.trainers import open_store
from tierstore import StorageIOError, StoreClosedError, TierStore, tiered_offload


class Tally(msgspec.Struct):
    """Where the interrupts came, and what was wrong after them."""

    in_forward: int = 0
    in_backward: int = 0
    elsewhere: int = 0
    closed: int = 0
    hooks_left: int = 0
    wrong: list[str] = []


class Training:
    """Steps of one model, under the store, forward and backward."""

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self._model, self._batch = make_model(0)
        self._model.zero_grad()
        self._model(self._batch).square().mean().backward()
        self._expected = [each.grad for each in self._model.parameters()]
        self.phase = ""

    def step(self) -> bool:
        """Whether its gradients are right."""
        self.phase = "forward"
        self._model.zero_grad()
        with tiered_offload(self._store, min_bytes=0):
            loss = self._model(self._batch).square().mean()
        self.phase = "backward"
        loss.backward()
        self.phase = ""
        return all(torch.equal(*pair) for pair in zip(self._expected, self.gradients(), strict=True))

    def gradients(self) -> list[torch.Tensor]:
        return [each.grad for each in self._model.parameters() if each.grad is not None]


def interrupt_once(training: Training, seconds: float, tally: Tally) -> None:
    has_come = False

    def interrupt(*_: object) -> None:
        nonlocal has_come
        has_come = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        while not has_come:  # Python swallows what is raised in a finalizer
            if not training.step():
                tally.wrong.append("gradients of an undisturbed step")
    except KeyboardInterrupt:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # a store that is closed ends the loop too: what follows is left alone
    if training.phase == "forward":
        tally.in_forward += 1
    elif training.phase == "backward":
        tally.in_backward += 1
    else:
        tally.elsewhere += 1


def run(kind: str, address: str, seed: int, num_interrupts: int) -> Tally:
    tally, steps = Tally(), random.Random(seed)
    store = open_store(kind, address, 0)
    training = Training(store)
    training.step()
    began = time.perf_counter()
    training.step()
    step_seconds = time.perf_counter() - began
    for number in range(num_interrupts):
        try:
            interrupt_once(training, steps.uniform(1e-4, 2 * step_seconds), tally)
            if not training.step():
                tally.wrong.append(f"gradients after interrupt {number}")
        except StoreClosedError as error:
            if "a KeyboardInterrupt came in the middle of a change" not in str(error):
                tally.wrong.append(str(error))
            tally.closed += 1
            end(store)
            take_hooks_off(tally)
            store = open_store(kind, address, 0)
            training = Training(store)
    settle(store)
    stats = store.stats()
    held = (stats.live_handles, stats.host_bytes, stats.staging_used_bytes, stats.lent_bytes, stats.disk_bytes)
    if any(held):
        tally.wrong.append(f"held at the end: {stats}")
    take_hooks_off(tally)
    if tally.hooks_left > 1 + num_interrupts // 100:
        tally.wrong.append(f"hooks were left on {tally.hooks_left} times")
    end(store)
    return tally


def take_hooks_off(tally: Tally) -> None:
    """Where an interrupt came as a scope began to be left, before anything of ours ran: that scope lasts."""
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        tally.hooks_left += 1


def settle(store: TierStore) -> None:
    """What an interrupted backward still holds goes with the next one, and with the garbage collector."""
    torch.zeros((), requires_grad=True).backward()
    gc.collect()
    store.flush()


def end(store: TierStore) -> None:
    try:
        store.close()
    except StorageIOError as error:  # its engine met the half changed books
        if "engine" not in str(error) and "close failed" not in str(error):
            raise


def main() -> None:
    """One seed."""
    kind, address, seed, num_interrupts = sys.argv[1:]
    torch.set_num_threads(1)
    print(msgspec.json.encode(run(kind, address, int(seed), int(num_interrupts))).decode())


if __name__ == "__main__":
    main()
