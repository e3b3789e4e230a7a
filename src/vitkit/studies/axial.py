"""Appendix D.6: axial attention at equal depth and at equal FLOPs."""

from vitkit.studies.families import RATES, few_shot_study, model_claim, paper_run, vit, with_paper_scale
from vitkit.studies.study import Figure

MEAN = "pooling=mean"


def _with(depth: int, *settings: str) -> dict[str, object]:
    model = vit(depth=depth)
    return dict(model) | {"model.settings": [*model["model.settings"], MEAN, *settings]}  # type: ignore[misc]


LAPTOP = few_shot_study(
    name="axial",
    title="Axial attention",
    paper="Appendix D.6",
    axes={
        "model": {
            "ViT": _with(4),
            "axial": _with(4, "block.axial=true"),
            "ViT, equal FLOPs": _with(7),
        }
    },
    rates=RATES,
    tune_by="model",
    claims=(
        model_claim(text="axial attention is better per layer", labels=("axial", "ViT")),
        model_claim(text="at equal FLOPs plain attention is better than axial", labels=("ViT, equal FLOPs", "axial")),
    ),
    figure=Figure(column="downstream_5shot", lines="model", x="flops", log_x=True, x_label="Training FLOPs"),
    hours="2.5 to 5.5",
)
STUDY = with_paper_scale(
    LAPTOP,
    axes={
        "model": {
            "ViT": {},
            "axial": {"model.settings": ["block.axial=true"]},
            "ViT, equal FLOPs": {"model.settings": ["depth=23"]},
        }
    },
    settings=paper_run("jft300m-b16", **{"model.settings": [MEAN]}),
)
