"""Weights in the package: their size, and the image sizes they take."""

from pathlib import Path

import pytest
import torch

import vitkit

EMBEDDED = Path(vitkit.__file__).parent / "weights" / "embedded"


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return vitkit.load(EMBEDDED, dtype=torch.float32)


def test_embedded_weights_take_at_most_8_megabytes() -> None:
    assert sum(path.stat().st_size for path in EMBEDDED.iterdir()) < 8_000_000


@pytest.mark.parametrize("size", [64, 96, 160])
def test_embedded_weights_take_images_of_several_sizes(model, size: int) -> None:
    model.set_input_size(size)
    with torch.inference_mode():
        logits = model(model.preprocess(torch.randint(256, (3, 200, 300), dtype=torch.uint8)))
    assert logits.shape == (1, 180)
    assert len(set(model.labels)) == 180
    assert logits.isfinite().all()
