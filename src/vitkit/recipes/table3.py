"""The rows of the paper's Table 3 go in, the runs that pre-train its models come out."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from vitkit.data.augment import AugmentConfig
from vitkit.model.config import ViTConfig
from vitkit.recipes.recipe import Recipe, slug
from vitkit.train.config import (
    DataConfig,
    ModelChoice,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
)
from vitkit.zoo.lookup import configure

GROUP = "The paper, pre-training (Table 3)"


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A data set to pre-train on, with what Table 3 says of all its rows.

    `held_out` is the share that runs are watched on where the data have no validation split of their own. `several`
    says whether an image may have more than one label, which makes the loss a sigmoid and the head's bias -10.
    """

    name: str
    title: str
    path: str
    kind: str | None = None
    held_out: float = 0.0
    several: bool = False
    decay: Literal["cosine", "linear"] = "linear"
    end_lr: float = 1e-5
    weight_decay: float
    dropout: float
    clip: float | None = None


HELD_OUT = 0.004
"""51,200 of the 12.7 M images of ImageNet-21k, as in big_vision's configuration; the paper does not say."""

JFT = Corpus(
    name="jft300m",
    title="JFT-300M",
    path="JFT-300M",
    held_out=HELD_OUT,
    several=True,
    weight_decay=0.1,
    dropout=0.0,
)
IMAGENET_21K = Corpus(
    name="imagenet21k",
    title="ImageNet-21k",
    path="imagenet21k",
    held_out=HELD_OUT,
    several=True,
    weight_decay=0.03,
    dropout=0.1,
)
IMAGENET = Corpus(
    name="imagenet",
    title="ImageNet",
    path="imagenet",
    kind="imagenet",
    decay="cosine",
    end_lr=0.0,
    weight_decay=0.3,
    dropout=0.1,
    clip=1.0,
)


class Row(NamedTuple):
    """One run of Table 3: compute in exaFLOPs, and ImageNet top-1 in % after fine-tuning at 384 pixels."""

    corpus: Corpus
    model: str
    epochs: int
    lr: float
    exaflops: float
    top1: float | None


# Compute and accuracy of JFT-300M are Table 6's; other accuracies are Table 5's, other compute is counted by
# vitkit.zoo for 14 M and 1.281 M images.
ROWS = (
    Row(JFT, "B/16", 7, 8e-4, 224, 84.15),
    Row(JFT, "B/32", 7, 8e-4, 55, 80.73),
    Row(JFT, "L/32", 7, 6e-4, 196, 84.37),
    Row(JFT, "L/16", 7, 4e-4, 783, 86.30),
    Row(JFT, "L/16", 14, 4e-4, 1567, 87.12),
    Row(JFT, "H/14", 14, 3e-4, 4262, 88.08),
    Row(JFT, "BiT-R50x1", 7, 1e-3, 50, 77.54),
    Row(JFT, "BiT-R50x2", 7, 1e-3, 199, 82.12),
    Row(JFT, "BiT-R101x1", 7, 8e-4, 96, 80.67),
    Row(JFT, "BiT-R152x1", 7, 6e-4, 141, 81.88),
    Row(JFT, "BiT-R152x2", 7, 6e-4, 563, 84.97),
    Row(JFT, "R50+B/16", 7, 8e-4, 274, 85.58),
    Row(JFT, "R50+B/32", 7, 8e-4, 106, 84.90),
    Row(JFT, "R50+L/32", 7, 2e-4, 246, 85.68),
    Row(JFT, "R50+L/16", 7, 4e-4, 859, 86.60),
    Row(JFT, "R50+L/16", 14, 4e-4, 1668, 87.12),
    Row(IMAGENET_21K, "B/16", 90, 1e-3, 133, 83.97),
    Row(IMAGENET_21K, "B/32", 90, 1e-3, 33, 81.28),
    Row(IMAGENET_21K, "L/16", 30, 1e-3, 155, 85.15),
    Row(IMAGENET_21K, "L/16", 90, 1e-3, 465, 85.15),
    Row(IMAGENET_21K, "L/32", 30, 1e-3, 39, 80.99),
    Row(IMAGENET_21K, "L/32", 90, 1e-3, 116, 80.99),
    Row(IMAGENET, "B/16", 300, 3e-3, 40, 77.91),
    Row(IMAGENET, "B/32", 300, 3e-3, 10, 73.38),
    Row(IMAGENET, "L/16", 300, 3e-3, 142, 76.53),
    Row(IMAGENET, "L/32", 300, 3e-3, 35, 71.16),
    Row(IMAGENET, "H/14", 300, 3e-3, 386, None),
)

