"""Images whose labels are not read go in; runs that pre-train on them, and that show what it is worth, come out.

Masked patch prediction is by the paper's appendix B.1.2. The autoencoder is by "Masked Autoencoders Are Scalable
Vision Learners" (He et al., 2021), table 8: AdamW with β2 0.95, lr 1.5e-4 × batch / 256, batch 4096, weight decay 0.05,
warm-up of 40 epochs, cosine, crops of 20 % to all of an image, flips and nothing else; 800 epochs are its ablations'.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

from vitkit.data.augment import AugmentConfig
from vitkit.model.masked import AutoencoderConfig, MaskedConfig
from vitkit.recipes.recipe import Recipe
from vitkit.recipes.small import FIGURES, small_model
from vitkit.recipes.table3 import HELD_OUT, IMAGENET, JFT, train_command
from vitkit.train.config import DataConfig, ModelChoice, ObjectiveConfig, OptimizerConfig, RunConfig, ScheduleConfig

GROUP = "Without labels"

IMAGES = 1_281_167
"""Training images of ImageNet."""
BATCH_SIZE = 4096
FASHION = "/usr/share/dataset-fashion-mnist"

Small = Literal["fashion-mnist", "cifar10"]
SMALL: tuple[Small, ...] = ("fashion-mnist", "cifar10")


def recipes() -> Iterator[Recipe]:
    """The two papers' runs, those for a folder of photos, then the small ones and what they are compared with.

    >>> [recipe.name for recipe in recipes()][:2]
    ['masked-b16', 'mae-b16']
    """
    yield Recipe(
        name="masked-b16",
        group=GROUP,
        summary="Masked patch prediction, B/16 on JFT-300M, 1M steps",
        command=train_command("masked-b16"),
        time="433 exaFLOPs by our count; 100,000 steps have most of the gain (appendix B.1.2)",
        expected="ImageNet 79.9 % after fine-tuning, 2 points above training from scratch (section 4.6). JFT-300M is "
        "not public: data.path is for any set of images",
        make=masked_b16,
    )
    yield Recipe(
        name="mae-b16",
        group=GROUP,
        summary="Masked autoencoder, B/16 on ImageNet, 800 epochs",
        command=train_command("mae-b16"),
        time="60 exaFLOPs by our count; not timed",
        expected="ImageNet 83.6 % after 1,600 epochs and fine-tuning (the paper)",
        make=mae_b16,
    )
    yield from folder_recipes()
    for data in SMALL:
        yield from small_recipes(data)


def folder_recipes() -> Iterator[Recipe]:
    """A folder of photos, labelled or not."""
    for name, what, make in (
        ("masked-folder", "predict colours of hidden patches", masked_folder),
        ("mae-folder", "fill in hidden patches", mae_folder),
    ):
        yield Recipe(
            name=name,
            group=GROUP,
            summary=f"A folder of photos without labels: {what}",
            command=f"vitkit train {name} --out runs/{name} data=FOLDER",
            time="about a quarter of an hour on two cores, not timed",
            expected="features for vitkit finetune; what they are worth depends on the photos",
            make=make,
        )


def small_recipes(data: Small) -> Iterator[Recipe]:
    """Both ways of pre-training on one data set, and 1 % of its labels with and without."""
    title, place = ("Fashion-MNIST", FASHION) if data == "fashion-mnist" else ("CIFAR-10", "FOLDER")
    size = "" if data == "fashion-mnist" else "-small"
    runs = "fashion" if data == "fashion-mnist" else "cifar10"
    short = "3 minutes on one core" if data == "fashion-mnist" else "a few minutes on two cores, not timed"
    alone, after = ("76.2 % of the 10,000 test images, ", "81.6 %, ") if data == "fashion-mnist" else ("", "")
    for method, summary, make in (
        ("masked", "Masked patch prediction", masked_small),
        ("mae", "Masked autoencoder", mae_small),
    ):
        name = f"{method}-{data}{size}"
        yield Recipe(
            name=name,
            group=GROUP,
            summary=f"{summary} on {title}, whose labels are not read",
            command=f"vitkit train {name} --out runs/{method}-{runs} data={place}",
            time="12 minutes on one core"
            if name == "mae-fashion-mnist"
            else "about half an hour on two cores, not timed",
            expected=f"features for {data}-1-percent-after; {FIGURES}",
            make=partial(make, data),
        )
    yield Recipe(
        name=f"{data}-1-percent",
        group=GROUP,
        summary=f"{title} with 1 % of its labels, from scratch",
        command=f"vitkit train {data}-1-percent --out runs/{runs}-scratch data={place}",
        time=short,
        expected=f"{alone}what {data}-1-percent-after is compared with; {FIGURES}",
        make=partial(few_labels, data),
    )
    yield Recipe(
        name=f"{data}-1-percent-after",
        group=GROUP,
        summary=f"{title} with 1 % of its labels, after learning without them",
        command=f"vitkit finetune runs/mae-{runs} {place} --recipe {data}-1-percent-after --out runs/{runs}-after",
        time=short,
        expected=f"{after}more than {data}-1-percent; {FIGURES}",
        make=partial(few_labels_after, data),
        kind="finetune",
        rates=(3e-4, 1e-3, 2e-3),
    )


# The papers' runs


def masked_b16() -> RunConfig:
    """Appendix B.1.2; it names no weight decay, and the rest is as in B.1."""
    return RunConfig(
        model=ModelChoice(name="B/16", image_size=224),
        data=DataConfig(path=JFT.path, val_share=HELD_OUT, preprocessing="paper"),
        augment=AugmentConfig(crop="inception", flip=True),
        objective=ObjectiveConfig(name="masked", masked=MaskedConfig(target="mean_colour")),
        optimizer=OptimizerConfig(name="adam", beta1=0.9, beta2=0.999, clip=None),
        schedule=ScheduleConfig(
            batch_size=BATCH_SIZE, epochs=None, steps=1_000_000, lr=2e-4, warmup_steps=10_000, decay="cosine"
        ),
    )


def mae_b16() -> RunConfig:
    """The autoencoder's table 8. Its encoder has a class token, fixed positions and the exact GELU."""
    settings = ("positions.kind=sincos_2d", "positions.sincos=mae", "positions.origin=mae", "block.activation=gelu_erf")
    return RunConfig(
        model=ModelChoice(name="B/16", image_size=224, settings=settings),
        data=DataConfig(path=IMAGENET.path, kind=IMAGENET.kind, val_share=0.0, preprocessing="mae"),
        augment=AugmentConfig(crop="inception", crop_area=(0.2, 1.0), flip=True),
        objective=ObjectiveConfig(name="autoencoder", autoencoder=AutoencoderConfig(width=512, depth=8, heads=16)),
        optimizer=OptimizerConfig(name="adam", beta1=0.9, beta2=0.95, weight_decay=0.05, clip=None),
        schedule=ScheduleConfig(
            batch_size=BATCH_SIZE,
            epochs=800.0,
            lr=1.5e-4 * BATCH_SIZE / 256,
            warmup_steps=round(40 * IMAGES / BATCH_SIZE),
            decay="cosine",
        ),
    )


