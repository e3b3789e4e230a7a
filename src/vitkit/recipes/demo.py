"""Nothing but what comes with vitkit goes in; the three runs of `vitkit demo` come out.

Pre-train on fractals, fine-tune on digits at a higher resolution, and for comparison learn the digits from scratch.
"""

from dataclasses import replace

from vitkit.data.augment import AugmentConfig
from vitkit.data.fractals import FractalConfig
from vitkit.recipes.small import small_model
from vitkit.train.config import DataConfig, KeepConfig, ModelChoice, OptimizerConfig, RunConfig, ScheduleConfig

LOW, HIGH = 16, 24
"""Image sizes of pre-training and fine-tuning: grids of 4×4 and 6×6 patches."""


def fractals() -> RunConfig:
    """Grey fractals of fifty formulas."""
    return RunConfig(
        model=small_model(image_size=LOW, patch_size=4, width=96, depth=4, mlp_dim=192),
        data=DataConfig(
            path="fractals", channels=1, fractals=FractalConfig(classes=50, per_class=400, size=LOW, colour=False)
        ),
        augment=AugmentConfig(crop="pad", pad=2),
        optimizer=OptimizerConfig(weight_decay=0.05),
        schedule=ScheduleConfig(batch_size=32, epochs=5.0, lr=1.5e-3, warmup_steps=50),
    )


def digits() -> RunConfig:
    """Digits from scratch, all training images, judged on the test images alone."""
    return RunConfig(
        model=replace(fractals().model, image_size=HIGH),
        data=DataConfig(path="digits", channels=1, val_share=0.0),
        augment=AugmentConfig(crop="pad", pad=2, flip=False),
        optimizer=OptimizerConfig(weight_decay=0.05),
        schedule=ScheduleConfig(batch_size=32, epochs=12.0, lr=2e-3, warmup_steps=40),
    )


def tuned_digits(*, weights: str, beside: str) -> RunConfig:
    """The same run from the weights of another, whose report shows it beside a third."""
    return replace(
        digits(),
        model=ModelChoice(weights=weights, image_size=HIGH, new_head=True),
        keep=KeepConfig(compare_with=(beside,)),
    )
