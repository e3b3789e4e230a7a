"""Where the native engine cannot be had, torch answers, and a sentence says why and what to do."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from model_cases import images_for, random_vit, small

from vitkit.core.errors import ConfigError
from vitkit.engine.cache import cache_folder, reason_against_keeping
from vitkit.engine.choose import build_failure, chosen, describe_native, is_ready, needs_building


@pytest.fixture
def forgetful() -> Iterator[None]:
    """A failure to build is found again, here and by the tests after this one."""
    build_failure.cache_clear()
    yield
    build_failure.cache_clear()


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has a number and no name."""
    for name in ("HOME", "XDG_CACHE_HOME", "VITKIT_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def fail(cls: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", classmethod(fail))


def answers_by_torch(reason: str) -> None:
    """The model answers right, by torch, with a remark that has the reason; nothing is built first."""
    model, images = random_vit(small()), images_for(small())
    assert not needs_building(model, precision="fp32")
    engine, remark = chosen(model)
    assert engine.name == "torch, prepacked"
    assert remark is not None
    assert remark.startswith("the native engine could not be made: ")
    assert reason in remark
    with torch.no_grad():
        torch.testing.assert_close(engine.answer(images)[1], model(images), atol=1e-4, rtol=0)  # what fp32 promises
    assert describe_native().startswith("cannot be built: ")


@pytest.mark.usefixtures("homeless", "forgetful")
def test_without_a_home_folder() -> None:
    with pytest.raises(ConfigError, match="no home folder"):
        cache_folder()
    assert not is_ready()
    answers_by_torch("no home folder to keep what is compiled in; set VITKIT_CACHE")


@pytest.mark.usefixtures("forgetful")
def test_with_a_file_where_the_cache_should_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "file"))
    assert "cannot be written to: set VITKIT_CACHE" in str(reason_against_keeping())
    answers_by_torch("VITKIT_CACHE")
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.usefixtures("forgetful")
def test_with_a_compiler_that_is_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "g++ 'unfinished")
    answers_by_torch("CXX is not a command")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("folder", ["there", "not/there/yet"])
def test_a_folder_that_can_be_made_is_good(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / folder))
    assert reason_against_keeping() is None
    assert [path.name for path in tmp_path.iterdir()] == ["there"]  # looking makes nothing


def test_a_start_without_a_home_says_so_and_answers(tmp_path: Path) -> None:
    """The whole of it, in a process of its own: no traceback, and JSON alone on stdout."""
    program = (
        "import json, pathlib, sys, vitkit\n"
        "from vitkit.cli.main import main\n"
        "def fail(cls): raise RuntimeError('Could not determine home directory.')\n"
        "pathlib.Path.home = classmethod(fail)\n"
        "model = vitkit.create('Ti/16', image_size=16, patch_size=8, classes=2, settings=['depth=1', 'width=24'])\n"
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
    assert run.stderr.count("no home folder") == 1
