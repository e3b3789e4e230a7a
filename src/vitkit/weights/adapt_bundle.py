"""Adaptation of a loaded model to other images, patches, channels, classes or pooling."""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from vitkit.core.errors import ConfigError
from vitkit.core.sizes import Size, format_size, pair
from vitkit.data.preprocessing import Preprocessing
from vitkit.model.config import ViTConfig
from vitkit.weights.adapt_state import LabelChange, PreprocessingChange, adapt_state
from vitkit.weights.bundle import ModelBundle, are_class_numbers
from vitkit.zoo.registry import configure, get_model_name
from vitkit.zoo.variants import ModelConfig


@dataclass(frozen=True, kw_only=True)
class AdaptRequest:
    """Requested shape of a model; None keeps what it has. `labels` sets the number of classes too."""

    image_size: Size | None = None
    patch_size: Size | None = None
    channels: int | None = None
    num_classes: int | None = None
    labels: tuple[str, ...] | None = None
    pooling: Literal["class", "mean"] | None = None


def adapt_bundle(bundle: ModelBundle, request: AdaptRequest) -> tuple[ModelBundle, tuple[str, ...]]:
    """Return the model in another shape, with its preprocessing and labels, and a description of each change.

    Labels for classes that only had numbers name these classes. Otherwise classes of the same name keep their weights.
    """
    labels = _choose_labels(bundle.labels, request)
    only_names = request.labels is not None and are_class_numbers(bundle.labels) and len(labels) == len(bundle.labels)
    classes_change = labels != bundle.labels and not only_names
    match_names = classes_change and request.labels is not None and _has_class_rows(bundle)
    new_head = classes_change and not match_names
    config = _choose_config(bundle.config, request, num_classes=len(labels), new_head=new_head)
    preprocessing = PreprocessingChange(old=bundle.preprocessing, new=adapt_preprocessing(bundle.preprocessing, config))
    adapted = adapt_state(
        bundle.state,
        old=bundle.config,
        new=config,
        new_head=new_head,
        labels=LabelChange(old=bundle.labels, new=labels) if match_names else None,
        preprocessing=preprocessing,
        generator=torch.Generator(),  # new heads are zero; the global generator is left alone
    )
    same_name = get_model_name(config) == get_model_name(bundle.config)
    result = ModelBundle(
        name=bundle.name if same_name else get_model_name(config),
        config=config,
        state=adapted.state,
        preprocessing=preprocessing.new,
        labels=labels,
    )
    naming = [f"labels: names for {len(labels):,} numbered classes"] if only_names and labels != bundle.labels else []
    return result, (*adapted.changes, *naming, *_describe_preprocessing_change(preprocessing))


def _choose_labels(old: tuple[str, ...], request: AdaptRequest) -> tuple[str, ...]:
    if request.labels is not None:
        return request.labels
    if request.num_classes is None or request.num_classes == len(old):
        return old
    return tuple(map(str, range(request.num_classes)))


def _has_class_rows(bundle: ModelBundle) -> bool:
    """Return whether classes have names, and each has a row of the head on the features themselves."""
    has_hidden_layer = any(name.startswith("pre_logits.") for name in bundle.state)
    return bool(bundle.labels) and not are_class_numbers(bundle.labels) and not has_hidden_layer


def _choose_config(config: ModelConfig, request: AdaptRequest, *, num_classes: int, new_head: bool) -> ModelConfig:
    """Return the requested configuration. A new head is the plain one of fine-tuning (section 3.2)."""
    if not isinstance(config, ViTConfig) and (request.patch_size or request.pooling):
        raise ConfigError("a ResNet has no patches and no class token", hint="leave patch size and pooling out")
    settings: dict[str, object] = {}
    if request.pooling and request.pooling != getattr(config, "pooling", None):
        # The class token is added and removed with the pooling that reads it.
        settings = {"pooling": request.pooling, "tokens.class_token": None}
    if new_head and isinstance(config, ViTConfig):
        config = replace(config, head=replace(config.head, pre_logits=None, bias=0.0))
    return configure(
        config,
        image_size=request.image_size,
        patch_size=request.patch_size,
        channels=request.channels,
        num_classes=num_classes,
        settings=settings,
    )


def adapt_preprocessing(old: Preprocessing, config: ModelConfig) -> Preprocessing:
    """Return the preprocessing for the image size and channels of a model.

    Of three channels or more, those that stay keep their mean and std, and new ones get the average of these. Otherwise
    one average is used for all channels, because the kernel is summed or spread over them.
    """
    resized = old if pair(old.image_size) == pair(config.image_size) else replace(old, image_size=config.image_size)
    if config.channels == old.channels:
        return resized
    mean, std = (_adapt_statistics(values, old.channels, config.channels) for values in (old.mean, old.std))
    return replace(resized, channels=config.channels, mean=mean, std=std)


def _adapt_statistics(values: tuple[float, ...], old: int, new: int) -> tuple[float, ...]:
    average = (sum(values) / len(values),)
    if len(values) == 1 or min(old, new) < 3:
        return average
    return (*values[:new], *average * (new - old))


def _describe_preprocessing_change(change: PreprocessingChange) -> list[str]:
    old, new, changes = change.old, change.new, []
    if pair(old.image_size) != pair(new.image_size):
        changes.append(f"preprocessing: image size {format_size(old.image_size)} → {format_size(new.image_size)}")
    if old.channels != new.channels:
        statistics = "one mean and std" if len(new.mean) == 1 else "a mean and std for each"
        changes.append(f"preprocessing: {old.channels} channels → {new.channels}, {statistics}")
    return changes
