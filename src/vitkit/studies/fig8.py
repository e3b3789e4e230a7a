"""Figure 8: which dimension of the model to scale. 64-pixel ViT."""

from vitkit.studies.families import RATES, few_shot_study, paper_run, vit, with_paper_scale
from vitkit.studies.study import Claim, Figure, Settings


def _shape(*, width: int = 96, depth: int = 4, mlp_dim: int = 384, patch_size: int = 16) -> Settings:
    return vit(width=width, depth=depth, mlp_dim=mlp_dim, image_size=64, patch_size=patch_size)


BASE = "base"
SHAPES = {
    "depth": {"2": _shape(depth=2), "8": _shape(depth=8), "16": _shape(depth=16)},
    "width": {
        "48": _shape(width=48, mlp_dim=192),
        "192": _shape(width=192, mlp_dim=768),
        "384": _shape(width=384, mlp_dim=1536),
    },
    "MLP": {"768": _shape(mlp_dim=768), "1536": _shape(mlp_dim=1536)},
    "patch": {"8": _shape(patch_size=8), "4": _shape(patch_size=4)},
    "all": {"large": _shape(width=192, depth=8, mlp_dim=768, patch_size=8)},
}

LAPTOP = few_shot_study(
    name="fig8",
    title="Scaling depth, width, MLP and patches",
    paper="Figure 8",
    axes={
        "shape": {BASE: _shape()}
        | {f"{name} {size}": settings for name, sizes in SHAPES.items() for size, settings in sizes.items()}
    },
    groups={"scaled": "shape"},
    base=BASE,
    rates=RATES,
    tune_at={"shape": BASE},
    claims=(
        Claim(
            text="smaller patches gain more per FLOP than depth, and depth more than width",
            kind="steeper",
            column="downstream_5shot",
            axis="scaled",
            labels=("patch", "depth", "width"),
            x="flops",
        ),
    ),
    figure=Figure(column="downstream_5shot", lines="scaled", x="flops", log_x=True, x_label="Training FLOPs"),
    quick={"shape": (BASE, "depth 8", "width 192", "patch 8")},
    hours="6 to 13",
    notes="All lines share the base: depth 4, width 96, MLP 384, patches of 16 pixels.",
)
PAPER_SHAPES = {
    BASE: [],
    "depth 6": ["depth=6"],
    "depth 24": ["depth=24"],
    "width 384": ["width=384", "heads=6", "mlp_dim=1536"],
    "width 1536": ["width=1536", "heads=24", "mlp_dim=6144"],
    "MLP 6144": ["mlp_dim=6144"],
    "MLP 12288": ["mlp_dim=12288"],
}
"""Changes of B/32."""
STUDY = with_paper_scale(
    LAPTOP,
    axes={
        "shape": {name: {"model.settings": settings} for name, settings in PAPER_SHAPES.items()}
        | {f"patch {size}": {"model.patch_size": size} for size in (16, 8)}
        | {"all L/16": paper_run("jft300m-l16-7ep")}
    },
    settings=paper_run("jft300m-b32"),
    notes="All lines share the base B/32. A wider or deeper model has the learning rate of the base.",
)
