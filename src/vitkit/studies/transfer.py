"""Design of the two studies of transfer over data size: upstream ladder, models, downstream sets and claims."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from vitkit.recipes.paper import IMAGENET, IMAGENET_21K, IMAGENET_IMAGES, JFT, Corpus
from vitkit.studies.families import FINETUNE_SETTINGS, PAPER_BATCH, RATES, UPSTREAM_SETTINGS, bit, vit, with_paper_scale
from vitkit.studies.study import UPSTREAM, Axis, Claim, Figure, Settings, Study, Transfer
from vitkit.zoo.cost import JFT_IMAGES

MODELS: Axis = {"small ViT": vit(width=64), "large ViT": vit(width=128, depth=8), "BiT": bit()}
DATASETS = ("cifar10", "cifar100", "pets")
UPSTREAMS: Axis = {
    "0.1": {"data.fraction": 0.1},
    "1.0": {"data.fraction": 1.0},
    "1.5": {"data.fraction": 1.0, "data.add": ["cifar100"]},
}
"""All images are 1.0; the training images of CIFAR-100 are half as many as those of Tiny-ImageNet."""
UNSEEN = "dataset!=cifar100"
"""The third rung is trained on the labels of CIFAR-100, which is therefore no measure of transfer."""


def make_claims(models: Iterable[str], upstreams: tuple[str, ...], *, where: tuple[str, ...]) -> tuple[Claim, ...]:
    """Return the claims; `upstreams` are in order of size, the largest first."""
    rising = (
        Claim(
            text=f"more pre-training data helps {name}",
            kind="order",
            column="top1",
            axis="upstream",
            labels=upstreams,
            where=(f"model={name}", *where),
        )
        for name in models
    )
    gain = Claim(
        text="the larger ViT gains more from data than the smaller one",
        kind="steeper",
        column="top1",
        axis="model",
        labels=("large ViT", "small ViT"),
        where=where,
        x="upstream",
    )
    return (*rising, gain)


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A pre-training dataset of the paper with the number of its images, and the epochs and rate of Table 3.

    `lr` None is that of each model.
    """

    corpus: Corpus
    images: int
    epochs: int
    lr: float | None = None

    @property
    def label(self) -> str:
        """Label of the axis: the number of images."""
        return f"{self.images:.3g}".replace("+0", "")

    @property
    def settings(self) -> Settings:
        """Settings of a run on this dataset."""
        corpus, rates = self.corpus, {} if self.lr is None else {"schedule.lr": self.lr}
        bias = -10.0 if corpus.multi_label else 0.0
        return {
            "data.path": corpus.name,
            "data.layout": corpus.layout or "none",
            "data.val_fraction": corpus.held_out,
            "objective.loss": "sigmoid" if corpus.multi_label else "softmax",
            "optimizer.weight_decay": corpus.weight_decay,
            "optimizer.clip": "none" if corpus.clip is None else corpus.clip,
            "schedule.decay": corpus.decay,
            "schedule.end_lr": corpus.end_lr,
            "schedule.steps": round(self.images * self.epochs / PAPER_BATCH),
            "model.settings": [f"head.bias={bias}", f"dropout.dense={corpus.dropout}"],
        } | rates


PAPER_RUNGS = (
    Rung(corpus=JFT, images=JFT_IMAGES, epochs=7),
    Rung(corpus=IMAGENET_21K, images=14_000_000, epochs=90, lr=1e-3),
    Rung(corpus=IMAGENET, images=IMAGENET_IMAGES, epochs=300, lr=3e-3),
)


def transfer_study(*, name: str, title: str, paper: str, figure: Figure, paper_numbers: Mapping[str, str]) -> Study:
    """Return one of the two studies."""
    laptop = Study(
        name=name,
        title=title,
        paper=paper,
        axes={"model": MODELS, "upstream": UPSTREAMS},
        settings=UPSTREAM_SETTINGS,
        data=(UPSTREAM, *DATASETS),
        transfer=Transfer(
            axes={"dataset": {name: {} for name in DATASETS}}, rates=(0.003, 0.01, 0.03), settings=FINETUNE_SETTINGS
        ),
        rates=RATES,
        tune_by="model",
        claims=make_claims(MODELS, ("1.5", "1.0", "0.1"), where=(UNSEEN,)),
        figure=figure,
        quick={"dataset": ("cifar10",), "model": ("small ViT", "large ViT")},
        paper_numbers=paper_numbers,
        hours="9 to 19",
        notes="Pre-training on 0.1 and all of the images, and on all with the training images of CIFAR-100 (1.5). "
        "The claims leave out transfer to CIFAR-100, whose labels the third has seen.",
    )
    return add_paper_scale(laptop)


def add_paper_scale(laptop: Study) -> Study:
    """Return the study that can also have ViTs on the paper's datasets; BiT's numbers are those of its own authors."""
    rates = {"small ViT": ("B/16", 768, 8e-4), "large ViT": ("L/16", 1024, 4e-4)}
    models: Axis = {
        label: {
            "model.name": model,
            "model.image_size": 224,
            "model.settings": [f"head.pre_logits={width}"],
            "schedule.lr": lr,
        }
        for label, (model, width, lr) in rates.items()
    }
    upstreams = {rung.label: rung.settings for rung in PAPER_RUNGS}
    return with_paper_scale(
        laptop,
        axes={"model": models, "upstream": upstreams},
        settings={"recipe": "jft300m-b16"},
        data=(*(rung.corpus.name for rung in PAPER_RUNGS), *DATASETS),
        transfer=Transfer(
            axes={"dataset": {name: {"recipe": f"finetune-{name}", "model.image_size": 384} for name in DATASETS}},
            rates=(0.001, 0.003, 0.01, 0.03),
        ),
        claims=make_claims(models, tuple(upstreams), where=()),
        figure=replace(laptop.figure, x_label="Pre-training images"),
        notes="ViTs pre-trained on ImageNet, ImageNet-21k and JFT-300M.",
    )
