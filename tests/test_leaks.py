"""The checks after each test see what an async test leaves behind, and a time limit ends one that hangs."""

from pathlib import Path
from xml.etree import ElementTree

from tests.processes import python

ROOT = Path(__file__).parents[1]
SUITE = """
import asyncio

import pytest
import uvloop

kept = []

async def test_in_order():
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)

async def test_leaks_a_task():
    kept.append(asyncio.create_task(asyncio.sleep(100)))

async def test_leaks_a_loop():
    kept.append(asyncio.new_event_loop())

async def test_fails_in_a_callback():
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(0)

async def test_fails_in_a_task_that_nobody_awaits():
    async def fail():
        raise ZeroDivisionError
    asyncio.create_task(fail())
    await asyncio.sleep(0.01)

@pytest.mark.timeout(1)
async def test_hangs():
    await asyncio.sleep(100)

async def test_after_all_those():
    await asyncio.sleep(0)
"""
NOTICED = {
    "test_leaks_a_task": ["tasks still run"],
    "test_leaks_a_loop": ["descriptors still open"],
    "test_fails_in_a_callback": ["the loop was told of"],
    "test_fails_in_a_task_that_nobody_awaits": ["the loop was told of"],
    "test_hangs": ["CancelledError: Timeout (>1.0s)", "the loop was told of"],
}
"""How each test that does not pass ends, in the words of its errors."""


def test_what_an_async_test_leaves_behind_is_an_error_and_a_time_limit_ends_it(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    report = tmp_path / "report.xml"
    options = ("-p", "tests.conftest", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "--rootdir=.")
    done = python("-m", "pytest", *options, f"--junitxml={report}", tmp_path, cwd=ROOT)
    assert "1 failed, 6 passed, 5 errors" in done.stdout, done.stdout + done.stderr
    found: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        found.setdefault(case.attrib["name"], []).extend(error.attrib["message"] for error in case)
    for test, messages in found.items():
        for message, words in zip(messages, NOTICED.get(test, ()), strict=True):
            assert words in message, test
