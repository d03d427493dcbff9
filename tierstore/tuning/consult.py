"""`tierstore doctor`: progress on standard error, the report on standard output."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..base.config import check_directory
from ..base.interrupts import ended_by_signals
from ..base.json_text import json_text
from ..base.new_file import check_distinct, check_new_file, make_file
from ..base.system_words import words_of
from ..errors import ConfigError, StorageIOError
from ..hardware import hardware_text
from ..plain_text import plain
from .examine import NUM_EXAMINED, examine
from .findings import unfit_because
from .recommended import config_text
from .report import hardware_of, report_of
from .report_view import report_view

__all__ = ["consult"]


def consult(
    path: str,
    socket: str | None,
    seconds: float,
    *,
    as_json: bool,
    config: str | None,
    hardware: str | None,
    verbose: bool = False,
) -> bool:
    """Examine, print, write the files asked for. Returns whether offloading works here. Blocks a little over `seconds`.

    Args:
        path: the directory.
        socket: where a daemon is looked for; None: in the usual places.
        seconds: for all measurements together.
        as_json: print the report as JSON, and nothing else, on standard output.
        config: a file to make with the recommended settings; None: none.
        hardware: a file to make with the description of the machine; None: none.
        verbose: print speeds by block size, and of codecs, too.

    Raises:
        StorageIOError: the system refuses a call, or a thread.
        ConfigError: the directory cannot be used, or a file is there already or cannot be made. A file that cannot be
            made may be noticed only when it is written, after the report.

    Main thread only: SIGTERM ends it as Ctrl-C does.
    """
    directory = _absolute(check_directory(path))
    files = {name: Path(file) for name, file in (("--config", config), ("--hardware", hardware)) if file is not None}
    check_distinct({}, files)
    for option, file in files.items():
        check_new_file(option, file)
    messages = Console(stderr=True, highlight=False)
    with ended_by_signals(), _progress(messages) as progress:
        task = progress.add_task("", total=NUM_EXAMINED)
        try:
            machine = examine(directory, socket, seconds, lambda at: progress.update(task, advance=1, description=at))
        except OSError as error:
            raise StorageIOError("examine", path, words_of(error), "nothing was changed") from error
    report = report_of(machine)
    if as_json:
        print(json_text(report))
    else:
        Console(highlight=False).print(report_view(report, verbose=verbose))
    sys.stdout.flush()
    if config is not None:
        make_file("--config", Path(config), config_text(report.settings))
        unfit = unfit_because(machine.drive)
        if unfit is not None and not machine.daemon.keeps_directory:
            said = f"{config} has no path: {directory} is not fit for a store, because {unfit}."
            messages.print(plain(said), markup=False)
    if hardware is not None:
        described = hardware_of(machine)
        if described is None:
            messages.print("The drive could not be measured: no description of this machine was written.")
        else:
            make_file("--hardware", Path(hardware), hardware_text(described))
    return report.is_usable


def _absolute(directory: Path) -> Path:
    """The absolute path: it goes into files that are read elsewhere."""
    text = os.path.abspath(directory)
    if not text.isascii() and text.encode("utf-8", "replace").decode("utf-8") != text:
        raise ConfigError("path", text, "the report and its files are UTF-8, which cannot encode this path")
    return Path(text)


def _progress(console: Console) -> Progress:
    """A bar on a terminal; nothing at all elsewhere."""
    columns = (BarColumn(bar_width=30), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
