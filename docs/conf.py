"""How Sphinx builds the documentation: `make docs`. Broken links, and pages that no list names, are errors there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

from made_pages import fill_in, with_included, with_links_to_files  # noqa: E402

import tierstore  # noqa: E402

project = "tierstore"
release = version = tierstore.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]

# Pages
myst_heading_anchors = 4
smartquotes_action = "D"  # dashes, but no quotes: "8GiB" is code, also in text
myst_enable_extensions = ["colon_fence"]
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True
copybutton_line_continuation_character = "\\"
suppress_warnings = ["misc.highlighting_failure"]  # a console block with a part of a program's output

# Docstrings
default_role = "py:obj"  # `TierStore.get` becomes a link, any other word in backticks is code
autodoc_mock_imports = ["transformers", "lightning"]  # large, and only named here
autodoc_member_order = "bysource"
napoleon_use_param = False  # "host_bytes, staging_bytes: text" would be read as a type and a name
napoleon_custom_sections = [
    (name, "params_style")
    for name in ("Attributes", "Held now", "Totals since the store was opened", "How it works here")
]
_OURS = "|".join(name for name in tierstore.__all__ if name[0].isupper())
nitpick_ignore_regex = [
    # Other words in backticks. A name of ours that is misspelt is an error.
    ("py:obj", rf"(?!(tierstore|{_OURS})\.[\w.]+$).*|tierstore\.(toml|sock)"),
    # Names of others, and names that only stand for a type in signatures.
    ("py:.*", r"(asyncio|collections|concurrent|contextlib|lightning|os|pathlib|torch|transformers|types|typing)\..*"),
    (
        "py:.*",
        r"(nn|optim)\.\w+|(.*\.)?(Any|Callable|ConfigSource|Copies|Figure|OpenDisk|P|PathLike|Select|Self)",
    ),
    ("py:.*", r"(.*\.)?(Codec|M|Mode|OffloadOptions|PrefetchOrder|Record|SizeLike|StoreChanges|T|Where)"),
]

# The site
html_theme = "furo"
pygments_dark_style = "monokai"  # furo's own underlines each imported name in blue
html_title = f"tierstore {release}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_copy_source = False
html_show_sphinx = False


def _resolve(app: Any, env: Any, node: nodes.Element, contnode: nodes.Element) -> nodes.Node | None:
    """Resolve a name that is documented elsewhere, and a class that is documented by another path than its module's."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target:
        return None
    anywhere = node.deepcopy()
    anywhere["refspecific"] = True
    name = target.rpartition(".")[2] if target.startswith("tierstore.") else target
    return env.domains["py"].resolve_xref(env, node["refdoc"], app.builder, "obj", name, anywhere, contnode)


def _read(app: Any, docname: str, source: list[str]) -> None:
    folder = Path(app.env.doc2path(docname)).parent
    page = fill_in(with_links_to_files(with_included(source[0], folder), folder, DOCS))
    is_internal = docname.startswith("project/internals/")  # no list names it, so it is not in the sidebar
    source[0] = f"---\norphan: true\n---\n\n{page}" if is_internal else page


def _link_pages(app: Any, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Make links of the pages that a docstring names, such as docs/how_to/budgets.md."""
    lines[:] = [re.sub(r"`?docs/([\w/]+)\.md`?", r":doc:`/\1`", line) for line in lines]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _link_pages)
    app.connect("source-read", _read)
    app.connect("missing-reference", _resolve)
