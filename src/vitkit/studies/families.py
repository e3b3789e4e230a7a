"""Models, settings and designs that several studies share: families of about equal FLOPs, by the project's own counter.

At 32 pixels ResNets have a small root (3×3, stride 1) and narrow stages: with the standard root the last stage would
end at 1×1, a weakened baseline.
"""

from dataclasses import replace
from functools import partial

from vitkit.studies.study import DOWNSTREAM, UPSTREAM, Axis, Claim, FewShot, Settings, Study
from vitkit.zoo.cost import JFT_IMAGES


def vit(
    *, width: int = 96, depth: int = 5, mlp_dim: int | None = None, image_size: int = 32, patch_size: int = 4
) -> Settings:
    """Return a small ViT with heads of width 32."""
    shape = [f"width={width}", f"depth={depth}", f"heads={max(1, width // 32)}", f"mlp_dim={mlp_dim or 4 * width}"]
    return _model(shape, image_size=image_size, patch_size=patch_size)


def hybrid() -> Settings:
    """Return a hybrid at 32 pixels: one unit, then patches of 4×4 cells."""
    transformer = ["width=96", "depth=4", "heads=3", "mlp_dim=384"]
    backbone = ["backbone.units=[1]", "backbone.root_width=16", "backbone.root=small"]
    return _model([*transformer, *backbone], image_size=32, patch_size=4)


def _model(settings: list[str], *, image_size: int, patch_size: int) -> Settings:
    return {
        "model.name": "Ti/16",
        "model.image_size": image_size,
        "model.patch_size": patch_size,
        "model.settings": settings,
    }


def bit(*, units: str = "[2,2,2,1]") -> Settings:
    """Return a narrow BiT at 32 pixels."""
    settings = [f"units={units}", "width_factor=0.25", "root=small"]
    return {"model.name": "BiT-R50x1", "model.image_size": 32, "model.settings": settings}


TRIO = {"ViT": vit(), "hybrid": hybrid(), "BiT": bit()}
UPSTREAM_SETTINGS: Settings = {
    "data.layout": "val-as-test",
    "data.val_fraction": 0.05,
    "augment.crop_area": [0.25, 1.0],
    "optimizer.weight_decay": 0.1,
    "schedule.batch_size": 128,
    "schedule.steps": 3900,
    "schedule.warmup_steps": 400,
    "schedule.lr": 1e-3,
    "schedule.decay": "linear",
    "schedule.end_lr": 1e-5,
    "logging.log_every": 20,
}
"""Half a million images of Tiny-ImageNet, whose validation images are the test."""
RATES = (3e-4, 1e-3, 3e-3)
few_shot_study = partial(
    Study, settings=UPSTREAM_SETTINGS, data=(UPSTREAM, DOWNSTREAM), measures=(FewShot(shots=(5,)),)
)
"""Create a study that pre-trains on one dataset and measures 5-shot accuracy on another."""
family_study = partial(few_shot_study, rates=RATES, tune_by="family")
"""Create such a study with an axis of model families, each with its own learning rate."""
family_claim = partial(Claim, column="downstream_5shot", axis="family")
"""Create a claim about the families of such a study."""
model_claim = partial(family_claim, kind="greater", axis="model")
"""Create a claim that the first of two models is better."""
FINETUNE_SETTINGS: Settings = {
    "optimizer.name": "sgd",
    "schedule.batch_size": 64,
    "schedule.steps": 1000,
    "schedule.warmup_steps": 50,
    "schedule.lr": 0.01,
    "augment.crop_area": [0.35, 1.0],
    "logging.log_every": 20,
}

PAPER_BATCH, PAPER_STEPS = 4096, round(7 * JFT_IMAGES / 4096)
"""Batch size of pre-training, and steps of seven epochs of JFT-300M: the images that each run of Table 6 sees."""


def paper_run(recipe: str, **settings: object) -> Settings:
    """Return a pre-training run of the paper: a recipe of Table 3 in steps, so that subsets see as many images."""
    return {"recipe": recipe, "schedule.steps": PAPER_STEPS, **settings}


def with_paper_scale(study: Study, *, settings: Settings | None = None, **changes: object) -> Study:
    """Return a study that can also have the paper's models, data and steps, with these changes.

    Table 3 has the learning rates of pre-training, so none is chosen.
    """
    fixed = replace(study, rates=(), tune_at={}, quick={}, large={}, settings=settings or {}, hours="")
    return replace(study, at_paper_scale=replace(fixed, **changes))  # type: ignore[arg-type]


PAPER_FAMILIES: Axis = {
    "ViT": paper_run("jft300m-b16"),
    "hybrid": paper_run("jft300m-r50-b16"),
    "BiT": paper_run("jft300m-r50x2"),
}
"""A trio of Table 6: 224, 274 and 199 exaFLOPs."""
