"""Section 4.6: masked pre-training, then few labels."""

from vitkit.recipes.paper import IMAGENET_RATES
from vitkit.studies.families import FINETUNE_SETTINGS, RATES, UPSTREAM_SETTINGS, paper_run, vit, with_paper_scale
from vitkit.studies.study import Claim, Figure, Study, Transfer


def _masked(target: str) -> dict[str, object]:
    return {"objective.name": "masked", "objective.masked.target": target}


LAPTOP = Study(
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
    rates=RATES,
    tune_by="pretraining",
    transfer=Transfer(
        axes={"labels": {label: {"data.fraction": float(label)} for label in ("0.01", "0.1", "1.0")}},
        settings=dict(FINETUNE_SETTINGS) | {"optimizer.name": "adam"},
        rates=RATES,
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
    hours="6.5 to 13",
)

MASKED = {"recipe": "masked-b16"}
STUDY = with_paper_scale(
    LAPTOP,
    axes={
        "pretraining": {
            "none": {},
            "512 colors": MASKED,
            "4×4 patch": MASKED | _masked("downsized"),
            "L2": MASKED | _masked("pixels"),
            "MAE": paper_run("mae-b16"),
            "supervised": paper_run("jft300m-b16"),
        }
    },
    settings={"model.name": "B/16"},
    transfer=Transfer(
        axes={
            "labels": {
                label: {"data.fraction": float(label), "data.layout": "val-as-test"} for label in ("0.01", "0.1", "1.0")
            }
        },
        settings={"recipe": "finetune-imagenet"},
        rates=IMAGENET_RATES,
    ),
    notes="From scratch means the 20,000 steps of fine-tuning alone.",
)
