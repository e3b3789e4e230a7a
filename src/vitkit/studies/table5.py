"""Table 5: fine-tuned accuracy on every downstream set, by pre-training data."""

from vitkit.studies.families import RATES, UPSTREAM_SETTINGS
from vitkit.studies.study import Claim, Figure, Study
from vitkit.studies.transfer import DATASETS, MODELS, TRANSFER, UPSTREAMS

STUDY = Study(
    name="table5",
    title="Transfer to every dataset",
    paper="Table 5",
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
    figure=Figure(column="top1", lines="upstream", rows=("model", "dataset")),
    quick={"dataset": ("cifar10",), "model": ("small ViT", "large ViT")},
    paper_numbers={
        "cifar10": "99.42 % after JFT-300M, 99.15 % after ImageNet-21k (L/16, Table 2)",
        "cifar100": "93.90 % after JFT-300M, 93.25 % after ImageNet-21k (L/16, Table 2)",
        "pets": "97.32 % after JFT-300M, 94.67 % after ImageNet-21k (L/16, Table 2)",
    },
    hours="6.5 to 14",
)
