"""Agreement of engines: fraction of equal top-1 classes, and differences of logits."""

import json

import pytest
import torch
from model_cases import images_for, random_vit, small

from vitkit.core.errors import InputError
from vitkit.core.result import fields_to_json
from vitkit.core.shapes import Tensor
from vitkit.inference.agreement import Agreement, measure_agreement
from vitkit.inference.engine import Precision, eager_engine


class Table:
    """An engine with fixed outputs."""

    name = "a table"
    precision: Precision = "int8"

    def __init__(self, logits: list[list[float]]) -> None:
        self.logits = torch.tensor(logits)

    def features(self, images: Tensor) -> Tensor:
        return torch.zeros(len(images), 1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        rows = images[:, 0, 0, 0].long()
        return self.features(images), self.logits[rows]


def numbered(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)[:, None, None, None].expand(-1, 3, 4, 4)


def test_agreement_covers_all_batches() -> None:
    right = Table([[0.0, 1.0], [2.0, 0.0], [0.0, 3.0], [4.0, 0.0]])
    other = Table([[0.0, 1.0], [0.0, 0.5], [0.0, 3.0], [4.0, 0.25]])
    found = measure_agreement(other, right, [numbered(0, 1, 2), numbered(3)])
    assert found == Agreement(images=4, same_top1=0.75, largest_difference=2.0, mean_difference=0.34375)  # 2.75 of 8
    assert str(found) == "same top-1 class for 3 of 4 images, logits differ by at most 2 (0.34 on average)"
    assert fields_to_json(found)["same_top1"] == 0.75


def test_model_agrees_with_itself() -> None:
    model = random_vit(small())
    found = measure_agreement(eager_engine(model), model, [images_for(small(), batch=3)])
    assert (found.images, found.same_top1, found.largest_difference) == (3, 1.0, 0.0)


def test_features_are_compared_without_classes() -> None:
    model = random_vit(small(num_classes=0))
    found = measure_agreement(eager_engine(model, precision="bf16"), model, [images_for(small(), batch=3)])
    assert not found.of_logits
    assert found.same_top1 == 1.0  # 8 bits of each number turn no vector by 8 degrees
    assert "features" in str(found)


@pytest.mark.parametrize("num_classes", [0, 5])
def test_nonfinite_output_agrees_with_nothing(num_classes: int) -> None:
    model = random_vit(small(num_classes=num_classes))
    images = images_for(small(), batch=3)
    images[1] = torch.nan
    found = measure_agreement(eager_engine(model), model, [images])
    assert found.same_top1 == pytest.approx(2 / 3)
    assert found.of_logits == bool(num_classes)
    json.dumps(fields_to_json(found), allow_nan=False)  # or it fails
    assert fields_to_json(found)["largest_difference"] is None


def test_agreement_needs_images() -> None:
    model = random_vit(small())
    with pytest.raises(InputError, match="no images"):
        measure_agreement(eager_engine(model), model, [])
