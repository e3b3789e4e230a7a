"""Fallback to torch where the native engine is not available, with a reason."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from model_cases import images_for, random_vit, small

from vitkit.core.cache_dir import cache_root, cache_unwritable_reason
from vitkit.core.errors import ConfigError
from vitkit.inference.native.library import is_built
from vitkit.inference.select import (
    describe_native_engine,
    needs_native_build,
    select_engine,
    try_build_native,
)


@pytest.fixture
def build_cache_cleared() -> Iterator[None]:
    """Try the build again in this test and in those after it."""
    try_build_native.cache_clear()
    yield
    try_build_native.cache_clear()


@pytest.fixture
def no_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run like a container user without a passwd entry."""
    for name in ("HOME", "XDG_CACHE_HOME", "VITKIT_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def fail(cls: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", classmethod(fail))


def check_fallback(reason: str) -> None:
    """Check that torch runs the model, the reason is given, and nothing is built."""
    model, images = random_vit(small()), images_for(small())
    assert not needs_native_build(model, precision="fp32")
    engine, fallback_reason = select_engine(model)
    assert engine.name == "torch, packed"
    assert fallback_reason is not None
    assert fallback_reason.startswith("the native engine is not available: ")
    assert reason in fallback_reason
    with torch.no_grad():
        torch.testing.assert_close(engine.forward(images)[1], model(images), atol=1e-4, rtol=0)  # the guarantee of fp32
    assert describe_native_engine().startswith("cannot be built: ")


@pytest.mark.usefixtures("no_home_directory", "build_cache_cleared")
def test_no_home_directory() -> None:
    with pytest.raises(ConfigError, match="no home directory"):
        cache_root()
    assert not is_built()
    check_fallback("no home directory for the cache; set VITKIT_CACHE")


@pytest.mark.usefixtures("build_cache_cleared")
def test_cache_path_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "file"))
    assert "cannot be written to: set VITKIT_CACHE" in str(cache_unwritable_reason())
    check_fallback("VITKIT_CACHE")
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.usefixtures("build_cache_cleared")
def test_compiler_that_is_not_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "g++ 'unfinished")
    check_fallback("CXX is not a command")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("directory", ["existing", "not/yet/existing"])
def test_cache_that_can_be_created_is_writable(tmp_path: Path, directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "existing").mkdir()
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / directory))
    assert cache_unwritable_reason() is None
    assert [path.name for path in tmp_path.iterdir()] == ["existing"]  # nothing was created


def test_predict_without_home_directory(tmp_path: Path) -> None:
    """The command prints only JSON to stdout, and no traceback."""
    program = (
        "import json, pathlib, sys, vitkit\n"
        "from vitkit.cli.main import main\n"
        "def fail(cls): raise RuntimeError('Could not determine home directory.')\n"
        "pathlib.Path.home = classmethod(fail)\n"
        "model = vitkit.create('Ti/16', image_size=16, patch_size=8, num_classes=2, "
        "settings={'depth': 1, 'width': 24})\n"
        "vitkit.save(model, 'model', labels=['cat', 'dog'])\n"
        "import numpy, PIL.Image\n"
        "PIL.Image.fromarray(numpy.zeros((9, 9, 3), dtype=numpy.uint8)).save('black.png')\n"
        "sys.exit(main(['predict', 'model', 'black.png', '--json', '--device', 'cpu']))\n"
    )
    hidden = ("HOME", "XDG_CACHE_HOME", "VITKIT_CACHE")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith('{"file": "black.png"')
    assert len(run.stdout.splitlines()) == 1
    assert run.stderr.count("no home directory") == 1
