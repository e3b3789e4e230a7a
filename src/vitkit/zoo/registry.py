"""Lookup, configuration and construction of models by name.

Importing this module does not import torch; `build`, `create` and `Model` do.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from vitkit.core.config import apply_settings, from_mapping
from vitkit.core.errors import ConfigError, UnknownNameError, did_you_mean
from vitkit.core.sizes import Size, pair
from vitkit.model.config import BiTConfig, ViTConfig
from vitkit.zoo.variants import VARIANTS, ModelConfig, Variant

if TYPE_CHECKING:
    import torch

    from vitkit.model.resnet import BiT
    from vitkit.model.vit import ViT

    Model = ViT | BiT


def __getattr__(name: str) -> object:
    """Resolve `Model`, the union of the model classes, on first use."""
    if name == "Model":
        from vitkit.model.resnet import BiT
        from vitkit.model.vit import ViT

        return ViT | BiT
    raise AttributeError(f"module {__name__} has no attribute {name}")


# Names


def find_variant(name: str) -> Variant:
    """Return the variant with this name or alias, in any case, with the image size that the alias implies.

    In a timm name, the tag after the dot identifies weights, not a model. The same holds for `-in21k`: the variant has
    1,000 classes, and the number of classes of pretrained weights comes from their file.

    >>> find_variant("b/16").name, find_variant("google/vit-base-patch16-384").config.image_size
    ('B/16', 384)
    >>> find_variant("vit_small_patch16_224.augreg_in21k").name
    'S/16'
    """
    key = name.lower()
    if key.startswith(("vit_", "resnetv2_")):
        key = key.partition(".")[0]
    for variant in VARIANTS:
        for alias in variant.names:
            if alias.lower() == key:
                return replace(variant, config=replace(variant.config, image_size=parse_image_size(alias)))
    hint = did_you_mean(name, [alias for variant in VARIANTS for alias in variant.names])
    if not hint and name.count("/") == 1 and "-" in name:
        hint = f'for Hugging Face: vitkit.load("hub:{name}")'
    raise UnknownNameError(f"unknown model {name}", hint=hint or "vitkit models lists every name")


def find_variants(pattern: str = "*") -> tuple[Variant, ...]:
    """Return the variants with a name or alias that matches a wildcard pattern, in any case.

    >>> [variant.name for variant in find_variants("r50+*")]
    ['R50+B/16', 'R50+B/32', 'R50+L/16', 'R50+L/32']
    """
    key = pattern.lower()
    matches = tuple(v for v in VARIANTS if any(fnmatchcase(name.lower(), key) for name in v.names))
    if not matches:
        hint = did_you_mean(pattern, [variant.name for variant in VARIANTS])
        raise UnknownNameError(f"no model matches {pattern}", hint=hint or "vitkit models lists every name")
    return matches


def parse_image_size(alias: str) -> int:
    """Return the image size at the end of a timm or hub name, or 224."""
    match = re.search(r"[-_](\d{3})(-in21k)?$", alias)
    return int(match[1]) if match else 224


def get_model_name(config: ModelConfig) -> str:
    """Return the name of the variant with these dimensions, or a description of the dimensions.

    Image size, classes and other details do not change the name.

    >>> get_model_name(configure("B/16", image_size=384, num_classes=10))
    'B/16'
    >>> get_model_name(configure("B/16", settings={"depth": 3}))
    'ViT 768 wide, 3 deep, patches of 16'
    """
    for variant in VARIANTS:
        if get_dimensions(variant.config) == get_dimensions(config):
            return variant.name
    if isinstance(config, BiTConfig):
        return f"BiT {config.width_factor} wide, {'-'.join(map(str, config.units))} units"
    height, width = pair(config.patch_size)
    patches = str(height) if height == width else f"{height}×{width}"
    return f"ViT {config.width} wide, {config.depth} deep, patches of {patches}"


def get_dimensions(config: ModelConfig) -> tuple[object, ...]:
    """Return what the weights of a model are made for: the patch size first, then everything else."""
    if isinstance(config, BiTConfig):
        return ("BiT", config.units, config.width_factor, config.root)
    backbone = config.backbone and (config.backbone.units, config.backbone.root_width, config.backbone.root)
    transformer = (config.width, config.depth, config.heads, config.mlp_dim)
    return (pair(config.patch_size), backbone, config.block.axial, *transformer)


# Models


def configure(
    model: str | ModelConfig,
    *,
    image_size: Size | None = None,
    patch_size: Size | None = None,
    channels: int | None = None,
    num_classes: int | None = None,
    settings: Mapping[str, object] | None = None,
) -> ModelConfig:
    """Return the configuration of a model with changes; `settings` have dotted or nested keys.

    >>> configure("B/16", image_size=384, settings={"positions.kind": "sincos_2d"}).grid
    (24, 24)
    """
    _check_model(model)
    config = find_variant(model).config if isinstance(model, str) else model
    arguments = {"image_size": image_size, "patch_size": patch_size, "channels": channels, "num_classes": num_classes}
    changes = {key: value for key, value in arguments.items() if value is not None}
    return apply_settings(from_mapping(type(config), changes, base=config), settings or {})


def _check_model(model: object) -> None:
    if not isinstance(model, str | ViTConfig | BiTConfig):
        expected, hint = "a name or a configuration", "vitkit models (vitkit.list_models()) lists the names"
        raise ConfigError("that is not a model to create", expected=expected, got=type(model).__name__, hint=hint)


def build(config: ModelConfig) -> "Model":
    """Build a model on the current default device; on "meta" its parameters have no data."""
    if isinstance(config, ViTConfig):
        from vitkit.model.vit import ViT

        return ViT(config)
    from vitkit.model.resnet import BiT

    return BiT(config)


def set_defaults(model: "Model") -> None:
    """Give a model that has none a name, class numbers as labels, and the paper's preprocessing."""
    from vitkit.data.preprocessing import get_preprocessing

    config = model.config
    if not hasattr(model, "name"):
        model.name = get_model_name(config)
    if not hasattr(model, "labels"):
        model.labels = tuple(map(str, range(config.num_classes)))
    if not hasattr(model, "preprocess"):
        model.preprocess = get_preprocessing("paper", image_size=config.image_size, channels=config.channels)


def create(
    model: str | ModelConfig,
    *,
    image_size: Size | None = None,
    patch_size: Size | None = None,
    channels: int | None = None,
    num_classes: int | None = None,
    settings: Mapping[str, object] | None = None,
    device: "torch.device | str" = "cpu",
    dtype: "torch.dtype | None" = None,
    generator: "torch.Generator | None" = None,
) -> "Model":
    """Create an untrained model in training mode, by name or configuration.

    On device "meta" it has shapes and no data. `dtype` is float32 unless given.

    >>> import torch
    >>> model = create("Ti/16", image_size=32, num_classes=10)
    >>> model(torch.rand(1, 3, 32, 32)).shape
    torch.Size([1, 10])
    """
    import torch

    config = configure(
        model,
        image_size=image_size,
        patch_size=patch_size,
        channels=channels,
        num_classes=num_classes,
        settings=settings,
    )
    with torch.device("meta"):
        module = build(config)
    set_defaults(module)
    module = module.to(dtype or torch.float32)
    if torch.device(device).type == "meta":
        return module
    module = module.to_empty(device=device)
    module.reset_parameters(generator)
    return module
