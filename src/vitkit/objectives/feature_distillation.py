"""Distillation from stored features: cross-entropy with the labels, and the cosine distance to a teacher's features.

The features were computed once, so the teacher costs nothing in training and need not be a model that vitkit can load.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from vitkit.core.errors import ConfigError
from vitkit.core.shapes import Float, Tensor
from vitkit.data.dataset import ImageSource
from vitkit.data.preprocessing import Preprocessing
from vitkit.data.stored_targets import StoredTargets, count_features
from vitkit.model.distilled import FeatureStudent
from vitkit.objectives.base import LossOutput, Objective, ObjectiveBuilder
from vitkit.objectives.config import ObjectiveConfig
from vitkit.objectives.supervised import cross_entropy
from vitkit.objectives.teacher import Teacher
from vitkit.zoo.flops import count_dense_flops
from vitkit.zoo.registry import Model
from vitkit.zoo.variants import ModelConfig


class FeatureDistillationObjective:
    """Cross-entropy with the labels, plus `weight` times the mean cosine distance to the teacher's features.

    A row of targets is the label distribution followed by the features, so that mixup mixes both with one weight.
    """

    def __init__(self, config: ObjectiveConfig) -> None:
        self.config = config

    def __call__(self, model: nn.Module, images: Float[Tensor, "B C H W"], targets: Float[Tensor, "B T"]) -> LossOutput:
        """Return the mean loss, the number of correct predictions and the sum of cosine similarities."""
        logits, features = (output.float() for output in model(images))
        labels, teacher = targets.split([logits.shape[1], features.shape[1]], dim=1)
        similarity = functional.cosine_similarity(features, teacher)
        loss = cross_entropy(logits, labels, loss=self.config.loss)
        loss = loss + self.config.feature_distillation.weight * (1.0 - similarity.mean())
        correct = (logits.argmax(dim=1) == labels.argmax(dim=1)).sum()
        return LossOutput(loss, {"correct": correct, "cosine": similarity.detach().sum()})


class FeatureDistillationBuilder(ObjectiveBuilder):
    """Builder of the objective, which adds a projection to the teacher's features."""

    def stored_targets(self, source: ImageSource) -> StoredTargets:  # noqa: D102
        return StoredTargets(self._directory(), source, crops=self.config.feature_distillation.crops)

    def wrap(self, model: Model, *, generator: torch.Generator | None = None) -> nn.Module:  # noqa: D102
        return FeatureStudent(model, features=count_features(self._directory()), generator=generator)

    def build(  # noqa: D102
        self, model: nn.Module, *, preprocessing: Preprocessing, teacher: Teacher | None
    ) -> Objective[Any]:
        return FeatureDistillationObjective(self.config)

    def forward_flops(self, model: ModelConfig) -> int:
        """Return the FLOPs of a forward pass with the projection."""
        projection = count_dense_flops(1, model.num_features, count_features(self._directory()))
        return super().forward_flops(model) + projection

    def _directory(self) -> str:
        if self.config.feature_distillation.targets is None:
            raise ConfigError(
                "feature distillation needs the stored features of a teacher",
                expected="objective.feature_distillation.targets=DIRECTORY",
                got="none",
                hint="python tools/teacher_targets.py writes them",
            )
        return self.config.feature_distillation.targets
