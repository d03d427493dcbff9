"""The daemon: puts its parts together, runs them, and ends them.

::

    listener ─► Acceptor ─► Connection (in Turns) ─► Lanes (whose turn) ─► Records ─► LocalDisk ─► answers
                                └► Registry (sessions) ◄── Reporter ◄── page, `Inspect`

One loop runs all of it; jobs of the disk tier run on its I/O threads."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from tierstore.base.config import check_directories, format_bytes, free_bytes_of_each, free_disk_bytes
from tierstore.base.defaults import NUM_AT_ONCE
from tierstore.base.event_loop import new_event_loop
from tierstore.base.system_words import words_of
from tierstore.base.threads import IoThreads, refuse_green_threads
from tierstore.disk.boundary import translated
from tierstore.disk.budget import divided_budget
from tierstore.disk.codec.codec import NO_CODEC, parse_codec
from tierstore.disk.drives import Drives, LocalTier
from tierstore.disk.file_layout import NamedFileLayout
from tierstore.disk.local import LocalDisk
from tierstore.errors import StorageIOError, StoreFullError

from .acceptor import Acceptor, listen, stop_listening, why_kept_out
from .lanes import Lanes
from .options import ServeSettings
from .page import Watch
from .registry import Registry
from .report import Reporter
from .tasks import Stage, Tasks

_log = logging.getLogger("tierstore.daemon")

_INLINE_BYTES = 128 * 2**10
_DISK_SHARE = 0.8  # of the space that is free, or taken by the daemon's own files
_NUM_JOBS = NUM_AT_ONCE + 2  # of a session, each way: while those are at the device, others take checksums
_NUM_IN_ALL = _NUM_JOBS + 2  # one is left for other sessions, and one for other users (`Lanes`)
_DRAIN_SECONDS = 30.0
_SWITCH_SECONDS = 0.0005  # as a turn takes (`turns.py`)


def serve(settings: ServeSettings) -> None:
    """Run a daemon until it is told to end (SIGTERM, SIGINT). Blocks.

    ConfigError: an option cannot be used, a living daemon uses the directory or the socket, or the process has
    greenlets in the place of threads. StorageIOError: the drive or the system refused; or the index was found to be
    damaged, and all that was stored was cleared."""
    refuse_green_threads()
    # A job at the drive needs the interpreter's lock a dozen times. Where one client keeps the loop busy, each time
    # would take the default 5 ms, for the jobs of all. See also `_REST_SECONDS` in `turns.py`.
    sys.setswitchinterval(_SWITCH_SECONDS)
    runner = asyncio.Runner(loop_factory=new_event_loop)
    try:
        runner.run(Daemon(settings).run())
    except OSError as error:
        reason = words_of(error, settings.place)
        raise StorageIOError("serve", settings.place, reason, "what was stored there still is") from error
    finally:
        with suppress(RuntimeError):  # a loop that was refused a call as it began cannot be closed
            runner.close()


class Daemon:
    """Opens the page, the files and the socket, then the parts that serve clients; closes them in reverse order."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self._stage = Stage()

    async def run(self) -> None:
        settings = self.settings
        for number in (signal.SIGTERM, signal.SIGINT):  # first: whoever can connect can already end it in good order
            asyncio.get_running_loop().add_signal_handler(number, self._stage.signalled)
        with ExitStack() as opened:
            page = None if settings.metrics is None else Watch(self._stage, *settings.metrics)
            if page is not None:  # first: it leaves no file behind
                opened.callback(page.close)
            layouts = self._lock_layouts(opened)
            listener = listen(settings.socket, settings.socket_group)
            opened.callback(stop_listening, listener, settings.socket)
            if page is not None:
                await page.begin()
            await self._serve(layouts, listener, page)

    def _lock_layouts(self, opened: ExitStack) -> list[NamedFileLayout]:
        """Lock the folder on each drive. `opened` unlocks them, and closes what no tier has closed by then."""
        layouts: list[NamedFileLayout] = []
        seed = secrets.randbits(63)  # one for all drives, so that clients can confirm the records on any of them
        for path in check_directories(self.settings.paths):
            with _opened_at(path):
                layouts.append(NamedFileLayout(path, seed))
            opened.callback(layouts[-1].close, keep=True)
        return layouts

    async def _serve(self, layouts: Sequence[NamedFileLayout], listener: socket.socket, page: Watch | None) -> None:
        stage, settings = self._stage, self.settings
        num_jobs = _NUM_JOBS * len(layouts)
        with _opened_at(settings.paths[0]):
            threads = IoThreads(2 * (num_jobs + 2) + 2, "tierstore-io")
        try:
            disk = await self._open_disk(layouts, threads)
            tasks = Tasks(after_each=lambda: self._end_if_damaged(disk))
            lanes = Lanes(tasks.start, num_jobs, _most_writes(settings.codec, num_jobs))
            registry = Registry(disk, lanes, tasks, stage, settings)
            reporter = Reporter(registry, None if page is None else page.address)
            acceptor = Acceptor(registry, reporter)
            if page is not None:
                page.reports = reporter.reports
            await registry.restore()
            self._end_if_damaged(disk)
            async with asyncio.TaskGroup() as group:
                tasks.group = group
                accepting = group.create_task(acceptor.accept(listener))
                stage.is_open = True
                _log.info("ready", extra=self._about(layouts, registry, page))
                if why := why_kept_out(settings.socket, settings.socket_group, settings.allowed_uids):
                    _log.warning("users of --allow-uid are kept out: %s", why)
                await stage.ending.wait()
                accepting.cancel()
                await self._drain(registry, acceptor, disk)
                stage.is_open = False
            await disk.close(keep=bool(registry.sessions))
            for place, damage in disk.damaged_indexes.items():
                kept = "what was stored there was cleared; start the daemon again"
                raise StorageIOError("write", f"the index under {place}", str(damage), kept) from damage
        finally:
            threads.shutdown(wait=not stage.ending_at_once.is_set())

    async def _open_disk(self, layouts: Sequence[NamedFileLayout], threads: Executor) -> LocalTier:
        budgets = self._budgets(layouts)
        openers = {
            str(path): partial(self._open_drive, path, layout, budget, threads)
            for path, layout, budget in zip(self.settings.paths, layouts, budgets, strict=True)
        }
        if len(openers) == 1:
            return self._open_drive(self.settings.paths[0], layouts[0], budgets[0], threads)
        return await Drives.open(openers, num_jobs=_NUM_IN_ALL, divides=False, keep=True)

    def _open_drive(self, path: Path, layout: NamedFileLayout, disk_bytes: int, threads: Executor) -> LocalDisk:
        with _opened_at(path):
            return LocalDisk(
                path,
                disk_bytes=disk_bytes,
                inline_bytes=_INLINE_BYTES,
                codec=self.settings.codec,
                checksum=True,
                executor=threads,
                num_turns=_NUM_IN_ALL,
                layout=layout,
                max_write_bytes_per_day=self.settings.max_write_bytes_per_day,
            )

    def _budgets(self, layouts: Sequence[NamedFileLayout]) -> list[int]:
        """The budget of each drive. What a file layout has kept counts as free, so that a restart changes no budget."""
        free_bytes = free_bytes_of_each(self.settings.paths)
        capacities = [free + layout.taken_bytes for free, layout in zip(free_bytes, layouts, strict=True)]
        if self.settings.disk_bytes is not None:
            return divided_budget(self.settings.disk_bytes, capacities)
        return [int(each * _DISK_SHARE) for each in capacities]

    def _about(self, layouts: Sequence[NamedFileLayout], registry: Registry, page: Watch | None) -> dict[str, object]:
        address = None if page is None else f"http://{page.address}/metrics"
        found = "; ".join(f"{path}: {layout.found}" for path, layout in zip(self.settings.paths, layouts, strict=True))
        where = {"path": self.settings.place, "socket": str(self.settings.socket), "metrics": address}
        return where | {"found": found, "sessions": len(registry.sessions)}

    # --- the end --------------------------------------------------------------------------------------------------

    def _end_if_damaged(self, disk: LocalTier) -> None:
        """End if an index is damaged: it would refuse every new session, and keep the space of freed records."""
        if self._stage.is_ending:
            return
        for place, damage in disk.damaged_indexes.items():
            _log.error("the index under %s is damaged (%s): this daemon ends and clears it", place, damage)
            self._stage.ending.set()

    async def _drain(self, registry: Registry, acceptor: Acceptor, disk: LocalTier) -> None:
        """Take no more, finish and answer what was taken, then close every connection: clients come back later."""
        _log.info("ending", extra={"sessions": len(registry.sessions)})
        registry.stop_timers()
        acceptor.stop_listening()
        quiet = asyncio.ensure_future(registry.wait_for_jobs())
        at_once = asyncio.ensure_future(self._stage.ending_at_once.wait())
        done, _ = await asyncio.wait((quiet, at_once), timeout=_DRAIN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        at_once.cancel()
        if quiet not in done:
            _log.warning("ended before everything was written; the clients still have it")
            quiet.cancel()
            logging.shutdown()
            # Jobs of the disk tier cannot be stopped; what is committed is found again, as after a kill.
            os._exit(1 if disk.damaged_indexes else 0)
        acceptor.end_when_sent()


def _most_writes(codec: str, num_jobs: int) -> int:
    """Of one session at once: where each is encoded, cores are left for the others. "auto" encodes what is cheap."""
    return num_jobs if parse_codec(codec) in (None, NO_CODEC) else min(num_jobs, len(os.sched_getaffinity(0)) + 1)


@contextmanager
def _opened_at(path: Path) -> Iterator[None]:
    """Around a block that opens files: a full drive is a StorageIOError here, because no record asks for room."""
    kept = "what was stored there still is"
    try:
        with translated("open", str(path), kept):
            yield
    except (StoreFullError, StorageIOError) as error:
        free = f"{format_bytes(free_disk_bytes(path))} are free on its file system"
        reason = words_of(error.__cause__ or error, str(path))
        raise StorageIOError("open", str(path), f"{reason}; {free}", kept) from error
