"""Figure 9: class token or mean pooling, each at three learning rates."""

from functools import partial

from vitkit.studies.families import RATES, UPSTREAM_SETTINGS, few_shot_study, paper_run, vit, with_paper_scale
from vitkit.studies.study import Claim, Figure

pooling_claim = partial(Claim, axis="pooling", labels=("class", "mean"))

LAPTOP = few_shot_study(
    name="fig9",
    title="Class token or mean",
    paper="Figure 9",
    axes={
        "pooling": {name: {"model.settings": [f"pooling={name}"]} for name in ("class", "mean")},
        "rate": {f"{rate:g}": {"schedule.lr": rate} for rate in RATES},
    },
    settings=dict(UPSTREAM_SETTINGS) | dict(vit()),
    seeds=5,
    claims=(
        pooling_claim(
            text="class token and mean are equal within 2 points, each at its own rate",
            kind="equal",
            column="downstream_5shot",
            margin=0.02,
            best_of="rate",
        ),
        pooling_claim(text="their best learning rates differ", kind="best_differs", column="val_top1", x="rate"),
    ),
    figure=Figure(column="downstream_5shot", lines="pooling", x="rate", log_x=True, x_label="Learning rate"),
    paper_numbers={"mean": "needs its own learning rate"},
    hours="4.5 to 10",
)
STUDY = with_paper_scale(LAPTOP, settings=paper_run("jft300m-b16"), seeds=3)
