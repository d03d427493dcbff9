"""What people write: sizes, codecs, environments, files of options. And what a daemon reports to them."""

import atexit
import math
import os
import tempfile
from functools import cache, partial
from pathlib import Path

from tests.fuzz.target import Target, raises
from tierstore.base.config import check_directories, local_world_size, parse_size, rank_of_process
from tierstore.commands.views import decode_report
from tierstore.daemon.options import OPTIONS, ServeSettings, settings_of
from tierstore.disk.codec.codec import parse_codec
from tierstore.errors import ConfigError, ProtocolError

__all__ = ["TARGETS"]

_NAMES = tuple(OPTIONS)


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


def _run_environment(data: bytes) -> None:
    """An option's number, a length, its text, and so on; every other one on the command line."""
    given: list[dict[str, str]] = [{}, {}]
    at = turn = 0
    while at + 2 <= len(data):
        name, length = _NAMES[data[at] % len(_NAMES)], data[at + 1]
        text = os.fsdecode(data[at + 2 : at + 2 + (length if length < 255 else len(data))])
        given[turn % 2 if data[at] < 128 else 0][name] = text
        at, turn = at + 2 + len(text), turn + 1
    _check_settings(given[1], {f"TIERSTORE_{name.upper()}": text for name, text in given[0].items()})


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


def _file_seeds() -> list[bytes]:
    return [
        b'path = "/nvme"\ndisk_bytes = "1TiB"\ngrace_seconds = 1.5\nmetrics = "127.0.0.1:9464"\nallow_uid = [1, 0]\n',
        b'path = "/nvme"\ncodec = "zstd:3"\nlog_level = "WARNING"\nlog_format = "json"\nsocket_group = "users"\n',
        b'path = "/"\nsession_disk_bytes = 4096\nhandshake_seconds = 3\nallow_uid = 7\nsocket = "/run/t"\n',
        b"grace_seconds = inf", b"path = 1", b"[path]", b"a.b = 1", b"", b"\xff", b"path = " + b"[" * 2000,
        b'path = "/"\ngrace_seconds = 1' + b"0" * 400, b"a" + b".a" * 2000 + b" = 1",
    ]  # fmt: skip


def _environment_seeds() -> list[bytes]:
    def given(name: str, text: bytes) -> bytes:
        return bytes([_NAMES.index(name), min(len(text), 255)]) + text

    path = given("path", b"/nvme")
    texts = {
        "disk_bytes": (b"1.5GiB", b"9" * 400 + b".0"),
        "grace_seconds": (b"1e3", b"nan"),
        "metrics": (b"[::1]:1", b"localhost:65536"),
        "allow_uid": (b"0, 7 1000", b"9" * 254),
        "codec": (b"shuffle-zstd:-5", b"zstd:23"),
        "log_level": (b"Debug",),
    }
    return [path, b""] + [path + given(name, text) for name, both in texts.items() for text in both]


def _word_seeds() -> list[bytes]:
    huge = b"9" * 5000
    texts = [b"8GiB", b" 1.5 kB ", b"zstd:22", b"auto", b"4", b"", b"\xc2\xb2", b"-1"]
    return [*texts, huge, b"zstd:" + huge, huge + b".0"]


def _report_seeds() -> list[bytes]:
    return [b"{}", b"\xff", b'{"x":' + b"[" * 3000, b'{"program":"\xff"}', b'{"a":"\xff"}']


TARGETS = (
    Target(
        "option_file",
        _run_file,
        _file_seeds,
        tuple(name.encode() for name in _NAMES),
        result_bytes=64 * 2**20,  # tomllib keeps every prefix of a dotted key: their square
    ),
    Target("option_texts", _run_environment, _environment_seeds),
    Target("words", _run_words, _word_seeds),
    Target("reports", lambda data: raises(ProtocolError, partial(decode_report, data, "the socket")), _report_seeds),
)
