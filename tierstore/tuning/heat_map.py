"""Predicted step times by two sizes (see `search.py`): in a terminal, as a page of HTML, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.table import Table
from rich.text import Text

from ..base.config import format_bytes
from ..base.new_file import check_folder
from ..errors import ConfigError
from .search import Found

__all__ = ["as_html", "check_heat_map", "draw_heat_map", "heat_table", "write_heat_map"]

_TITLE = "Predicted seconds of a step"
_FAST, _SLOW = (34, 139, 84), (190, 50, 50)
"""Each as red, green, blue."""
_WHITE = (255, 255, 255)
_INCHES = 1.1


def heat_table(found: Found) -> Table:
    """The map for a terminal. Darker green is faster."""
    table = Table(title=f"{_TITLE}, by host_bytes and {found.down}", title_justify="left", box=None)
    table.add_column("ahead" if found.down == "lookahead_bytes" else "device", justify="right")
    for host in found.hosts:
        table.add_column(format_bytes(host), justify="right")
    for value, row in zip(found.downs, _rows(found), strict=True):
        cells = [Text(_figure(seconds), style=f"on {_hex(_colour(found, seconds))} #000000") for seconds in row]
        table.add_row(_size(value), *cells)
    return table


def write_heat_map(found: Found, file: Path) -> None:
    """Write the map, as HTML if the suffix says so, else as a picture.

    Raises:
        ConfigError: the file cannot be written, or its suffix is unknown.
    """
    try:
        if file.suffix == ".html":
            file.write_text(as_html(found), encoding="utf-8")
        else:
            draw_heat_map(found, file)
    except OSError as error:
        raise ConfigError("--heat-map", str(file), f"cannot be written: {error.strerror or error}") from error


def check_heat_map(file: Path) -> None:
    """Check that the map can be written there. Raises ConfigError if not."""
    if file.suffix not in (".html", ".png", ".svg", ".pdf"):
        raise ConfigError("--heat-map", str(file), "give a file with the suffix .html, .png, .svg or .pdf")
    if file.suffix != ".html" and find_spec("matplotlib") is None:
        what = "matplotlib is not installed (pip install matplotlib); the suffix .html needs none"
        raise ConfigError("--heat-map", str(file), what)
    check_folder("--heat-map", file)


def as_html(found: Found) -> str:
    """The map as a page that needs no other file."""
    head = "".join(f"<th>{format_bytes(host)}</th>" for host in found.hosts)
    rows = "".join(
        f"<tr><th>{_size(value)}</th>"
        + "".join(f'<td style="background:{_hex(_colour(found, each))}">{_figure(each)}</td>' for each in row)
        + "</tr>"
        for value, row in zip(found.downs, _rows(found), strict=True)
    )
    style = "body{font:15px sans-serif;margin:2em}td,th{padding:.5em 1em;text-align:right}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{_TITLE}</title><style>{style}</style>'
        f"<h1>{_TITLE}</h1><p>Across: host_bytes. Down: {found.down}.</p>"
        f"<table><tr><th></th>{head}</tr>{rows}</table></html>\n"
    )


def draw_heat_map(found: Found, file: Path) -> None:
    """Draw the map with matplotlib, which is no dependency of this package. Raises OSError."""
    from matplotlib.figure import Figure

    rows = _rows(found)
    figure = Figure(figsize=(3 + _INCHES * len(found.hosts), 2 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.imshow([[tuple(part / 255 for part in _colour(found, each)) for each in row] for row in rows], aspect="auto")
    for y, row in enumerate(rows):
        for x, seconds in enumerate(row):
            axes.text(x, y, _figure(seconds), ha="center", va="center")
    axes.set_xticks(range(len(found.hosts)), [format_bytes(host) for host in found.hosts])
    axes.set_yticks(range(len(rows)), [_size(value) for value in found.downs])
    axes.set_xlabel("host_bytes")
    axes.set_ylabel(found.down)
    axes.set_title(_TITLE)
    figure.savefig(file, dpi=110)


def _rows(found: Found) -> list[list[float | None]]:
    return [[found.at(host, value) for host in found.hosts] for value in found.downs]


def _colour(found: Found, seconds: float | None) -> tuple[int, int, int]:
    """The colour between the map's fastest and slowest; white: not known."""
    known = [each for row in _rows(found) for each in row if each is not None]
    if seconds is None:
        return _WHITE
    least, most = min(known), max(known)
    share = (seconds - least) / (most - least) if most > least else 0.0
    red, green, blue = (round(fast + share * (slow - fast)) for fast, slow in zip(_FAST, _SLOW, strict=True))
    return red, green, blue


def _hex(colour: Sequence[int]) -> str:
    return "#" + "".join(f"{part:02x}" for part in colour)


def _size(value: int | None) -> str:
    """A size in words. None: a lookahead without a limit of its own."""
    return "as needed" if value is None else format_bytes(value)


def _figure(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}"
