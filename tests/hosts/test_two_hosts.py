"""Training over two hosts with two ranks and a daemon each: the same bits, whoever is killed, and nothing left behind.

`network.py` makes the hosts, `rank.py` is what a rank does, `training.py` says which comparisons are exact and why. An
import of torch takes seconds, so all of it is one launch of torchrun.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.hosts.network import END_SECONDS, Host, two_hosts

# Not imported from `training.py` and `rank.py`, which need torch's distributed parts.
NUM_STEPS = 4
KILLED_STEP = 2
VARIANTS = ["DDP, equal batches", "FSDP2, equal batches", "FSDP2", "FSDP2, replicated over hosts"]
ONLY_WITHOUT_STORE = {"FSDP2"}
"""Variants whose sums one process cannot take in the same order."""
LIMIT_SECONDS = 240.0

Report = dict[str, Any]

pytestmark = pytest.mark.slow


class Played(NamedTuple):
    """What came of the launch.

    Attributes:
        codes: of torchrun on each host.
        first, last: what each rank found before the ranks of the second host were killed, and at the end.
        sessions: how many each daemon has opened since its last start.
        starts: how often each daemon was started.
        left: what each host still held at the end, by kind; empty lists if nothing.
        logs: of everything.
    """

    codes: list[int]
    first: list[Report]
    last: list[Report]
    sessions: list[int]
    starts: list[int]
    left: list[dict[str, list[str]]]
    logs: str


def torchrun(host: Host, master: Host, out: Path) -> subprocess.Popen[bytes]:
    options = {
        "nnodes": 2,
        "nproc-per-node": 2,
        "rdzv-backend": "c10d",
        "rdzv-endpoint": f"{master.address}:29400",
        "rdzv-conf": f"is_host={int(host is master)}",
        "rdzv-id": "hosts",
        "local-addr": host.address,
        "max-restarts": 2,
        "monitor-interval": 0.1,
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    return host.start(
        "torchrun",
        *(sys.executable, "-m", "torch.distributed.run", *words, "-m", "tests.hosts.rank", str(out)),
        GLOO_SOCKET_IFNAME="cable",
        OMP_NUM_THREADS="1",
        MKL_CBWR="AUTO,STRICT",
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",  # a store of its own for each start of the ranks
    )


def reports(out: Path, name: str) -> list[Report]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob(f"{name}-[0-9].json"))]


def wait_for_the_end_of_sessions(host: Host) -> int:
    """Those of killed ranks end with the grace period, by the daemon's own clock; how many the daemon has opened."""
    ends_at = time.monotonic() + END_SECONDS
    while (report := host.report()).num_sessions:
        assert time.monotonic() < ends_at, report
        time.sleep(0.05)
    return report.num_sessions_opened


def end_daemon(host: Host, supervisor: subprocess.Popen[bytes]) -> None:
    """With SIGTERM, as a service manager does."""
    (serving,) = [process for process in host.processes() if "serve" in process.cmdline()[:5]]
    serving.send_signal(signal.SIGTERM)
    assert supervisor.wait(END_SECONDS) == 0


def left_on(host: Host) -> dict[str, list[str]]:
    return {
        "processes": [" ".join(process.cmdline()) for process in host.processes()],
        "files on the drive": os.listdir(host.files),
        "sockets": [str(path) for path in host.runtime.rglob("*") if path.is_socket()],
        "shared memory": os.listdir(host.shared_memory),
    }


def is_gone(namespace: str) -> bool:
    """Whether no process is in that network namespace any more."""
    return not any(namespace == _network_of(name) for name in filter(str.isdecimal, os.listdir("/proc")))


def _network_of(process: str | int) -> str:
    try:
        return os.readlink(f"/proc/{process}/ns/net")
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return ""  # it has ended, or is somebody else's


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    folder = tmp_path_factory.mktemp("hosts")
    out = folder / "out"
    out.mkdir()
    with two_hosts(folder) as hosts:
        options = ("--codec=none", "--disk-bytes=256MiB", "--grace-seconds=1")
        supervisors = [host.start_daemon(*options) for host in hosts]
        agents = [torchrun(host, hosts[0], out) for host in hosts]
        ends_at = time.monotonic() + LIMIT_SECONDS
        codes = [agent.wait(max(1.0, ends_at - time.monotonic())) for agent in agents]
        sessions = [wait_for_the_end_of_sessions(host) for host in hosts]
        for host, supervisor in zip(hosts, supervisors, strict=True):
            end_daemon(host, supervisor)
        logs = [host.log for host in hosts]
        starts = [1 + log.count("started again") for log in logs]
        left = [left_on(host) for host in hosts]
        yield Played(codes, reports(out, "first-rank"), reports(out, "rank"), sessions, starts, left, "\n".join(logs))


@pytest.fixture(scope="module")
def ended(played: Played) -> Played:
    """A training that came to its end."""
    assert played.codes == [0, 0], played.logs
    assert len(played.first) == len(played.last) == 4
    return played


@pytest.mark.parametrize("name", VARIANTS)
def test_training_over_two_hosts_has_the_bits_of_the_same_ranks_without_a_store(ended: Played, name: str) -> None:
    """The daemon of the second host is killed in a forward and in a backward of the variant "FSDP2"."""
    for rank in ended.first:
        assert rank[name]["unlike_plain"] == []
        assert rank[name]["num_losses"] == NUM_STEPS
        assert rank[name]["num_parameters"] > 15
        assert rank[name]["are_finite"], "nothing is shown by NaNs"
        assert rank[name]["restored_bytes"] > 0


@pytest.mark.parametrize("name", VARIANTS)
def test_training_over_two_hosts_has_the_bits_of_one_process_where_sums_have(ended: Played, name: str) -> None:
    for rank in ended.first:
        assert rank[name]["unlike_alone"] == (None if name in ONLY_WITHOUT_STORE else [])


def test_daemon_of_one_host_was_killed_twice_and_the_other_was_not(ended: Played) -> None:
    assert ended.starts == [1, 3]
    assert "a bug" not in ended.logs
    assert "dropped" not in ended.logs


def test_ranks_of_one_host_killed_training_resumes_and_ends_with_the_same_bits(ended: Played) -> None:
    for rank in ended.last:
        assert rank["resumed_at"] == KILLED_STEP
        assert rank["num_losses"] == rank["num_steps"] == NUM_STEPS
        assert rank["unlike_plain"] == []
        assert rank["unlike_alone"] == []
    assert ended.sessions[0] >= 4, "each rank opened a session, and another one when it was started again"


def test_nothing_is_left_on_either_host(ended: Played) -> None:
    assert ended.left == [{"processes": [], "files on the drive": [], "sockets": [], "shared memory": []}] * 2


def test_host_that_ends_takes_all_its_processes_and_its_network_with_it(tmp_path: Path) -> None:
    """Those that left their session and their parent too."""
    with two_hosts(tmp_path) as hosts:
        networks = [_network_of(host.pid) for host in hosts]
        assert not any(map(is_gone, networks))
        started = [host.start("sleep", "sh", "-c", "setsid sleep 1000 & setsid sleep 1000") for host in hosts]
        for host in hosts:
            while len(host.processes()) < 3:
                pass  # nothing announces them
    assert all(map(is_gone, networks))
    assert all(process.wait(END_SECONDS) != 0 for process in started)
