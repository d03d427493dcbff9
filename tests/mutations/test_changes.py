"""Changes are those of the text, names are found wherever their files lie, and what does not fit says so."""

import ast
from pathlib import Path

import pytest

from tests.mutations import changes, rules
from tests.mutations.changes import Change, UnfitChangeError, after, always, before, drop, never, replace
from tests.mutations.rules import node_id

SHELF = """
LIMIT = 4


class Shelf(Base):
    @traced
    def take(self, key, *, wait=True):
        if key in self.residency and (  # a comment
            not self.closed
        ):
            self.count(key, by=1)
            return self.residency.pop(key)
        with self.lock:
            self.wait(key)
            self.note(key, self.size, by=2)
        return None if wait else self.size
"""


@pytest.fixture
def product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A product of one file, and an empty folder of tests."""
    for folder in ("tierstore", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "tierstore" / "shelf.py").write_text(SHELF)
    for module in (changes, rules):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    rules._nodes.cache_clear()
    return tmp_path


@pytest.mark.usefixtures("product")
@pytest.mark.parametrize(
    ("change", "old", "new"),
    [
        (drop("Shelf.take", "self.wait(key)"), "self.wait(key)", "pass"),
        (drop("Shelf.take", "not self.closed"), "not self.closed", "True"),
        (drop("Shelf.take", "by=2"), ", by=2", ""),
        (drop("Shelf.take", "self.size", inside="self.note(...)"), "self.size, ", ""),
        (drop("Shelf.take", "traced"), "    @traced\n", ""),
        (drop("Shelf", "Base"), "(Base)", ""),
        (never("Shelf.take", "key in self.residency"), "key in self.residency", "False"),
        (always("Shelf.take", "wait"), "if wait else", "if True else"),
        (replace("shelf:", "LIMIT = ...", "LIMIT = 5"), "LIMIT = 4", "LIMIT = 5"),
        (replace("Shelf.take", "with self.lock: ...", "if True: ..."), "with self.lock:", "if True:"),
        (replace("Shelf.take", "self.note(key, ...)", "self.seen(...)"), "note(key, self", "seen(self"),
        (replace("Shelf.take", "self.wait(key)", "self.wait(0)\ndel key"), "self.wait(key)", "self.wait(0); del key"),
        (before("Shelf.take", "self.wait(key)", "key()"), "self.wait(key)", "key(); self.wait(key)"),
        (after("Shelf.take", "return self.residency.pop(key)", "key()"), "pop(key)", "pop(key); key()"),
    ],
    ids=lambda value: f"{value.pattern}" if isinstance(value, Change) else "",
)
def test_change_is_that_of_the_text(change: Change, old: str, new: str) -> None:
    path, changed = change.made()
    assert SHELF.count(old) == 1
    assert path == Path("tierstore/shelf.py")
    assert ast.dump(ast.parse(changed)) == ast.dump(ast.parse(SHELF.replace(old, new)))


@pytest.mark.usefixtures("product")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (drop("Shelf.give", "self.wait(key)"), "found 0 times in Shelf.give, 0 places"),
        (drop("box:Shelf.take", "self.wait(key)"), "found 0 times"),
        (drop("Shelf.take", "self.wait()"), "found 0 times in Shelf.take, 1 places"),
        (drop("Shelf.take", "self.size"), "found 2 times in Shelf.take"),
        (replace("Shelf.take", "self.wait(key)", "self.wait( key )"), "the replacement is the same"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_change_that_does_not_fit_says_so(change: Change, reason: str) -> None:
    with pytest.raises(UnfitChangeError, match=reason):
        change.made()


def test_name_in_two_files_is_told_apart_by_the_pattern_or_the_module(product: Path) -> None:
    (product / "daemon").mkdir()
    (product / "daemon" / "shelf.py").write_text("class Shelf:\n    def take(self): self.wait(key), self.ask()\n")
    assert drop("Shelf.take", "self.ask()").made()[0] == Path("daemon/shelf.py")
    with pytest.raises(UnfitChangeError, match=r"found 2 times in Shelf\.take, 2 places"):
        drop("Shelf.take", "self.wait(key)").made()
    assert drop("tierstore.shelf:Shelf.take", "self.wait(key)").made()[0] == Path("tierstore/shelf.py")


def test_test_is_found_by_its_name_and_told_apart_by_its_file(product: Path) -> None:
    for folder in ("store", "hooks"):
        (product / "tests" / folder).mkdir()
        (product / "tests" / folder / f"test_{folder}.py").write_text(
            f"def test_both(): pass\nclass TestAll:\n    def test_{folder}(self): pass\n"
        )
    assert node_id("test_hooks[a::b.py]") == "hooks/test_hooks.py::TestAll::test_hooks[a::b.py]"
    assert node_id("test_store.py::test_both") == "store/test_store.py::test_both"
    assert node_id("test_store.py") == "store/test_store.py"
    for name, number in (("test_both", 2), ("test_neither", 0)):
        with pytest.raises(LookupError, match=f"{name}: {number} tests are called so"):
            node_id(name)
    rules._nodes.cache_clear()
