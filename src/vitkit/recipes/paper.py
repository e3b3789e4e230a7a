"""Recipes of the ViT paper (Tables 3 and 4) and of "How to train your ViT?" (AugReg).

AugReg's settings are from its paper (Steiner et al., 2021) and from its authors' configurations in big_vision: Adam,
batch 4096, lr 1e-3, warm-up 10k steps, cosine, clip 1.0, 300 epochs, no hidden layer in the head. The paper crosses
each level with weight decay 0.1 or 0.03, and with dropout and stochastic depth both 0 or both 0.1.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

from vitkit.data.config import AUGREG_LEVELS, AugmentConfig, augreg_config
from vitkit.model.config import ViTConfig
from vitkit.objectives.config import ObjectiveConfig
from vitkit.recipes.recipe import Recipe, slug
from vitkit.training.config import DataConfig, ModelChoice, OptimizerConfig, RunConfig, ScheduleConfig
from vitkit.zoo.registry import configure

PRETRAINING = "The paper, pre-training (Table 3)"
FINETUNING = "The paper, fine-tuning (Table 4)"
AUGREG = "How to train your ViT? (AugReg)"

IMAGENET_IMAGES = 1_281_167
HELD_OUT = 0.004
"""51,200 of the 12.7 M images of ImageNet-21k, as in big_vision's configuration; the paper does not say."""


