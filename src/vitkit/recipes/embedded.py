"""Recipes of the weights embedded in the package: a small hybrid that learns from labels and a teacher's features."""

from collections.abc import Iterator
from dataclasses import replace

from vitkit.data.config import AugmentConfig
from vitkit.objectives.config import FeatureDistillationConfig
from vitkit.recipes.recipe import Recipe
from vitkit.training.config import DataConfig, ModelChoice, ObjectiveConfig, OptimizerConfig, RunConfig, ScheduleConfig

GROUP = "Embedded weights"
EXPECTED = "the file's model card has the accuracy; docs/experiments.md has the stages"


def recipes() -> Iterator[Recipe]:
    """Yield the recipe of the first stage and of those that continue it."""
    data = "objective.feature_distillation.targets=TARGETS"
    first = Recipe(
        name="embedded",
        group=GROUP,
        summary="First stage of the embedded weights, on 180 classes of Tiny-ImageNet at 40 pixels",
        command=f"vitkit train embedded --out runs/embedded data=TINY-IMAGENET {data}",
        time="about 1.5 hours of one core",
        expected=EXPECTED,
        make=first_stage,
    )
    command = f"vitkit finetune runs/embedded TINY-IMAGENET --recipe embedded-continue --out runs/embedded-2 {data}"
    summary = "A further stage of the embedded weights, from those of the stage before"
    yield first
    yield replace(
        first,
        name="embedded-continue",
        summary=summary,
        command=command,
        make=next_stage,
        kind="finetune",
        rates=(0.02,),
    )


def first_stage() -> RunConfig:
    """Return the run from scratch. Crops are large, because the targets are those of the whole image."""
    return RunConfig(
        model=embedded_model(image_size=40),
        data=DataConfig(path="tiny-imagenet"),
        augment=AugmentConfig(crop_area=(0.5, 1.0), mixup=0.2),
        objective=ObjectiveConfig(
            name="feature_distillation",
            smoothing=0.1,
            feature_distillation=FeatureDistillationConfig(targets="targets"),
        ),
        optimizer=OptimizerConfig(name="muon", weight_decay=0.02),
        schedule=ScheduleConfig(
            batch_size=128, epochs=None, steps=3200, lr=0.02, warmup_steps=160, decay="linear", end_lr=0.0
        ),
    )


def next_stage() -> RunConfig:
    """Return a run that continues a finished one: the head is kept, the rate rises and decays again."""
    first = first_stage()
    return replace(
        first, model=ModelChoice(image_size=48), schedule=replace(first.schedule, steps=4400, warmup_steps=440)
    )


def embedded_model(*, image_size: int) -> ModelChoice:
    """Return the model: 3.7 million parameters, one token for 8 × 8 pixels, positions that need no resampling."""
    settings = (
        "width=192",
        "depth=7",
        "heads=6",
        "mlp_dim=768",
        "pooling=mean",
        "block.activation=gelu_erf",
        "backbone.units=[]",
        "backbone.root=stack",
        "backbone.root_width=128",
        "backbone.root_units=[1, 1]",
        "positions.kind=sincos_2d",
    )
    return ModelChoice(name="Ti/16", image_size=image_size, patch_size=2, settings=settings)
