"""Figure 4: few-shot accuracy over the size of the pre-training data."""

from functools import partial

from vitkit.studies.families import (
    PAPER_FAMILIES,
    TRIO,
    UPSTREAM_SETTINGS,
    bit,
    family_claim,
    family_study,
    paper_run,
    vit,
    with_paper_scale,
)
from vitkit.studies.study import Figure

FRACTIONS = ("0.03", "0.1", "0.3", "1.0")
STEEPER = family_claim(
    text="ViT's slope of logit(accuracy) over log N is steeper than BiT's",
    kind="steeper",
    labels=("ViT", "BiT"),
    x="fraction",
    logits=True,
)
claim_with_all_images = partial(family_claim, kind="greater", where=("fraction=1.0",))

LAPTOP = family_study(
    name="fig4",
    title="Few-shot accuracy over data size",
    paper="Figure 4",
    axes={
        "family": TRIO | {"narrow ViT": vit(width=64), "small BiT": bit(units="[1,1,1]")},
        "fraction": {fraction: {"data.fraction": float(fraction)} for fraction in FRACTIONS},
    },
    settings=dict(UPSTREAM_SETTINGS) | {"schedule.steps": 7800, "evaluation.patience": 5},
    tune_at={"fraction": "0.3"},
    claims=(
        STEEPER,
        claim_with_all_images(
            text="with all 100,000 images BiT is still ahead of ViT: the lines do not cross", labels=("BiT", "ViT")
        ),
    ),
    figure=Figure(
        column="downstream_5shot",
        lines="family",
        x="fraction",
        log_x=True,
        x_label="Fraction of the pre-training images",
    ),
    quick={"family": ("ViT", "hybrid", "BiT"), "fraction": ("0.03", "0.3", "1.0")},
    paper_numbers={"BiT": "better with little pre-training data", "ViT": "catches up and passes as data grows"},
    hours="5 to 11",
    notes="Runs stop early on held-out images. The paper's ladder is 9, 30, 90 and 300 million images; here it is 3, "
    "10, 30 and 100 % of the images.",
)
STUDY = with_paper_scale(
    LAPTOP,
    axes={
        "family": dict(PAPER_FAMILIES)
        | {"narrow ViT": paper_run("jft300m-b32"), "small BiT": paper_run("jft300m-r50x1")},
        "fraction": LAPTOP.axes["fraction"],
    },
    settings={"evaluation.patience": 5},
    claims=(
        STEEPER,
        claim_with_all_images(text="with all images ViT is ahead of BiT: the lines cross", labels=("ViT", "BiT")),
    ),
    notes="Subsets of 9, 30, 90 and 300 million images of JFT-300M, each run sees as many images.",
)