_TPU_DAYS = {("L/16", 14): "0.68k", ("H/14", 14): "2.5k"}


def recipes() -> Iterator[Recipe]:
    """A recipe for each row; the epochs are in the name where they tell two rows apart.

    >>> [recipe.name for recipe in recipes()][3:5]
    ['jft300m-l16-7ep', 'jft300m-l16-14ep']
    """
    for row in ROWS:
        alike = [other for other in ROWS if (other.corpus, other.model) == (row.corpus, row.model)]
        epochs = f"-{row.epochs}ep" if len(alike) > 1 else ""
        name = f"{row.corpus.name}-{slug(row.model)}{epochs}"
        yield Recipe(
            name=name,
            group=GROUP,
            summary=f"{row.model} on {row.corpus.title}, {row.epochs} epochs",
            command=train_command(name),
            time=_time(row),
            expected=_expected(row, alone=len(alike) == 1),
            make=partial(pretraining, row),
        )


def train_command(name: str) -> str:
    """How a large recipe is run: on as many machines as there are, with the data given."""
    return f"torchrun --nproc-per-node 8 -m vitkit train {name} --out runs/{name} data=FOLDER"


def pretraining(row: Row) -> RunConfig:
    """The run of one row, by appendix B.1."""
    corpus = row.corpus
    return RunConfig(
        model=ModelChoice(name=row.model, image_size=224, settings=_settings(row)),
        data=DataConfig(path=corpus.path, kind=corpus.kind, val_share=corpus.held_out, preprocessing="paper"),
        augment=AugmentConfig(crop="inception", flip=True),
        objective=ObjectiveConfig(loss="sigmoid" if corpus.several else "softmax"),
        optimizer=OptimizerConfig(
            name="adam", beta1=0.9, beta2=0.999, weight_decay=corpus.weight_decay, clip=corpus.clip
        ),
        schedule=ScheduleConfig(
            batch_size=4096,
            epochs=float(row.epochs),
            lr=row.lr,
            warmup_steps=10_000,
            decay=corpus.decay,
            end_lr=corpus.end_lr,
        ),
    )


def _settings(row: Row) -> tuple[str, ...]:
    """What pre-training changes of the model: the head's hidden layer and bias, and dropout."""
    model = configure(row.model)
    if not isinstance(model, ViTConfig):
        return ()
    settings = [f"head.pre_logits={model.width}"]
    if row.corpus.several:
        settings.append("head.bias=-10.0")
    if row.corpus.dropout:
        settings.append(f"dropout.dense={row.corpus.dropout}")
    return tuple(settings)


def _time(row: Row) -> str:
    """What the run costs."""
    if row.corpus is not JFT:
        return f"{row.exaflops:g} exaFLOPs by our count; not timed"
    days = _TPU_DAYS.get((row.model, row.epochs))
    return f"{row.exaflops:g} exaFLOPs (Table 6)" + (f", {days} TPUv3-core-days (Table 2)" if days else "")


def _expected(row: Row, *, alone: bool) -> str:
    """What the paper found, and where it says so."""
    if row.top1 is None:
        return "not in the paper: Table 5 leaves this model out"
    found = f"ImageNet {row.top1:.2f} % after fine-tuning at 384 pixels"
    if row.corpus is JFT:
        return f"{found} (Table 6). JFT-300M is not public: data.path is for whoever has such a set"
    return f"{found} (Table 5)" if alone else f"{found} (Table 5, which does not say after how many epochs)"
