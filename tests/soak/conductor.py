"""Leads a soak: rounds of trainers and daemons, disturbed on purpose, with a census after each.

One trainer and one daemon ("steady") live as long as the soak: growth shows there. Beside them, each round has fresh
trainers, and a daemon ("shaky") that may be killed.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack
from multiprocessing.connection import wait
from pathlib import Path

from msgspec.structs import replace

from tests.daemon.clients import report_of
from tests.daemon.conftest import DaemonProcess
from tests.soak.census import Census, census_of, differences
from tests.soak.plan import Order, RoundPlan, Said
from tests.soak.processes import (
    TrainerProcess,
    files_under,
    small_drive,
    start_daemon,
    surroundings,
)
from tests.waiting import until
from tierstore.daemon.report import DaemonReport

__all__ = ["Conductor", "SoakFailure"]

ROUND_SECONDS = 200.0
"""After which a round hangs: many times what it takes."""
_GRACE_SECONDS, _SHORT_GRACE_SECONDS = 60.0, 0.3
_WARM_ROUNDS = 3
_WARM_BYTES = 64 * 2**20  # a process that has not worked yet loads code and fills caches
_DRIVES, _SHAKY_DRIVES = ("drive", "second drive"), ("shaky drive", "second shaky drive")
_WATCHED = "anon_inode:[eventpoll]"  # the loop has one, and each connection


class SoakFailure(Exception):  # noqa: N818 - it is a finding, not an error of ours
    """Something is wrong. The message has the census."""


def _is_free(report: DaemonReport) -> bool:
    """Nothing announces the end of a lease."""
    return not (report.sessions or report.disk.num_records or report.disk.disk_bytes)


class _Baseline:
    """What a long-lived process held after its first rounds; it may hold no more later."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: list[Census] = []

    def check(self, census: Census) -> list[str]:
        """What has become more, in words."""
        self.seen.append(census)
        before = max(self.seen[:_WARM_ROUNDS], key=lambda each: each.memory_bytes)
        return [f"{self.name}: {each}" for each in differences(before, census)]


class Conductor:
    """Runs rounds, one after the other, in an empty folder. A context manager: everything it started ends with it."""

    def __init__(self, folder: Path) -> None:
        self.num_rounds = 0
        self.counts: Counter[str] = Counter()
        self.baselines = _Baseline("the long-lived trainer"), _Baseline("the steady daemon")
        self._folder = folder
        with ExitStack() as started:
            for name in (*_DRIVES, *_SHAKY_DRIVES, "steady drive"):
                (folder / name).mkdir()
            options = {"grace_seconds": _SHORT_GRACE_SECONDS, "disk_bytes": "2GiB"}
            self._steady = start_daemon([folder / "steady drive"], folder, "steady", **options)
            started.callback(self._steady.kill)
            self._trainer = TrainerProcess("trainer", folder)
            started.callback(self._trainer.end)
            _ready(self._trainer)
            self._before = surroundings(folder, *self._known())
            self._exit = started.pop_all()

    def __enter__(self) -> Conductor:
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def finish(self) -> None:
        """End what has lived all along. Raises SoakFailure: something is left."""
        _expect_end(self._trainer.name, self._trainer.end(), self._trainer.dump())
        _expect_end("the steady daemon", self._steady.stop(), self._steady.log)
        self._check_nothing_left()

    def run(self, plan: RoundPlan) -> None:
        """One round. Raises SoakFailure: something is wrong in it, or left by it."""
        try:
            with ExitStack() as ending:
                self._run(plan, ending)
        except AssertionError as error:
            raise SoakFailure(str(error)) from error
        self._check_nothing_left()
        self.num_rounds += 1
        self.counts[f"rounds: {plan.disturbance}"] += 1
        self.counts["rounds on two drives"] += plan.num_drives == 2

    def _run(self, plan: RoundPlan, ending: ExitStack) -> None:
        drives, shaky_drives = (
            [self._folder / name for name in names[: plan.num_drives]] for names in (_DRIVES, _SHAKY_DRIVES)
        )
        if plan.disturbance.startswith("small drive"):
            small = ending.enter_context(small_drive(self._folder))
            if small is not None and plan.disturbance == "small drive":
                drives = [small]
            elif small is not None:
                shaky_drives = [small]
        files_before = files_under(shaky_drives[0])
        round_ = _Round(plan, self._folder, shaky_drives, ending)
        fresh = [TrainerProcess(f"fresh-{number}", self._folder) for number in range(1, len(plan.trainers))]
        for trainer in fresh:
            ending.callback(trainer.end)
            ending.callback(trainer.process.kill)
        begun = {trainer: _ready(trainer) for trainer in fresh}
        trainers = [self._trainer, *fresh]
        places = {"embedded": drives, "steady": [self._steady.socket], "shaky": [round_.daemon.socket]}
        for trainer, each in zip(trainers, plan.trainers, strict=True):
            trainer.order(Order(each, list(map(str, places[each.home]))))
        self._judge_trainers(plan, begun, round_.listen(trainers))
        for trainer in fresh:
            if trainer not in round_.killed:
                _expect_end(trainer.name, trainer.end(), trainer.dump())
        self._judge_daemons(round_.daemon)
        if (left := files_under(shaky_drives[0])) != files_before:
            raise SoakFailure(f"the shaky daemon left {left}")

    def _judge_trainers(
        self, plan: RoundPlan, begun: dict[TrainerProcess, Census], told: dict[TrainerProcess, Said]
    ) -> None:
        failures = []
        for trainer, said in told.items():
            assert said.census is not None
            self.counts.update(said.counts)
            failures += [f"{trainer.name}: {each}" for each in said.failures]
            if trainer is self._trainer:
                failures += self.baselines[0].check(said.census)
            else:
                before = replace(begun[trainer], memory_bytes=begun[trainer].memory_bytes + _WARM_BYTES)
                failures += [f"{trainer.name}: {each}" for each in differences(before, said.census)]
        if failures:
            censuses = {trainer.name: said.census for trainer, said in told.items()}
            raise SoakFailure("\n".join([*failures, f"census: {censuses}", f"plan: {plan}"]))

    def _judge_daemons(self, shaky: DaemonProcess) -> None:
        """All sessions end, and leave nothing; the shaky daemon ends as it is told to."""
        for daemon in (self._steady, shaky):
            try:
                until(lambda daemon=daemon: _is_free(report_of(daemon)))
            except AssertionError:
                raise SoakFailure(f"a daemon is not free of its clients: {report_of(daemon)}") from None
        pid = self._steady.process.pid
        until(lambda: census_of(pid).descriptors.get(_WATCHED, 0) <= 1)  # our own questions are over
        census = census_of(pid)
        if failures := self.baselines[1].check(census):
            raise SoakFailure("\n".join([*failures, f"census: {census}"]))
        _expect_end("the shaky daemon", shaky.stop(), shaky.log)
        if "a bug" in (log := shaky.log + self._steady.log):
            raise SoakFailure(f"a daemon has found a bug of its own: {log[-6000:]}")

    def _known(self) -> list[int]:
        """What lives as long as the soak."""
        return [self._trainer.process.pid or 0, self._steady.process.pid]

    def _check_nothing_left(self) -> None:
        for name in (*_DRIVES, *_SHAKY_DRIVES):
            if left := files_under(self._folder / name):
                raise SoakFailure(f"left in the {name}: {left}")
        if (after := surroundings(self._folder, *self._known())) != self._before:
            raise SoakFailure(f"before: {self._before}\nafter: {after}")


