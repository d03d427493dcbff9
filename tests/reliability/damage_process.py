"""A process whose own store is damaged under it: `python -m tests.reliability.damage_process CASES`.

Each case is [what, [directory, ...], seed], all of them in JSON. For each it forks a child, so that torch is imported
once, and prints a line of JSON: an `Outcome`. The files of an embedded store have no names; they are reached through
/proc/self/fd. Of several directories the index of one is damaged; what lies on the others alone must be right.

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
from typing import NamedTuple

import msgspec
import torch

from tests.inspect_store import inspect, inspect_drives, inspect_tier
from tierstore import CorruptDataError, StorageIOError, StoreClosedError, StoreFullError, TierStore
from tierstore.disk.drives import Drives
from tierstore.disk.local import LocalDisk
from tierstore.disk.location import Location
from tierstore.residency.handle import Handle

LARGE, MIDDLE, SMALL = 300_000, 25_000, 600
"""Numbers of float32: an extent; a value that is read where it lies in LMDB's file; one that is read through LMDB."""
DIVIDED = 2_200_000
"""Of an extent on each of several drives."""
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
        sound_done: everything that lives in extents, or on a drive that is not damaged, had been read.
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


class Place(NamedTuple):
    """Where a record lies, or a part of it."""

    disk: LocalDisk
    location: Location


class Victim:
    """A store with records of each size, all of them on disk.

    Attributes:
        disks: the tier of each of its drives.
        places: of each record, by key; of a divided one, those of its parts.
    """

    def __init__(self, store: TierStore, steps: random.Random) -> None:
        tier = inspect(store).disk
        assert isinstance(tier, (LocalDisk, Drives))
        self.store, self.steps = store, steps
        self.disks = [tier] if isinstance(tier, LocalDisk) else inspect_drives(tier).disks
        self.contents: dict[int, torch.Tensor] = {}
        self.handles: dict[int, Handle] = {}
        divided: list[int] = []
        if isinstance(tier, Drives):
            inspect_drives(tier).set_speeds([1e9] * len(self.disks))  # each has a half, however busy the machine is
            divided = [DIVIDED] * 2
        for number, size in enumerate([LARGE] * 6 + [MIDDLE] * 8 + [SMALL] * 40 + divided):
            content = torch.randint(-9, 9, (size + number,)).float() + number
            handle = store.put(content.clone())
            self.contents[handle.record.key] = content
            self.handles[handle.record.key] = handle
        store.flush()
        self.places: dict[int, list[Place]] = {}
        for key in self.contents:
            parts = [(tier, key)] if isinstance(tier, LocalDisk) else inspect_drives(tier).places_of(key)
            self.places[key] = [Place(disk, disk.found_locations()[part]) for disk, part in parts]
            assert len(self.places[key]) == (2 if len(self.contents[key]) >= DIVIDED else 1)
        assert all(disk.found_locations() for disk in self.disks), "each drive has some"

    def keys(self, *sizes: int) -> list[int]:
        return [key for key, content in self.contents.items() if min(sizes) <= len(content) < max(sizes) + 100]

    def on(self, disk: LocalDisk, keys: list[int]) -> list[int]:
        """Those of the records of which something lies on that drive."""
        return [key for key in keys if any(place.disk is disk for place in self.places[key])]

    def names_the_drive(self, error: CorruptDataError, key: int) -> bool:
        """Whether it does, where there are several."""
        drives = (each.place for place in self.places.get(key, ()) for each in place.disk.drives())
        return len(self.disks) == 1 or key not in self.places or error.place.startswith(tuple(drives))

    def flip_payload(self, key: int) -> int:
        """Change some bytes of one record, or of one of its parts; how many."""
        disk, location = self.places[key][key % len(self.places[key])]
        assert location.offset is not None
        tier = inspect_tier(disk)
        file = tier.index.file.fileno() if location.segment is None else tier.space.descriptor(location.segment)
        span = (location.offset, location.encoded_bytes)
        return flip(file, self.steps, [span], self.steps.choice((1, 1, 8, 500)))

    def look(self, keys: list[int], outcome: Outcome, damaged: set[int] | None = None) -> None:
        """Ask for records; `damaged`: exactly those that must be refused, if that is known."""
        for key in keys:
            try:
                found = self.store.get(self.handles[key])
            except CorruptDataError as error:
                outcome.corrupt += 1
                says = error.key == key and error.place and error.expected and error.expected != error.found
                says = says and self.names_the_drive(error, key)
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
def opened(directories: list[Path], outcome: Outcome, steps: random.Random, **options: object) -> Iterator[Victim]:
    outcome.codec = steps.choice(_CODECS)
    settings: dict[str, object] = {"host_bytes": 0, "disk_bytes": "64MiB", "codec": outcome.codec}
    store = TierStore(directories, **(settings | options))  # type: ignore[arg-type]
    yield Victim(store, steps)
    try:
        store.close()
    except StorageIOError:
        pass  # the engine had failed, by what LMDB said


