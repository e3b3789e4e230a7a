"""Design of the two studies of transfer over data size: upstream ladder, models, downstream sets and claims."""

from functools import partial

from vitkit.studies.families import FINETUNE_SETTINGS, RATES, UPSTREAM_SETTINGS, bit, vit
from vitkit.studies.study import UPSTREAM, Axis, Claim, Study, Transfer

MODELS: Axis = {"small ViT": vit(width=64), "large ViT": vit(width=128, depth=8), "BiT": bit()}
UPSTREAMS: Axis = {"0.1": {"data.fraction": 0.1}, "1.0": {"data.fraction": 1.0}}
DATASETS = ("cifar10", "cifar100", "pets")
transfer_study = partial(
    Study,
    axes={"model": MODELS, "upstream": UPSTREAMS},
    settings=UPSTREAM_SETTINGS,
    data=(UPSTREAM, *DATASETS),
    transfer=Transfer(
        axes={"dataset": {name: {} for name in DATASETS}}, rates=(0.003, 0.01, 0.03), settings=FINETUNE_SETTINGS
    ),
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
    quick={"dataset": ("cifar10",), "model": ("small ViT", "large ViT")},
    hours="6.5 to 14",
)
"""Create one of the two studies."""
