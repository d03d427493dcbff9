"""The machines that come with the package, and how one is found."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from tests.tuning.made_up import chain, machine
from tierstore.disk.codec.codec import parse_codec
from tierstore.errors import ConfigError
from tierstore.hardware import hardware_text
from tierstore.simulator import Settings
from tierstore.tuning.codecs import SAMPLES
from tierstore.tuning.machines import find_machine, shipped_machines
from tierstore.tuning.plan import Prediction, predict

_SHIPPED = {each.name: each for each in shipped_machines()}


@pytest.mark.parametrize("name", _SHIPPED)
def test_shipped_machine_is_found_by_name_and_plans(name: str) -> None:
    found = find_machine(name)
    assert found == _SHIPPED[name]
    assert found.title
    assert isinstance(predict(chain(), found, Settings(host_bytes=2**27, codec="auto")), Prediction)


@pytest.mark.parametrize("name", _SHIPPED)
def test_shipped_machine_says_where_its_figures_come_from_and_claims_no_measurement(name: str) -> None:
    text = files("tierstore.tuning.machines").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    about = " ".join(line.removeprefix("#").strip() for line in text.partition("version =")[0].splitlines())
    assert "data sheet" in about or "announcement" in about or "documentation" in about
    assert "assumed" in about
    drive = _SHIPPED[name].hardware.drive
    assert not any(each.measured_bytes for each in (*drive.writes, *drive.reads))


def test_shipped_machines_have_accelerators_but_the_clouds() -> None:
    assert {name for name, each in _SHIPPED.items() if not each.hardware.accelerators} == {"cloud-l32s-v3"}
    for each in _SHIPPED.values():
        for link in each.hardware.accelerators:
            out, back = link.to_host_bytes_per_second, link.to_device_bytes_per_second
            assert max(out, back) <= (link.both_bytes_per_second or out + back) <= out + back


def test_shipped_machines_differ_in_drives_not_in_codecs() -> None:
    codecs = {machine.hardware.codecs for machine in _SHIPPED.values()}
    assert len(codecs) == 1
    (speeds,) = codecs
    assert {speed.data for speed in speeds} == set(SAMPLES)
    assert all(speed.codec in ("bits", "constant") or parse_codec(speed.codec) is not None for speed in speeds)
    assert len({machine.hardware.drive for machine in _SHIPPED.values()}) == len(_SHIPPED)


def test_machine_of_a_file_has_its_name_its_title_and_its_figures(tmp_path: Path) -> None:
    file, hardware = tmp_path / "mine.toml", machine().hardware
    file.write_text(f"# My machine\n{hardware_text(hardware)}")
    found = find_machine(str(file))
    assert (found.name, found.title, found.hardware) == ("mine", "My machine", hardware)
    file.write_text(hardware_text(hardware))
    assert find_machine(str(file)).title == ""


@pytest.mark.parametrize("name", ["sato", "sata" * 100])
def test_machine_of_no_such_name_is_refused_with_those_that_there_are(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_machine(name)
    assert caught.value.given == name
    assert all(name in caught.value.allowed for name in _SHIPPED)


@pytest.mark.parametrize("place", ["missing.toml", "nowhere/missing", "", "\0", "a" * 300])
def test_machine_of_a_file_that_cannot_be_read_is_refused(place: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        find_machine(str(tmp_path / place))
