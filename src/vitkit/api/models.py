"""Models and weights: create, load, save, describe, compare, convert, adapt, verify."""

import logging
import pathlib
from collections.abc import Sequence
from os import PathLike
from typing import Literal

import torch
from torch import nn

from vitkit.api.public import public
from vitkit.core.errors import ConfigError
from vitkit.core.sizes import Size
from vitkit.data.preprocessing import Preprocessing
from vitkit.inference.engine import open_device
from vitkit.model.config import BiTConfig, ViTConfig
from vitkit.model.resnet import BiT
from vitkit.model.vit import ViT
from vitkit.typing import ModelSource, Path, Settings
from vitkit.weights import load as weights_load
from vitkit.weights.adapt import AdaptResult, adapt_source, read_labels
from vitkit.weights.adapt_bundle import AdaptRequest
from vitkit.weights.convert import ConversionResult, convert_source
from vitkit.weights.create import load_for_shape
from vitkit.weights.describe import WeightsDiff, WeightsInfo, describe_source, diff_sources
from vitkit.weights.verify import VerificationResult, verify_source
from vitkit.zoo import registry

logger = logging.getLogger(__name__)


def check_dtype(dtype: object) -> None:
    """Raise ConfigError for what is not a floating-point type of torch, such as its name."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        is_name = isinstance(getattr(torch, str(dtype), None), torch.dtype)
        hint = f"use dtype=torch.{dtype}" if is_name else "use dtype=torch.bfloat16, for example"
        raise ConfigError("dtype is not a floating-point type of torch", got=repr(dtype), hint=hint)


@public
def create(
    model: str | ViTConfig | BiTConfig,
    *,
    pretrained: bool | ModelSource = False,
    num_classes: int | None = None,
    image_size: Size | None = None,
    patch_size: Size | None = None,
    channels: int | None = None,
    settings: Settings | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    generator: torch.Generator | None = None,
) -> ViT | BiT:
    """Build a model in training mode, untrained or with pretrained weights adapted to this shape.

    An untrained model has a zero head, hence equal logits, as in the paper. Pretrained weights keep the computation of
    their origin, such as its form of GELU. Each change of their shape is logged.

    Args:
        model: Name of `list_models()`, or a configuration.
        pretrained: True for the default weights of the name, which may be downloaded, or any source of weights.
        num_classes: Outputs of the head, 0 for none. Other than that of pretrained weights, it means a new zero head.
        image_size: Side of the images, or height and width.
        patch_size: Side of the patches, or height and width.
        channels: Channels of the images.
        settings: Other settings by dotted or nested keys.
        device: Device of the parameters; on "meta" they have no data.
        dtype: Floating-point type of the parameters.
        generator: Random generator of the initial values.

    >>> import torch, vitkit
    >>> model = vitkit.create("Ti/16", image_size=32, num_classes=10, settings={"depth": 2})
    >>> model(torch.rand(1, 3, 32, 32)).shape
    torch.Size([1, 10])
    """
    device = open_device(device)
    check_dtype(dtype)
    target = registry.configure(
        model,
        image_size=image_size,
        patch_size=patch_size,
        channels=channels,
        num_classes=num_classes,
        settings=settings,
    )
    if pretrained is False:
        return registry.create(target, device=device, dtype=dtype, generator=generator)
    bundle, changes = load_for_shape(model, pretrained, target, num_classes=num_classes, settings=settings or {})
    for change in changes:
        logger.info("%s", change)
    return bundle.build_model().to(device=device, dtype=dtype).train()


@public
def load(
    source: ModelSource,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    format: str | None = None,  # noqa: A002  the word users type
) -> ViT | BiT:
    """Load a model as its author evaluated it: in eval mode, with labels and preprocessing.

    Args:
        source: A run, an artifact, a weight file of any format, `hub:owner/name`, a published name, or a model, which
            is copied. An unfinished run means its best evaluated checkpoint.
        device: Device of the parameters.
        dtype: Floating-point type of the parameters; None keeps that of the file.
        format: Name of the format, if it is detected wrongly.

    >>> import tempfile, vitkit
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     model = vitkit.create("Ti/16", image_size=32, num_classes=2)
    ...     path = vitkit.save(model, f"{directory}/model", labels=["cat", "dog"])
    ...     loaded = vitkit.load(path)
    >>> loaded.labels, loaded.preprocess.image_size
    (('cat', 'dog'), 32)
    """
    if dtype is not None:
        check_dtype(dtype)
    return weights_load.load(source, device=open_device(device), dtype=dtype, format=format)


@public
def save(
    model: nn.Module, path: Path, *, labels: Sequence[str] | None = None, preprocessing: Preprocessing | None = None
) -> pathlib.Path:
    """Write an artifact that vitkit, timm and transformers load, and return its path.

    It appears whole or not at all. An existing artifact is replaced; any other directory that is not empty is refused.

    Args:
        model: A ViT or BiT, also as wrapped by `torch.compile` or DistributedDataParallel.
        path: Directory of the artifact.
        labels: Class names; those of the model by default.
        preprocessing: Preprocessing of the images; that of the model by default.

    >>> import tempfile, vitkit
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = vitkit.save(vitkit.create("Ti/16", image_size=32, num_classes=2), f"{directory}/model")
    >>> path.name
    'model'
    """
    return weights_load.save(model, path, labels=labels, preprocessing=preprocessing)


@public
def describe_weights(source: ModelSource, *, format: str | None = None) -> WeightsInfo:  # noqa: A002
    """Identify a weight file: format, model, sizes, labels, and tensors that are missing or extra.

    Args:
        source: Any source of a model.
        format: Name of the format, if it is detected wrongly.

    >>> import vitkit
    >>> vitkit.describe_weights(vitkit.create("Ti/16", num_classes=3)).classes
    3
    """
    return describe_source(source, format=format)


@public
def diff_weights(
    a: ModelSource, b: ModelSource, *, format_a: str | None = None, format_b: str | None = None
) -> WeightsDiff:
    """Compare two models tensor by tensor, with their configuration, preprocessing and labels.

    Args:
        a: Any source of a model.
        b: Any source of a model.
        format_a: Name of the format of `a`, if it is detected wrongly.
        format_b: Name of the format of `b`, if it is detected wrongly.

    >>> import vitkit
    >>> model = vitkit.create("Ti/16", image_size=32, num_classes=3)
    >>> vitkit.diff_weights(model, model).is_same
    True
    """
    return diff_sources((a, format_a), (b, format_b))


@public
def convert(
    source: ModelSource,
    out: Path,
    *,
    to: str,
    settings: Settings | None = None,
    format: str | None = None,  # noqa: A002  the word users type
    overwrite: bool = False,
    allow_loss: bool = False,
) -> ConversionResult:
    """Write a model in another format, read it back, and compare every value.

    Args:
        source: Any source of a model.
        out: File or directory to write, depending on the format.
        to: Name of a format, such as vitkit, timm, huggingface, torchvision or google.
        settings: Settings that override the configuration of a file that states it wrongly; tensors must stay the same.
        format: Name of the format of `source`, if it is detected wrongly.
        overwrite: Replace `out` if it exists.
        allow_loss: Leave out the head if the format cannot hold it, and tensors that are not part of the model, such as
            a decoder; `.dropped` names them. Otherwise they are an error.

    >>> import tempfile, vitkit
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     result = vitkit.convert(vitkit.create("Ti/16", image_size=32), f"{directory}/model", to="timm")
    >>> result.dropped
    ()
    """
    return convert_source(
        source,
        pathlib.Path(out),
        to=to,
        settings=settings or {},
        format=format,
        overwrite=overwrite,
        allow_loss=allow_loss,
    )


@public
def adapt(
    source: ModelSource,
    out: Path | None = None,
    *,
    image_size: Size | None = None,
    patch_size: Size | None = None,
    channels: int | None = None,
    num_classes: int | None = None,
    labels: Sequence[str] | Path | None = None,
    pooling: Literal["class", "mean"] | None = None,
    format: str | None = None,  # noqa: A002  the word users type
    overwrite: bool = False,
) -> AdaptResult:
    """Return a copy of a model in another shape, and write it as an artifact if `out` is given.

    Args:
        source: Any source of a model; it is unchanged.
        out: Directory of the artifact.
        image_size: Side of the images, or height and width; position embeddings are resampled.
        patch_size: Side of the patches, or height and width; the kernel is resized.
        channels: Channels of the images; logits of gray images do not change.
        num_classes: Classes of a new zero head, 0 for none.
        labels: Class names, or a file with one per line, a run, a dataset, or "imagenet". Known classes keep their
            weights.
        pooling: Input of the head: the class token or the mean of all tokens.
        format: Name of the format, if it is detected wrongly.
        overwrite: Replace `out` if it exists.

    >>> import torch, vitkit
    >>> result = vitkit.adapt(vitkit.create("Ti/16", image_size=32, num_classes=3), channels=1)
    >>> result.model(torch.rand(1, 1, 32, 32)).shape
    torch.Size([1, 3])
    """
    if num_classes is not None and labels is not None:
        raise ConfigError("labels already set the number of classes", hint="leave num_classes out")
    names = read_labels(pathlib.Path(labels)) if isinstance(labels, str | PathLike) else labels
    request = AdaptRequest(
        image_size=image_size,
        patch_size=patch_size,
        channels=channels,
        num_classes=num_classes,
        labels=None if names is None else tuple(names),
        pooling=pooling,
    )
    path = None if out is None else pathlib.Path(out)
    return adapt_source(source, path, request, format=format, overwrite=overwrite)


@public
def verify(source: ModelSource, *, format: str | None = None) -> VerificationResult:  # noqa: A002
    """Compare the logits of a model with stored logits, or with those of the library that it came from.

    A file that cannot be loaded is an error; one that disagrees is not.

    Args:
        source: Any source of a model.
        format: Name of the format, if it is detected wrongly.

    >>> import tempfile, vitkit
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = vitkit.save(vitkit.create("Ti/16", image_size=32, num_classes=2), f"{directory}/model")
    ...     result = vitkit.verify(path)
    >>> result.agrees
    True
    """
    return verify_source(source, format=format)
