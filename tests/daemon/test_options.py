"""Options of `tierstore serve`: where they may stand, what wins, and what cannot be used."""

from pathlib import Path

import pytest

from tierstore.daemon.options import OPTIONS, ServeSettings, settings_of
from tierstore.errors import ConfigError

GIB = 2**30

# Option, its text, the same in TOML, where it ends up, and what is there then.
EACH = [
    ("path", "/nvme", '"/nvme"', "paths", (Path("/nvme"),)),
    ("socket", "/run/t.sock", '"/run/t.sock"', "socket", Path("/run/t.sock")),
    ("disk_bytes", "2GiB", '"2GiB"', "disk_bytes", 2 * GIB),
    ("disk_bytes", "4096", "4096", "disk_bytes", 4096),
    ("disk_bytes", "0", "0", "disk_bytes", 0),
    ("session_disk_bytes", "1GiB", '"1GiB"', "session_disk_bytes", GIB),
    ("session_queued_bytes", "64MiB", '"64MiB"', "session_queued_bytes", 64 * 2**20),
    ("session_queued_bytes", "0", "0", "session_queued_bytes", 0),
    ("max_sessions_per_user", "8", "8", "max_sessions_per_user", 8),
    ("max_records_per_user", "100000000", "100000000", "max_records_per_user", 10**8),
    ("max_write_bytes_per_day", "2GiB", '"2GiB"', "max_write_bytes_per_day", 2 * GIB),
    ("grace_seconds", "1.5", "1.5", "grace_seconds", 1.5),
    ("grace_seconds", "0", "0", "grace_seconds", 0.0),
    ("handshake_seconds", "3", "3", "handshake_seconds", 3.0),
    ("metrics", "127.0.0.1:9464", '"127.0.0.1:9464"', "metrics", ("127.0.0.1", 9464)),
    ("metrics", "localhost:1", '"localhost:1"', "metrics", ("127.0.0.1", 1)),
    ("metrics", "[::1]:1", '"[::1]:1"', "metrics", ("::1", 1)),
    ("allow_uid", "1000", "1000", "allowed_uids", frozenset({1000})),
    ("allow_uid", ["1000", "0", "7"], "[1000, 0, 7]", "allowed_uids", frozenset({0, 7, 1000})),
    ("socket_group", "users", '"users"', "socket_group", "users"),
    ("codec", "zstd:3", '"zstd:3"', "codec", "zstd:3"),
    ("log_level", "WARNING", '"WARNING"', "log_level", "warning"),
    ("log_format", "json", '"json"', "log_format", "json"),
]


def settings_by(by: str, tmp_path: Path, name: str, text: object, toml: str) -> ServeSettings:
    """Those with one option, and the one that must be given."""
    line: dict[str, object] = {} if name == "path" else {"path": "/elsewhere"}
    environment = {}
    if by == "line":
        line[name] = text
    elif by == "environment":
        environment[f"TIERSTORE_{name.upper()}"] = (" :"[name == "path"]).join(text) if isinstance(text, list) else text
    else:
        (tmp_path / "serve.toml").write_text(f"{name} = {toml}\n")
        line["config"] = str(tmp_path / "serve.toml")
    return settings_of(line, environment)  # type: ignore[arg-type]


@pytest.mark.parametrize("by", ["line", "environment", "file"])
def test_option_given(by: str, tmp_path: Path) -> None:
    several = "path", ["/nvme 0", "/nvme1"], '["/nvme 0", "/nvme1"]', "paths", (Path("/nvme 0"), Path("/nvme1"))
    for name, text, toml, place, expected in (*EACH, several):
        assert getattr(settings_by(by, tmp_path, name, text, toml), place) == expected, (name, text)


def test_paths_are_those_that_a_shell_would_give_and_directories_are_absolute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`--path=~/drive` and `TIERSTORE_PATH="~/drive"` come as they are written; others look from another directory."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    settings = settings_of({"path": ["~/drive", "other"], "socket": "~/s"}, {})
    assert settings.paths == (tmp_path / "home" / "drive", tmp_path / "other")
    assert settings.socket == tmp_path / "home" / "s"
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert settings_of({"path": "/nvme"}, {}).paths == (Path("/nvme"),)
    with pytest.raises(ConfigError, match="give an absolute path"):
        settings_of({"path": "other"}, {})


def test_every_option_is_tested() -> None:
    assert {name for name, *_ in EACH} == set(OPTIONS)


