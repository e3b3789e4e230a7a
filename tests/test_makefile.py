"""First contact: `make` with a Python that is old or has no venv module, and with half an environment."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parent.parent / "Makefile"
OLD = f'exec {sys.executable} -c "import sys; sys.version_info = (3, 10, 12); exec(sys.argv[2])" "$@"'
WITHOUT_VENV = f"""
[ "$1" = -m ] || exec {sys.executable} "$@"
mkdir -p "$3/bin"
echo "ensurepip is not available: apt install python3-venv"
exit 1
"""
BROKEN = "exit 1"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="GNU make is not installed")


def write_python(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def create_environment(folder: Path, script: str) -> str:
    """Let `make` create the environment with a stand-in for Python, which must fail, and return its messages."""
    command = ["make", "-f", MAKEFILE, f"PYTHON={write_python(folder / 'python', script)}", ".venv/.created"]
    inherited = ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "VENV", "CONSTRAINTS")  # from `make test-lowest`
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    return result.stdout + result.stderr


def test_missing_venv_module_leaves_no_environment(tmp_path):
    assert "apt install python3-venv" in create_environment(tmp_path, WITHOUT_VENV)
    assert not (tmp_path / ".venv").exists()


def test_old_python_is_named_before_anything_is_created(tmp_path):
    assert "vitkit needs Python 3.11 or newer" in create_environment(tmp_path, OLD)
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize("script", [BROKEN, OLD])
def test_unusable_environment_is_named_and_left_alone(tmp_path, script):
    python = write_python(tmp_path / ".venv/bin/python", script)
    expected = ".venv is incomplete or has a Python older than 3.11: delete it and run make again"
    assert expected in create_environment(tmp_path, f'exec {sys.executable} "$@"')
    assert python.exists()
