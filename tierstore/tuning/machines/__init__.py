"""Machines to plan for: hardware files of the package, found by name, and those of the user, found by path."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

from ...errors import ConfigError
from ...hardware import Hardware, read_hardware

__all__ = ["Machine", "find_machine", "shipped_machines"]


@dataclass(frozen=True)
class Machine:
    """A machine to plan for: the name of its file without suffix, the file's first comment ("": none), its figures."""

    name: str
    title: str
    hardware: Hardware


def shipped_machines() -> list[Machine]:
    """The machines that come with the package, sorted by name. Reads files."""
    machines = []
    for each in files(__package__).iterdir():
        if each.name.endswith(".toml"):
            with as_file(each) as file:
                machines.append(_read(file))
    return sorted(machines, key=lambda machine: machine.name)


def find_machine(name_or_path: str) -> Machine:
    """The machine of that name in the package, or else the machine that the file at that path describes. Reads files.

    Raises:
        ConfigError: there is neither; or `read_hardware` refuses the file.
    """
    shipped = {machine.name: machine for machine in shipped_machines()}
    if name_or_path in shipped:
        return shipped[name_or_path]
    file = Path(name_or_path)
    try:
        return _read(file)
    except ConfigError as error:
        if len(file.parts) != 1 or file.suffix == ".toml" or not isinstance(error.__cause__, OSError):
            raise
        allowed = f"it is none of {', '.join(shipped)}, and no file: {error.__cause__.strerror}"
        raise ConfigError("hardware", name_or_path, allowed) from error.__cause__


def _read(file: Path) -> Machine:
    hardware = read_hardware(file)
    first = file.read_text(encoding="utf-8").partition("\n")[0]
    return Machine(file.stem, first.removeprefix("#").strip() if first.startswith("#") else "", hardware)
