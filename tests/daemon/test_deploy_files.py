"""The files that run the daemon agree with one another, with pyproject.toml and with the reference."""

import configparser
import inspect
import json
import re
import tomllib
from pathlib import Path, PurePosixPath

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
    found = [re.fullmatch(r"([\w.-]+)([<>=!~].+)", line) for line in lines if line and not line.startswith("#")]
    return {match[1]: match[2] for match in found if match}


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


def test_daemon_requirements_are_the_dependencies_without_torch_and_the_solver() -> None:
    declared = requirements(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    del declared["torch"], declared["highspy"]
    wanted = requirements((DEPLOY / "daemon-requirements.txt").read_text().splitlines())
    assert wanted == declared
    assert wanted.keys() <= requirements((ROOT / "constraints.txt").read_text().splitlines()).keys()


def documented() -> list[str]:
    """The options, whose names in the environment and in the file follow by the rule that the page gives."""
    text = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    assert "the environment (`TIERSTORE_DISK_BYTES` for `--disk-bytes`)" in text
    return [name.replace("-", "_") for name in re.findall(r"^\| `--([\w-]+) \S+` \|", text, re.MULTILINE)]


def test_documented_options_are_those_of_the_command() -> None:
    names = list(inspect.signature(serve).parameters)
    assert documented() == names
    assert set(names) == OPTIONS.keys() | {"config"}


def test_deploy_files_use_documented_options_only() -> None:
    files = [ROOT / "Dockerfile", *DEPLOY.iterdir()]
    named = {name for file in files for name in re.findall(r"TIERSTORE_[A-Z_]+", file.read_text())}
    ours = {"TIERSTORE_DRIVE", "TIERSTORE_DAEMON_UID"}  # compose.yaml's own, and the trainer's
    assert named - ours <= {f"TIERSTORE_{name.upper()}" for name in documented()}
    assert {"TIERSTORE_PATH", "TIERSTORE_SOCKET"} <= named


def test_daemon_takes_every_setting_of_the_toml_file(tmp_path: Path) -> None:
    lines = (DEPLOY / "tierstore.toml").read_text()
    everything = tmp_path / "tierstore.toml"
    everything.write_text(re.sub(r"^# (\w+ = )", r"\1", lines, flags=re.MULTILINE))
    assert tomllib.loads(everything.read_text()).keys() == OPTIONS.keys()
    plain = settings_of({"config": str(DEPLOY / "tierstore.toml")}, {})
    assert (plain.paths, plain.socket) == ((Path("/nvme/tierstore"),), Path(SYSTEM_ADDRESS))
    full = settings_of({"config": str(everything)}, {})
    assert (full.session_disk_bytes, full.session_queued_bytes) == (100 * 2**30, 256 * 2**20)
    assert (full.grace_seconds, full.codec) == (plain.grace_seconds, plain.codec)


def one(stage: list[Instruction], word: str) -> str:
    (rest,) = [instruction.rest for instruction in stage if instruction.word == word]
    return rest


def image_environment(stage: list[Instruction]) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in one(stage, "ENV").split())


def test_image_runs_the_installed_daemon_as_no_root_with_a_folder_for_the_socket_alone() -> None:
    image = stages_of((ROOT / "Dockerfile").read_text())[-1]
    _, source, target = one(image, "COPY").split()
    build = stages_of((ROOT / "Dockerfile").read_text())[0]
    assert one(build, "RUN").split()[1] == source == target
    assert image_environment(image)["PATH"] == f"{target}/bin:$PATH"
    assert json.loads(one(image, "ENTRYPOINT")) == ["tierstore", "serve"]
    assert one(image, "USER") == f"{DAEMON_UID}:{DAEMON_UID}"
    words = [instruction.word for instruction in image]
    assert "RUN" not in words[words.index("USER") :]
    assert one(image, "FROM") == one(build, "FROM").removesuffix(" AS build")
    environment = image_environment(image)
    folder = str(PurePosixPath(environment["TIERSTORE_SOCKET"]).parent)
    assert one(image, "VOLUME") == folder
    assert f"--owner={DAEMON_UID} --group={DAEMON_UID} --mode=0700 {folder}" in one(image, "RUN")
    assert environment["TIERSTORE_PATH"] not in one(image, "RUN")
    assert one(image, "HEALTHCHECK").endswith('CMD exec tierstore stat --socket "$TIERSTORE_SOCKET"')


def test_compose_shares_user_and_socket_bounds_memory_and_never_makes_the_drive() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
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
    (drive,) = [each for each in sidecar["volumes"] if each["type"] == "bind"]
    assert drive["target"] == sidecar["environment"]["TIERSTORE_PATH"]
    assert drive["bind"]["create_host_path"] is False


def test_pod_runs_the_daemon_beside_the_trainer_and_shares_a_folder_with_the_socket_below_it() -> None:
    (document,) = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    assert (document["apiVersion"], document["kind"]) == ("v1", "Pod")
    pod = document["spec"]
    (sidecar,), (trainer,) = pod["initContainers"], pod["containers"]
    assert sidecar["restartPolicy"] == "Always"
    assert pod["terminationGracePeriodSeconds"] > DRAIN_SECONDS
    users = pod["securityContext"]
    assert users["runAsUser"] == users["runAsGroup"] == users["fsGroup"] == DAEMON_UID
    for container in (sidecar, trainer):
        assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
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


def test_unit_lets_the_daemon_write_where_its_settings_send_it() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "tierstore.service")
    settings = tomllib.loads((DEPLOY / "tierstore.toml").read_text())
    service = unit["Service"]
    assert service["ReadWritePaths"] == unit["Unit"]["RequiresMountsFor"] == settings["path"]
    assert f"/run/{service['RuntimeDirectory']}" == str(PurePosixPath(settings["socket"]).parent)
    assert service["RuntimeDirectoryPreserve"] == "yes"
    assert service["RuntimeDirectoryMode"] == "0700"
    assert int(service["TimeoutStopSec"]) > DRAIN_SECONDS
    assert "AF_UNIX" in service["RestrictAddressFamilies"].split()
