"""Figure 7: attention distance by layer, of the checkpoints of another study. Nothing is trained."""

from vitkit.studies.study import Claim, Figure, Study

STUDY = Study(
    name="fig7",
    title="Learned representations",
    paper="Figure 7",
    axes={"run": {}},
    inspects="table8",
    data=("upstream", "runs"),
    claims=(
        Claim(
            text="heads look farther with depth",
            kind="rises",
            column="distance",
            axis="family",
            labels=("ViT",),
            x="layer",
        ),
        Claim(
            text="the hybrid's first layer is less local",
            kind="greater",
            column="distance",
            axis="family",
            labels=("hybrid", "ViT"),
            where=("layer=1",),
        ),
    ),
    figure=Figure(column="distance", lines="run", x="layer", x_label="Layer"),
    paper_numbers={"ViT": "attention distance grows with depth"},
    hours="0.2",
)
