"""Run the notebooks of the documentation and store their outputs.

python tools/run_notebooks.py [NOTEBOOK ...]
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "docs" / "notebooks"
VOLATILE = ("execution", "widgets")
"""Metadata that changes with every run."""
TESTS = Path(__file__).parents[1] / "tests"
PRELUDE = f"""
import sys
sys.path.append({str(TESTS)!r})
import oracles
oracles.fix_torchvision()  # Lightning imports it, and its wheel may be broken next to a CPU build of torch
"""


def run_notebook(path: Path, *, parameters: str = "") -> nbformat.NotebookNode:
    """Run a notebook in a new kernel; `parameters` replaces values after the cell with the tag "parameters".

    The cells that are added for this run are removed from the result, and so are messages on stderr, which name paths
    of this machine.
    """
    notebook = nbformat.read(path, as_version=4)
    tagged = [index for index, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", ())]
    prelude = nbformat.v4.new_code_cell(PRELUDE)
    override = nbformat.v4.new_code_cell(parameters)
    notebook.cells[tagged[0] + 1 : tagged[0] + 1] = [override]
    notebook.cells.insert(0, prelude)
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    notebook.cells = [cell for cell in notebook.cells if cell not in (prelude, override)]
    for cell in notebook.cells:
        for key in VOLATILE:
            cell.metadata.pop(key, None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def main() -> None:
    """Run the given notebooks, or all of them."""
    for path in map(Path, sys.argv[1:] or sorted(map(str, NOTEBOOKS.glob("*.ipynb")))):
        nbformat.write(run_notebook(path), path)
        print(path.name)


if __name__ == "__main__":
    main()
