"""Leads a soak: rounds of trainers and daemons, disturbed on purpose, with a census after each.

One trainer and one daemon ("steady") live as long as the soak: growth shows there. Beside them, each round has fresh
trainers, and a daemon ("shaky") that may be killed.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue

from tests.daemon.conftest import DaemonProcess
from tests.soak.census import Census, census_of, differences
from tests.soak.orders import Order, Said
from tests.soak.places import Surroundings, files_under, small_drive, surroundings
from tests.soak.plan import RoundPlan, TrainerPlan
from tests.soak.processes import TrainerProcess, report_of, start_daemon

__all__ = ["Conductor", "SoakFailure", "Summary"]

ROUND_SECONDS = 200.0
"""After which a round hangs: many times what it takes."""
_FREED_SECONDS = 60.0
_GRACE_SECONDS = 60.0
_SHORT_GRACE_SECONDS = 0.3
_WARM_ROUNDS = 3
_QUOTA = "2MiB"
_DRIVES, _SHAKY_DRIVES = ("drive", "second drive"), ("shaky drive", "second shaky drive")
_WATCHED = "anon_inode:[eventpoll]"  # the loop has one, and each connection

_Heard = Queue[tuple[TrainerProcess, Said | None]]


class SoakFailure(Exception):  # noqa: N818 - it is a finding, not an error of ours
    """Something is wrong. The message has the census."""


@dataclass
class Summary:
    """What a soak did.

    Attributes:
        num_rounds: that ended well.
        counts: of what trainers did and verified, by name.
        memory_bytes: of the long-lived trainer and the steady daemon, after each round.
    """

    num_rounds: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    memory_bytes: dict[str, list[int]] = field(default_factory=lambda: {"trainer": [], "daemon": []})


class _Baseline:
    """What a long-lived process held after its first rounds; it may hold no more later."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._first: list[Census] = []

    def check(self, census: Census) -> list[str]:
        """What has become more, in words."""
        if len(self._first) < _WARM_ROUNDS:
            self._first.append(census)
        before = max(self._first, key=lambda each: each.memory_bytes)
        return [f"{self._name}: {each}" for each in differences(before, census)]


