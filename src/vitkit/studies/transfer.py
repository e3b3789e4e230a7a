"""Upstream ladder, models and downstream sets of the two studies of transfer over data size."""

from vitkit.studies.families import FINETUNE_SETTINGS, bit, vit
from vitkit.studies.study import Axis, Transfer

MODELS: Axis = {"small ViT": vit(width=64), "large ViT": vit(width=128, depth=8), "BiT": bit()}
UPSTREAMS: Axis = {"0.1": {"data.fraction": 0.1}, "1.0": {"data.fraction": 1.0}}
DATASETS = ("cifar10", "cifar100", "pets")
TRANSFER = Transfer(
    axes={"dataset": {name: {} for name in DATASETS}},
    rates=(0.003, 0.01, 0.03),
    settings=FINETUNE_SETTINGS,
)
