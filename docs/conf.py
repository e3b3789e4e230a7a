"""Sphinx's settings; `make docs` builds with every warning an error, and without a network."""

from importlib.metadata import version as installed_version

project = "vitkit"
author = "the vitkit authors"
copyright = "the vitkit authors, Apache-2.0"
version = release = installed_version("vitkit")

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
default_role = "code"  # docstrings mark code by single backticks

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}
maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"vitkit {release}"
html_theme_options = {"navigation_with_keys": True}
html_show_sourcelink = False
html_show_sphinx = False
