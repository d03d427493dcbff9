"""What is released: its files, its version, and its changes."""

import re
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

import tierstore
from tests.release.artefacts import ROOT, Release, build, files_of_repository

README = (ROOT / "README.md").read_text(encoding="utf-8")
CHANGES = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
LINKS = ("tierstore/hooks", "tierstore/daemon")
"""Folders in a release, links in the repository."""


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """Built by the setuptools that is installed here; no index is asked."""
    pytest.importorskip("setuptools", minversion="77", reason="the build backend is not installed")
    target = tmp_path_factory.mktemp("dist")
    return build(target, tmp_path_factory.mktemp("scratch"))


def metadata_of(wheel: Path) -> Message:
    """What an index reads. The page is its payload."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def targets_of(page: str) -> list[str]:
    """Of all its links and pictures."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page)
    children = [child for token in tokens for child in token.children or ()]
    return [str(target) for child in children if (target := child.attrGet("href") or child.attrGet("src"))]


def test_version_is_named_once_and_the_release_and_images_have_it(release: Release) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "version" not in project, "two places would differ one day"
    shown = metadata_of(release.wheel)
    assert shown["Version"] == tierstore.__version__
    assert release.sdist.name == f"tierstore-{tierstore.__version__}.tar.gz"
    assert shown["Author"]
    versions = re.findall(r"PYTHONS \?= (.+)", (ROOT / "Makefile").read_text(encoding="utf-8"))[0].split()
    named = [each.rpartition(" ")[2] for each in shown.get_all("Classifier", []) if re.search(r":: 3\.\d+$", each)]
    assert named == versions, "those that are tested"
    assert shown["Description-Content-Type"] == "text/markdown"
    assert "## Ten lines" in str(shown.get_payload()), "an index shows README"
    image = f"tierstore:{tierstore.__version__}"
    for file in ("Dockerfile", "deploy/compose.yaml", "deploy/kubernetes.yaml"):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert f"\n#     docker build --tag {image} .\n" in text, f"{file} says how to build what it names"
        assert set(re.findall(r"^ +image: (\S+)$", text, re.MULTILINE)) == (set() if file == "Dockerfile" else {image})


def test_page_of_an_index_leads_to_the_repository_by_one_address(tmp_path: Path) -> None:
    """README's links are relative, which an index does not follow."""
    for name in ("dist", "scratch"):
        (tmp_path / name).mkdir()
    address = "https://example.org/somebody/tierstore"
    shown = metadata_of(build(tmp_path / "dist", tmp_path / "scratch", address).wheel)
    page, tag = str(shown.get_payload()), f"v{tierstore.__version__}"
    relative = [target for target in targets_of(README) if not target.startswith("https:")]
    led = [f"{address}/{'raw' if target.endswith('.png') else 'blob'}/{tag}/{target}" for target in relative]
    assert len(led) > 20
    assert [target for target in targets_of(page) if target.startswith(address)] == led
    assert all(target.startswith("https://") for target in targets_of(page))
    first, *_ = re.findall(r"(?m)^\$ (.+)", page)
    assert first == "pip install tierstore"
    assert f"$ git clone {address} tierstore" in page
    assert "ADDRESS" not in page
    urls = dict(each.split(", ") for each in shown.get_all("Project-URL", []))
    assert urls["Source"] == address
    assert {url for name, url in urls.items() if name != "Source"} <= set(led)


def test_page_without_an_address_has_no_links_into_the_repository(release: Release) -> None:
    """There is none in `pyproject.toml` yet; once there is, README's own command names it."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["tierstore"]["address"]
    assert f"$ git clone {named or 'ADDRESS'} tierstore" in README
    shown = metadata_of(release.wheel)
    page = str(shown.get_payload())
    assert all(target.startswith("https://") for target in targets_of(page))
    assert page.count("\n## ") == README.count("\n## ")
    assert bool(shown.get_all("Project-URL")) == bool(named)


def test_sdist_has_every_file_of_the_repository(release: Release) -> None:
    with tarfile.open(release.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {str(path) for path in files_of_repository()}
    assert wanted - names - set(LINKS) == set()
    for link in LINKS:
        folder = ROOT / link
        assert {f"{link}/{file.name}" for file in folder.glob("*.py")} <= names


def test_wheel_has_the_package_with_its_data_and_nothing_else(release: Release) -> None:
    with zipfile.ZipFile(release.wheel) as wheel:
        names = set(wheel.namelist())
    assert {name.partition("/")[0] for name in names} == {"tierstore", f"tierstore-{tierstore.__version__}.dist-info"}
    wanted = ("py.typed", "tracing/page.html", "hooks/offload.py", "daemon/server.py")
    assert {f"tierstore/{file}" for file in wanted} <= names
    sources = {str(path) for path in files_of_repository() if path.suffix == ".py" and path.parts[0] == "tierstore"}
    assert sources <= names


def test_changes_begin_with_this_version_dated_and_short_and_so_is_readme() -> None:
    heading, *_ = re.findall(r"^## (.+)$", CHANGES, re.MULTILINE)
    assert re.fullmatch(rf"{re.escape(tierstore.__version__)} - 20\d\d-\d\d-\d\d", heading)
    section = CHANGES.split("\n## ")[1]
    assert set(re.findall(r"^### (.+)$", section, re.MULTILINE)) <= {"Added", "Changed", "Fixed", "Removed"}
    assert len(section.split()) <= 1500
    lines = README.splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 120
    assert {"make demo", "make test"} <= set(re.findall(r"make \w+", README))
