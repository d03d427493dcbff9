"""What a type checker says of a program with wrong calls, as an editor outside of the clone would."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("wrong_calls.py")

pytest.importorskip("basedpyright", reason="an extra of development, with a Node.js of its own")


def test_type_checker_reports_every_wrong_call_and_no_right_one(tmp_path: Path) -> None:
    """pyright's own standard rules, in a folder from which the package is found only as it is installed."""
    text = PROGRAM.read_text(encoding="utf-8")
    wrong = {number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# wrong")}
    assert len(wrong) == 17
    shutil.copy(PROGRAM, tmp_path / "program.py")
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    checked = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    found = json.loads(checked.stdout)["generalDiagnostics"]
    assert {each["range"]["start"]["line"] + 1 for each in found} == wrong, found
