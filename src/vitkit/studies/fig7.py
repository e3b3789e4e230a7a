"""Figure 7: attention distance by layer, filters and positions, of the checkpoints of another study."""

from functools import partial

from vitkit.studies.study import RUNS, Claim, Figure, Study

distance_claim = partial(Claim, column="distance", axis="family")

STUDY = Study(
    name="fig7",
    title="Learned representations",
    paper="Figure 7",
    axes={},
    inspects="table8",
    data=("upstream", RUNS),
    claims=(
        distance_claim(text="heads look farther with depth", kind="rises", labels=("ViT",), x="layer"),
        distance_claim(
            text="the hybrid's first layer is less local",
            kind="greater",
            labels=("hybrid", "ViT"),
            where=("layer=1",),
        ),
    ),
    figure=Figure(column="distance", lines="model", x="layer", dots=True, x_label="Layer"),
    hours="0.2",
    notes="The mean over 128 images; a dot is a head. Checkpoints of fig4 show hybrids and data sizes, too. A study "
    "that ran with checkpoint.save_every=500 checkpoint.last=20 also shows the distance over training.",
)