def _ready(trainer: TrainerProcess) -> Census:
    """Wait for a trainer's first word: what it holds."""
    said = trainer.hear()
    if said is None or said.census is None:
        raise SoakFailure(f"{trainer.name} ended: {trainer.dump()}")
    return said.census


def _expect_end(name: str, code: int | None, log: str) -> None:
    if code:
        raise SoakFailure(f"{name} ended with {code}: {log[-6000:]}")


class _Round:
    """The trainers and the shaky daemon of one round, and its disturbance."""

    def __init__(self, plan: RoundPlan, folder: Path, shaky_drives: list[Path], ending: ExitStack) -> None:
        self.killed: set[TrainerProcess] = set()
        self._plan, self._folder, self._shaky_drives, self._ending = plan, folder, shaky_drives, ending
        is_short = plan.disturbance in ("trainer killed", "daemon away")
        self._options: dict[str, object] = {
            "codec": plan.daemon_codec,
            "grace_seconds": _SHORT_GRACE_SECONDS if is_short else _GRACE_SECONDS,
            "disk_bytes": "2GiB",
        }
        if plan.disturbance == "quota":
            self._options["session_disk_bytes"] = "2MiB"
        self._start_daemon()

    def listen(self, trainers: list[TrainerProcess]) -> dict[TrainerProcess, Said]:
        """What each trainer that lives says at the round's end; meanwhile comes the disturbance."""
        told: dict[TrainerProcess, Said] = {}
        num_opened = num_episodes = 0
        steps = [(self._plan.after_episodes, self._disturb)]
        if self._plan.disturbance == "daemon away":  # until some episodes ended without it: their trainers gave up
            steps.append((self._plan.after_episodes + 2, lambda _: self._start_daemon()))
        ends_at = time.monotonic() + ROUND_SECONDS
        while silent := [each for each in trainers if each not in told and each not in self.killed]:
            ready = wait([each.words for each in silent], max(0.1, ends_at - time.monotonic()))
            if not ready:
                raise SoakFailure("\n".join(f"{each.name} hangs: {each.dump()}" for each in silent))
            for trainer in silent:
                if trainer.words not in ready or trainer in self.killed:
                    continue
                said = trainer.hear()
                if said is None:
                    raise SoakFailure(f"{trainer.name} died with {trainer.end()}: {trainer.dump()}")
                if said.kind == "round":
                    told[trainer] = said
                num_opened += said.kind == "opened"  # a first connection is not waited for: all have theirs
                num_episodes += said.kind == "episode"
                is_over = len(told.keys() | self.killed) == len(trainers)
                while steps and num_opened == len(trainers) and (is_over or num_episodes >= steps[0][0]):
                    steps.pop(0)[1](trainers)
        return told

    def _disturb(self, trainers: list[TrainerProcess]) -> None:
        match self._plan.disturbance:
            case "trainer killed" if len(trainers) > 1:
                self.killed.add(trainers[-1])
                trainers[-1].process.kill()
            case "daemon killed":
                self.daemon.kill()
                self._start_daemon()
            case "daemon restarted":
                _expect_end("the shaky daemon", self.daemon.stop(), self.daemon.log)
                self._start_daemon()
            case "daemon away":
                self.daemon.kill()

    def _start_daemon(self) -> None:
        self.daemon = start_daemon(self._shaky_drives, self._folder, "shaky", **self._options)
        self._ending.callback(self.daemon.kill)
