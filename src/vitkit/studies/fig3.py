"""Figure 3: fine-tuned accuracy over the size of the pre-training data."""

from vitkit.studies.families import RATES, UPSTREAM_SETTINGS
from vitkit.studies.study import Claim, Figure, Study
from vitkit.studies.transfer import DATASETS, MODELS, TRANSFER, UPSTREAMS

STUDY = Study(
    name="fig3",
    title="Transfer over data size",
    paper="Figure 3",
    axes={"model": MODELS, "upstream": UPSTREAMS},
    settings=UPSTREAM_SETTINGS,
    data=("upstream", *DATASETS),
    transfer=TRANSFER,
    rates=RATES,
    tune_by="model",
    claims=(
        *(
            Claim(
                text=f"more pre-training data helps {name}",
                kind="greater",
                column="top1",
                axis="upstream",
                labels=("1.0", "0.1"),
                where=(f"model={name}",),
            )
            for name in MODELS
        ),
        Claim(
            text="the larger ViT gains more from data than the smaller one",
            kind="steeper",
            column="top1",
            axis="model",
            labels=("large ViT", "small ViT"),
            x="upstream",
        ),
    ),
    figure=Figure(
        column="top1", lines="model", x="upstream", log_x=True, x_label="Fraction of the pre-training images"
    ),
    quick={"dataset": ("cifar10",), "model": ("small ViT", "large ViT")},
    paper_numbers={"BiT": "better with little pre-training data", "large ViT": "passes as data grows"},
    hours="6.5 to 14",
)
