"""How Sphinx builds the documentation: `make docs`. Broken links, and pages that no list names, are errors there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from docutils import nodes

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS), str(ROOT)]

from from_program import fill_in, include_with_links  # noqa: E402

import tierstore  # noqa: E402

project = "tierstore"
release = version = tierstore.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]

# Pages
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
copybutton_prompt_text = r"\$ |# "
copybutton_prompt_is_regexp = True
suppress_warnings = ["misc.highlighting_failure"]  # a console block with a part of a program's output

# Docstrings
default_role = "py:obj"  # `TierStore.get` becomes a link, any other word in backticks is code
autodoc_mock_imports = ["transformers", "lightning"]  # large, and only named here
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
napoleon_custom_sections = [
    ("Held now", "params_style"),
    ("Totals since the store was opened", "params_style"),
    ("How it works here", "params_style"),
]
nitpick_ignore_regex = [
    ("py:obj", ".*"),
    # Names of others, and names that stand for a type in signatures alone.
    ("py:.*", r"(asyncio|collections|concurrent|contextlib|lightning|os|pathlib|torch|transformers|types|typing)\..*"),
    ("py:.*", r"(nn|optim)\.\w+|.*\b(Any|Callable|ConfigSource|Never|PathLike|Select|Self|SizeLike|T|Where)"),
]

# The site
html_theme = "furo"
html_title = f"tierstore {release}"
html_copy_source = False
html_show_sphinx = False


def _resolve(app: Any, env: Any, node: nodes.Element, contnode: nodes.Element) -> nodes.Node | None:
    """Resolve what Sphinx cannot: a folder of the repository, and a public name by the module it is defined in."""
    target = node.get("reftarget", "")
    if node.get("reftype") == "myst":
        is_folder = Path(env.doc2path(node["refdoc"])).parent.joinpath(target).is_dir()
        return nodes.inline("", "", *contnode.children) if is_folder else None
    name = target.rpartition(".")[2]
    if node.get("refdomain") == "py" and target.startswith("tierstore.") and name in tierstore.__all__:
        domain = env.domains["py"]
        return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", f"tierstore.{name}", node, contnode)
    return None


def _read(app: Any, docname: str, source: list[str]) -> None:
    source[0] = fill_in(include_with_links(source[0], Path(app.env.doc2path(docname)).parent))


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _read)
    app.connect("missing-reference", _resolve)
