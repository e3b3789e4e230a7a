"""S10 at a small count: whichever way a model is asked, it gives the answers that it was evaluated with.

`bench/same_answers.py` is the same with a thousand photos; its functions are what runs here.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image
from serve.serving import tiny_model

from vitkit.checkpoints.foreign import load
from vitkit.data.sources.detect import open_data
from vitkit.export.runtimes import RUNTIMES

SCRIPT = Path(__file__).parents[2] / "bench" / "same_answers.py"
IMAGES = 24


@pytest.fixture(scope="module")
def script() -> ModuleType:
    specification = importlib.util.spec_from_file_location("same_answers", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["same_answers"] = module
    specification.loader.exec_module(module)
    return module


def write_program(to: str, model: str, out: Path) -> None:
    """What `vitkit export` writes, without the proof that it runs: tests/export has that."""
    out.mkdir()
    RUNTIMES[to].write(load(model), out)


@pytest.fixture(scope="module")
def agreements(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A tiny model's answers for images of several sizes, shapes and formats, by every way there is."""
    folder = tmp_path_factory.mktemp("same")
    rng = np.random.default_rng(0)
    for number in range(IMAGES):
        height, width = rng.integers(20, 90, 2) * (8 if number % 3 == 0 else 1)  # some far larger than the model takes
        name = folder / "images" / "ab"[number % 2] / f"{number}.{('jpg', 'png', 'webp', 'bmp')[number % 4]}"
        name.parent.mkdir(parents=True, exist_ok=True)
        coarse = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((int(width), int(height)), Image.Resampling.BICUBIC).save(name)
    model = tiny_model(folder / "model", classes=7)
    source = open_data(folder / "images").splits["all"]
    found = script.compare(str(model), source, export=write_program)
    return {agreement.way: agreement for agreement in found}


@pytest.mark.parametrize("way", ["predict", "serve", "serve /v1", "onnx", "torch", "openvino"])
def test_answers_are_those_of_evaluation(agreements: dict[str, Any], way: str) -> None:
    found = agreements[way]
    if found.left_out:
        pytest.skip(found.left_out)
    assert (found.images, found.same_first) == (IMAGES, IMAGES)
    assert found.difference <= 1e-4  # S10's bound; float32 sums in another order give about 1e-6 here


def test_a_difference_would_be_found(script: ModuleType) -> None:
    expected = np.eye(4, dtype=np.float32)
    other_class = expected[[1, 0, 2, 3]]
    assert script.agreement("predict", expected, lambda: expected).holds
    assert not script.agreement("predict", expected, lambda: expected + 2e-4).holds
    assert script.agreement("predict", expected, lambda: other_class).same_first == 2
    assert not script.agreement("predict", expected, lambda: other_class).holds
