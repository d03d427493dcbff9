"""The files that run the daemon agree with one another, with pyproject.toml and with the reference."""

from __future__ import annotations

import configparser
import inspect
import json
import re
import shutil
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from tests.daemon.dockerfile import Instruction, stages_of
from tierstore.base.address import SYSTEM_ADDRESS
from tierstore.commands.serve import serve
from tierstore.daemon.options import OPTIONS, settings_of

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DAEMON_UID = 10001
DRAIN_SECONDS = 30  # that the daemon takes at most to finish what it was given


def requirements(lines: list[str]) -> dict[str, str]:
    """Version by name, as written."""
    found = [re.fullmatch(r"([\w.-]+)([<>=!~].+)", line) for line in lines if line and not line.startswith("#")]
    return {match[1]: match[2] for match in found if match}


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


# --- what is installed --------------------------------------------------------------------------------------------


def test_daemon_requirements_are_the_dependencies_without_torch_and_the_solver() -> None:
    declared = requirements(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    del declared["torch"], declared["highspy"]
    wanted = requirements((DEPLOY / "daemon-requirements.txt").read_text().splitlines())
    assert wanted == declared
    assert wanted.keys() <= requirements((ROOT / "constraints.txt").read_text().splitlines()).keys()


# --- options ------------------------------------------------------------------------------------------------------


class Options:
    """As the table in docs/reference/configuration.md has them."""

    def __init__(self) -> None:
        text = (ROOT / "docs" / "reference" / "configuration.md").read_text()
        rows = re.findall(r"^\| `(--[\w-]+) \S+` \| `(\w+)` \| (?:`(\w+)`|-) \|", text, re.MULTILINE)
        self.flags = {flag for flag, _, _ in rows}
        self.environment = {name for _, name, _ in rows}
        self.keys = {key for _, _, key in rows if key}
        self.rows = rows


@pytest.fixture(scope="module")
def options() -> Options:
    return Options()


def test_documented_options_are_those_of_the_command(options: Options) -> None:
    assert options.keys == OPTIONS.keys()
    assert options.flags == {"--" + name.replace("_", "-") for name in inspect.signature(serve).parameters}
    for flag, environment, key in options.rows:
        name = flag.removeprefix("--").replace("-", "_")
        assert environment == f"TIERSTORE_{name.upper()}"
        assert key == ("" if flag == "--config" else name)


def test_deploy_files_use_documented_options_only(options: Options) -> None:
    files = [ROOT / "Dockerfile", *DEPLOY.iterdir()]
    named = {name for file in files for name in re.findall(r"TIERSTORE_[A-Z_]+", file.read_text())}
    ours = {"TIERSTORE_DRIVE", "TIERSTORE_DAEMON_UID"}  # compose.yaml's own, and the trainer's
    assert named - ours <= options.environment
    assert {"TIERSTORE_PATH", "TIERSTORE_SOCKET"} <= named


def test_daemon_takes_every_setting_of_the_toml_file(options: Options, tmp_path: Path) -> None:
    lines = (DEPLOY / "tierstore.toml").read_text()
    everything = tmp_path / "tierstore.toml"
    everything.write_text(re.sub(r"^# (\w+ = )", r"\1", lines, flags=re.MULTILINE))
    assert tomllib.loads(everything.read_text()).keys() == options.keys
    plain = settings_of({"config": str(DEPLOY / "tierstore.toml")}, {})
    assert (plain.paths, plain.socket) == ((Path("/nvme/tierstore"),), Path(SYSTEM_ADDRESS))
    full = settings_of({"config": str(everything)}, {})
    limits = replace(plain.limits, session_disk_bytes=100 * 2**30, session_queued_bytes=256 * 2**20)
    assert (full.limits, full.codec) == (limits, plain.codec)


# --- the image ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def image() -> list[Instruction]:
    """The last stage of the Dockerfile."""
    return stages_of((ROOT / "Dockerfile").read_text())[-1]


def one(stage: list[Instruction], word: str) -> str:
    (rest,) = [instruction.rest for instruction in stage if instruction.word == word]
    return rest


def image_environment(stage: list[Instruction]) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in one(stage, "ENV").split())


def test_image_runs_the_installed_daemon_as_no_root_in_exec_form(image: list[Instruction]) -> None:
    _, source, target = one(image, "COPY").split()
    build = stages_of((ROOT / "Dockerfile").read_text())[0]
    assert one(build, "RUN").split()[1] == source == target
    assert image_environment(image)["PATH"] == f"{target}/bin:$PATH"
    assert json.loads(one(image, "ENTRYPOINT")) == ["tierstore", "serve"]
    assert one(image, "USER") == f"{DAEMON_UID}:{DAEMON_UID}"
    words = [instruction.word for instruction in image]
    assert "RUN" not in words[words.index("USER") :]
    assert one(image, "FROM") == one(build, "FROM").removesuffix(" AS build")


