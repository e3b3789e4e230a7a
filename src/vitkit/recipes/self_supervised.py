"""Self-supervised recipes, and runs with 1 % of the labels that show their benefit.

Masked patch prediction follows the paper's appendix B.1.2. The autoencoder follows "Masked Autoencoders Are Scalable
Vision Learners" (He et al., 2021), table 8: AdamW with β2 0.95, lr 1.5e-4 × batch / 256, batch 4096, weight decay 0.05,
warm-up of 40 epochs, cosine, crops of 20 % to all of an image, flips and nothing else; 800 epochs are its ablations'.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Literal

from vitkit.data.config import AugmentConfig
from vitkit.model.pretraining_config import MAEConfig, MaskedConfig
from vitkit.objectives.config import ObjectiveConfig
from vitkit.recipes.paper import IMAGENET, JFT, imagenet_schedule, train_command
from vitkit.recipes.recipe import Recipe
from vitkit.recipes.small import FIGURES, small_model
from vitkit.training.config import DataConfig, ModelChoice, OptimizerConfig, RunConfig, ScheduleConfig

GROUP = "Self-supervised"
recipe = partial(Recipe, GROUP)

BATCH_SIZE = 4096
FASHION = "/usr/share/dataset-fashion-mnist"

Small = Literal["fashion-mnist", "cifar10"]
SMALL: tuple[Small, ...] = ("fashion-mnist", "cifar10")


def recipes() -> Iterator[Recipe]:
    """Yield the two papers' runs, those for a folder of photos, then the small ones with their baselines."""
    yield recipe(
        "masked-b16",
        masked_b16,
        "Masked patch prediction, B/16 on JFT-300M, 1M steps",
        train_command("masked-b16"),
        "433 exaFLOPs by our count; 100,000 steps have most of the gain (appendix B.1.2)",
        "ImageNet 79.9 % after fine-tuning, 2 points above training from scratch (section 4.6). JFT-300M is "
        "not public: set data.path to any images",
    )
    yield recipe(
        "mae-b16",
        mae_b16,
        "Masked autoencoder, B/16 on ImageNet, 800 epochs",
        train_command("mae-b16"),
        "60 exaFLOPs by our count; not timed",
        "ImageNet 83.6 % after 1,600 epochs and fine-tuning (the paper)",
    )
    for name, make, task in (
        ("masked-folder", masked_folder, "predict colors of hidden patches"),
        ("mae-folder", mae_folder, "fill in hidden patches"),
    ):
        yield recipe(
            name,
            make,
            f"A folder of photos without labels: {task}",
            f"vitkit train {name} --out runs/{name} data=FOLDER",
            "about a quarter of an hour on two cores, not timed",
            "features for vitkit finetune; their quality depends on the photos",
        )
    yield from chain.from_iterable(map(small_recipes, SMALL))


def small_recipes(data: Small) -> Iterator[Recipe]:
    """Yield both ways of pre-training on a dataset, and runs with 1 % of its labels with and without it."""
    gray = data == "fashion-mnist"
    title, path, runs = ("Fashion-MNIST", FASHION, "fashion") if gray else ("CIFAR-10", "FOLDER", "cifar10")
    short = "3 minutes on one core" if gray else "a few minutes on two cores, not timed"
    scratch_result, tuned_result = ("76.2 % of the 10,000 test images, ", "81.6 %, ") if gray else ("", "")
    few, half_hour = f"{data}-1-percent", "about half an hour on two cores, not timed"
    for method, make, summary, time in (
        ("masked", masked_small, "Masked patch prediction", half_hour),
        ("mae", mae_small, "Masked autoencoder", "12 minutes on one core" if gray else half_hour),
    ):
        name = f"{method}-{data}" + ("" if gray else "-small")
        yield recipe(
            name,
            partial(make, data),
            f"{summary} on {title} without its labels",
            f"vitkit train {name} --out runs/{method}-{runs} data={path}",
            time,
            f"features for {few}-after; {FIGURES}",
        )
    yield recipe(
        few,
        partial(few_labels, data),
        f"{title} with 1 % of its labels, from scratch",
        f"vitkit train {few} --out runs/{runs}-scratch data={path}",
        short,
        f"{scratch_result}the baseline of {few}-after; {FIGURES}",
    )
    yield recipe(
        f"{few}-after",
        partial(few_labels_after, data),
        f"{title} with 1 % of its labels, after self-supervised pre-training",
        f"vitkit finetune runs/mae-{runs} {path} --recipe {few}-after --out runs/{runs}-after",
        short,
        f"{tuned_result}more than {few}; {FIGURES}",
        rates=(3e-4, 1e-3, 2e-3),
    )


def masked_b16() -> RunConfig:
    """Return the run of appendix B.1.2; it has no weight decay, and the rest is as in B.1."""
    return RunConfig(
        model=ModelChoice(name="B/16", image_size=224),
        data=JFT.data(),
        augment=AugmentConfig(crop="inception", flip=True),
        objective=ObjectiveConfig(name="masked", masked=MaskedConfig(target="mean_color")),
        optimizer=OptimizerConfig(name="adam", beta1=0.9, beta2=0.999, clip=None),
        schedule=ScheduleConfig(
            batch_size=BATCH_SIZE, epochs=None, steps=1_000_000, lr=2e-4, warmup_steps=10_000, decay="cosine"
        ),
    )


