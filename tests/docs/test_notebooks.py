"""Notebooks of the documentation run with reduced sizes, and their stored outputs have no errors."""

import importlib.util
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="notebooks need nbformat")
pytest.importorskip("nbclient", reason="notebooks need nbclient")
pytest.importorskip("ipykernel", reason="notebooks need ipykernel")

ROOT = Path(__file__).parents[2]
CLOCK = """
import itertools
import vitkit.api.training
vitkit.api.training.budget_clock = lambda ticks=itertools.count(): 3.0 * next(ticks)
"""
"""A clock that does not depend on the speed of the machine."""
PARAMETERS = {
    "folder-to-server": f"{CLOCK}MINUTES = 0.5\nPER_CLASS = 8",
    "model-and-attention": "STEPS = 3",
}
TOOL = ROOT / "tools" / "run_notebooks.py"


def load_tool():
    specification = importlib.util.spec_from_file_location("run_notebooks", TOOL)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_every_notebook_is_tested() -> None:
    assert {path.stem for path in (ROOT / "docs" / "notebooks").glob("*.ipynb")} == PARAMETERS.keys()


@pytest.mark.parametrize("name", PARAMETERS)
def test_stored_outputs_are_complete(name) -> None:
    notebook = nbformat.read(ROOT / "docs" / "notebooks" / f"{name}.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]


@pytest.mark.parametrize("name", PARAMETERS)
def test_notebook_runs(name, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = load_tool().run_notebook(ROOT / "docs" / "notebooks" / f"{name}.ipynb", parameters=PARAMETERS[name])
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