def test_image_has_a_folder_for_the_socket_and_none_for_the_drive(image: list[Instruction]) -> None:
    environment = image_environment(image)
    folder = str(PurePosixPath(environment["TIERSTORE_SOCKET"]).parent)
    assert one(image, "VOLUME") == folder
    assert f"--owner={DAEMON_UID} --group={DAEMON_UID} --mode=0700 {folder}" in one(image, "RUN")
    assert environment["TIERSTORE_PATH"] not in one(image, "RUN")
    assert one(image, "HEALTHCHECK").endswith('CMD exec tierstore stat --socket "$TIERSTORE_SOCKET"')


# --- Compose ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_compose_shares_user_and_socket_and_bounds_memory(compose: dict[str, Any]) -> None:
    sidecar, trainer = compose["services"]["sidecar"], compose["services"]["trainer"]
    socket = sidecar["environment"]["TIERSTORE_SOCKET"]
    (mount,) = [each for each in sidecar["volumes"] if each["source"] == "socket"]
    assert mount in trainer["volumes"]
    assert mount["target"] == str(PurePosixPath(socket).parent)
    assert trainer["entrypoint"] == ["tierstore", "stat", "--socket", socket]
    assert sidecar["user"] == trainer["user"] == f"{DAEMON_UID}:{DAEMON_UID}"
    assert sidecar["mem_limit"]
    assert trainer["mem_limit"]
    assert seconds(sidecar["stop_grace_period"]) > DRAIN_SECONDS
    assert f"uid={DAEMON_UID},gid={DAEMON_UID},mode=0700" in compose["volumes"]["socket"]["driver_opts"]["o"]


def test_compose_mounts_the_drive_where_the_daemon_looks_and_never_makes_it(compose: dict[str, Any]) -> None:
    sidecar = compose["services"]["sidecar"]
    (drive,) = [each for each in sidecar["volumes"] if each["type"] == "bind"]
    assert drive["target"] == sidecar["environment"]["TIERSTORE_PATH"]
    assert drive["bind"]["create_host_path"] is False


# --- Kubernetes ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pod() -> dict[str, Any]:
    (document,) = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    assert (document["apiVersion"], document["kind"]) == ("v1", "Pod")
    return document["spec"]


def test_pod_runs_the_daemon_as_a_sidecar_beside_the_trainer(pod: dict[str, Any]) -> None:
    (sidecar,), (trainer,) = pod["initContainers"], pod["containers"]
    assert sidecar["restartPolicy"] == "Always"
    assert pod["terminationGracePeriodSeconds"] > DRAIN_SECONDS
    users = pod["securityContext"]
    assert users["runAsUser"] == users["runAsGroup"] == users["fsGroup"] == DAEMON_UID
    for container in (sidecar, trainer):
        assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]


def test_pod_shares_a_folder_and_the_socket_lies_below_it(pod: dict[str, Any]) -> None:
    (sidecar,), (trainer,) = pod["initContainers"], pod["containers"]
    environment = {each["name"]: each["value"] for each in sidecar["env"]}
    socket = environment["TIERSTORE_SOCKET"]
    ask = ["tierstore", "stat", "--socket", socket]
    assert trainer["command"] == ask
    assert [sidecar[probe]["exec"]["command"] for probe in ("startupProbe", "livenessProbe")] == [ask, ask]
    (shared,) = [each for each in sidecar["volumeMounts"] if each["name"] == "socket"]
    assert shared in trainer["volumeMounts"]
    # One folder deeper: an emptyDir is writable for everybody. One in memory is sticky too (a tmpfs without a mode).
    assert [each["emptyDir"]["medium"] for each in pod["volumes"] if each["name"] == "socket"] == ["Memory"]
    assert PurePosixPath(socket).parents[1] == PurePosixPath(shared["mountPath"])
    (drive,) = [each for each in sidecar["volumeMounts"] if each["name"] == "drive"]
    assert drive["mountPath"] == environment["TIERSTORE_PATH"]
    assert {each["name"] for each in pod["volumes"]} == {"drive", "socket"}


# --- systemd ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "tierstore.service")
    return parser


def test_unit_lets_the_daemon_write_where_its_settings_send_it(unit: configparser.ConfigParser) -> None:
    settings = tomllib.loads((DEPLOY / "tierstore.toml").read_text())
    service = unit["Service"]
    assert service["ReadWritePaths"] == unit["Unit"]["RequiresMountsFor"] == settings["path"]
    assert f"/run/{service['RuntimeDirectory']}" == str(PurePosixPath(settings["socket"]).parent)
    assert service["RuntimeDirectoryPreserve"] == "yes"
    assert service["RuntimeDirectoryMode"] == "0700"
    assert int(service["TimeoutStopSec"]) > DRAIN_SECONDS
    assert "AF_UNIX" in service["RestrictAddressFamilies"].split()


def test_unit_is_one_that_systemd_understands(tmp_path: Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("there is no systemd-analyze")
    copy = tmp_path / "tierstore.service"
    text = (DEPLOY / "tierstore.service").read_text()
    copy.write_text(text.replace("/opt/tierstore/bin/tierstore", "/bin/true"))  # it must exist
    done = subprocess.run([tool, "verify", copy], capture_output=True, text=True, check=False, timeout=60)
    complaints = [line for line in done.stderr.splitlines() if copy.name in line]
    assert (done.returncode, complaints) == (0, [])
