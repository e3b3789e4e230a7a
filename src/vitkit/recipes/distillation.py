"""Distillation recipes: DeiT, and the weights embedded in the package.

DeiT's settings are from the table of hyper-parameters of "Training data-efficient image transformers & distillation
through attention" (Touvron et al., 2020), and otherwise from its released code: 300 epochs, batch 1024, AdamW, lr
5e-4 × batch / 512, weight decay 0.05, warm-up of 5 epochs, cosine to 1e-5, stochastic depth 0.1, label smoothing 0.1,
RandAugment 9/0.5, mixup 0.8, cutmix 1, erasing 0.25, no clipping, crops of 8 % to all of an image, and hard
distillation of weight 0.5.

Differences: images are not repeated within a batch (three times there); RandAugment's magnitude is constant (standard
deviation 0.5 there), operations are always applied (with probability 0.5 there) and have Google's set and scale;
erasing uses uniform noise (normal there). The teacher there is a RegNetY-16GF of 82.9 %, which vitkit does not have.

The embedded weights are a small hybrid that learns from labels and a teacher's features.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from vitkit.data.config import AugmentConfig
from vitkit.objectives.config import DistillationConfig, FeatureDistillationConfig, ObjectiveConfig
from vitkit.recipes.paper import IMAGENET, imagenet_schedule, train_command
from vitkit.recipes.recipe import Recipe, slug
from vitkit.recipes.small import digits
from vitkit.training.config import DataConfig, ModelChoice, OptimizerConfig, RunConfig, ScheduleConfig

GROUP = "Distillation (DeiT)"
EMBEDDED = "Embedded weights"
BATCH_SIZE = 1024
MODELS = {"Ti/16": (2.9, 74.5), "S/16": (10.7, 81.2), "B/16": (40.7, 83.4)}
"""Distilled models of the paper: compute of 300 epochs by our count, without the teacher's, and top-1."""


def recipes() -> Iterator[Recipe]:
    """Yield the small recipe, the paper's three models, then the stages of the embedded weights.

    >>> [recipe.name for recipe in recipes()][:2]
    ['digits-distilled', 'deit-ti16-distilled']
    """
    yield Recipe(
        GROUP,
        "digits-distilled",
        digits_distilled,
        "Digits with a tenth of the parameters; the teacher is the run of digits",
        "vitkit train digits-distilled --out runs/small-digits objective.distillation.teacher=runs/digits",
        "a minute or two on two cores",
        "95.7 % of the 359 test images over three seeds, 95.4 % without a teacher; docs/experiments.md",
    )
    for model, (exaflops, top1) in MODELS.items():
        name = f"deit-{slug(model)}-distilled"
        yield Recipe(
            GROUP,
            name,
            partial(imagenet_distilled, model),
            f"{model} on ImageNet with a teacher, 300 epochs",
            f"{train_command(name)} objective.distillation.teacher=RUN",
            f"{exaflops:g} exaFLOPs by our count, and the teacher's forward passes; not timed",
            f"ImageNet {top1:.1f} % with a RegNetY-16GF as teacher (the paper)",
        )
    targets = "objective.feature_distillation.targets=TARGETS"
    first = Recipe(
        EMBEDDED,
        "embedded",
        first_stage,
        "First stage of the embedded weights, on 180 classes of Tiny-ImageNet at 40 pixels",
        f"vitkit train embedded --out runs/embedded data=TINY-IMAGENET {targets}",
        "about 1.5 hours of one core",
        "the file's model card has the accuracy; docs/experiments.md has the stages",
    )
    yield first
    command = f"vitkit finetune runs/embedded TINY-IMAGENET --recipe embedded-continue --out runs/embedded-2 {targets}"
    summary = "A further stage of the embedded weights, from those of the stage before"
    yield replace(first, name="embedded-continue", make=next_stage, summary=summary, command=command, rates=(0.02,))


def imagenet_distilled(model: str) -> RunConfig:
    """Return the run of a model of the paper, without a teacher."""
    return RunConfig(
        model=ModelChoice(name=model, image_size=224, settings=("dropout.stochastic_depth=0.1",)),
        data=IMAGENET.data(preprocessing="deit"),
        augment=AugmentConfig(
            crop_area=(0.08, 1.0), randaugment_layers=2, randaugment_magnitude=9, erasing=0.25, mixup=0.8, cutmix=1.0
        ),
        objective=ObjectiveConfig(
            name="distillation", smoothing=0.1, distillation=DistillationConfig(kind="hard", weight=0.5, token=True)
        ),
        optimizer=OptimizerConfig(name="adam", weight_decay=0.05, clip=None),
        schedule=imagenet_schedule(
            batch_size=BATCH_SIZE, epochs=300.0, lr=5e-4 * BATCH_SIZE / 512, warmup_epochs=5, end_lr=1e-5
        ),
    )


def digits_distilled() -> RunConfig:
    """Return the digits recipe for a smaller model with a distillation token; the teacher is that recipe's run."""
    teacher = digits()
    shape = ("width=32", "depth=2", "heads=1", "mlp_dim=64", "block.activation=gelu_erf")
    return replace(
        teacher,
        model=ModelChoice(name="Ti/16", image_size=16, patch_size=4, settings=shape),
        objective=ObjectiveConfig(name="distillation", distillation=DistillationConfig(teacher="runs/digits")),
        schedule=replace(teacher.schedule, epochs=50.0),
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
        *("width=192", "depth=7", "heads=6", "mlp_dim=768", "pooling=mean", "block.activation=gelu_erf"),
        *("backbone.units=[]", "backbone.root=stack", "backbone.root_width=128", "backbone.root_units=[1, 1]"),
        "positions.kind=sincos_2d",
    )
    return ModelChoice(name="Ti/16", image_size=image_size, patch_size=2, settings=settings)
