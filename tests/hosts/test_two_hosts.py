"""Training over two hosts with two ranks and a daemon each: the same bits, whoever is killed, and nothing left behind.

`network.py` makes the hosts, `rank.py` is what a rank does. All of it is one launch of torchrun: an import of torch
takes seconds.
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

NUM_STEPS, KILLED_STEP = 4, 2  # as `rank.py` has them, which needs torch's distributed parts
LIMIT_SECONDS = 240.0

pytestmark = pytest.mark.slow


class Played(NamedTuple):
    """What each rank found before those of the second host were killed, and at the end; and what is known of each host.

    `sessions`: how many its daemon has opened since its last start. `left`: what it still held at the end, by kind.
    """

    first: list[Any]
    last: list[Any]
    sessions: list[int]
    left: list[dict[str, list[str]]]
    logs: list[str]


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


def end_daemon(host: Host, supervisor: subprocess.Popen[bytes]) -> int:
    """How many sessions it has opened. Those of killed ranks end with the grace period, by the daemon's own clock."""
    ends_at = time.monotonic() + END_SECONDS
    while (report := host.report()).num_sessions:
        assert time.monotonic() < ends_at, report
        time.sleep(0.05)
    (serving,) = [process for process in host.processes() if "serve" in process.cmdline()[:5]]
    serving.send_signal(signal.SIGTERM)
    assert supervisor.wait(END_SECONDS) == 0
    return report.num_sessions_opened


def left_on(host: Host) -> dict[str, list[str]]:
    return {
        "processes": [" ".join(process.cmdline()) for process in host.processes()],
        "files on the drive": os.listdir(host.files),
        "sockets": [str(path) for path in host.inside("/run").rglob("*") if path.is_socket()],
        "shared memory": os.listdir(host.inside("/dev/shm")),
    }


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    folder = tmp_path_factory.mktemp("hosts")
    out = folder / "out"
    out.mkdir()
    with two_hosts(folder) as hosts:
        supervisors = [host.start_daemon("--codec=none", "--disk-bytes=256MiB", "--grace-seconds=1") for host in hosts]
        agents = [torchrun(host, hosts[0], out) for host in hosts]
        ends_at = time.monotonic() + LIMIT_SECONDS
        codes = [agent.wait(max(1.0, ends_at - time.monotonic())) for agent in agents]
        logs = [host.log for host in hosts]
        assert codes == [0, 0], logs
        sessions = [end_daemon(host, supervisor) for host, supervisor in zip(hosts, supervisors, strict=True)]
        first, last = (
            [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob(f"{name}-[0-9].json"))]
            for name in ("first-rank", "rank")
        )
        assert len(first) == len(last) == 4
        yield Played(first, last, sessions, [left_on(host) for host in hosts], logs)


def test_training_over_two_hosts_has_the_bits_of_the_same_ranks_without_a_store(played: Played) -> None:
    """The daemon of the second host is killed in a forward and in a backward of the variant "FSDP2"."""
    for rank in played.first:
        assert rank.keys() == {"DDP", "FSDP2", "FSDP2, replicated over hosts"}
        for report in rank.values():
            assert report["unlike_plain"] == []
            assert report["num_losses"] == NUM_STEPS
            assert report["num_parameters"] > 15
            assert report["are_finite"], "nothing is shown by NaNs"
            assert report["restored_bytes"] > 0


def test_daemon_of_one_host_was_killed_twice_and_the_other_was_not(played: Played) -> None:
    assert [log.count("started again") for log in played.logs] == [0, 2]
    assert not any(word in log for log in played.logs for word in ("a bug", "dropped"))


def test_ranks_of_one_host_killed_training_resumes_and_ends_with_the_same_bits(played: Played) -> None:
    for rank in played.last:
        assert (rank["resumed_at"], rank["num_losses"]) == (KILLED_STEP, NUM_STEPS)
        assert rank["unlike_plain"] == []
    assert played.sessions[0] >= 4, "each rank opened a session, and another one when it was started again"


def test_nothing_is_left_on_either_host(played: Played) -> None:
    assert played.left == [{"processes": [], "files on the drive": [], "sockets": [], "shared memory": []}] * 2
