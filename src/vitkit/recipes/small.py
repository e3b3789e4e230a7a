"""Small recipes that train on two cores in minutes."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from vitkit.data.config import AugmentConfig, FractalConfig
from vitkit.objectives.config import ObjectiveConfig
from vitkit.recipes.recipe import Recipe
from vitkit.training.config import DataConfig, ModelChoice, OptimizerConfig, RunConfig, ScheduleConfig

GROUP = "Small, for two cores"
FIGURES = "docs/experiments.md has the figures and curves"


def digits() -> RunConfig:
    """Return the run on digits: 8 pixels wide, enlarged to 16 for 4×4 patches, and not flipped."""
    return RunConfig(
        model=small_model(image_size=16, patch_size=4, width=96, depth=4, mlp_dim=192),
        data=DataConfig(path="digits", channels=1),
        augment=AugmentConfig(crop="pad", pad=1, flip=False),
        optimizer=OptimizerConfig(weight_decay=0.1),
        schedule=ScheduleConfig(batch_size=64, epochs=100.0, lr=2e-3, warmup_steps=100),
    )


def folder() -> RunConfig:
    """Return the run on a folder; its length is in steps, so that the time does not depend on the number of photos."""
    return RunConfig(
        model=small_model(image_size=96, patch_size=12, width=192, depth=6, mlp_dim=384),
        data=DataConfig(path="photos"),
        augment=AugmentConfig(crop_area=(0.25, 1.0), color_jitter=0.2, mixup=0.2),
        objective=ObjectiveConfig(smoothing=0.1),
        optimizer=OptimizerConfig(weight_decay=0.1),
        schedule=ScheduleConfig(batch_size=32, epochs=None, steps=800, lr=1e-3, warmup_steps=80),
    )


def finetune_folder() -> RunConfig:
    """Return the fine-tuning run: Adam, less sensitive to the rate than Table 4's SGD, with layer-wise decay.

    Rates of 1e-3, 3e-4 and 1e-4 gave 79, 82 and 84 % of 153 photos of ants and bees (embedded weights with a fitted
    head, 85 % before; 40 steps, one seed: the differences are within the interval).
    """
    return RunConfig(
        model=ModelChoice(new_head=True),
        data=DataConfig(path="photos"),
        augment=AugmentConfig(crop_area=(0.35, 1.0)),
        objective=ObjectiveConfig(smoothing=0.1),
        optimizer=OptimizerConfig(weight_decay=0.05, layer_decay=0.8),
        schedule=ScheduleConfig(batch_size=32, epochs=15.0, lr=3e-4, warmup_steps=20),
    )


def fashion_mnist() -> RunConfig:
    """Return the run on Fashion-MNIST: small batches, since many steps learn more in a short run than few."""
    return RunConfig(
        model=small_hybrid(image_size=28, depth=3),
        data=DataConfig(path="fashion-mnist", channels=1, val_fraction=0.02),
        augment=AugmentConfig(crop="pad", pad=1),
        objective=ObjectiveConfig(smoothing=0.1),
        optimizer=OptimizerConfig(weight_decay=0.1),
        schedule=ScheduleConfig(batch_size=32, epochs=11.0, lr=1e-3, warmup_steps=1000),
    )


def cifar10_small() -> RunConfig:
    """Return the run on CIFAR-10 with the usual crop and flip: half an hour is too short to overfit."""
    return replace(cifar10_after_fractals(), model=small_hybrid(image_size=32, depth=5))


def fractals_small() -> RunConfig:
    """Return the pre-training run on fractals for cifar10-small's model."""
    return RunConfig(
        model=small_hybrid(image_size=32, depth=5),
        data=DataConfig(path="fractals", fractals=FractalConfig(num_classes=200, per_class=1000, size=32)),
        augment=AugmentConfig(crop="pad", pad=4),
        optimizer=OptimizerConfig(weight_decay=0.05),
        schedule=ScheduleConfig(batch_size=32, epochs=2.75, lr=1e-3, warmup_steps=1000),
    )


