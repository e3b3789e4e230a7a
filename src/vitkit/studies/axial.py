"""Appendix D.6: axial attention at equal depth and at equal FLOPs."""

from vitkit.studies.families import UPSTREAM_SETTINGS, vit
from vitkit.studies.study import Claim, FewShot, Figure, Study

MEAN = "pooling=mean"


def _with(depth: int, *settings: str) -> dict[str, object]:
    model = vit(depth=depth)
    return dict(model) | {"model.settings": [*model["model.settings"], MEAN, *settings]}  # type: ignore[misc]


STUDY = Study(
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
    settings=UPSTREAM_SETTINGS,
    data=("upstream", "downstream"),
    measures=(FewShot(shots=(5,)),),
    rates=(3e-4, 1e-3, 3e-3),
    tune_by="model",
    claims=(
        Claim(
            text="axial attention is better per layer",
            kind="greater",
            column="downstream_5shot",
            axis="model",
            labels=("axial, 4 layers", "ViT, 4 layers"),
        ),
        Claim(
            text="at equal FLOPs plain attention is better than axial",
            kind="greater",
            column="downstream_5shot",
            axis="model",
            labels=("ViT, equal FLOPs", "axial, 4 layers"),
        ),
    ),
    figure=Figure(column="downstream_5shot", lines="model", x="flops", log_x=True, x_label="Training FLOPs"),
    hours="2.5 to 5.5",
)
