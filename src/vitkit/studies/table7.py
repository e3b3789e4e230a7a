"""Table 7: Adam or SGD to pre-train ResNets."""

from vitkit.studies.families import UPSTREAM_SETTINGS, bit, few_shot_study, model_claim, paper_run, with_paper_scale
from vitkit.studies.study import Figure

RATES = {"adam": (3e-4, 1e-3, 3e-3), "sgd": (0.03, 0.1, 0.3)}

NO_DECAY = {"optimizer.weight_decay": 0.0}
"""SGD's weight decay would be coupled to its momentum; without any, the optimizer is all that differs."""

LAPTOP = few_shot_study(
    name="table7",
    title="Adam or SGD for ResNets",
    paper="Table 7",
    axes={
        "optimizer": {
            f"{name} {rate:g}": {"optimizer.name": name, "schedule.lr": rate}
            for name, rates in RATES.items()
            for rate in rates
        }
    },
    groups={"method": "optimizer"},
    settings=dict(UPSTREAM_SETTINGS) | dict(bit()) | NO_DECAY,
    claims=(
        model_claim(
            text="Adam is better than SGD, each at its best rate",
            axis="method",
            labels=("adam", "sgd"),
            best_of="optimizer",
            expected="0.5 points are likely too few for three seeds: read the interval",
        ),
    ),
    figure=Figure(column="downstream_5shot", lines="optimizer"),
    quick={"optimizer": ("adam 0.001", "sgd 0.1")},
    hours="2.5 to 5.5",
)
STUDY = with_paper_scale(LAPTOP, settings=paper_run("jft300m-r50x1", **NO_DECAY))
