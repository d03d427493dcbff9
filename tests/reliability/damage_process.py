"""A process whose own store is damaged under it: `python -m tests.reliability.damage_process CASES`.

Each case is [what, directory, seed], all of them in JSON. For each it forks a child, so that torch is imported once,
and prints a line of JSON: an `Outcome`. The files of an embedded store have no names; they are reached through
/proc/self/fd.

payload: flip bytes of records in extents and of values in LMDB's file, where they lie.
index: flip bytes all over LMDB's file, its structure included; extents first, then what lives there, then new records.
"""

import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from tests.inspect_store import inspect, inspect_tier
from tierstore import CorruptDataError, StorageIOError, StoreClosedError, StoreFullError, TierStore
from tierstore.disk.local import LocalDisk
from tierstore.residency.handle import Handle

LARGE, MIDDLE, SMALL = 300_000, 25_000, 600
"""Numbers of float32: an extent; a value that is read where it lies in LMDB's file; one that is read through LMDB."""
_CODECS = ("none", "zstd", "shuffle-zstd")
_CHILD_SECONDS = 60


class Outcome(msgspec.Struct):
    """What became of one seed.

    Attributes:
        seed: of the flips.
        codec: of the store.
        num_flips: bytes that were changed.
        hit: records whose own bytes were changed, as far as that is known.
        right: records that were read bit for bit.
        corrupt: refused with `CorruptDataError`.
        failed: not read or written, because of what LMDB said.
        wrong: everything that must not be, in words.
        sound_done: everything that lives in extents had been read.
        signal: that ended the child; 0: none did.
    """

    seed: int
    codec: str = ""
    num_flips: int = 0
    hit: int = 0
    right: int = 0
    corrupt: int = 0
    failed: int = 0
    wrong: list[str] = []
    sound_done: bool = False
    signal: int = 0


class Victim:
    """A store with records of each size, all of them on disk; `places`: where each lies, by key."""

    def __init__(self, store: TierStore, steps: random.Random) -> None:
        disk = inspect(store).disk
        assert isinstance(disk, LocalDisk)
        self.store, self.steps = store, steps
        self.tier = inspect_tier(disk)
        self.contents: dict[int, torch.Tensor] = {}
        self.handles: dict[int, Handle] = {}
        for number, size in enumerate([LARGE] * 6 + [MIDDLE] * 8 + [SMALL] * 40):
            content = torch.randint(-9, 9, (size + number,)).float() + number
            handle = store.put(content.clone())
            self.contents[handle.record.key] = content
            self.handles[handle.record.key] = handle
        store.flush()
        self.places = {key: disk.found_locations()[key] for key in self.contents}

    def keys(self, *sizes: int) -> list[int]:
        return [key for key, content in self.contents.items() if min(sizes) <= len(content) < max(sizes) + 100]

    def flip_payload(self, key: int) -> int:
        """Change some bytes of one record; how many."""
        location = self.places[key]
        assert location.offset is not None
        index, space = self.tier.index, self.tier.space
        file = index.file.fileno() if location.segment is None else space.descriptor(location.segment)
        return flip(file, self.steps, [(location.offset, location.encoded_bytes)], self.steps.choice((1, 1, 8, 500)))

    def look(self, keys: list[int], outcome: Outcome, damaged: set[int] | None = None) -> None:
        """Ask for records; `damaged`: exactly those that must be refused, if that is known."""
        for key in keys:
            try:
                found = self.store.get(self.handles[key])
            except CorruptDataError as error:
                outcome.corrupt += 1
                says = error.key == key and error.place and error.expected and error.expected != error.found
                if not says or f"handle {key}: damaged data in {error.place}" not in str(error):
                    outcome.wrong.append(f"it does not say what is damaged: {error}")
                if damaged is not None and key not in damaged:
                    outcome.wrong.append(f"record {key} was not touched: {error}")
            except (StorageIOError, StoreClosedError) as error:
                outcome.failed += 1
                if damaged is not None:
                    outcome.wrong.append(f"record {key}: {error!r}")
            else:
                outcome.right += 1
                if not torch.equal(found, self.contents[key]):
                    outcome.wrong.append(f"record {key} has wrong values")
                if damaged is not None and key in damaged:
                    outcome.wrong.append(f"record {key} was damaged, and nobody noticed")


