"""The runs of the demo: digits from scratch, and digits after pre-training on fractals."""

from dataclasses import replace
from pathlib import Path

from vitkit.data.config import AugmentConfig, FractalConfig
from vitkit.recipes.small import small_model
from vitkit.training.config import DataConfig, ModelChoice, OptimizerConfig, ReportConfig, RunConfig, ScheduleConfig

LOW, HIGH = 16, 24
"""Image sizes of pre-training and fine-tuning: grids of 4×4 and 6×6 patches."""
QUICK_SETTINGS = {
    "schedule.steps": 4,
    "data.fractals.num_classes": 10,
    "data.fractals.per_class": 20,
    "data.workers": 0,
}


def demo_runs(out: Path, *, quick: bool = False) -> dict[str, tuple[str, RunConfig]]:
    """Return titles and configurations of the three runs, in order; `quick` trains for a few steps only."""
    runs = {
        "from-scratch": ("training on digits from scratch, for comparison", digits()),
        "fractals": ("pre-training on fractals", fractals_run()),
        "fractals-then-digits": (
            "fine-tuning on digits at a higher resolution",
            tuned_digits(init=str(out / "fractals"), compare_with=str(out / "from-scratch")),
        ),
    }
    settings = QUICK_SETTINGS if quick else {}
    return {name: (title, config.override(settings)) for name, (title, config) in runs.items()}


def fractals_run() -> RunConfig:
    """Return the pre-training run, on gray fractals of fifty formulas."""
    return RunConfig(
        model=small_model(image_size=LOW, patch_size=4, width=96, depth=4, mlp_dim=192),
        data=DataConfig(
            path="fractals", channels=1, fractals=FractalConfig(num_classes=50, per_class=400, size=LOW, color=False)
        ),
        augment=AugmentConfig(crop="pad", pad=2),
        optimizer=OptimizerConfig(weight_decay=0.05),
        schedule=ScheduleConfig(batch_size=32, epochs=5.0, lr=1.5e-3, warmup_steps=50),
    )


def digits() -> RunConfig:
    """Return the run from scratch, on all training images and evaluated on the test images alone."""
    return RunConfig(
        model=replace(fractals_run().model, image_size=HIGH),
        data=DataConfig(path="digits", channels=1, val_fraction=0.0),
        augment=AugmentConfig(crop="pad", pad=2, flip=False),
        optimizer=OptimizerConfig(weight_decay=0.05),
        schedule=ScheduleConfig(batch_size=32, epochs=12.0, lr=2e-3, warmup_steps=40),
    )


def tuned_digits(*, init: str, compare_with: str) -> RunConfig:
    """Return the same run from initial weights, with another run in its report."""
    return replace(
        digits(),
        model=ModelChoice(init=init, image_size=HIGH, new_head=True),
        report=ReportConfig(compare_with=(compare_with,)),
    )