def cifar10_after_fractals() -> RunConfig:
    """Return cifar10-small's run from 30 % of the weights of fractals-small, a better start than all of them."""
    return RunConfig(
        model=ModelChoice(new_head=True, shrink=0.3),
        data=DataConfig(path="cifar10", val_fraction=0.02),
        augment=AugmentConfig(crop="pad", pad=4),
        objective=ObjectiveConfig(smoothing=0.1),
        optimizer=OptimizerConfig(weight_decay=0.05),
        schedule=ScheduleConfig(batch_size=32, epochs=11.0, lr=1e-3, warmup_steps=1000),
    )


def cifar10_hybrid() -> RunConfig:
    """Return the run on CIFAR-10 with a stacked root and Muon: 1.8e14 FLOPs of training."""
    model = stacked_hybrid(image_size=32, root_width=128)
    return muon_run(model, DataConfig(path="cifar10", val_fraction=0.02), pad=4, epochs=9.0, warmup_steps=340)


def cifar10_bit() -> RunConfig:
    """Return cifar10-hybrid's run for BiT with a small root: at 32 pixels the usual one would leave 2 × 2 cells."""
    settings = ("units=[2, 2, 2]", "root=small", "width_factor=0.375")
    model = ModelChoice(name="BiT-R50x1", image_size=32, settings=settings)
    return muon_run(model, DataConfig(path="cifar10", val_fraction=0.02), pad=4, epochs=8.1, warmup_steps=310)


def fashion_mnist_hybrid() -> RunConfig:
    """Return the run on Fashion-MNIST with a stacked root and Muon: 6e13 FLOPs of training."""
    model = stacked_hybrid(image_size=28, root_width=64)
    data = DataConfig(path="fashion-mnist", channels=1, val_fraction=0.02)
    return muon_run(model, data, pad=1, epochs=7.1, warmup_steps=330)


def muon_run(model: ModelChoice, data: DataConfig, *, pad: int, epochs: float, warmup_steps: int) -> RunConfig:
    """Return a short run with Muon: linear decay, label smoothing, and shifted and flipped images."""
    return RunConfig(
        model=model,
        data=data,
        augment=AugmentConfig(crop="pad", pad=pad),
        objective=ObjectiveConfig(smoothing=0.1),
        optimizer=OptimizerConfig(name="muon", weight_decay=0.02),
        schedule=ScheduleConfig(
            batch_size=64, epochs=epochs, lr=0.02, warmup_steps=warmup_steps, decay="linear", end_lr=0.0
        ),
    )


def stacked_hybrid(*, image_size: int, root_width: int) -> ModelChoice:
    """Return two blocks after a root of 3 × 3 convolutions with a residual unit at each of its resolutions."""
    model = small_model(image_size=image_size, patch_size=1, width=128, depth=2, mlp_dim=256)
    root = ("backbone.units=[]", "backbone.root=stack", f"backbone.root_width={root_width}")
    settings = (*model.settings, *root, "backbone.root_units=[1, 1]", "positions.kind=sincos_2d")
    return replace(model, settings=settings)


def small_hybrid(*, image_size: int, depth: int) -> ModelChoice:
    """Return a hybrid with one token for 4 × 4 pixels: hybrids are better for small budgets (section 4.4).

    Fixed positions need not be learned in a short run.
    """
    model = small_model(image_size=image_size, patch_size=1, width=128, depth=depth, mlp_dim=256)
    resnet = ("backbone.units=[1]", "backbone.root_width=64", "positions.kind=sincos_2d")
    return replace(model, settings=(*model.settings, *resnet))


def small_model(*, image_size: int, patch_size: int, width: int, depth: int, mlp_dim: int) -> ModelChoice:
    """Return a small ViT: heads of width 32, mean pooling (learns faster than a token), exact GELU (fast on CPUs)."""
    shape = (f"width={width}", f"depth={depth}", f"heads={width // 32}", f"mlp_dim={mlp_dim}")
    settings = (*shape, "pooling=mean", "block.activation=gelu_erf")
    return ModelChoice(name="Ti/16", image_size=image_size, patch_size=patch_size, settings=settings)