class Conductor:
    """Runs rounds, one after the other. A context manager: everything it started ends with it.

    Args:
        folder: an empty one, on the disk to use; its path is short enough for a socket.
    """

    def __init__(self, folder: Path) -> None:
        self.summary = Summary()
        self._folder = folder
        self._heard: _Heard = Queue()
        self._exit = ExitStack()
        self._baselines = {name: _Baseline(name) for name in ("the long-lived trainer", "the steady daemon")}
        self._before: Surroundings = {}

    def __enter__(self) -> Conductor:
        self._before = surroundings(self._folder)
        with ExitStack() as started:
            for name in (*_DRIVES, *_SHAKY_DRIVES, "steady drive"):
                (self._folder / name).mkdir()
            options = {"grace_seconds": _SHORT_GRACE_SECONDS, "disk_bytes": "2GiB"}
            self._steady = start_daemon([self._folder / "steady drive"], self._folder, "steady", **options)
            started.callback(self._steady.kill)
            self._trainer = TrainerProcess("trainer", self._folder, self._hear)
            started.callback(self._trainer.end)
            self._wait_for(self._trainer, "ready")
            self._exit = started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def finish(self) -> None:
        """End what has lived all along.

        Raises:
            SoakFailure: something is left.
        """
        if code := self._trainer.end():
            raise SoakFailure(f"the long-lived trainer ended with {code}: {self._trainer.dump()}")
        if code := self._steady.stop():
            raise SoakFailure(f"the steady daemon ended with {code}: {self._steady.log[-3000:]}")
        self._check_folders()
        if (after := surroundings(self._folder)) != self._before:
            raise SoakFailure(f"before: {self._before}\nafter: {after}")

    def run(self, plan: RoundPlan) -> None:
        """One round.

        Raises:
            SoakFailure: something is wrong in it, or left by it.
        """
        with ExitStack() as ending:
            try:
                self._run(plan, ending)
            except AssertionError as error:
                raise SoakFailure(str(error)) from error
        after = surroundings(self._folder, self._trainer.process.pid, self._steady.process.pid)
        if after != self._before:
            raise SoakFailure(f"before: {self._before}\nafter: {after}")
        self.summary.num_rounds += 1
        self.summary.counts[f"rounds: {plan.disturbance}"] += 1

    def _run(self, plan: RoundPlan, ending: ExitStack) -> None:
        drives, shaky_drives = (
            [self._folder / name for name in names[: plan.num_drives]] for names in (_DRIVES, _SHAKY_DRIVES)
        )
        self._heard = Queue()  # the last words of an earlier round's trainers go nowhere
        if plan.disturbance.startswith("small drive"):
            small = ending.enter_context(small_drive(self._folder))
            if small is not None:
                drives, shaky_drives = (
                    ([small], shaky_drives) if plan.disturbance == "small drive" else (drives, [small])
                )
        round_ = _Round(plan, self._folder, shaky_drives, self._heard, ending)
        trainers = [
            self._trainer,
            *(round_.start_trainer(f"fresh-{number}") for number in range(1, len(plan.trainers))),
        ]
        begun = [None, *(self._wait_for(trainer, "ready").census for trainer in trainers[1:])]
        for trainer, each in zip(trainers, plan.trainers, strict=True):
            trainer.order(Order(each, list(map(str, self._places_of(each, drives, round_.daemon)))))
        told = round_.listen(trainers)
        self._judge_trainers(plan, trainers, begun, told, round_.killed)
        for trainer in trainers[1:]:
            if trainer not in round_.killed and (code := trainer.end()):
                raise SoakFailure(f"{trainer.name} ended with {code}: {trainer.dump()}")
        self._judge_daemons(round_)
        self._check_folders()
        self.summary.counts["rounds on two drives"] += plan.num_drives == 2

    def _places_of(self, plan: TrainerPlan, drives: list[Path], shaky: DaemonProcess) -> list[Path]:
        return {"embedded": drives, "steady": [self._steady.socket], "shaky": [shaky.socket]}[plan.home]

    def _judge_trainers(
        self,
        plan: RoundPlan,
        trainers: list[TrainerProcess],
        begun: list[Census | None],
        told: dict[TrainerProcess, Said],
        killed: set[TrainerProcess],
    ) -> None:
        failures = []
        for trainer, census in zip(trainers, begun, strict=True):
            if trainer in killed:
                continue
            said = told[trainer]
            assert said.census is not None
            self.summary.counts.update(said.counts)
            failures += [f"{trainer.name}: {each}" for each in said.failures]
            if census is None:
                failures += self._baselines["the long-lived trainer"].check(said.census)
                self.summary.memory_bytes["trainer"].append(said.census.memory_bytes)
            else:
                failures += [f"{trainer.name}: {each}" for each in differences(_grown(census), said.census)]
        if failures:
            censuses = {trainer.name: said.census for trainer, said in told.items()}
            raise SoakFailure("\n".join([*failures, f"census: {censuses}", f"plan: {plan}"]))

    def _judge_daemons(self, round_: _Round) -> None:
        """All sessions end, and leave nothing; the shaky daemon ends as it is told to."""
        for daemon in (self._steady, round_.daemon):
            _wait_until_free(daemon)
        census = _settled_census(self._steady)
        self.summary.memory_bytes["daemon"].append(census.memory_bytes)
        if failures := self._baselines["the steady daemon"].check(census):
            raise SoakFailure("\n".join([*failures, f"census: {census}"]))
        if code := round_.daemon.stop():
            raise SoakFailure(f"the shaky daemon ended with {code}: {round_.daemon.log[-3000:]}")
        if "a bug" in (log := round_.daemon.log + self._steady.log):
            raise SoakFailure(f"a daemon has found a bug of its own: {log[-6000:]}")
        if (left := files_under(round_.daemon.path)) not in ([], ["filler"]):
            raise SoakFailure(f"the shaky daemon left {left}")

    def _check_folders(self) -> None:
        for name in (*_DRIVES, *_SHAKY_DRIVES):
            if left := files_under(self._folder / name):
                raise SoakFailure(f"left in the {name}: {left}")

    def _hear(self, trainer: TrainerProcess, said: Said | None) -> None:
        self._heard.put((trainer, said))

    def _wait_for(self, trainer: TrainerProcess, kind: str) -> Said:
        """The next word of this trainer, which is of this kind; the others say nothing yet."""
        speaker, said = self._heard.get(timeout=ROUND_SECONDS)
        while speaker is not trainer and said is not None and said.kind == "ready":
            self._heard.put((speaker, said))
            speaker, said = self._heard.get(timeout=ROUND_SECONDS)
        if said is None or said.kind != kind:
            raise SoakFailure(f"{speaker.name} ended: {speaker.dump()}")
        return said


def _grown(census: Census) -> Census:
    """Of a process that has not worked yet: its first round loads code and fills caches."""
    from msgspec.structs import replace

    return replace(census, memory_bytes=census.memory_bytes + 64 * 2**20)


