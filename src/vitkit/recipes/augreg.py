"""A model, a level of augmentation and a data set go in, a run of "How to train your ViT?" comes out.

Facts are from that paper (Steiner et al., 2021) and from the configurations that its authors released in big_vision:
Adam, batch 4096, lr 1e-3, warm-up 10k steps, cosine, clip 1.0, 300 epochs, no hidden layer in the head. The paper
crosses each level with weight decay 0.1 or 0.03, and with dropout and stochastic depth both 0 or both 0.1.
"""

from collections.abc import Iterator
from functools import partial

from vitkit.data.augment import augreg
from vitkit.recipes.recipe import Recipe, slug
from vitkit.recipes.table3 import IMAGENET, IMAGENET_21K, Corpus, train_command
from vitkit.train.config import DataConfig, ModelChoice, ObjectiveConfig, OptimizerConfig, RunConfig, ScheduleConfig

GROUP = "How to train your ViT? (AugReg)"
LEVELS = ("none", "light1", "light2", "medium1", "medium2", "strong1", "strong2")
EXAFLOPS = {
    "R+Ti/16": (1.0, 10.9),
    "Ti/16": (2.9, 31.6),
    "S/32": (2.6, 28.8),
    "S/16": (10.6, 116),
    "B/32": (10.2, 111),
    "B/16": (40.5, 443),
    "R26+S/32": (8.0, 87.3),
    "L/16": (142, 1551),
    "R50+L/32": (44.8, 489),
}
"""What 300 epochs of the paper's models take on ImageNet and on ImageNet-21k, by our count."""

BEST = {
    IMAGENET.name: {
        "Ti/16": "light1",
        "S/32": "light2",
        "S/16": "medium2",
        "B/32": "medium2",
        "B/16": "medium2",
        "L/16": "medium2",
    },
    IMAGENET_21K.name: {
        "Ti/16": "none",
        "S/32": "none",
        "S/16": "light1",
        "B/32": "light2",
        "B/16": "light2",
        "L/16": "medium2",
    },
}
"""The level that big_vision's configurations take for each model, with weight decay 0.1 and no dropout."""

WEIGHT_DECAY = 0.1
"""big_vision writes 1e-4, which is not multiplied by the lr of 1e-3; ours is."""


def recipes() -> Iterator[Recipe]:
    """Every model at every level, on ImageNet and on ImageNet-21k.

    >>> [recipe.name for recipe in recipes()][:2]
    ['augreg-r-ti16-none', 'augreg-r-ti16-light1']
    """
    for corpus, ending in ((IMAGENET, ""), (IMAGENET_21K, "-21k")):
        for model, exaflops in EXAFLOPS.items():
            for level in LEVELS:
                name = f"augreg-{slug(model)}-{level}{ending}"
                yield Recipe(
                    name=name,
                    group=GROUP,
                    summary=f"{model} on {corpus.title} with augmentation {level}, 300 epochs",
                    command=train_command(name),
                    time=f"{exaflops[corpus is IMAGENET_21K]:g} exaFLOPs by our count; not timed",
                    expected=_expected(corpus, model, level),
                    make=partial(training, corpus, model, level),
                )


def training(corpus: Corpus, model: str, level: str) -> RunConfig:
    """The run of one model at one level. Evaluation squashes, as the ViT paper's code; big_vision crops the centre."""
    return RunConfig(
        model=ModelChoice(name=model, image_size=224, settings=("head.bias=-10.0",) if corpus.several else ()),
        data=DataConfig(path=corpus.path, kind=corpus.kind, val_share=corpus.held_out, preprocessing="paper"),
        augment=augreg(level),
        objective=ObjectiveConfig(loss="sigmoid" if corpus.several else "softmax"),
        optimizer=OptimizerConfig(name="adam", beta1=0.9, beta2=0.999, weight_decay=WEIGHT_DECAY, clip=1.0),
        schedule=ScheduleConfig(batch_size=4096, epochs=300.0, lr=1e-3, warmup_steps=10_000, decay="cosine"),
    )


def _expected(corpus: Corpus, model: str, level: str) -> str:
    """Which level is best, as far as the authors' configurations say; their accuracies are in the paper's figures."""
    best = BEST[corpus.name].get(model)
    if best is None:
        return "see figure 4 of the paper"
    if best == level:
        return f"the best level for {model} on {corpus.title}, by big_vision's configuration"
    return f"big_vision's configuration takes {best} for {model} on {corpus.title}; see figure 4 of the paper"
