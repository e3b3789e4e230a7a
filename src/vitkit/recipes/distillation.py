"""A teacher, a smaller model and images go in, a run in which the smaller one learns from both comes out.

Facts are from the table of hyper-parameters of "Training data-efficient image transformers & distillation through
attention" (Touvron et al., 2020), and where that is silent from its released code: 300 epochs, batch 1024, AdamW, lr
5e-4 × batch / 512, weight decay 0.05, warm-up of 5 epochs, cosine to 1e-5, stochastic depth 0.1, label smoothing 0.1,
RandAugment 9/0.5, mixup 0.8, cutmix 1, erasing 0.25, no clipping, crops of 8 % to all of an image, and hard
distillation of weight 0.5.

What our augmentation cannot say of it: images are not repeated within a batch (three times there); the magnitude of
RandAugment does not vary from image to image (by 0.5 there), an operation is applied always and not in half of the
cases, and the set and the scale of operations are Google's; erasing puts in noise of evenly spread pixels, not of
normally distributed ones. The teacher there is a RegNetY-16GF of 82.9 %, a ResNet's relative that vitkit has not.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from vitkit.data.augment import AugmentConfig
from vitkit.objectives.distillation import DistillationConfig
from vitkit.recipes.recipe import Recipe, slug
from vitkit.recipes.small import digits
from vitkit.recipes.table3 import IMAGENET
from vitkit.train.config import DataConfig, ModelChoice, ObjectiveConfig, OptimizerConfig, RunConfig, ScheduleConfig

GROUP = "Distillation (DeiT)"

BATCH_SIZE = 1024
IMAGES = 1_281_167


class Row(NamedTuple):
    """One distilled model of the paper: operations of 300 epochs by our count, without the teacher's, and top-1."""

    model: str
    exaflops: float
    top1: float


ROWS = (Row("Ti/16", 2.9, 74.5), Row("S/16", 10.7, 81.2), Row("B/16", 40.7, 83.4))


def recipes() -> Iterator[Recipe]:
    """The small run, then the paper's three models.

    >>> [recipe.name for recipe in recipes()][:2]
    ['digits-distilled', 'deit-ti16-distilled']
    """
    yield Recipe(
        name="digits-distilled",
        group=GROUP,
        summary="Digits by a model a tenth the size of that of digits, which is its teacher",
        command="vitkit train digits-distilled --out runs/small-digits objective.distillation.teacher=runs/digits",
        time="a minute or two on two cores",
        expected="95.7 % of the 359 test images over three seeds, 95.4 % without a teacher; docs/experiments.md",
        make=digits_distilled,
    )
    for row in ROWS:
        name = f"deit-{slug(row.model)}-distilled"
        yield Recipe(
            name=name,
            group=GROUP,
            summary=f"{row.model} on ImageNet with a teacher, 300 epochs",
            command=f"torchrun --nproc-per-node 8 -m vitkit train {name} --out runs/{name} data=FOLDER "
            "objective.distillation.teacher=RUN",
            time=f"{row.exaflops:g} exaFLOPs by our count, and the teacher's forward passes; not timed",
            expected=f"ImageNet {row.top1:.1f} % with a RegNetY-16GF for a teacher (the paper)",
            make=partial(distilled, row.model),
        )


def distilled(model: str) -> RunConfig:
    """The run of one model of the paper; the teacher is still to be named."""
    an_epoch = IMAGES / BATCH_SIZE
    return RunConfig(
        model=ModelChoice(name=model, image_size=224, settings=("dropout.stochastic_depth=0.1",)),
        data=DataConfig(path=IMAGENET.path, kind=IMAGENET.kind, val_share=IMAGENET.held_out, preprocessing="deit"),
        augment=AugmentConfig(
            crop_area=(0.08, 1.0),
            randaugment_layers=2,
            randaugment_magnitude=9,
            erasing=0.25,
            mixup=0.8,
            cutmix=1.0,
        ),
        objective=ObjectiveConfig(
            name="distillation",
            smoothing=0.1,
            distillation=DistillationConfig(kind="hard", weight=0.5, token=True),
        ),
        optimizer=OptimizerConfig(name="adam", weight_decay=0.05, clip=None),
        schedule=ScheduleConfig(
            batch_size=BATCH_SIZE,
            epochs=300.0,
            lr=5e-4 * BATCH_SIZE / 512,
            warmup_steps=round(5 * an_epoch),
            decay="cosine",
            end_lr=1e-5,
        ),
    )


def digits_distilled() -> RunConfig:
    """The digits recipe for a smaller model with a class and a distillation token; its teacher is that recipe's run."""
    teacher = digits()
    shape = ("width=32", "depth=2", "heads=1", "mlp_dim=64", "block.activation=gelu_erf")
    return replace(
        teacher,
        model=ModelChoice(name="Ti/16", image_size=16, patch_size=4, settings=shape),
        objective=ObjectiveConfig(name="distillation", distillation=DistillationConfig(teacher="runs/digits")),
        schedule=replace(teacher.schedule, epochs=50.0),
    )