def recipes() -> Iterator[Recipe]:
    """Yield the small recipes, the fastest first."""
    recipe = partial(Recipe, GROUP)
    yield recipe(
        "digits",
        digits,
        "Hand-written digits, which come with vitkit",
        "vitkit train digits --out runs/digits",
        "about 2 minutes on two cores",
        f"98 % of the 359 test images; {FIGURES}",
    )
    yield recipe(
        "folder",
        folder,
        "A folder of 200 to 5,000 photos, from scratch",
        "vitkit train FOLDER --out runs/photos",
        "at most 5 minutes on two cores",
        f"depends on the photos; fine-tuning gives more; {FIGURES}",
    )
    yield recipe(
        "finetune-folder",
        finetune_folder,
        "A folder of photos, from pretrained weights",
        "vitkit finetune WEIGHTS FOLDER --out runs/photos",
        "minutes on two cores for a small model and a thousand photos",
        f"depends on the weights and the photos; {FIGURES}",
        rates=(1e-4, 3e-4, 1e-3, 3e-3),
    )
    yield recipe(
        "fashion-mnist",
        fashion_mnist,
        "Fashion-MNIST at 28 pixels, from scratch",
        "vitkit train fashion-mnist --out runs/fashion data=/usr/share/dataset-fashion-mnist",
        "19 minutes on two cores",
        f"91.3 % of the 10,000 test images; {FIGURES}",
    )
    yield recipe(
        "cifar10-small",
        cifar10_small,
        "CIFAR-10 at 32 pixels, from scratch",
        "vitkit train cifar10-small --out runs/cifar10 data=FOLDER",
        "29 minutes on two cores",
        f"76.2 % of the 10,000 test images; {FIGURES}",
    )
    yield recipe(
        "fashion-mnist-hybrid",
        fashion_mnist_hybrid,
        "Fashion-MNIST at 28 pixels with a convolutional root and Muon, from scratch",
        "vitkit train fashion-mnist-hybrid --out runs/fashion data=FOLDER",
        "6e13 FLOPs, about 10 minutes on two cores; 7 on one with parallel.precision=bf16 where the CPU has it",
        f"92.9 % of the 10,000 test images; {FIGURES}",
    )
    yield recipe(
        "cifar10-hybrid",
        cifar10_hybrid,
        "CIFAR-10 at 32 pixels with a convolutional root and Muon, from scratch",
        "vitkit train cifar10-hybrid --out runs/cifar10 data=FOLDER",
        "1.8e14 FLOPs, about 30 minutes on two cores; 17 on one with parallel.precision=bf16 where the CPU has it",
        f"88.5 % of the 10,000 test images; {FIGURES}",
    )
    yield recipe(
        "cifar10-bit",
        cifar10_bit,
        "CIFAR-10 at 32 pixels with BiT, the baseline of cifar10-hybrid with the same compute",
        "vitkit train cifar10-bit --out runs/cifar10-bit data=FOLDER",
        "1.8e14 FLOPs, about 30 minutes on two cores",
        f"not measured yet; {FIGURES}",
    )
    yield recipe(
        "fractals-small",
        fractals_small,
        "Fractals, drawn on the fly, to pre-train the model of cifar10-small",
        "vitkit train fractals-small --out runs/fractals",
        "30 minutes on two cores",
        f"77 % of the held-out images of 200 classes; {FIGURES}",
    )
    yield recipe(
        "cifar10-after-fractals",
        cifar10_after_fractals,
        "CIFAR-10 at 32 pixels, from the weights of fractals-small",
        "vitkit finetune runs/fractals FOLDER --recipe cifar10-after-fractals --out runs/cifar10-after",
        "29 minutes on two cores",
        f"76.5 % of the 10,000 test images, as good as cifar10-small; {FIGURES}",
        rates=(3e-4, 1e-3, 2e-3),
    )
