"""A model's name goes in, the model comes out; or a pattern, and the rows of the table that match it."""

import re
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch

from vitkit.core.config import apply_overrides, from_mapping
from vitkit.core.errors import UnknownNameError, did_you_mean
from vitkit.core.shapes import Size, pair
from vitkit.model.config import ViTConfig
from vitkit.model.resnet import BiT, BiTConfig
from vitkit.model.vit import ViT
from vitkit.zoo.variants import VARIANTS, ModelConfig, Variant

Model = ViT | BiT


def find(name: str) -> Variant:
    """The variant of that name or alias, in any case; an alias's image size is put into its configuration.

    What follows a dot in a timm name tells weights apart, not models; so does `-in21k`, and the model is one of 1,000
    classes. How many classes such weights have, if any, depends on who wrote the file, and loading follows the file.

    >>> find("b/16").name, find("google/vit-base-patch16-384").config.image_size
    ('B/16', 384)
    >>> find("vit_small_patch16_224.augreg_in21k").name
    'S/16'
    """
    wanted = name.lower()
    if wanted.startswith(("vit_", "resnetv2_")):
        wanted = wanted.partition(".")[0]
    for variant in VARIANTS:
        for known in (variant.name, *variant.aliases):
            if known.lower() == wanted:
                return replace(variant, config=replace(variant.config, image_size=image_size_in(known)))
    names = [known for variant in VARIANTS for known in (variant.name, *variant.aliases)]
    raise UnknownNameError(
        f"no model is called {name}", hint=did_you_mean(name, names) or "vitkit models lists every name"
    )


def image_size_in(alias: str) -> int:
    """The image size that timm and hub names carry at their end; 224 for the others.

    >>> image_size_in("vit_base_patch16_384"), image_size_in("google/vit-base-patch32-224-in21k"), image_size_in("B/16")
    (384, 224, 224)
    """
    found = re.search(r"[-_](\d{3})(-in21k)?$", alias)
    return int(found[1]) if found else 224


def name_of(config: ModelConfig) -> str:
    """What to call a model: the paper's name for its sizes, whatever its images, classes and details; or its sizes.

    >>> name_of(configure("B/16", image_size=384, classes=10)), name_of(configure("B/16", settings=["depth=3"]))
    ('B/16', 'ViT 768 wide, 3 deep, patches of 16')
    """
    for variant in VARIANTS:
        if _sizes(variant.config) == _sizes(config):
            return variant.name
    if isinstance(config, BiTConfig):
        return f"BiT {config.width_factor} wide, {'-'.join(map(str, config.units))} units"
    height, width = pair(config.patch_size)
    patches = str(height) if height == width else f"{height}×{width}"
    return f"ViT {config.width} wide, {config.depth} deep, patches of {patches}"


def _sizes(config: ModelConfig) -> tuple[object, ...]:
    if isinstance(config, BiTConfig):
        return ("BiT", config.units, config.width_factor)
    backbone = config.backbone and (config.backbone.units, config.backbone.root_width)
    return (
        pair(config.patch_size),
        backbone,
        config.block.axial,
        config.width,
        config.depth,
        config.heads,
        config.mlp_dim,
    )


def matching(pattern: str = "*") -> tuple[Variant, ...]:
    """The variants whose name, or one of whose aliases, fits a wildcard pattern in any case.

    >>> [variant.name for variant in matching("r50+*")]
    ['R50+B/16', 'R50+B/32', 'R50+L/16', 'R50+L/32']
    """
    return tuple(
        variant
        for variant in VARIANTS
        if any(fnmatchcase(name.lower(), pattern.lower()) for name in (variant.name, *variant.aliases))
    )


def models(pattern: str = "*") -> list[str]:
    """The names of the paper's models that fit a wildcard pattern.

    >>> models("H/*")
    ['H/14']
    """
    return [variant.name for variant in matching(pattern)]


def configure(
    model: str | ModelConfig,
    *,
    image_size: Size | None = None,
    patch_size: Size | None = None,
    channels: int | None = None,
    classes: int | None = None,
    settings: Sequence[str] = (),
) -> ModelConfig:
    """A model's configuration, changed where asked; `settings` are `section.key=value` for all that has no argument.

    >>> configure("B/16", image_size=384, settings=["positions.kind=sincos_2d"]).grid
    (24, 24)
    """
    config = find(model).config if isinstance(model, str) else model
    asked = {"image_size": image_size, "patch_size": patch_size, "channels": channels, "classes": classes}
    changes = {key: value for key, value in asked.items() if value is not None}
    return apply_overrides(from_mapping(type(config), changes, base=config), settings)


def build(config: ModelConfig) -> Model:
    """A model of this configuration, with parameters set where it is not on the meta device."""
    return ViT(config) if isinstance(config, ViTConfig) else BiT(config)


def create(
    model: str | ModelConfig,
    *,
    image_size: Size | None = None,
    patch_size: Size | None = None,
    channels: int | None = None,
    classes: int | None = None,
    settings: Sequence[str] = (),
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    generator: torch.Generator | None = None,
) -> Model:
    """A freshly initialised model by name, or by configuration; on device "meta" it has shapes and no numbers.

    >>> model = create("Ti/16", image_size=32, classes=10)
    >>> model(torch.rand(1, 3, 32, 32)).shape
    torch.Size([1, 10])
    """
    config = configure(
        model,
        image_size=image_size,
        patch_size=patch_size,
        channels=channels,
        classes=classes,
        settings=settings,
    )
    with torch.device("meta"):
        made = build(config)
    made = made.to(dtype)
    if torch.device(device).type == "meta":
        return made
    made = made.to_empty(device=device)
    made.reset_parameters(generator)
    return made
