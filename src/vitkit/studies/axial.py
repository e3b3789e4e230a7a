"""Appendix D.6: axial attention at equal depth and at equal FLOPs."""

from functools import partial

from vitkit.studies.families import RATES, few_shot_study, vit
from vitkit.studies.study import Claim, Figure

MEAN = "pooling=mean"
model_claim = partial(Claim, kind="greater", column="downstream_5shot", axis="model")


def _with(depth: int, *settings: str) -> dict[str, object]:
    model = vit(depth=depth)
    return dict(model) | {"model.settings": [*model["model.settings"], MEAN, *settings]}  # type: ignore[misc]


STUDY = few_shot_study(
    name="axial",
    title="Axial attention",
    paper="Appendix D.6",
    axes={
        "model": {
            "ViT, 4 layers": _with(4),
            "axial, 4 layers": _with(4, "block.axial=true"),
            "ViT, equal FLOPs": _with(7),
        }
    },
    rates=RATES,
    tune_by="model",
    claims=(
        model_claim(text="axial attention is better per layer", labels=("axial, 4 layers", "ViT, 4 layers")),
        model_claim(
            text="at equal FLOPs plain attention is better than axial", labels=("ViT, equal FLOPs", "axial, 4 layers")
        ),
    ),
    figure=Figure(column="downstream_5shot", lines="model", x="flops", log_x=True, x_label="Training FLOPs"),
    hours="2.5 to 5.5",
)
