"""Paths that are no UTF-8, and names that steer a terminal: all commands and pages work, and none shows them raw."""

import json
import os
import threading
from pathlib import Path

import pytest
import torch

from tests.daemon.clients import ask, page_of, report_of
from tests.daemon.conftest import StartDaemon, tierstore
from tierstore import ConfigError, TierStore, tiered_offload
from tierstore.commands.views import decode_report
from tierstore.errors import DaemonUnavailableError, ProtocolError, StorageIOError
from tierstore.plain_text import plain, plain_json, unicode_text

ODD = "x\x9b31m\x1b[2J\u202e\u2066\u200b\u2028y"
"""As a client may call itself; no byte of it may reach a terminal as it is."""
NO_TEXT = os.fsdecode(b"\xfe\xff")
SECONDS = 30.0


def is_safe(text: str) -> bool:
    return all(each.isprintable() or each == "\n" for each in text)


def test_every_view_of_a_daemon_with_such_paths_and_names(start_daemon: StartDaemon, tmp_path: Path) -> None:
    drive, socket = tmp_path / NO_TEXT, tmp_path / NO_TEXT / "t.sock"
    drive.mkdir()
    daemon = start_daemon(drive, socket, metrics="127.0.0.1:0")
    trace = tmp_path / f"{NO_TEXT}.jsonl"
    with TierStore.connect(socket, host_bytes=0, name=ODD) as store:
        name, threading.current_thread().name = threading.current_thread().name, f"{ODD}\udcff"
        try:
            with tiered_offload(store, trace=trace):
                inputs = torch.randn(2**19, requires_grad=True)
                output = (inputs * inputs.sin()).exp()
            output.sum().backward()
        finally:
            threading.current_thread().name = name
        report = report_of(daemon)
        assert report.path == f"{tmp_path}/\\xfe\\xff"
        assert [each.client for each in report.sessions] == [ODD], "programs get the name itself"
        for arguments in (["stat"], ["top", "--iterations=1"]):
            done = tierstore(*arguments, f"--socket={socket}", COLUMNS="250")
            assert done.returncode == 0, done.stderr
            assert is_safe(done.stdout)
            assert r"x\x9b31m\x1b[2J\u202e\u2066\u200b\u2028y" in done.stdout
            as_json = tierstore(*arguments, "--json", f"--socket={socket}")
            assert is_safe(as_json.stdout)
            found = json.loads(as_json.stdout)
            assert found.get("report", found)["sessions"][0]["client"] == ODD
        assert is_safe(ask(page_of(daemon), "/metrics").text)
        status = ask(page_of(daemon), "/status.json").text
        assert is_safe(status)
        assert decode_report(status.encode(), "the page").path == report.path
    assert is_safe(daemon.log)
    for arguments in (["show", str(trace)], ["show", "--json", str(trace)], ["view", str(trace)]):
        done = tierstore("trace", *arguments)
        assert done.returncode == 0, done.stderr
        assert is_safe(done.stdout)
    page = trace.with_suffix(".html").read_text(encoding="utf-8")
    assert not {"\x9b", "\x1b", "\u202e", "\u2066", "\u200b", "\u2028"} & set(page)
    assert r"\\u202e" in page, "the thread is still named"
    assert daemon.stop() == 0


@pytest.mark.parametrize(
    "error",
    [
        ConfigError(f"{ODD}: store.path", "a", "give another"),
        DaemonUnavailableError(ODD, 1.0, ODD),
        ProtocolError(ODD, ODD),
        StorageIOError("open", f"/{ODD}\udcff", ODD),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_error_repeats_what_steers_a_terminal(error: Exception) -> None:
    assert is_safe(str(error))


def test_escapes() -> None:
    assert plain("é x\n\x9b\udcff", kept="\n") == "é x\n\\x9b\\xff"
    assert plain("\n\u202e\U000e0001") == "\\n\\u202e\\U000e0001"
    assert unicode_text("\udcff\ud800\u202e") == "\\xff\\ud800\u202e"
    odd = {ODD: [f"{ODD}\x7f\U000e0001é", 1]}
    text = plain_json(json.dumps(odd, ensure_ascii=False, indent=1))
    assert is_safe(text)
    assert json.loads(text) == odd