def damage_payload(directories: list[Path], outcome: Outcome) -> None:
    steps = random.Random(outcome.seed)
    with opened(directories, outcome, steps) as victim:
        hittable = [key for key, places in victim.places.items() if places[0].location.offset is not None]
        damaged = set(steps.sample(hittable, steps.randrange(1, 6)))
        outcome.hit = len(damaged)
        outcome.num_flips = sum(victim.flip_payload(key) for key in damaged)
        victim.look(list(victim.contents), outcome, damaged)
        outcome.sound_done = True
        victim.look(list(damaged), outcome, damaged)  # again: the same error, not the bytes


def damage_index(directories: list[Path], outcome: Outcome) -> None:
    steps = random.Random(outcome.seed)
    with opened(directories, outcome, steps) as victim:
        hit = victim.disks[outcome.seed % len(victim.disks)]
        index = inspect_tier(hit).index.file.fileno()
        length = os.fstat(index).st_size
        pages = [page for page in range(0, length, 4096) if steps.random() < 0.1]
        # Half of it where LMDB keeps the structure: a page's header and the first of its pointers and nodes.
        spans = [(page, steps.choice((64, 4096))) for page in pages]
        spans = [(page, min(span, length - page)) for page, span in spans]
        outcome.num_flips = flip(index, steps, spans or [(0, 4096)], 8 * len(spans) or 1)
        values = victim.keys(MIDDLE) + victim.keys(SMALL)
        elsewhere = [key for key in values if key not in victim.on(hit, values)]
        victim.look(victim.keys(LARGE, DIVIDED), outcome, set())
        victim.look(elsewhere, outcome, set())
        outcome.sound_done = True
        tell(outcome)
        victim.look(victim.on(hit, values), outcome)
        write_more(victim, outcome)
        victim.look(elsewhere, outcome, set())
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
        except (StorageIOError, StoreFullError, StoreClosedError) as error:
            outcome.failed += 1
            if len(victim.disks) > 1:
                outcome.wrong.append(f"the other drive did not take a record: {error!r}")
            continue
        victim.handles[handle.record.key] = handle
        victim.contents[handle.record.key] = content
        victim.look([handle.record.key], outcome)


_report = -1


def tell(outcome: Outcome) -> None:
    """Whatever becomes of this process, its parent has heard so much; in one piece."""
    os.write(_report, msgspec.json.encode(outcome) + b"\n")


def in_child(damage: Callable[[list[Path], Outcome], None], directories: list[Path], seed: int) -> Outcome:
    """Run one seed; what the child said last, and how it ended."""
    global _report
    to_read, _report = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(to_read)
        signal.alarm(_CHILD_SECONDS)  # a hang ends as SIGALRM, which no damage explains
        outcome = Outcome(seed)
        try:
            damage(directories, outcome)
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
    for directory in filter(os.listdir, directories):
        outcome.wrong.append(f"left behind: {os.listdir(directory)}")
    return outcome


def main() -> None:
    """Run all cases of the command line."""
    damages = {"payload": damage_payload, "index": damage_index}
    torch.set_num_threads(1)
    for what, directories, seed in msgspec.json.decode(sys.argv[1]):
        outcome = in_child(damages[what], list(map(Path, directories)), seed)
        print(msgspec.json.encode(outcome).decode(), flush=True)


if __name__ == "__main__":
    main()
