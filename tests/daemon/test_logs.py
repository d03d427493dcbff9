"""The daemon's log: a line per event, a line per cause and minute, and no secret in any."""

import base64
import json
import logging
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import wire
from tests.daemon.clients import client_of, report_of
from tests.daemon.conftest import DaemonProcess, StartDaemon, environment_of_tests, words_of
from tierstore.daemon.logs import CauseFilter, JsonFormatter, LineWriter, TextFormatter


def record_of(
    message: str, *arguments: object, level: int = logging.INFO, error: bool = False, **fields: object
) -> logging.LogRecord:
    logger = logging.getLogger("tierstore.daemon")
    exc_info = sys.exc_info() if error else None
    return logger.makeRecord(logger.name, level, "file", 1, message, arguments, exc_info, extra=fields or None)


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def test_line_has_time_level_message_and_fields() -> None:
    record = record_of("session ended: %s", "closed", session=3, client="train.py", rank=None, path="/a b")
    record.created, record.msecs = 1767225600.5, 500.0
    line = TextFormatter().format(record)
    assert line == '2026-01-01T00:00:00.500Z INFO session ended: closed session=3 client=train.py path="/a b"'
    words = {"time": "2026-01-01T00:00:00.500Z", "level": "INFO", "message": "session ended: closed"}
    fields = {"session": 3, "client": "train.py", "path": "/a b"}
    assert json.loads(JsonFormatter().format(record)) == words | fields


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_nobody_begins_a_line_steers_the_terminal_or_makes_up_a_field(formatter: logging.Formatter) -> None:
    for said in ("a\nb", "a\r\nb", "\x1b[31m", "a\u2028b", "\x85", "\x00", "\x9b31m", "\u202e", "\u2066", "\u200b"):
        line = formatter.format(record_of("refused: %s", said, client=said))
        assert line.isprintable(), line
    line = TextFormatter().format(record_of("opened", client='x uid=0 "y"'))
    assert line.endswith(r' opened client="x uid=0 \"y\""')
    try:
        raise OSError("no such drive")
    except OSError:
        line = formatter.format(record_of("a bug", error=True))
    assert line.isprintable()
    assert all(word in line for word in ("no such drive", "Traceback"))


def test_second_line_of_a_cause_waits_a_minute_and_tells_what_was_dropped() -> None:
    clock = Clock()
    keeps = CauseFilter(60.0, clock).filter
    assert keeps(record_of("refused: %s", "one", uid=1))
    for _ in range(3):
        clock.seconds += 19
        assert not keeps(record_of("refused: %s", "another", uid=1))
    clock.seconds += 3
    later = record_of("refused: %s", "the last", uid=1)
    assert keeps(later)
    assert TextFormatter().format(later).endswith("refused: the last uid=1 not_logged=3")
    clock.seconds += 60
    last = record_of("refused: %s", "the last", uid=1)
    assert keeps(last)
    assert "not_logged" not in TextFormatter().format(last)


def test_other_messages_clients_and_levels_are_other_causes() -> None:
    keeps = CauseFilter(60.0, Clock()).filter
    about: dict[str, Any] = {"client": "a", "rank": 0, "uid": 1}
    assert keeps(record_of("lost", **about))
    assert keeps(record_of("ended", **about))
    assert keeps(record_of("lost", level=logging.WARNING, **about))
    for other in ({"client": "b"}, {"rank": 1}, {"uid": 2}):
        assert keeps(record_of("lost", **(about | other)))
    assert keeps(record_of("lost", session=9, **about)), "the second session of one script is news"
    assert not keeps(record_of("lost", session=9, **about))


def test_lines_of_a_user_are_bounded_whatever_names_and_sessions_it_makes_up() -> None:
    """And no crowd of sessions pushes that bound out of what is remembered."""
    clock = Clock()
    keeps = CauseFilter(60.0, clock)
    kept = [
        keeps.filter(record_of("session opened", client=f"c{number}", rank=None, session=number, uid=1))
        for number in range(5000)
    ]
    assert sum(kept) == 100
    assert keeps.filter(record_of("session opened", client="c", session=1, uid=2)), "others are still heard"
    clock.seconds += 60
    later = record_of("session opened", client="c", session=5001, uid=1)
    assert keeps.filter(later)
    assert TextFormatter().format(later).endswith(" not_logged=4900")
    for uid in range(3, 5000):
        assert keeps.filter(record_of("refused", uid=uid))
    assert len(keeps._num_said) + len(keeps._num_dropped) <= 4100


def test_flood_of_one_cause_is_one_line(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    for _ in range(20):
        with client_of(daemon) as client:
            client.send(wire.Hello((99,), "intruder"))
            assert client.is_refused("99")
    assert daemon.stop() == 0
    assert sum("refused" in line for line in daemon.log.splitlines()) == 1


def test_secrets_are_never_logged_nor_reported(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(log_level="debug", log_format="json")
    with client_of(daemon) as client:
        opened = client.open()
    wrong = bytes(range(32))
    for resumes in ([wire.Resume(opened.session, wrong)], [wire.Resume(opened.session, opened.token)] * 2):
        with client_of(daemon) as client:
            client.greet()
            client.send(*resumes)
            assert client.is_refused()
    said = repr(report_of(daemon))
    assert daemon.stop() == 0
    said += daemon.log
    assert "session opened" in said
    for secret in (opened.token, wrong):
        as_base64 = base64.b64encode(secret).decode().rstrip("=")
        for shown in (secret.hex(), repr(secret)[2:-1], as_base64, str(list(secret))):
            assert shown not in said


def test_log_that_nobody_reads_keeps_nobody_waiting_and_what_is_lost_is_counted() -> None:
    reading, writing = os.pipe()
    writer = LineWriter(writing)
    writer.setFormatter(TextFormatter())
    for number in range(5000):
        writer.emit(record_of("event %d", number, text="x" * 200))
    with open(reading, encoding="utf-8") as lines:  # somebody reads again
        found = [next(lines) for _ in range(1000)]
        assert [f"event {number} " in line for number, line in enumerate(found)] == [True] * 1000
        writer.emit(record_of("the last"))
        rest = [next(lines)]
        while "the last" not in rest[-1]:
            rest.append(next(lines))
        writer.close()
        os.close(writing)
    # The thread that writes may have fallen behind while there was room in the pipe: then more than one line tells.
    num_lost = [int(number) for line in rest for number in re.findall(r" lines_lost=(\d+)$", line.strip())]
    assert sum(num_lost) == 5000 - 1000 - (len(rest) - 1) > 3000


def test_log_whose_reader_is_gone_is_no_matter() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    writer = LineWriter(writing)
    writer.emit(record_of("lost"))
    writer.close()
    os.close(writing)


def test_daemon_whose_standard_error_nobody_reads_goes_on_and_ends(tmp_path: Path, short_directory: Path) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    (tmp_path / "drive").mkdir()
    options = words_of({"path": tmp_path / "drive", "socket": short_directory / "s"})
    command = [sys.executable, "-m", "tierstore.cli", "serve", *options]
    process = subprocess.Popen(command, stderr=writing, env=environment_of_tests())
    os.close(writing)
    daemon = DaemonProcess(process, tmp_path / "drive", short_directory / "s", tmp_path / "log")
    daemon.log_file.touch()
    try:
        daemon.wait_until_ready()
        with client_of(daemon) as client:
            client.open()
            client.end()
        assert daemon.stop() == 0
    finally:
        daemon.kill()
        os.close(reading)
