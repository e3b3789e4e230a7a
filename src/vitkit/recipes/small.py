"""What two cores can do in minutes goes in, the runs that most people will start with come out."""

from collections.abc import Iterator
from dataclasses import replace

from vitkit.data.augment import AugmentConfig
from vitkit.data.fractals import FractalConfig
from vitkit.recipes.recipe import Recipe
from vitkit.train.config import DataConfig, ModelChoice, ObjectiveConfig, OptimizerConfig, RunConfig, ScheduleConfig

GROUP = "Small, for two cores"
FIGURES = "docs/experiments.md has the figures and curves"


def recipes() -> Iterator[Recipe]:
    """The small recipes, the quickest first.

    >>> [recipe.name for recipe in recipes()][:2]
    ['digits', 'folder']
    """
    yield Recipe(
        name="digits",
        group=GROUP,
        summary="Hand-written digits, which come with vitkit",
        command="vitkit train digits --out runs/digits",
        time="about 2 minutes on two cores",
        expected=f"98 % of the 359 test images; {FIGURES}",
        make=digits,
    )
    yield Recipe(
        name="folder",
        group=GROUP,
        summary="A folder of 200 to 5,000 photos, from scratch",
        command="vitkit train FOLDER --out runs/photos",
        time="at most 5 minutes on two cores",
        expected=f"depends on the photos, and is less than fine-tuning gives; {FIGURES}",
        make=folder,
    )
    yield Recipe(
        name="finetune-folder",
        group=GROUP,
        summary="A folder of photos, from a model that has learned something before",
        command="vitkit finetune WEIGHTS FOLDER --out runs/photos",
        time="minutes on two cores for a small model and a thousand photos",
        expected=f"depends on the weights and the photos; {FIGURES}",
        make=finetune_folder,
        kind="finetune",
        rates=(1e-4, 3e-4, 1e-3, 3e-3),
    )
    yield Recipe(
        name="fashion-mnist",
        group=GROUP,
        summary="Fashion-MNIST at 28 pixels, from scratch",
        command="vitkit train fashion-mnist --out runs/fashion data=/usr/share/dataset-fashion-mnist",
        time="19 minutes on two cores",
        expected=f"91.3 % of the 10,000 test images; {FIGURES}",
        make=fashion_mnist,
    )
    yield Recipe(
        name="cifar10-small",
        group=GROUP,
        summary="CIFAR-10 at 32 pixels, from scratch",
        command="vitkit train cifar10-small --out runs/cifar10 data=FOLDER",
        time="29 minutes on two cores",
        expected=f"76.2 % of the 10,000 test images; {FIGURES}",
        make=cifar10_small,
    )
    yield Recipe(
        name="fractals-small",
        group=GROUP,
        summary="Fractals, drawn on the fly, to pre-train the model of cifar10-small",
        command="vitkit train fractals-small --out runs/fractals",
        time="30 minutes on two cores",
        expected=f"77 % of the held-out images of 200 classes; {FIGURES}",
        make=fractals_small,
    )
    yield Recipe(
        name="cifar10-after-fractals",
        group=GROUP,
        summary="CIFAR-10 at 32 pixels, from the weights of fractals-small",
        command="vitkit finetune runs/fractals FOLDER --recipe cifar10-after-fractals --out runs/cifar10-after",
        time="29 minutes on two cores",
        expected=f"76.5 % of the 10,000 test images, as good as cifar10-small; {FIGURES}",
        make=cifar10_after_fractals,
        kind="finetune",
        rates=(3e-4, 1e-3, 2e-3),
    )


def digits() -> RunConfig:
    """Digits are 8 pixels wide; a ViT sees 4×4 patches of them at twice that size. Mirrored digits are no digits."""
    return RunConfig(
        model=small_model(image_size=16, patch_size=4, width=96, depth=4, mlp_dim=192),
        data=DataConfig(path="digits", channels=1),
        augment=AugmentConfig(crop="pad", pad=1, flip=False),
        optimizer=OptimizerConfig(weight_decay=0.1),
        schedule=ScheduleConfig(batch_size=64, epochs=100.0, lr=2e-3, warmup_steps=100),
    )


