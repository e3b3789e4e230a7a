"""Registry of objectives and their configurations; imports no torch.

To add one, write a module with an `ObjectiveBuilder` and add its entry here.
"""

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Literal

from vitkit.core.errors import ConfigError, check_fraction, check_not_negative, check_positive, did_you_mean
from vitkit.model.pretraining_config import MAEConfig, MaskedConfig

if TYPE_CHECKING:
    from vitkit.objectives.base import ObjectiveBuilder


@dataclass(frozen=True)
class ObjectiveEntry:
    """An objective's builder as `module:class`, imported on first use so that configurations need no torch."""

    builder: str
    needs_labels: bool


OBJECTIVES = {
    "supervised": ObjectiveEntry("vitkit.objectives.supervised:SupervisedBuilder", needs_labels=True),
    "masked": ObjectiveEntry("vitkit.objectives.masked_patches:MaskedPatchBuilder", needs_labels=False),
    "mae": ObjectiveEntry("vitkit.objectives.mae:MAEBuilder", needs_labels=False),
    "distillation": ObjectiveEntry("vitkit.objectives.distillation:DistillationBuilder", needs_labels=True),
    "feature_distillation": ObjectiveEntry(
        "vitkit.objectives.distillation:FeatureDistillationBuilder", needs_labels=True
    ),
}


def find_objective(name: str) -> ObjectiveEntry:
    """Return the entry of an objective."""
    if name not in OBJECTIVES:
        raise ConfigError(
            "objective.name is not valid", expected=", ".join(OBJECTIVES), got=name, hint=did_you_mean(name, OBJECTIVES)
        )
    return OBJECTIVES[name]


DistillationKind = Literal["hard", "soft"]


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig:
    """Softmax or sigmoid cross-entropy; the latter for images with several labels (appendix B.1)."""

    loss: Literal["softmax", "sigmoid"] = "softmax"
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_fraction("objective.smoothing", self.smoothing)


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """Distillation from a teacher: (1 − weight) · loss of the labels + weight · loss of the teacher (DeiT).

    Args:
        teacher: Run, artifact or weights of any origin.
        kind: "hard" uses the teacher's prediction as a label, "soft" its distribution at `temperature`.
        token: Give the student a distillation token with a head of its own; otherwise one head has both losses.
    """

    teacher: str | None = None
    kind: DistillationKind = "hard"
    weight: float = 0.5
    temperature: float = 3.0
    token: bool = True

    def __post_init__(self) -> None:
        check_positive("objective.distillation.temperature", self.temperature)
        check_fraction("objective.distillation.weight", self.weight, allow_one=True)


@dataclass(frozen=True, kw_only=True)
class FeatureDistillationConfig:
    """Distillation from stored features: loss of the labels + weight · cosine distance to the features.

    Args:
        targets: Directory of the features of the training images, written by tools/teacher_targets.py.
        crops: Number of crops to use; the features of each must have been computed.
    """

    targets: str | None = None
    crops: int = 1
    weight: float = 5.0

    def __post_init__(self) -> None:
        check_positive("objective.feature_distillation.crops", self.crops)
        check_not_negative("objective.feature_distillation.weight", self.weight)


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(SupervisedConfig):
    """The objective by name, with one section for each that has settings; `loss` and `smoothing` are for labels."""

    name: str = "supervised"
    masked: MaskedConfig = MaskedConfig()
    mae: MAEConfig = MAEConfig()
    distillation: DistillationConfig = DistillationConfig()
    feature_distillation: FeatureDistillationConfig = FeatureDistillationConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        find_objective(self.name)

    @property
    def needs_labels(self) -> bool:
        """Whether the objective needs labels."""
        return find_objective(self.name).needs_labels


def get_builder(config: ObjectiveConfig) -> "ObjectiveBuilder":
    """Return the builder of the configured objective."""
    builder: type[ObjectiveBuilder] = resolve_name(find_objective(config.name).builder)
    return builder(config)
