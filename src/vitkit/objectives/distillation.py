"""Distillation: cross-entropy with the labels, and with a teacher's predictions or its stored features.

Predictions: Touvron et al., "Training data-efficient image transformers & distillation through attention" (2020),
section 4. The teacher has no gradient, is in no checkpoint, and every rank has a complete copy.

Features were computed once, so the teacher costs nothing in training and need not be a model that vitkit can load.
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
from vitkit.model.pretraining import DistilledViT, FeatureStudent
from vitkit.model.pretraining_config import make_student_config
from vitkit.model.vit import ViT
from vitkit.objectives.base import LossOutput, Objective, ObjectiveBuilder
from vitkit.objectives.config import DistillationConfig, DistillationKind, ObjectiveConfig, SupervisedConfig
from vitkit.objectives.supervised import cross_entropy
from vitkit.objectives.teacher import Teacher
from vitkit.zoo.flops import count_dense_flops
from vitkit.zoo.registry import Model
from vitkit.zoo.variants import ModelConfig


class DistillationObjective:
    """Weighted sum of the cross-entropy with the labels and the distillation loss.

    A model whose forward pass returns two logits has one for the label and one for the teacher; a single one is used
    for both.
    """

    def __init__(
        self,
        config: DistillationConfig,
        *,
        supervised: SupervisedConfig,
        teacher: Teacher,
        preprocessing: Preprocessing,
    ) -> None:
        if supervised.loss != "softmax":
            raise ConfigError(
                "distillation needs one label per image, and a sigmoid loss is for several",
                expected="objective.loss=softmax",
                got=supervised.loss,
            )
        self.config, self.supervised, self.teacher, self.preprocessing = config, supervised, teacher, preprocessing

    def __call__(self, model: nn.Module, images: Float[Tensor, "B C H W"], targets: Float[Tensor, "B Y"]) -> LossOutput:
        """Return the mean loss, and the number of correct predictions by the mean of both logits."""
        teacher_logits = self.teacher.logits(images, preprocessing=self.preprocessing)
        outputs = model(images)
        for_label, for_teacher = (each.float() for each in (outputs if isinstance(outputs, tuple) else (outputs,) * 2))
        label_loss = cross_entropy(for_label, targets, loss=self.supervised.loss)
        teacher_loss = distillation_loss(
            for_teacher, teacher_logits, kind=self.config.kind, temperature=self.config.temperature
        )
        correct = ((for_label + for_teacher).argmax(dim=1) == targets.argmax(dim=1)).sum()
        weight = self.config.weight
        return LossOutput((1.0 - weight) * label_loss + weight * teacher_loss, {"correct": correct})


class DistillationBuilder(ObjectiveBuilder):
    """Builder of the distillation objective; the student gets a distillation token if configured."""

    def teacher(self) -> str | None:
        if self.config.distillation.teacher is None:
            raise ConfigError(
                "distillation needs a teacher",
                hint="set objective.distillation.teacher to a finished run, or a file that vitkit weights info knows",
            )
        return self.config.distillation.teacher

    def configure_model(self, model: ModelConfig) -> ModelConfig:
        return make_student_config(model, token=self.config.distillation.token)

    def wrap(self, model: Model, *, generator: Any = None) -> nn.Module:
        return DistilledViT(model) if isinstance(model, ViT) and model.config.tokens.distillation else model

    def build(self, model: nn.Module, *, preprocessing: Preprocessing, teacher: Teacher | None) -> Objective[Any]:
        if teacher is None:
            raise ConfigError("distillation needs a teacher")
        return DistillationObjective(
            self.config.distillation, supervised=self.config, teacher=teacher, preprocessing=preprocessing
        )


def distillation_loss(
    logits: Float[Tensor, "B Y"], teacher_logits: Float[Tensor, "B Y"], *, kind: DistillationKind, temperature: float
) -> Float[Tensor, ""]:
    """Return the mean distillation loss over images.

    "hard" is the cross-entropy with the teacher's prediction (equation 3). "soft" is τ² times the divergence of the
    student's softmax of logits / τ from the teacher's (equation 2), summed over classes; DeiT's released code also
    divides by the number of classes, which amounts to a smaller weight.

    >>> same = torch.tensor([[2.0, 1.0, 0.0]])
    >>> distillation_loss(same, same, kind="soft", temperature=3.0).item()
    0.0
    """
    if kind == "hard":
        return functional.cross_entropy(logits, teacher_logits.argmax(dim=1))
    student, teacher = (functional.log_softmax(each / temperature, dim=1) for each in (logits, teacher_logits))
    divergence = functional.kl_div(student, teacher, reduction="batchmean", log_target=True)
    return temperature**2 * divergence


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

    def stored_targets(self, source: ImageSource) -> StoredTargets:
        return StoredTargets(self._directory(), source, crops=self.config.feature_distillation.crops)

    def wrap(self, model: Model, *, generator: torch.Generator | None = None) -> nn.Module:
        return FeatureStudent(model, features=count_features(self._directory()), generator=generator)

    def build(self, model: nn.Module, *, preprocessing: Preprocessing, teacher: Teacher | None) -> Objective[Any]:
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