def _wait_until_free(daemon: DaemonProcess) -> None:
    """Its sessions have ended, those of killed clients by its own clock; then it holds nothing."""
    ends_at = time.monotonic() + _FREED_SECONDS
    while (report := report_of(daemon)).sessions or report.disk.num_records or report.disk.disk_bytes:
        if time.monotonic() > ends_at:
            raise SoakFailure(f"a daemon is not free of its clients: {report}")
        time.sleep(0.05)  # nothing announces the end of a lease


def _settled_census(daemon: DaemonProcess) -> Census:
    """When it has noticed that the last of our own connections, which ask it what it holds, is gone."""
    ends_at = time.monotonic() + _FREED_SECONDS
    while (census := census_of(daemon.process.pid)).descriptors.get(_WATCHED, 0) > 1 and time.monotonic() < ends_at:
        time.sleep(0.01)  # nothing announces that either
    return census


class _Round:
    """The processes of one round, and its disturbance."""

    def __init__(
        self, plan: RoundPlan, folder: Path, shaky_drives: list[Path], heard: _Heard, ending: ExitStack
    ) -> None:
        self.killed: set[TrainerProcess] = set()
        self._plan = plan
        self._folder = folder
        self._heard = heard
        self._ending = ending
        grace_seconds = _SHORT_GRACE_SECONDS if plan.disturbance == "trainer killed" else _GRACE_SECONDS
        self._options: dict[str, object] = {
            "codec": plan.daemon_codec,
            "grace_seconds": grace_seconds,
            "disk_bytes": "2GiB",
        }
        if plan.disturbance == "quota":
            self._options["session_disk_bytes"] = _QUOTA
        if plan.disturbance == "daemon away":
            self._options["grace_seconds"] = _SHORT_GRACE_SECONDS
        self._shaky_drives = shaky_drives
        self._start_daemon()

    def start_trainer(self, name: str) -> TrainerProcess:
        """One that ends with the round."""
        trainer = TrainerProcess(name, self._folder, lambda trainer, said: self._heard.put((trainer, said)))
        self._ending.callback(trainer.kill)
        return trainer

    def listen(self, trainers: list[TrainerProcess]) -> dict[TrainerProcess, Said]:
        """What each trainer says at the round's end; meanwhile comes the disturbance.

        Raises:
            SoakFailure: a trainer died, or hangs.
        """
        told: dict[TrainerProcess, Said] = {}
        num_opened = num_episodes = 0
        is_disturbed = False
        ends_at = time.monotonic() + ROUND_SECONDS
        while len(told) + len(self.killed) < len(trainers):
            try:
                trainer, said = self._heard.get(timeout=max(0.1, ends_at - time.monotonic()))
            except Empty:
                silent = [each for each in trainers if each not in told and each not in self.killed]
                raise SoakFailure("\n".join(f"{each.name} hangs: {each.dump()}" for each in silent)) from None
            if said is None:
                if trainer not in self.killed and trainer not in told:
                    raise SoakFailure(f"{trainer.name} died with {trainer.process.wait(30)}: {trainer.dump()}")
            elif said.kind in ("opened", "episode"):
                num_opened += said.kind == "opened"  # a first connection is not waited for: all have theirs
                num_episodes += said.kind == "episode"
                if not is_disturbed and num_opened == len(trainers) and num_episodes >= self._plan.after_episodes:
                    is_disturbed = True
                    self._disturb(trainers)
            elif trainer not in self.killed:
                told[trainer] = said
        return told

    def _disturb(self, trainers: list[TrainerProcess]) -> None:
        match self._plan.disturbance:
            case "trainer killed" if len(trainers) > 1:
                self.killed.add(trainers[-1])
                trainers[-1].kill()
            case "daemon killed":
                self.daemon.kill()
                self._start_daemon()
            case "daemon restarted":
                if code := self.daemon.stop():
                    raise SoakFailure(f"the shaky daemon ended with {code}: {self.daemon.log[-3000:]}")
                self._start_daemon()
            case "daemon away":
                self.daemon.kill()
                self._wait_for_complaints()
                self._start_daemon()

    def _wait_for_complaints(self) -> None:
        """Return when some episodes have ended without a daemon; they are of trainers that have given up."""
        heard = []
        while len(heard) < 2 and all(said is not None and said.kind == "episode" for _, said in heard):
            heard.append(self._heard.get(timeout=ROUND_SECONDS))
        for each in heard:
            self._heard.put(each)

    def _start_daemon(self) -> None:
        self.daemon = start_daemon(self._shaky_drives, self._folder, "shaky", **self._options)
        self._ending.callback(self.daemon.kill)
