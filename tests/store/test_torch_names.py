"""The private names of PyTorch: all looked up in one module, and each of them missed when tierstore is imported."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import tierstore.tensors.torch_names

ROOT = Path(__file__).parents[2]
HOME = Path(tierstore.tensors.torch_names.__file__)
_FOUND = set(re.findall(r'"(torch\.[\w.]+)"', HOME.read_text(encoding="utf-8")))
_MODULES = {"torch._C._dynamo.eval_frame", "torch._C._dynamo.guards", "torch._dynamo"}  # that may be imported
NAMES = sorted(_FOUND - _MODULES)
SOURCES = [file for folder in ("tierstore", "hooks", "daemon") for file in (ROOT / folder).rglob("*.py")]

ON_TENSORS = {name.split(".")[-1] for name in NAMES if name.startswith(("torch.Tensor.", "torch.UntypedStorage."))}

# Each name, and each way to import, in a process of its own: forked from one that has imported torch alone.
TAKE_AWAY = """
import json, os, sys, torch, torch._C._dynamo.eval_frame, torch._C._dynamo.guards

class Missing:
    def __get__(self, instance, owner):
        raise AttributeError("taken away")

def take_away(name):
    *path, last = name.split(".")
    owner = torch
    for step in path[1:]:
        owner = getattr(owner, step)
    if isinstance(owner, type) and last not in vars(owner):
        setattr(owner, last, Missing())  # inherited from a class of C, which nobody can change
    else:
        delattr(owner, last)

def said_without(name, statement):
    take_away(name)
    try:
        exec(statement)
    except BaseException as error:
        return f"{type(error).__name__} {isinstance(error, ImportError)} {error}"
    return "nothing"

assert "tierstore" not in sys.modules
for name, statement in json.load(sys.stdin):
    sys.stdout.flush()
    if os.fork() == 0:
        print(json.dumps(said_without(name, statement)), flush=True)
        os._exit(0)
    os.wait()
"""


def _private_uses(tree: ast.AST) -> Iterator[str]:
    """What a file names of torch's: whole names, or attributes of tensors and storages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            path = ast.unparse(node)
            if path.startswith("torch."):
                yield path
            elif not path.startswith(("self.", "cls.")) and (
                hasattr(torch.Tensor, node.attr) or hasattr(torch.UntypedStorage, node.attr)
            ):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name for name in names if "._" in name)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("torch._"))


def test_every_private_name_of_torch_is_looked_up_in_one_module() -> None:
    assert len(SOURCES) > 100
    uses = {
        (str(file.relative_to(ROOT)), use)
        for file in SOURCES
        if file.resolve() != HOME.resolve()
        for use in _private_uses(ast.parse(file.read_text(encoding="utf-8")))
    }
    assert {(file, use) for file, use in uses if use not in ON_TENSORS} == set()
    assert {use for _, use in uses} == ON_TENSORS - {"_use_count"}


def _said_without(cases: Sequence[tuple[str, str]]) -> list[str]:
    """Of each name and statement: which error the statement raised where torch lacks the name."""
    done = subprocess.run(
        [sys.executable, "-c", TAKE_AWAY],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said: list[str] = list(map(json.loads, done.stdout.splitlines()))
    assert len(said) == len(cases), done.stderr
    return said


def test_name_that_has_vanished_is_the_error_of_the_import() -> None:
    """However it is imported. A test for each would import torch for each."""
    assert len(NAMES) > 20
    cases = [(name, "from tierstore import TierStore") for name in NAMES]
    others = (
        "import tierstore.hooks",
        "from tierstore.store import TierStore",
        "from tierstore import *",
        "import tierstore; tierstore.offload_module",
        "import tierstore.testing.store",
    )
    cases += [("torch._C._current_autograd_node", statement) for statement in others]
    version = re.escape(torch.__version__)
    for (name, _), each in zip(cases, _said_without(cases), strict=True):
        expected = rf"UnsupportedTorchError True .* torch {version}, which has no {name}; .*2\.11 to 2\.15.*"
        assert re.fullmatch(expected, each), (name, each)