# Photos


def masked_folder() -> RunConfig:
    """The model of the folder recipe, and three times its steps: there is more to learn from a photo than its label."""
    return RunConfig(
        model=small_model(image_size=96, patch_size=12, width=192, depth=6, mlp_dim=384),
        data=DataConfig(path="photos"),
        augment=AugmentConfig(crop_area=(0.2, 1.0)),
        objective=ObjectiveConfig(name="masked"),
        optimizer=OptimizerConfig(weight_decay=0.05, beta2=0.95),
        schedule=ScheduleConfig(batch_size=32, epochs=None, steps=2400, lr=5e-4, warmup_steps=240),
    )


def mae_folder() -> RunConfig:
    """The same with an autoencoder, whose encoder sees a quarter of the patches."""
    return replace(masked_folder(), objective=small_autoencoder())


# Two cores


def masked_small(data: Small) -> RunConfig:
    """Every patch is seen or asked for. Grey patches have eight mean colours, too few to learn much from: there the 16
    cells of the patch are asked for, which at four pixels a side are the pixels.
    """
    grey = data == "fashion-mnist"
    target: Literal["downsized", "mean_colour"] = "downsized" if grey else "mean_colour"
    return replace(
        without_labels(data),
        objective=ObjectiveConfig(name="masked", masked=MaskedConfig(target=target)),
        schedule=ScheduleConfig(batch_size=64, epochs=14.0 if grey else 9.0, lr=1e-3, warmup_steps=1000),
    )


def mae_small(data: Small) -> RunConfig:
    """The encoder sees a quarter of the patches. Ten epochs of Fashion-MNIST help, in 12 minutes."""
    grey = data == "fashion-mnist"
    return replace(
        without_labels(data),
        objective=small_autoencoder(),
        schedule=ScheduleConfig(batch_size=64, epochs=10.0 if grey else 12.0, lr=1e-3, warmup_steps=1000),
    )


def small_autoencoder() -> ObjectiveConfig:
    """A light decoder: what it need not know, the encoder need not either."""
    return ObjectiveConfig(name="autoencoder", autoencoder=AutoencoderConfig(width=64, depth=2, heads=2))


def without_labels(data: Small) -> RunConfig:
    """What both ways of pre-training share: Adam with the autoencoder's β2, and crops that leave most of an image."""
    return RunConfig(
        model=patches(data),
        data=images(data),
        augment=AugmentConfig(crop_area=(0.5, 1.0)),
        optimizer=OptimizerConfig(weight_decay=0.05, beta2=0.95),
    )


def few_labels(data: Small) -> RunConfig:
    """1 % of the labels; the whole of training is so many steps, not epochs, since there are few images in an epoch."""
    return replace(few_labels_after(data), model=patches(data), optimizer=OptimizerConfig(weight_decay=0.05))


def few_labels_after(data: Small) -> RunConfig:
    """The same from weights that have learned without labels; lower layers, which have learned most, move less."""
    return RunConfig(
        model=ModelChoice(new_head=True),
        data=replace(images(data), label_share=0.01),
        augment=AugmentConfig(crop="pad", pad=1 if data == "fashion-mnist" else 4),
        objective=ObjectiveConfig(smoothing=0.1),
        optimizer=OptimizerConfig(weight_decay=0.05, layer_decay=0.8),
        schedule=ScheduleConfig(batch_size=32, epochs=None, steps=2000, lr=1e-3, warmup_steps=100),
    )


def images(data: Small) -> DataConfig:
    """The images of a small data set."""
    return DataConfig(path=data, channels=1 if data == "fashion-mnist" else 3, val_share=0.02)


def patches(data: Small) -> ModelChoice:
    """A plain ViT on patches of 4 × 4 pixels, with fixed positions: 49 of them in Fashion-MNIST, 64 in CIFAR-10."""
    side, depth = (28, 4) if data == "fashion-mnist" else (32, 5)
    model = small_model(image_size=side, patch_size=4, width=128, depth=depth, mlp_dim=256)
    return replace(model, settings=(*model.settings, "positions.kind=sincos_2d"))