def flip(file: int, steps: random.Random, spans: list[tuple[int, int]], num_bytes: int) -> int:
    """Change so many bytes (at different places) of a file that is open; how many."""
    length = sum(length for _, length in spans)
    places = steps.sample(range(length), min(num_bytes, length))
    writable = os.open(f"/proc/self/fd/{file}", os.O_RDWR)
    try:
        for place in places:
            start = 0
            for offset, span in spans:
                if place < start + span:
                    at = offset + place - start
                    break
                start += span
            (old,) = os.pread(writable, 1, at)
            os.pwrite(writable, bytes([old ^ steps.randrange(1, 256)]), at)
    finally:
        os.close(writable)
    return len(places)


@contextmanager
def opened(directory: Path, outcome: Outcome, steps: random.Random) -> Iterator[Victim]:
    outcome.codec = steps.choice(_CODECS)
    store = TierStore(directory, host_bytes=0, disk_bytes="64MiB", codec=outcome.codec)
    yield Victim(store, steps)
    try:
        store.close()
    except StorageIOError:
        pass  # the engine had failed, by what LMDB said


def damage_payload(directory: Path, outcome: Outcome) -> None:
    steps = random.Random(outcome.seed)
    with opened(directory, outcome, steps) as victim:
        hittable = [key for key, place in victim.places.items() if place.offset is not None]
        damaged = set(steps.sample(hittable, steps.randrange(1, 6)))
        outcome.hit = len(damaged)
        outcome.num_flips = sum(victim.flip_payload(key) for key in damaged)
        victim.look(list(victim.contents), outcome, damaged)
        outcome.sound_done = True
        victim.look(list(damaged), outcome, damaged)  # again: the same error, not the bytes


def damage_index(directory: Path, outcome: Outcome) -> None:
    steps = random.Random(outcome.seed)
    with opened(directory, outcome, steps) as victim:
        index = victim.tier.index.file.fileno()
        length = os.fstat(index).st_size
        pages = [page for page in range(0, length, 4096) if steps.random() < 0.1]
        # Half of it where LMDB keeps the structure: a page's header and the first of its pointers and nodes.
        spans = [(page, steps.choice((64, 4096))) for page in pages]
        spans = [(page, min(span, length - page)) for page, span in spans]
        outcome.num_flips = flip(index, steps, spans or [(0, 4096)], 8 * len(spans) or 1)
        victim.look(victim.keys(LARGE), outcome, set())
        outcome.sound_done = True
        tell(outcome)
        victim.look(victim.keys(MIDDLE) + victim.keys(SMALL), outcome)
        write_more(victim, outcome)
        victim.handles.clear()
        try:
            victim.store.flush()
        except (StorageIOError, StoreFullError, StoreClosedError):
            outcome.failed += 1


def write_more(victim: Victim, outcome: Outcome) -> None:
    for number, size in enumerate((LARGE, SMALL, MIDDLE) * 4):
        content = torch.arange(size).float() + number
        try:
            handle = victim.store.put(content.clone())
            victim.store.flush()
        except (StorageIOError, StoreFullError, StoreClosedError):
            outcome.failed += 1
            continue
        victim.handles[handle.record.key] = handle
        victim.contents[handle.record.key] = content
        victim.look([handle.record.key], outcome)


_report = -1


def tell(outcome: Outcome) -> None:
    """Whatever becomes of this process, its parent has heard so much; in one piece."""
    os.write(_report, msgspec.json.encode(outcome) + b"\n")


def in_child(damage: Callable[[Path, Outcome], None], directory: Path, seed: int) -> Outcome:
    """Run one seed; what the child said last, and how it ended."""
    global _report
    to_read, _report = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(to_read)
        signal.alarm(_CHILD_SECONDS)  # a hang ends as SIGALRM, which no damage explains
        outcome = Outcome(seed)
        try:
            damage(directory, outcome)
        except BaseException:  # noqa: BLE001 - whatever it is, it must not be
            outcome.wrong.append(traceback.format_exc())
        tell(outcome)
        os._exit(0)
    os.close(_report)
    with open(to_read, "rb") as report:
        lines = report.read().splitlines()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    outcome = msgspec.json.decode(lines[-1], type=Outcome) if lines else Outcome(seed)
    outcome.signal = max(0, -code)
    if os.listdir(directory):
        outcome.wrong.append(f"left behind: {os.listdir(directory)}")
    return outcome


def main() -> None:
    """Run all cases of the command line."""
    damages = {"payload": damage_payload, "index": damage_index}
    torch.set_num_threads(1)
    for what, directory, seed in msgspec.json.decode(sys.argv[1]):
        outcome = in_child(damages[what], Path(directory), seed)
        print(msgspec.json.encode(outcome).decode(), flush=True)


if __name__ == "__main__":
    main()