def folder() -> RunConfig:
    """A number of steps, not of epochs: few photos are seen often, many seldom, in the same time."""
    return RunConfig(
        model=small_model(image_size=96, patch_size=12, width=192, depth=6, mlp_dim=384),
        data=DataConfig(path="photos"),
        augment=AugmentConfig(crop_area=(0.25, 1.0), colour_jitter=0.2, mixup=0.2),
        objective=ObjectiveConfig(smoothing=0.1),
        optimizer=OptimizerConfig(weight_decay=0.1),
        schedule=ScheduleConfig(batch_size=32, epochs=None, steps=800, lr=1e-3, warmup_steps=80),
    )


def finetune_folder() -> RunConfig:
    """Adam needs less care with its rate than Table 4's SGD; lower layers, which are the most general, move less."""
    return RunConfig(
        model=ModelChoice(new_head=True),
        data=DataConfig(path="photos"),
        augment=AugmentConfig(crop_area=(0.35, 1.0)),
        objective=ObjectiveConfig(smoothing=0.1),
        optimizer=OptimizerConfig(weight_decay=0.05, layer_decay=0.8),
        schedule=ScheduleConfig(batch_size=32, epochs=15.0, lr=1e-3, warmup_steps=20),
    )


def fashion_mnist() -> RunConfig:
    """Clothes may be mirrored and moved a little. In a short run many small steps learn more than few large ones."""
    return RunConfig(
        model=small_hybrid(image_size=28, units=1, width=128, depth=3, mlp_dim=256),
        data=DataConfig(path="fashion-mnist", channels=1, val_share=0.02),
        augment=AugmentConfig(crop="pad", pad=1),
        objective=ObjectiveConfig(smoothing=0.1),
        optimizer=OptimizerConfig(weight_decay=0.1),
        schedule=ScheduleConfig(batch_size=32, epochs=11.0, lr=1e-3, warmup_steps=1000),
    )


def cifar10_small() -> RunConfig:
    """The usual crop and flip of CIFAR, and little else: half an hour is too short to learn by heart."""
    return replace(cifar10_after_fractals(), model=cifar_model())


def fractals_small() -> RunConfig:
    """Pre-training for cifar10-small's model on images that need no camera."""
    return RunConfig(
        model=cifar_model(),
        data=DataConfig(path="fractals", fractals=FractalConfig(classes=200, per_class=1000, size=32)),
        augment=AugmentConfig(crop="pad", pad=4),
        optimizer=OptimizerConfig(weight_decay=0.05),
        schedule=ScheduleConfig(batch_size=32, epochs=2.75, lr=1e-3, warmup_steps=1000),
    )


def cifar10_after_fractals() -> RunConfig:
    """What cifar10-small does, from the weights of fractals-small, of which 30 % are a better start than all."""
    return RunConfig(
        model=ModelChoice(new_head=True, shrink=0.3),
        data=DataConfig(path="cifar10", val_share=0.02),
        augment=AugmentConfig(crop="pad", pad=4),
        objective=ObjectiveConfig(smoothing=0.1),
        optimizer=OptimizerConfig(weight_decay=0.05),
        schedule=ScheduleConfig(batch_size=32, epochs=11.0, lr=1e-3, warmup_steps=1000),
    )


def cifar_model() -> ModelChoice:
    """The model that these three share."""
    return small_hybrid(image_size=32, units=1, width=128, depth=5, mlp_dim=256)


def small_hybrid(*, image_size: int, units: int, width: int, depth: int, mlp_dim: int) -> ModelChoice:
    """A ViT on the root and the first units of a ResNet, a cell of which stands for 4 × 4 pixels. Small budgets are
    where the paper finds hybrids ahead (section 4.4), and fixed positions spare a short run the learning of them.
    """
    model = small_model(image_size=image_size, patch_size=1, width=width, depth=depth, mlp_dim=mlp_dim)
    resnet = (f"backbone.units=[{units}]", "backbone.root_width=64", "positions.kind=sincos_2d")
    return replace(model, settings=(*model.settings, *resnet))


def small_model(*, image_size: int, patch_size: int, width: int, depth: int, mlp_dim: int) -> ModelChoice:
    """A ViT of its own shape: heads 32 wide, the mean of the patches, which learns sooner than a token, and the GELU
    that a CPU computes sooner.
    """
    shape = (f"width={width}", f"depth={depth}", f"heads={width // 32}", f"mlp_dim={mlp_dim}")
    settings = (*shape, "pooling=mean", "block.activation=gelu_erf")
    return ModelChoice(name="Ti/16", image_size=image_size, patch_size=patch_size, settings=settings)
