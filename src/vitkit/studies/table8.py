"""Table 8: position embeddings. 32-pixel ViT, half a million images, few-shot accuracy."""

from functools import partial

from vitkit.studies.families import RATES, UPSTREAM_SETTINGS, few_shot_study, paper_run, vit, with_paper_scale
from vitkit.studies.study import Claim, FewShot, Figure

INJECTIONS = {"stem": "stem", "every": "every_layer", "shared": "shared"}
KINDS = {"1-D": "learned_1d", "2-D": "learned_2d"}
LEARNED = tuple(f"{kind} {injection}" for kind in KINDS for injection in INJECTIONS)
position_claim = partial(Claim, column="downstream_10shot", axis="positions")

LAPTOP = few_shot_study(
    name="table8",
    title="Position embeddings",
    paper="Table 8",
    axes={
        "positions": {
            "none": {"model.settings": ["positions.kind=none"]},
            **{
                f"{kind} {injection}": {
                    "model.settings": [f"positions.kind={KINDS[kind]}", f"positions.injection={INJECTIONS[injection]}"]
                }
                for kind in KINDS
                for injection in INJECTIONS
            },
            "relative": {"model.settings": ["positions.kind=relative"]},
        }
    },
    settings=dict(UPSTREAM_SETTINGS) | dict(vit()),
    rates=RATES,
    tune_at={"positions": "1-D stem"},
    measures=(FewShot(shots=(5, 10)),),
    seeds=5,
    claims=(
        position_claim(
            text="without positions 10-shot accuracy is lower by at least 2 points",
            kind="greater",
            labels=("1-D stem", "none"),
            margin=0.02,
            expected="shows; about 7 points in public small runs",
        ),
        position_claim(
            text="1-D, 2-D and all placements are equal within 1 point", kind="equal", labels=LEARNED, margin=0.01
        ),
        position_claim(
            text="relative positions lead, unlike in the paper",
            kind="greater",
            labels=("relative", "1-D stem"),
            expected="may lead by 2 to 4 points",
        ),
    ),
    figure=Figure(column="downstream_10shot", lines="positions"),
    quick={"positions": ("none", "1-D stem", "2-D stem", "relative")},
    paper_numbers={
        "none": ".61382",
        "1-D stem": ".64206",
        "1-D every": ".63964",
        "1-D shared": ".64292",
        "2-D stem": ".64001",
        "2-D every": ".64046",
        "2-D shared": ".64022",
        "relative": ".64032",
    },
    hours="6 to 13",
    notes="The paper's numbers are ImageNet 5-shot accuracies of B/16.",
)
STUDY = with_paper_scale(LAPTOP, settings=paper_run("jft300m-b16"), seeds=3)
