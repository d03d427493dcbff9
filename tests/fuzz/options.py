"""What people write: sizes, codecs, environments, files of options. And what a daemon reports to them."""

import atexit
import io
import math
import os
import tempfile
from functools import cache, partial
from pathlib import Path

import msgspec
from rich.console import Console

from tests.fuzz.target import Target, raises
from tierstore.base.config import check_directories, local_world_size, parse_size, rank_of_process
from tierstore.commands.views import decode_report, rates_between, stat_view, top_view
from tierstore.daemon.options import OPTIONS, ServeSettings, settings_of
from tierstore.daemon.report import DaemonReport, DiskState, Jobs, JobTimes, SessionState, Spread, Totals
from tierstore.disk.codec.codec import parse_codec
from tierstore.errors import ConfigError, ProtocolError

__all__ = ["TARGETS"]


@cache
def _file() -> Path:
    """For the file of options; removed when the process ends."""
    descriptor, name = tempfile.mkstemp(prefix="tierstore-fuzz-", suffix=".toml")
    os.close(descriptor)
    atexit.register(Path(name).unlink, missing_ok=True)
    return Path(name)


def _run_file(data: bytes) -> None:
    _file().write_bytes(data)
    _check_settings({"config": str(_file())}, {})


def _check_settings(line: dict[str, str], environment: dict[str, str]) -> None:
    found: list[ServeSettings] = []
    if raises(ConfigError, lambda: found.append(settings_of(line, environment))) is not None:
        return
    (settings,) = found
    assert settings.disk_bytes is None or settings.disk_bytes >= 0
    assert math.isfinite(settings.grace_seconds)
    assert math.isfinite(settings.handshake_seconds)
    assert all(uid >= 0 for uid in settings.allowed_uids)
    assert settings.metrics is None or 0 <= settings.metrics[1] < 2**16
    parse_codec(settings.codec)
    raises(ConfigError, partial(check_directories, settings.paths))


def _run_words(data: bytes) -> None:
    """One text, as each kind of value that the store reads itself."""
    text = os.fsdecode(data)
    for value in (text, int.from_bytes(data, "big", signed=True)):
        raises(ConfigError, lambda value=value: _not_negative(parse_size(value, "disk_bytes")))
    raises(ConfigError, partial(parse_codec, text))
    raises(ConfigError, lambda: _not_negative(local_world_size({"LOCAL_WORLD_SIZE": text}) - 1))
    rank = rank_of_process({"RANK": text})
    assert rank is None or 0 <= rank < 2**63, "a rank that no message can carry"


def _not_negative(number: object) -> None:
    assert isinstance(number, int)
    assert number >= 0


def _report_with(client: str, number: int) -> DaemonReport:
    spread = Spread((1.0,), (number, 0), 1.0)
    times = JobTimes(number, 0, spread, spread, spread)
    totals = Totals(*[number] * len(Totals.__struct_fields__))
    session = SessionState(1, client, number, 1, 0, False, float(number), number, 0, 0, 0, 0, 0, None, 0, totals)
    disk = DiskState(number, number, number, number, client)
    return DaemonReport(
        client, 1, client, client, client, float(number), False, disk, Jobs(times, times), totals, 2, 1, [session],
        {client: {client: number}},
    )  # fmt: skip


def _run_report(data: bytes) -> None:
    """As it came, from a daemon of any version; or, after a "!", a sound one with a client's words in it."""
    found: list[DaemonReport] = []
    if data.startswith(b"!"):
        found.append(_report_with(data[9:].decode("utf-8", "replace"), int.from_bytes(data[1:9], "little")))
    elif raises(ProtocolError, lambda: found.append(decode_report(data, "the socket"))) is not None:
        return
    (report,) = found
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    console.print(stat_view(report))
    console.print(top_view(report, rates_between(report, msgspec.structs.replace(report, uptime_seconds=2.0**53))))


def _file_seeds() -> list[bytes]:
    return [
        b'path = "/nvme"\ndisk_bytes = "1TiB"\ngrace_seconds = 1.5\nmetrics = "127.0.0.1:9464"\nallow_uid = [1, 0]\n',
        b'path = "/nvme"\ncodec = "zstd:3"\nlog_level = "WARNING"\nlog_format = "json"\nsocket_group = "users"\n',
        b'path = "/"\nsession_disk_bytes = 4096\nhandshake_seconds = 3\nallow_uid = 7\nsocket = "/run/t"\n',
        b"grace_seconds = inf", b"path = 1", b"[path]", b"a.b = 1", b"", b"\xff", b"path = " + b"[" * 2000,
        b'path = "/"\ngrace_seconds = 1' + b"0" * 400, b"a" + b".a" * 2000 + b" = 1",
    ]  # fmt: skip


def _word_seeds() -> list[bytes]:
    huge = b"9" * 5000
    texts = [b"8GiB", b" 1.5 kB ", b"zstd:22", b"auto", b"4", b"", b"\xc2\xb2", b"-1"]
    return [*texts, huge, b"zstd:" + huge, huge + b".0"]


def _report_seeds() -> list[bytes]:
    sound = msgspec.json.encode(_report_with("trainer", 5))
    return [
        sound,
        b"!" + bytes(8) + b"[/red]",
        b"!" + b"\xff" * 8 + b"\x1b[31m",
        b"{}",
        b"\xff",
        b'{"x":' + b"[" * 3000,
        b'{"program":"\xff"}',
        b'{"a":"\xff"}',
    ]


TARGETS = (
    Target(
        "option_file",
        _run_file,
        _file_seeds,
        tuple(name.encode() for name in OPTIONS),
        result_bytes=64 * 2**20,  # tomllib keeps every prefix of a dotted key: their square
    ),
    Target("words", _run_words, _word_seeds),
    Target("reports", _run_report, _report_seeds),
)