def mae_b16() -> RunConfig:
    """Return the run of MAE's table 8. Its encoder has a class token, fixed positions and the exact GELU."""
    settings = ("positions.kind=sincos_2d", "positions.sincos=mae", "positions.origin=mae", "block.activation=gelu_erf")
    return RunConfig(
        model=ModelChoice(name="B/16", image_size=224, settings=settings),
        data=IMAGENET.data(preprocessing="mae"),
        augment=AugmentConfig(crop="inception", crop_area=(0.2, 1.0), flip=True),
        objective=ObjectiveConfig(name="mae", mae=MAEConfig(width=512, depth=8, heads=16)),
        optimizer=OptimizerConfig(name="adam", beta1=0.9, beta2=0.95, weight_decay=0.05, clip=None),
        schedule=imagenet_schedule(batch_size=BATCH_SIZE, epochs=800.0, lr=1.5e-4 * BATCH_SIZE / 256, warmup_epochs=40),
    )


def masked_folder() -> RunConfig:
    """Return the run with the model of the folder recipe and three times its steps."""
    return RunConfig(
        model=small_model(image_size=96, patch_size=12, width=192, depth=6, mlp_dim=384),
        data=DataConfig(path="photos"),
        augment=AugmentConfig(crop_area=(0.2, 1.0)),
        objective=ObjectiveConfig(name="masked"),
        optimizer=OptimizerConfig(weight_decay=0.05, beta2=0.95),
        schedule=ScheduleConfig(batch_size=32, epochs=None, steps=2400, lr=5e-4, warmup_steps=240),
    )


def mae_folder() -> RunConfig:
    """Return the same run with a masked autoencoder."""
    return replace(masked_folder(), objective=small_autoencoder())


def masked_small(data: Small) -> RunConfig:
    """Return the masked-patch run of a small dataset.

    Gray patches have only eight mean colors, so the target is the 16 cells of a patch, which here are its pixels.
    """
    gray = data == "fashion-mnist"
    target: Literal["downsized", "mean_color"] = "downsized" if gray else "mean_color"
    return replace(
        without_labels(data),
        objective=ObjectiveConfig(name="masked", masked=MaskedConfig(target=target)),
        schedule=ScheduleConfig(batch_size=64, epochs=14.0 if gray else 9.0, lr=1e-3, warmup_steps=1000),
    )


def mae_small(data: Small) -> RunConfig:
    """Return the MAE run of a small dataset."""
    gray = data == "fashion-mnist"
    return replace(
        without_labels(data),
        objective=small_autoencoder(),
        schedule=ScheduleConfig(batch_size=64, epochs=10.0 if gray else 12.0, lr=1e-3, warmup_steps=1000),
    )


def small_autoencoder() -> ObjectiveConfig:
    """Return the objective with a small decoder."""
    return ObjectiveConfig(name="mae", mae=MAEConfig(width=64, depth=2, heads=2))


def without_labels(data: Small) -> RunConfig:
    """Return the settings common to both objectives: Adam with MAE's β2, and crops of most of an image."""
    return RunConfig(
        model=patches(data),
        data=images(data),
        augment=AugmentConfig(crop_area=(0.5, 1.0)),
        optimizer=OptimizerConfig(weight_decay=0.05, beta2=0.95),
    )


def few_labels(data: Small) -> RunConfig:
    """Return the run with 1 % of the labels from scratch; its length is in steps, since an epoch has few images."""
    return replace(few_labels_after(data), model=patches(data), optimizer=OptimizerConfig(weight_decay=0.05))


def few_labels_after(data: Small) -> RunConfig:
    """Return the same run from pretrained weights, with layer-wise decay."""
    return RunConfig(
        model=ModelChoice(new_head=True),
        data=replace(images(data), label_fraction=0.01),
        augment=AugmentConfig(crop="pad", pad=1 if data == "fashion-mnist" else 4),
        objective=ObjectiveConfig(smoothing=0.1),
        optimizer=OptimizerConfig(weight_decay=0.05, layer_decay=0.8),
        schedule=ScheduleConfig(batch_size=32, epochs=None, steps=2000, lr=1e-3, warmup_steps=100),
    )


def images(data: Small) -> DataConfig:
    """Return the dataset of a small recipe."""
    return DataConfig(path=data, channels=1 if data == "fashion-mnist" else 3, val_fraction=0.02)


def patches(data: Small) -> ModelChoice:
    """Return a ViT with 4 × 4 patches and fixed positions: 49 patches for Fashion-MNIST, 64 for CIFAR-10."""
    side, depth = (28, 4) if data == "fashion-mnist" else (32, 5)
    model = small_model(image_size=side, patch_size=4, width=128, depth=depth, mlp_dim=256)
    return replace(model, settings=(*model.settings, "positions.kind=sincos_2d"))