def imagenet_schedule(
    *, batch_size: int, epochs: float, lr: float, warmup_epochs: int, end_lr: float = 0.0
) -> ScheduleConfig:
    """Return a cosine schedule on ImageNet whose warm-up is a number of epochs."""
    warmup_steps = round(warmup_epochs * IMAGENET_IMAGES / batch_size)
    return ScheduleConfig(
        batch_size=batch_size, epochs=epochs, lr=lr, warmup_steps=warmup_steps, decay="cosine", end_lr=end_lr
    )


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A pre-training dataset with its settings in Table 3.

    `held_out` is the fraction for validation if the dataset has no validation split. With `multi_label`, images may
    have several labels: the loss is a sigmoid and the head's bias -10.
    """

    name: str
    title: str
    path: str
    layout: str | None = None
    held_out: float = HELD_OUT
    multi_label: bool = True
    decay: Literal["cosine", "linear"] = "linear"
    end_lr: float = 1e-5
    weight_decay: float
    dropout: float
    clip: float | None = None

    def data(self, *, preprocessing: str = "paper") -> DataConfig:
        """Return the dataset of a run."""
        return DataConfig(path=self.path, layout=self.layout, val_fraction=self.held_out, preprocessing=preprocessing)

    def pretraining(self, model: ModelChoice, *, epochs: int, lr: float) -> RunConfig:
        """Return a pre-training run (appendix B.1)."""
        return RunConfig(
            model=model,
            data=self.data(),
            augment=AugmentConfig(crop="inception", flip=True),
            objective=ObjectiveConfig(loss="sigmoid" if self.multi_label else "softmax"),
            optimizer=OptimizerConfig(
                name="adam", beta1=0.9, beta2=0.999, weight_decay=self.weight_decay, clip=self.clip
            ),
            schedule=ScheduleConfig(
                batch_size=4096, epochs=float(epochs), lr=lr, warmup_steps=10_000, decay=self.decay, end_lr=self.end_lr
            ),
        )


JFT = Corpus(name="jft300m", title="JFT-300M", path="JFT-300M", weight_decay=0.1, dropout=0.0)
IMAGENET_21K = Corpus(name="imagenet21k", title="ImageNet-21k", path="imagenet21k", weight_decay=0.03, dropout=0.1)
IMAGENET = Corpus(
    name="imagenet",
    title="ImageNet",
    path="imagenet",
    layout="imagenet",
    held_out=0.0,
    multi_label=False,
    decay="cosine",
    end_lr=0.0,
    weight_decay=0.3,
    dropout=0.1,
    clip=1.0,
)


class PretrainingRow(NamedTuple):
    """One run of Table 3: compute in exaFLOPs, and ImageNet top-1 in % after fine-tuning at 384 pixels."""

    corpus: Corpus
    model: str
    epochs: int
    lr: float
    exaflops: float
    top1: float | None


# Compute and accuracy of JFT-300M are Table 6's; other accuracies are Table 5's, other compute is counted by
# vitkit.zoo for 14 M and 1.281 M images.
TABLE3 = (
    PretrainingRow(JFT, "B/16", 7, 8e-4, 224, 84.15),
    PretrainingRow(JFT, "B/32", 7, 8e-4, 55, 80.73),
    PretrainingRow(JFT, "L/32", 7, 6e-4, 196, 84.37),
    PretrainingRow(JFT, "L/16", 7, 4e-4, 783, 86.30),
    PretrainingRow(JFT, "L/16", 14, 4e-4, 1567, 87.12),
    PretrainingRow(JFT, "H/14", 14, 3e-4, 4262, 88.08),
    PretrainingRow(JFT, "BiT-R50x1", 7, 1e-3, 50, 77.54),
    PretrainingRow(JFT, "BiT-R50x2", 7, 1e-3, 199, 82.12),
    PretrainingRow(JFT, "BiT-R101x1", 7, 8e-4, 96, 80.67),
    PretrainingRow(JFT, "BiT-R152x1", 7, 6e-4, 141, 81.88),
    PretrainingRow(JFT, "BiT-R152x2", 7, 6e-4, 563, 84.97),
    PretrainingRow(JFT, "R50+B/16", 7, 8e-4, 274, 85.58),
    PretrainingRow(JFT, "R50+B/32", 7, 8e-4, 106, 84.90),
    PretrainingRow(JFT, "R50+L/32", 7, 2e-4, 246, 85.68),
    PretrainingRow(JFT, "R50+L/16", 7, 4e-4, 859, 86.60),
    PretrainingRow(JFT, "R50+L/16", 14, 4e-4, 1668, 87.12),
    PretrainingRow(IMAGENET_21K, "B/16", 90, 1e-3, 133, 83.97),
    PretrainingRow(IMAGENET_21K, "B/32", 90, 1e-3, 33, 81.28),
    PretrainingRow(IMAGENET_21K, "L/16", 30, 1e-3, 155, 85.15),
    PretrainingRow(IMAGENET_21K, "L/16", 90, 1e-3, 465, 85.15),
    PretrainingRow(IMAGENET_21K, "L/32", 30, 1e-3, 39, 80.99),
    PretrainingRow(IMAGENET_21K, "L/32", 90, 1e-3, 116, 80.99),
    PretrainingRow(IMAGENET, "B/16", 300, 3e-3, 40, 77.91),
    PretrainingRow(IMAGENET, "B/32", 300, 3e-3, 10, 73.38),
    PretrainingRow(IMAGENET, "L/16", 300, 3e-3, 142, 76.53),
    PretrainingRow(IMAGENET, "L/32", 300, 3e-3, 35, 71.16),
    PretrainingRow(IMAGENET, "H/14", 300, 3e-3, 386, None),
)
TPU_DAYS = {("L/16", 14): "0.68k", ("H/14", 14): "2.5k"}


class FinetuningRow(NamedTuple):
    """A dataset of Table 4. A sweep holds out `dev_fraction` of the training images; without a sweep, `lr` is used."""

    name: str
    title: str
    steps: int
    warmup_steps: int
    lr: float
    dev_fraction: float
    time: str
    expected: str
    rates: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03)
    image_size: int = 384
    ema_decay: float | None = None


IMAGENET_RATES = (0.003, 0.01, 0.03, 0.06)
"""The last of them is for ResNets and hybrids."""

# Table 4 has no warm-up; 500 steps is the released code's, and 100 its choice for runs of 500 steps. Times of B/16
# are those its authors report for eight V100; accuracies of B/16 pre-trained on ImageNet-21k are Table 5's.
_B16 = "B/16 on eight V100 (the released code's README)"
_SHORT = "17 minutes for 500 steps of B/16 on eight V100 (the released code's README, on CIFAR)"
_FROM_21K = "with B/16 pre-trained on ImageNet-21k (Table 5)"

_L16_512 = "longer than the 59 hours of L/16 at 384 pixels on eight V100 (the released code's README)"
_HEADLINE = "pixels with averaged weights, the headline run of"

TABLE4 = (
    FinetuningRow(
        *("imagenet", "ImageNet", 20_000, 500, 0.03, 0.01, f"18 hours, {_B16}", f"83.97 % {_FROM_21K}"),
        rates=IMAGENET_RATES,
    ),
    FinetuningRow("cifar10", "CIFAR-10", 10_000, 500, 0.01, 0.02, f"7 hours, {_B16}", f"98.95 % {_FROM_21K}"),
    FinetuningRow("cifar100", "CIFAR-100", 10_000, 500, 0.01, 0.02, f"7 hours, {_B16}", f"91.67 % {_FROM_21K}"),
    FinetuningRow("pets", "Oxford-IIIT Pets", 500, 100, 0.01, 0.1, _SHORT, f"94.43 % {_FROM_21K}"),
    FinetuningRow("flowers", "Oxford Flowers-102", 500, 100, 0.01, 0.1, _SHORT, f"99.38 % {_FROM_21K}"),
    FinetuningRow(
        *("vtab1k", "one of VTAB-1k's 19 tasks", 2500, 500, 0.01, 0.2, "2500 steps for each of 19 tasks; not timed"),
        "72.72 % over the 19 tasks with L/16 pre-trained on ImageNet-21k (Table 2)",
        rates=(0.01,),
    ),
    FinetuningRow(
        *("imagenet-l16-512", f"ImageNet at 512 {_HEADLINE} L/16", 20_000, 500, 0.03, 0.01, _L16_512),
        "87.76 % with L/16 from JFT-300M, 85.30 % from ImageNet-21k (Table 2)",
        *(IMAGENET_RATES, 512, 0.9999),
    ),
    FinetuningRow(
        *("imagenet-h14-518", f"ImageNet at 518 {_HEADLINE} H/14", 20_000, 500, 0.03, 0.01, "not timed"),
        "88.55 % with H/14 from JFT-300M (Table 2)",
        *(IMAGENET_RATES, 518, 0.9999),
    ),
)


class AugregRow(NamedTuple):
    """A model of AugReg, on ImageNet and on ImageNet-21k.

    Compute of 300 epochs is by our count. The best levels are those of big_vision's configurations, with weight decay
    0.1 and no dropout.
    """

    exaflops: tuple[float, float]
    best: tuple[str, str] | None = None


AUGREG_MODELS = {
    "R+Ti/16": AugregRow((1.0, 10.9)),
    "Ti/16": AugregRow((2.9, 31.6), ("light1", "none")),
    "S/32": AugregRow((2.6, 28.8), ("light2", "none")),
    "S/16": AugregRow((10.6, 116), ("medium2", "light1")),
    "B/32": AugregRow((10.2, 111), ("medium2", "light2")),
    "B/16": AugregRow((40.5, 443), ("medium2", "light2")),
    "R26+S/32": AugregRow((8.0, 87.3)),
    "L/16": AugregRow((142, 1551), ("medium2", "medium2")),
    "R50+L/32": AugregRow((44.8, 489)),
}


def recipes() -> Iterator[Recipe]:
    """Yield the recipes of Table 3, Table 4 and AugReg."""
    yield from map(pretraining_recipe, TABLE3)
    yield from map(finetuning_recipe, TABLE4)
    for corpus in (IMAGENET, IMAGENET_21K):
        for model in AUGREG_MODELS:
            yield from (augreg_recipe(corpus, model, level) for level in AUGREG_LEVELS)


def train_command(name: str) -> str:
    """Return the command of a large recipe."""
    return f"torchrun --nproc-per-node 8 -m vitkit train {name} --out runs/{name} data=FOLDER"


def pretraining_recipe(row: PretrainingRow) -> Recipe:
    """Return the recipe of a row of Table 3; the name has the epochs if two rows differ only in them."""
    corpus = row.corpus
    is_unique = sum((other.corpus, other.model) == (corpus, row.model) for other in TABLE3) == 1
    name = f"{corpus.name}-{slug(row.model)}" + ("" if is_unique else f"-{row.epochs}ep")
    time = f"{row.exaflops:g} exaFLOPs " + ("(Table 6)" if corpus is JFT else "by our count; not timed")
    if corpus is JFT and (days := TPU_DAYS.get((row.model, row.epochs))):
        time += f", {days} TPUv3-core-days (Table 2)"
    source = "(Table 5)" if is_unique else "(Table 5, which does not say after how many epochs)"
    if corpus is JFT:
        source = "(Table 6). JFT-300M is not public: set data.path to a similar dataset"
    expected = "not in the paper: Table 5 does not have this model"
    if row.top1 is not None:
        expected = f"ImageNet {row.top1:.2f} % after fine-tuning at 384 pixels {source}"
    summary = f"{row.model} on {corpus.title}, {row.epochs} epochs"
    return Recipe(PRETRAINING, name, partial(pretraining, row), summary, train_command(name), time, expected)


def pretraining(row: PretrainingRow) -> RunConfig:
    """Return the run of a row of Table 3: a ViT's head has a hidden layer, and dropout is the corpus's."""
    model, settings = configure(row.model), []
    if isinstance(model, ViTConfig):
        settings.append(f"head.pre_logits={model.width}")
        if row.corpus.multi_label:
            settings.append("head.bias=-10.0")
        if row.corpus.dropout:
            settings.append(f"dropout.dense={row.corpus.dropout}")
    choice = ModelChoice(name=row.model, image_size=224, settings=tuple(settings))
    return row.corpus.pretraining(choice, epochs=row.epochs, lr=row.lr)


def finetuning_recipe(row: FinetuningRow) -> Recipe:
    """Return the recipe of a row of Table 4."""
    name, summary = f"finetune-{row.name}", f"{row.title}, {row.steps} steps"
    sweep = " --sweep" if len(row.rates) > 1 else ""
    command = f"vitkit finetune WEIGHTS FOLDER --recipe {name} --out runs/{name}{sweep}"
    return Recipe(FINETUNING, name, partial(finetuning, row), summary, command, row.time, row.expected, row.rates)


def finetuning(row: FinetuningRow) -> RunConfig:
    """Return the run of a row of Table 4 (appendix B.1.1), without initial weights and data path.

    The pre-training head is replaced by a single linear layer. ImageNet's validation split is the test split.
    """
    path = row.name.partition("-")[0]
    return RunConfig(
        model=ModelChoice(image_size=row.image_size, new_head=True),
        data=DataConfig(path=path, layout="val-as-test" if path == "imagenet" else None, val_fraction=row.dev_fraction),
        augment=AugmentConfig(crop="inception", flip=True),
        optimizer=OptimizerConfig(name="sgd", momentum=0.9, weight_decay=0.0, clip=1.0, ema_decay=row.ema_decay),
        schedule=ScheduleConfig(
            batch_size=512,
            epochs=None,
            steps=row.steps,
            lr=row.lr,
            warmup_steps=row.warmup_steps,
            decay="cosine",
            end_lr=0.0,
        ),
    )


def augreg_recipe(corpus: Corpus, model: str, level: str) -> Recipe:
    """Return the recipe of a model at a level. The result names the authors' best; accuracies are in their figures."""
    name = f"augreg-{slug(model)}-{level}" + ("-21k" if corpus is IMAGENET_21K else "")
    row, expected = AUGREG_MODELS[model], "see figure 4 of the paper"
    best = row.best and row.best[corpus is IMAGENET_21K]
    if best == level:
        expected = f"the best level for {model} on {corpus.title}, by big_vision's configuration"
    elif best is not None:
        expected = f"big_vision's configuration uses {best} for {model} on {corpus.title}; {expected}"
    summary = f"{model} on {corpus.title} with augmentation {level}, 300 epochs"
    time = f"{row.exaflops[corpus is IMAGENET_21K]:g} exaFLOPs by our count; not timed"
    return Recipe(AUGREG, name, partial(augreg, corpus, model, level), summary, train_command(name), time, expected)


def augreg(corpus: Corpus, model: str, level: str) -> RunConfig:
    """Return the run of a model at a level. Evaluation squashes, as in the ViT paper; big_vision crops the center.

    Weight decay is multiplied by the lr of 1e-3, that of big_vision (1e-4) is not.
    """
    choice = ModelChoice(name=model, image_size=224, settings=("head.bias=-10.0",) if corpus.multi_label else ())
    settings = replace(corpus, weight_decay=0.1, clip=1.0, decay="cosine", end_lr=0.0)
    return replace(settings.pretraining(choice, epochs=300, lr=1e-3), augment=augreg_config(level))
