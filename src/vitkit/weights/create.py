"""Pretrained weights in the shape of a requested model."""

from dataclasses import replace
from pathlib import Path

from vitkit.core.config import flatten_settings
from vitkit.core.errors import ConfigError, UnknownNameError, WeightsError, did_you_mean
from vitkit.model.config import ViTConfig
from vitkit.typing import ModelSource, Settings
from vitkit.weights.adapt_bundle import AdaptRequest, adapt_bundle
from vitkit.weights.bundle import ModelBundle
from vitkit.weights.convert import change_config
from vitkit.weights.hub import NotCachedError
from vitkit.weights.load import check_shapes, load_stored_bundle, source_name
from vitkit.zoo.pretrained import find_pretrained_name, get_pretrained_names
from vitkit.zoo.registry import configure, get_dimensions, get_model_name
from vitkit.zoo.variants import ModelConfig


def load_for_shape(
    model: str | ModelConfig,
    pretrained: bool | ModelSource,
    target: ModelConfig,
    *,
    num_classes: int | None,
    settings: Settings,
) -> tuple[ModelBundle, tuple[str, ...]]:
    """Return pretrained weights in the shape of `target`, and a description of each change.

    `target` is `model` with the requested changes. A name decides the sizes of the model and leaves its computation to
    the weights; a configuration decides both. The number of classes is that of the weights unless it is requested.
    """
    source = _default_source(model) if isinstance(pretrained, bool) else pretrained
    try:
        bundle = load_stored_bundle(source)
    except NotCachedError as error:
        hint = (error.hint or "").replace('pass "path', 'pass pretrained="path')
        raise NotCachedError(error.message, hint=hint) from error
    _check_dimensions(bundle, target, source=source)
    keys, is_whole = flatten_settings(settings), not isinstance(model, str)
    takes_classes = is_whole or num_classes is not None or "num_classes" in keys
    pooling = target.pooling if isinstance(target, ViTConfig) and (is_whole or "pooling" in keys) else None
    request = AdaptRequest(
        image_size=target.image_size,
        patch_size=target.patch_size if isinstance(target, ViTConfig) else None,
        channels=target.channels,
        num_classes=target.num_classes if takes_classes else None,
        pooling=pooling if pooling in ("class", "mean") else None,
    )
    adapted, changes = adapt_bundle(bundle, request)
    if is_whole:
        check_shapes(adapted.state, target, path=Path(source_name(source)))
        return replace(adapted, config=target), changes
    config, other_changes = change_config(adapted, settings, source=source_name(source))
    return replace(adapted, config=config), (*changes, *other_changes)


def _default_source(model: str | ModelConfig) -> str:
    """Return the default weights of a name; a name without weights on the hub is an error."""
    if not isinstance(model, str):
        raise ConfigError(
            "pretrained=True needs the name of a model",
            expected="a name of list_models(pretrained=True)",
            got="a configuration",
            hint='pass a source, as in pretrained="B/16"',
        )
    if find_pretrained_name(model) is None:
        configure(model)  # an unknown model is reported as such
        hint = did_you_mean(model, get_pretrained_names()) or "see vitkit.list_models(pretrained=True)"
        raise UnknownNameError(f"{model} has no default weights on the hub", hint=hint)
    return model


def _check_dimensions(bundle: ModelBundle, target: ModelConfig, *, source: ModelSource) -> None:
    """Raise an error if weights are of a model with other dimensions; only its patches may be of another size."""
    if get_dimensions(bundle.config)[1:] != get_dimensions(target)[1:]:
        raise WeightsError(
            f"{source_name(source)}: the weights are of another model",
            expected=get_model_name(target),
            got=get_model_name(bundle.config),
            hint="create the model that the weights are of, or load(source)",
        )
