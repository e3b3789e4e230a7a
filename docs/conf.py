"""Sphinx configuration. `make docs` builds offline and treats warnings as errors."""

import pkgutil
import re
from importlib import import_module
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

project = "vitkit"
author = "the vitkit authors"
copyright = "the vitkit authors, Apache-2.0"
version = release = installed_version("vitkit")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
default_role = "code"  # docstrings mark code by single backticks
suppress_warnings = ["ref.python"]  # a short name in a signature may have several definitions

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

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


def write_api_page(name: str) -> None:
    """Write the page of a subpackage: its docstring, and one section per module that can be imported here."""
    package = import_module(f"vitkit.{name}")
    sections = [f"# vitkit.{name}", package.__doc__ or ""]
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        try:
            import_module(module.name)
        except ImportError:  # an extra that is not installed
            continue
        sections += [f"## {module.name}", f"```{{eval-rst}}\n.. automodule:: {module.name}\n```"]
    (API / f"{name}.md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")


for subpackage in pkgutil.iter_modules(import_module("vitkit").__path__):
    if subpackage.ispkg and subpackage.name != "cli":
        write_api_page(subpackage.name)


def convert_markdown(*event: Any) -> None:
    """Convert Markdown tables in a docstring to `list-table` directives, in place, and escape bars around a term."""
    lines: list[str] = event[-1]
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
