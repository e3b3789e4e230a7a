"""Guarantee S10 at a small count: prediction and serving give the outputs of evaluation.

`bench/agreement.py` compares a thousand photos, and exported models too; the exporter tests compare those here.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image
from server.serving import save_tiny_model

from vitkit.data.layouts.registry import open_dataset

SCRIPT = Path(__file__).parents[2] / "bench" / "agreement.py"
IMAGES = 24
METHODS = ("predict", "serve", "serve /v1")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    specification = importlib.util.spec_from_file_location("agreement", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["agreement"] = module
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def agreements(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Outputs of a tiny model for images of several sizes, shapes and formats."""
    folder = tmp_path_factory.mktemp("same")
    rng = np.random.default_rng(0)
    for number in range(IMAGES):
        height, width = rng.integers(20, 90, 2) * (8 if number % 3 == 0 else 1)  # some far larger than the model takes
        name = folder / "images" / "ab"[number % 2] / f"{number}.{('jpg', 'png', 'webp', 'bmp')[number % 4]}"
        name.parent.mkdir(parents=True, exist_ok=True)
        coarse = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((int(width), int(height)), Image.Resampling.BICUBIC).save(name)
    model = save_tiny_model(folder / "model", num_classes=7)
    source = open_dataset(folder / "images").splits["all"]
    compared = script.compare(str(model), source, export=lambda *_: None, methods=METHODS)
    return {agreement.method: agreement for agreement in compared}


@pytest.mark.parametrize("method", METHODS)
def test_outputs_equal_those_of_evaluation(agreements: dict[str, Any], method: str) -> None:
    agreement = agreements[method]
    assert (agreement.images, agreement.same_top1) == (IMAGES, IMAGES)
    assert agreement.difference <= 1e-4  # the bound of S10; float32 sums in another order differ by about 1e-6


def test_differences_are_detected(script: ModuleType) -> None:
    expected = np.eye(4, dtype=np.float32)
    other_class = expected[[1, 0, 2, 3]]
    assert script.measure_agreement("predict", expected, lambda: expected).holds
    assert not script.measure_agreement("predict", expected, lambda: expected + 2e-4).holds
    assert script.measure_agreement("predict", expected, lambda: other_class).same_top1 == 2
    assert not script.measure_agreement("predict", expected, lambda: other_class).holds
