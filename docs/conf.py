"""Sphinx configuration. `make docs` builds offline and treats warnings as errors."""

import inspect
import re
from importlib import import_module
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

project = "vitkit"
author = "the vitkit authors"
copyright = "the vitkit authors, Apache-2.0"
version = release = installed_version("vitkit")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
default_role = "code"  # docstrings mark code by single backticks
suppress_warnings = ["ref.python"]  # a short name in a signature may have several definitions

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks are stored with their outputs; tests run them

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}
maximum_signature_line_length = 88
add_module_names = False
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"vitkit {release}"
html_theme_options = {"navigation_with_keys": True}
html_show_sourcelink = False
html_show_sphinx = False

API = Path(__file__).parent / "api"


PAGES = {
    "vitkit": "Functions and classes. Each function is also a command with the same options.",
    "vitkit.results": "Results of the functions.",
    "vitkit.errors": "Errors, which have a message and a hint.",
    "vitkit.typing": "Types of arguments.",
    "vitkit.inspection": "Attention maps, attention distance and other functions on the outputs of a model.",
}
"""Modules with public names, in the order of the reference."""


DESCRIBED: set[object] = set()
"""Classes with a description; others that a page repeats are not indexed again."""


def write_api_page(module: str, summary: str) -> None:
    """Write the page of a module: one section for each name of its `__all__`."""
    home = import_module(module)
    sections = [f"# {module}", summary]
    for name in home.__all__:
        if name.startswith("__"):
            continue
        value = getattr(home, name)
        kind = "autofunction" if inspect.isfunction(value) else "autoclass" if inspect.isclass(value) else "autodata"
        option = "no-index" if kind == "autoclass" and value in DESCRIBED else "no-index-entry"
        DESCRIBED.add(value if kind == "autoclass" else name)
        sections += [f"## {name}", f"```{{eval-rst}}\n.. {kind}:: {module}.{name}\n   :{option}:\n```"]
    (API / f"{module}.md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")


for page, text in PAGES.items():
    write_api_page(page, text)


def convert_markdown(*event: Any) -> None:
    """Convert Markdown tables in a docstring to `list-table` directives, in place, and escape bars around a term."""
    _, kind, _, value, _, lines = event
    if kind == "data" and lines[:1] == (inspect.getdoc(value) or "").splitlines()[:1]:
        lines.clear()  # the docstring of its type, such as Union
    converted: list[str] = []
    for line in lines:
        if not line.startswith("|"):
            converted.append(re.sub(r"\|(\w[^|`]*\w)\|", r"\|\1\|", line))
        elif not set(line) <= set("|-: "):
            if not (converted and converted[-1].startswith("     ")):
                converted += [".. list-table::", "   :header-rows: 1", ""]
            first, *rest = line.strip("|").split("|")
            converted += [f"   * - {first.strip()}", *(f"     - {cell.strip()}" for cell in rest)]
    lines[:] = converted


def setup(app: Any) -> None:
    """Register the conversion of docstrings."""
    app.connect("autodoc-process-docstring", convert_markdown)