def test_nothing_given_leaves_the_defaults() -> None:
    assert settings_of({"path": "/nvme"}, {}) == ServeSettings((Path("/nvme"),))


@pytest.mark.parametrize(
    ("given_by", "seconds"),
    [("line environment file", 1), ("environment file", 2), ("file", 3), ("line file", 1), ("", 60)],
)
def test_line_before_environment_before_file_before_default(given_by: str, seconds: float, tmp_path: Path) -> None:
    file, other = tmp_path / "serve.toml", tmp_path / "other.toml"
    file.write_text('path = "/nvme"\n' + ("grace_seconds = 3\n" if "file" in given_by else ""))
    other.write_text('path = "/other"\n')
    line = {"grace_seconds": "1"} if "line" in given_by else {}
    environment = {"TIERSTORE_CONFIG": str(file), "TIERSTORE_METRICS": ""}
    if "environment" in given_by:
        environment["TIERSTORE_GRACE_SECONDS"] = "2"
    found = settings_of(line, environment)
    assert (found.grace_seconds, found.metrics) == (seconds, None), "an empty variable is not set"
    assert settings_of({"config": str(other)}, environment).paths == (Path("/other"),)


ENDLESS = {"disk_bytes": "", "allow_uid": "", "metrics": "127.0.0.1:", "codec": "zstd:"}
"""Python itself raises for numbers of more than 4,300 digits."""


BAD = [
    ("path", ""),
    ("path", "a\0b"),
    ("disk_bytes", "much"),
    ("disk_bytes", "-1"),
    ("max_sessions_per_user", "0"),
    ("max_sessions_per_user", "10000000"),
    ("max_records_per_user", "0"),
    ("grace_seconds", "soon"),
    ("grace_seconds", "nan"),
    ("grace_seconds", "1e12"),
    ("metrics", "9464"),
    ("metrics", "127.0.0.1:65536"),
    ("metrics", "0.0.0.0:9464"),
    ("metrics", "192.168.1.1:9464"),
    ("metrics", "example.org:9464"),
    ("allow_uid", "root"),
    ("allow_uid", "-1"),
    ("allow_uid", str(2**32 - 1)),
    ("disk_bytes", str(2**63)),
    ("codec", "rar"),
    ("log_level", "loud"),
    ("log_format", "xml"),
    *((name, start + "9" * 5000) for name, start in ENDLESS.items()),
]


def test_bad_value_named_by_where_it_stands() -> None:
    for name, text in BAD:
        with pytest.raises(ConfigError) as refused:
            settings_of({"path": "/nvme", name: text}, {})
        assert refused.value.option == "--" + name.replace("_", "-")
        assert len(str(refused.value)) < 2000
        if text and "\0" not in text:
            with pytest.raises(ConfigError) as refused:
                settings_of({"path": "/nvme"} if name != "path" else {}, {f"TIERSTORE_{name.upper()}": text})
            assert refused.value.option == f"TIERSTORE_{name.upper()}"
            assert text[:100] in str(refused.value)


BAD_TOML = [
    "path = []",
    "disk_bytes = true",
    "max_sessions_per_user = 0",
    "metrics = 9464",
    'allow_uid = ["root"]',
    "allow_uid = [true]",
    "disk_bytes = 0x" + "f" * 5000,
    "grace_seconds = 1" + "0" * 400,
    "serve" + ".serve" * 2000 + " = 1",
    "codec = 1",
    "grace = 1",
    'config = "other.toml"',
    "[serve]\npath = 1",
]


def test_bad_key_or_type_names_file_and_key(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    for toml in BAD_TOML:
        file.write_text(toml + "\n")
        with pytest.raises(ConfigError) as refused:
            settings_of({"config": str(file)} | ({} if toml.startswith("path") else {"path": "/nvme"}), {})
        key = "serve" if toml.startswith("[") else toml.split(" ")[0].split(".")[0]
        assert refused.value.option == f"{file}: {key}"
        assert len(str(refused.value)) < 2000


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b"path = ", "not valid TOML"),
        (b'path = "\xff"', "not valid TOML"),
        (b"a = " + b"[" * 5000, "not valid TOML"),
    ],
)
def test_bad_file_named(content: bytes | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as refused:
        settings_of({"config": str(file)}, {})
    assert (refused.value.option, refused.value.given) == ("--config", str(file))


def test_no_path_says_how_to_give_one() -> None:
    with pytest.raises(ConfigError, match="TIERSTORE_PATH"):
        settings_of({}, {})
