"""The disk tier that a daemon keeps: the same contract as that of a directory, and what is its own."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.daemon.conftest import DaemonProcess, StartDaemon
from tests.store.disk_conformance import PLAIN, DiskConformance, at_phase, random_bytes, read_back
from tierstore.errors import ConfigError, DaemonUnavailableError
from tierstore.sidecar.remote import RemoteDisk
from tierstore.testing import FaultPlan, Latency, Rule

MIB = 2**20
OpenRemote = Callable[..., Awaitable[RemoteDisk]]


@pytest.fixture
def daemon(start_daemon: StartDaemon) -> DaemonProcess:
    return start_daemon(session_disk_bytes=64 * MIB, codec="none")


@pytest.fixture(scope="module")
def shared_daemon(start_shared_daemon: StartDaemon) -> DaemonProcess:
    return start_shared_daemon(session_disk_bytes=64 * MIB, codec="none")


@pytest.fixture
async def open_remote(request: pytest.FixtureRequest) -> AsyncIterator[OpenRemote]:
    """With the test's own daemon, if it has one, or with the shared one."""
    name = "daemon" if "daemon" in request.fixturenames else "shared_daemon"
    daemon: DaemonProcess = request.getfixturevalue(name)
    async with AsyncExitStack() as at_end:

        async def opened(**options: object) -> RemoteDisk:
            settings: dict[str, object] = {
                "address": str(daemon.socket),
                "name": "test",
                "rank": None,
                "pid": os.getpid(),
                "window_bytes": 4 * MIB,
                "reconnect_seconds": 20.0,
                "executor": at_end.enter_context(ThreadPoolExecutor(4)),
            }
            disk = await RemoteDisk.open(**(settings | options))  # type: ignore[arg-type]
            at_end.push_async_callback(disk.close)
            return disk

        yield opened


class TestConformance(DiskConformance):
    @pytest.fixture
    async def tier(self, open_remote: OpenRemote) -> RemoteDisk:
        return await open_remote()


async def test_record_longer_than_the_window_goes_through_it_in_parts(open_remote: OpenRemote) -> None:
    tier = await open_remote(window_bytes=64 * 1024)
    content = random_bytes(5 * MIB + 17)
    before = _mapped_bytes()
    await tier.write(1, at_phase(content, 64), PLAIN)
    assert await read_back(tier, 1, len(content), phase=64) == content
    assert await read_back(tier, 1, len(content), phase=8) == content
    assert _mapped_bytes() == before == 64 * 1024
    assert tier.usage().num_records == 1
    await tier.discard([1])
    assert (tier.usage().num_records, tier.usage().disk_bytes) == (0, 0)


STINGY_DAEMON = """
import sys
from pathlib import Path
from tierstore.daemon.server import serve
from tierstore.daemon.options import ServeSettings

serve(ServeSettings((Path(sys.argv[1]),), Path(sys.argv[2]), slab_bytes=8 * 2**20))
"""


async def test_larger_window_than_the_daemon_allows_is_refused(
    open_remote: OpenRemote, daemon: DaemonProcess, start_daemon: StartDaemon
) -> None:
    """To ask for it all the same would end the connection, and each one that the client makes after it."""
    daemon.kill()
    start_daemon(daemon.path, daemon.socket, program=STINGY_DAEMON)
    with pytest.raises(ConfigError, match="window_bytes"):
        await open_remote(window_bytes=16 * MIB)
    tier = await open_remote(window_bytes=8 * MIB)
    content = random_bytes(20 * MIB)
    await tier.write(1, memoryview(content), PLAIN)
    assert await read_back(tier, 1, len(content)) == content


async def test_daemon_that_stays_away_fails_those_too_that_wait_for_the_window(
    open_remote: OpenRemote, start_daemon: StartDaemon, daemon: DaemonProcess
) -> None:
    """More than the window holds is asked for, at once and again and again: nobody waits for slots that do not come."""
    tier = await open_remote(reconnect_seconds=0.2)
    contents = {key: random_bytes(MIB, seed=key) for key in range(9)}
    await tier.write(0, memoryview(contents[0]), PLAIN)
    daemon.kill()
    writes = [tier.write(key, memoryview(contents[key]), PLAIN) for key in range(1, 9)]
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [DaemonUnavailableError] * 8
    for _ in range(6):
        with pytest.raises(DaemonUnavailableError) as caught:
            await read_back(tier, 0, MIB)
        assert caught.value.waited_seconds >= 0.2
    start_daemon(daemon.path, daemon.socket, session_disk_bytes=64 * MIB, codec="none")
    for key in range(1, 9):
        await tier.write(key, memoryview(contents[key]), PLAIN)
    for key, content in contents.items():
        assert await read_back(tier, key, MIB) == content


async def test_daemon_that_hangs_is_given_up_in_time_and_taken_up_when_it_goes_on(
    open_remote: OpenRemote, daemon: DaemonProcess
) -> None:
    tier = await open_remote(reconnect_seconds=1.0)
    content = random_bytes(MIB)
    await tier.write(1, memoryview(content), PLAIN)
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(20):
            with pytest.raises(DaemonUnavailableError, match="no sign of life for 1 s") as caught:
                await read_back(tier, 1, MIB)
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    assert caught.value.waited_seconds >= 1
    assert await read_back(tier, 1, MIB) == content


async def test_daemon_that_is_slow_is_waited_for(
    open_remote: OpenRemote, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """Its work takes longer than a lost daemon is waited for; it says that it lives."""
    late = FaultPlan.of(Rule("pwritev", Latency(1.5)))
    slow = start_daemon(tmp_path / "slow", tmp_path / "slow.sock", codec="none", plan=late)
    tier = await open_remote(address=str(slow.socket), reconnect_seconds=0.2)
    content = random_bytes(MIB)
    began_at = asyncio.get_running_loop().time()
    await tier.write(1, memoryview(content), PLAIN)
    assert asyncio.get_running_loop().time() - began_at >= 1.5
    assert await read_back(tier, 1, MIB) == content


def _mapped_bytes() -> int:
    with open("/proc/self/maps", encoding="utf-8") as lines:
        ranges = [line.split()[0].split("-") for line in lines if "memfd:tierstore" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in ranges)
