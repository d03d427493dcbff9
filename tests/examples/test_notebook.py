"""The notebook does what it shows: each cell is executed, one is interrupted, and prints what is saved with it.

After a change, run it in Jupyter from top to bottom and save it, with the last line of the traceback alone.
"""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


def shown(cell: dict[str, Any], kind: str) -> list[str]:
    """What is saved of its outputs: texts of the stream, or the names of errors."""
    outputs = [each for each in cell["outputs"] if each["output_type"] == kind]
    return ["".join(each["text"]) if kind == "stream" else each["ename"] for each in outputs]


def test_cells_print_what_is_saved_and_training_goes_on_after_an_interrupt(
    store_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(store_directory)
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [each for each in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if each["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "run it from top to bottom"
    for cell in cells:
        printed, raised = io.StringIO(), []
        try:
            with redirect_stdout(printed):
                exec(compile("".join(cell["source"]), str(NOTEBOOK), "exec"), names)
        except KeyboardInterrupt:
            raised = ["KeyboardInterrupt"]
        assert raised == shown(cell, "error")
        assert printed.getvalue() == "".join(shown(cell, "stream"))
    assert sum(map(len, (shown(cell, "error") for cell in cells))) == 1
    assert shown(cells[-2], "stream") == ["the same bits: True\n"]
