"""What every command has: help pages that people can read, shell completion, JSON."""

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import typer.main

from tests.processes import python
from tierstore import cli

_APP = typer.main.get_command(cli.app)
_UNCLEAR = ("so many", "so long", "that is meant", "lasts", "looks", "one does not", "plainly")
"""Phrases that a reader has to puzzle over."""
_NO_BEGINNINGS = {"Of", "As", "In", "That", "Between", "Leave", "Which", "Most", "For"}


def _commands(command: object = _APP, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    yield path, command
    for name, each in getattr(command, "commands", {}).items():
        yield from _commands(each, (*path, name))


_PATHS = [path for path, _ in _commands()]


def _help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    monkeypatch.setattr(sys, "argv", ["tierstore", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (0, None)
    return capsys.readouterr().out


@pytest.mark.parametrize("path", _PATHS, ids=[" ".join(path) or "tierstore" for path in _PATHS])
def test_help_fits_80_columns_and_has_plain_words(
    path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short, text = (_help(monkeypatch, capsys, *path, option) for option in ("-h", "--help"))
    assert short == text
    assert "Usage:" in text
    assert max(map(len, text.splitlines())) <= 80
    assert not re.search(r"<\w+(\[\w+\]| range)?>", text), "a metavar is missing, or a type is shown"
    assert not re.search(r"[{}]", text)
    assert "…" not in text, "a path is cut"
    words = " ".join(text.lower().replace("│", " ").split())
    assert [each for each in _UNCLEAR if each in words] == []
    if not path:
        assert "--install-completion" in text
        assert "--show-completion" in text


def test_options_say_what_they_are_or_do_and_name_values_in_upper_case() -> None:
    known = {
        "PATH", "FILE", "SIZE", "SECONDS", "NUMBER", "DEVICE", "HOST:PORT", "UID", "GROUP", "CODEC", "LEVEL", "FORMAT",
        "NAME|FILE", "ORDER", "HOURS", "PRICE", "COMMAND",
    }  # fmt: skip
    for path, command in _commands():
        for parameter in command.params:  # type: ignore[attr-defined]
            assert parameter.help.split()[0] not in _NO_BEGINNINGS, (path, parameter.name)
            takes_value = not getattr(parameter, "is_flag", False) and not hasattr(command, "commands")
            assert not takes_value or parameter.metavar in known, (path, parameter.name)


def test_every_command_whose_output_a_program_may_read_has_json() -> None:
    without = {
        path
        for path, command in _commands()
        if not hasattr(command, "commands") and "as_json" not in {each.name for each in command.params}  # type: ignore[attr-defined]
    }
    assert without == {("serve",), ("run",)}, "they print nothing; the log of one has --log-format json"


# --- completion -------------------------------------------------------------------------------------------------------


def _tierstore(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; sys.argv[0] = 'tierstore'; from tierstore.cli import main; main()"
    return python("-c", program, *arguments, **variables)


def test_completion_script_for_bash_is_one_that_bash_takes() -> None:
    done = _tierstore("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert done.returncode == 0, done.stderr
    assert "complete -o default -F _tierstore_completion tierstore" in done.stdout
    checked = subprocess.run(["bash", "-n"], input=done.stdout, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("tierstore t", ["top", "tune", "trace"]), ("tierstore top --i", ["--interval", "--iterations"])],
)
def test_completion_offers_commands_and_options(typed: str, offered: list[str]) -> None:
    words = str(len(typed.split()) - 1)
    done = _tierstore(_TIERSTORE_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=words)
    assert sorted(done.stdout.split()) == sorted(offered), done.stderr
