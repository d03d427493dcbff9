"""The heat map, wherever it is drawn."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tierstore.errors import ConfigError
from tierstore.tuning.heat_map import as_html, check_heat_map, heat_table, write_heat_map
from tierstore.tuning.search import Found
from tierstore.tuning.settings import TrialSettings

MIB = 2**20
START = TrialSettings(4 * MIB)
FOUND = Found(
    {
        TrialSettings(0): 2.0,
        TrialSettings(4 * MIB): 1.0,
        TrialSettings(0, lookahead_bytes=MIB): 1.5,
        TrialSettings(4 * MIB, lookahead_bytes=MIB): None,
    },
    [0, 4 * MIB],
    [MIB, None],
    START,
    is_whole=True,
)


def test_page_has_every_figure_and_the_fastest_is_green() -> None:
    page = as_html(FOUND)
    for text in ("2.000", "1.500", "1.000", '<td style="background:#ffffff">-', "as needed", "4 MiB"):
        assert text in page
    assert 'background:#228b54">1.000' in page
    assert 'background:#be3232">2.000' in page


def test_terminal_s_has_every_figure() -> None:
    screen = StringIO()
    Console(file=screen, width=100).print(heat_table(FOUND))
    for text in ("2.000", "1.500", "1.000", "as needed"):
        assert text in screen.getvalue()


def test_picture_is_written(tmp_path: Path) -> None:
    write_heat_map(FOUND, tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_page_is_written(tmp_path: Path) -> None:
    write_heat_map(FOUND, tmp_path / "map.html")
    assert (tmp_path / "map.html").read_text() == as_html(FOUND)


@pytest.mark.parametrize("name", ["map", "map.doc"])
def test_file_of_an_unknown_kind_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--heat-map"):
        check_heat_map(Path(name))


def test_file_in_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        write_heat_map(FOUND, tmp_path / "none" / "map.html")


def test_map_by_device_bytes_says_so(tmp_path: Path) -> None:
    predicted = {replace(START, device_bytes=2 * MIB): 0.25, START: 0.5}
    found = Found(predicted, [4 * MIB], [0, 2 * MIB], START, is_whole=True, down="device_bytes")
    page = as_html(found)
    assert "Down: device_bytes." in page
    assert page.index("0.500") < page.index("2 MiB") < page.index("0.250")
    screen = StringIO()
    Console(file=screen, width=100).print(heat_table(found))
    assert "by host_bytes and device_bytes" in " ".join(screen.getvalue().split())
    write_heat_map(found, tmp_path / "map.svg")
    assert "device_bytes" in (tmp_path / "map.svg").read_text()
