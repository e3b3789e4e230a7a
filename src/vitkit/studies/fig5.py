"""Figure 5: accuracy over pre-training compute."""

from vitkit.studies.families import TRIO, family_claim, family_study
from vitkit.studies.study import Figure

BUDGETS = ("3e13", "1e14", "3e14")

STUDY = family_study(
    name="fig5",
    title="Accuracy over compute",
    paper="Figure 5",
    axes={"family": TRIO, "budget": {budget: {"flops": float(budget)} for budget in BUDGETS}},
    tune_at={"budget": "3e13"},
    claims=(
        family_claim(
            text="the hybrid leads ViT at the smallest budget",
            kind="greater",
            labels=("hybrid", "ViT"),
            where=("budget=3e13",),
        ),
        family_claim(
            text="the hybrid's lead over ViT shrinks with compute", kind="shrinks", labels=("hybrid", "ViT"), x="budget"
        ),
        family_claim(
            text="ViT needs less compute than BiT: it is ahead at the largest budget",
            kind="greater",
            labels=("ViT", "BiT"),
            where=("budget=3e14",),
            expected="not expected this small; contested at scale too (arXiv 2310.16764)",
        ),
    ),
    figure=Figure(
        column="downstream_5shot", lines="family", x="budget", log_x=True, fit=True, x_label="Pre-training FLOPs"
    ),
    quick={"budget": BUDGETS},
    large={"budget": {"1e15": {"flops": 1e15}}},
    paper_numbers={"ViT": "wins for the same compute", "hybrid": "leads at small budgets"},
    hours="5 to 12",
    notes="The bands are 95 % intervals of the fitted curves. `--large` adds a budget of 1e15 FLOPs.",
)
