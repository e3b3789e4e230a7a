"""Figure 9: class token or mean pooling, each at three learning rates."""

from vitkit.studies.families import RATES, UPSTREAM_SETTINGS, vit
from vitkit.studies.study import Claim, FewShot, Figure, Study

STUDY = Study(
    name="fig9",
    title="Class token or mean",
    paper="Figure 9",
    axes={
        "pooling": {name: {"model.settings": [f"pooling={name}"]} for name in ("class", "mean")},
        "rate": {f"{rate:g}": {"schedule.lr": rate} for rate in RATES},
    },
    settings=dict(UPSTREAM_SETTINGS) | dict(vit()),
    data=("upstream", "downstream"),
    measures=(FewShot(shots=(5,)),),
    seeds=5,
    claims=(
        Claim(
            text="class token and mean are equal within 2 points, each at its own rate",
            kind="equal",
            column="downstream_5shot",
            axis="pooling",
            labels=("class", "mean"),
            margin=0.02,
            best_of="rate",
        ),
        Claim(
            text="their best learning rates differ",
            kind="best_differs",
            column="val_top1",
            axis="pooling",
            labels=("class", "mean"),
            x="rate",
        ),
    ),
    figure=Figure(column="downstream_5shot", lines="pooling", x="rate", log_x=True, x_label="Learning rate"),
    paper_numbers={"mean": "needs its own learning rate"},
    hours="4.5 to 10",
)
