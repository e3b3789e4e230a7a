"""Distillation from stored features: the loss, the crops, and unusable targets."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from vitkit.core.errors import ConfigError, DataError
from vitkit.data.augment import mix_batch, one_hot
from vitkit.data.config import AugmentConfig
from vitkit.data.dataset import ImageSource
from vitkit.data.layouts.registry import open_dataset
from vitkit.data.loader import BatchShard, SamplerState, make_training_loader
from vitkit.data.preprocessing import Preprocessing
from vitkit.data.stored_targets import NAMES, StoredTargets, crop_box, crop_path
from vitkit.model.pretraining import FeatureStudent
from vitkit.objectives.config import FeatureDistillationConfig, ObjectiveConfig, get_builder
from vitkit.objectives.distillation import FeatureDistillationObjective
from vitkit.zoo.registry import create


@pytest.fixture
def source() -> ImageSource:
    return open_dataset("digits").splits["train"]


@pytest.fixture
def directory(tmp_path: Path, source: ImageSource) -> Path:
    """Targets in another order than the images: row i of crop c is (i, c)."""
    names = [source.name(index) for index in reversed(range(len(source)))]
    (tmp_path / NAMES).write_text("".join(f"{name}\n" for name in names))
    for crop in range(2):
        rows = np.stack([np.arange(len(source))[::-1], np.full(len(source), crop)], axis=1)
        np.save(crop_path(tmp_path, crop), rows.astype(np.float16))
    return tmp_path


class TwoOutputs(nn.Module):
    def __init__(self, logits: torch.Tensor, features: torch.Tensor) -> None:
        super().__init__()
        self.outputs = logits, features

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.outputs


def test_loss_is_cross_entropy_plus_weighted_cosine_distance() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, features, teacher = (torch.randn(4, n, generator=generator) for n in (3, 5, 5))
    labels = one_hot(torch.tensor([0, 2, 1, 1]), num_classes=3)
    config = ObjectiveConfig(
        name="feature_distillation", feature_distillation=FeatureDistillationConfig(targets="x", weight=2.0)
    )
    output = FeatureDistillationObjective(config)(
        TwoOutputs(logits, features), torch.zeros(4, 3, 8, 8), torch.cat([labels, teacher], dim=1)
    )
    cosines = functional.cosine_similarity(features, teacher)
    expected = functional.cross_entropy(logits, labels) + 2.0 * (1 - cosines).mean()
    torch.testing.assert_close(output.loss, expected)
    torch.testing.assert_close(output.metrics["cosine"], cosines.sum())


def test_batches_carry_the_features_of_their_images(source: ImageSource, directory: Path) -> None:
    targets = StoredTargets(directory, source, crops=2)
    loader = make_training_loader(
        source,
        start=SamplerState(0, 0, 0),
        shard=BatchShard(batch_size=8),
        preprocessing=Preprocessing(image_size=8, channels=1, mean=(0.5,), std=(0.5,)),
        augment=AugmentConfig(),
        targets=targets,
    )
    with loader:
        batch = next(loader)
    assert batch.features is not None
    indices = batch.features[:, 0].long()
    assert batch.labels.tolist() == source.labels[indices].tolist()
    assert batch.features[:, 1].tolist() == (indices % 2).tolist()


def test_crops_alternate_between_epochs(source: ImageSource, directory: Path) -> None:
    targets = StoredTargets(directory, source, crops=2)
    assert [targets.crop(epoch, 7) for epoch in range(4)] == [1, 0, 1, 0]
    assert targets.features(0, 7).tolist() == [7, 1]
    assert targets.box(1, 7, height=8, width=8) == (0, 0, 8, 8)


def test_crop_boxes_are_inside_and_large() -> None:
    for number in range(200):
        left, top, right, bottom = crop_box(f"image {number}", 1 + number % 3, height=48, width=64)
        assert 0 <= left < right <= 64
        assert 0 <= top < bottom <= 48
        assert (right - left) * (bottom - top) > 0.3 * 48 * 64


def test_mixup_mixes_images_labels_and_features_alike() -> None:
    images, rows = torch.eye(4)[:, None, None], torch.eye(4)
    mixed, targets = mix_batch(images, torch.cat([rows, rows], dim=1), mixup=0.4, rng=np.random.default_rng(0))
    assert torch.equal(targets[:, :4], targets[:, 4:])
    assert torch.equal(mixed[:, 0, 0], targets[:, :4])


def test_student_returns_logits_alone_in_evaluation() -> None:
    student = FeatureStudent(create("Ti/16", num_classes=5, image_size=32), features=7)
    images = torch.rand(2, 3, 32, 32)
    logits, features = student(images)
    assert (logits.shape, features.shape) == ((2, 5), (2, 7))
    assert student.eval()(images).shape == (2, 5)


def test_missing_targets_are_named(source: ImageSource, directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs the stored features"):
        get_builder(ObjectiveConfig(name="feature_distillation")).stored_targets(source)
    with pytest.raises(DataError, match=r"crop2\.npy: cannot be read"):
        StoredTargets(directory, source, crops=3)
    (directory / NAMES).write_text("other\n" * len(source))
    with pytest.raises(DataError, match="training images have no stored features"):
        StoredTargets(directory, source)
    (directory / NAMES).write_text("other\n")
    with pytest.raises(DataError, match=r"the features are not those of names\.txt"):
        StoredTargets(directory, source)
    np.save(crop_path(directory, 0), np.zeros(3))
    with pytest.raises(DataError, match="not a table of features"):
        StoredTargets(directory, source)
