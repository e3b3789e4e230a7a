"""Section 4.6: masked pre-training, then few labels."""

from vitkit.studies.families import FINETUNE_SETTINGS, UPSTREAM_SETTINGS, vit
from vitkit.studies.study import Claim, Figure, Study, Transfer


def _masked(target: str) -> dict[str, object]:
    return {"objective.name": "masked", "objective.masked.target": target}


STUDY = Study(
    name="masked",
    title="Self-supervision by masked patches",
    paper="Section 4.6, appendix B.1.2",
    axes={
        "pretraining": {
            "none": {},
            "512 colors": _masked("mean_color"),
            "4×4 patch": _masked("downsized"),
            "L2": _masked("pixels"),
            "MAE": {"objective.name": "mae"},
            "supervised": {},
        }
    },
    settings=dict(UPSTREAM_SETTINGS) | dict(vit()),
    data=("upstream", "downstream"),
    scratch=("none",),
    transfer=Transfer(
        axes={"labels": {label: {"data.label_fraction": float(label)} for label in ("0.01", "0.1", "1.0")}},
        settings=dict(FINETUNE_SETTINGS) | {"optimizer.name": "adam", "schedule.lr": 1e-3},
    ),
    claims=tuple(
        Claim(
            text=f"supervised > masked > scratch with {float(labels):.0%} of the labels",
            kind="order",
            column="top1",
            axis="pretraining",
            labels=("supervised", "512 colors", "none"),
            where=(f"labels={labels}",),
        )
        for labels in ("0.01", "0.1")
    ),
    figure=Figure(column="top1", lines="pretraining", x="labels", log_x=True, x_label="Fraction of the labels"),
    quick={"pretraining": ("none", "512 colors", "supervised"), "labels": ("0.01", "0.1")},
    paper_numbers={"512 colors": "79.9 % on ImageNet (B/16): 2 points above scratch, 4 below supervised"},
    hours="4 to 8",
)
