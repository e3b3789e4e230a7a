"""The place of a model goes in, a module ready to run comes out, with its preprocessing and labels; and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vitkit.checkpoints import foreign, native
from vitkit.checkpoints.native import Artefact
from vitkit.core.errors import ConfigError, WeightsError
from vitkit.core.files import as_text
from vitkit.core.shapes import Float, Tensor
from vitkit.data.given import Given, picture_given
from vitkit.data.transforms import Preprocessing
from vitkit.data.transforms import preprocessing as preprocessing_of
from vitkit.model.config import ViTConfig
from vitkit.model.resnet import BiT
from vitkit.model.vit import ViT
from vitkit.zoo.lookup import Model, name_of


@dataclass(frozen=True)
class Preprocess:
    """An image in any form goes in, the batch of one that a model takes comes out.

    >>> import numpy as np
    >>> Preprocess(Preprocessing(image_size=32))(np.zeros((40, 30, 3), dtype=np.uint8)).shape
    torch.Size([1, 3, 32, 32])
    """

    preprocessing: Preprocessing

    def __call__(self, image: Given) -> Float[Tensor, "1 C H W"]:
        """The batch of this one image."""
        how = self.preprocessing
        picture = picture_given(image, channels=how.channels)
        return how.normalise(torch.from_numpy(how.pixels(picture))[None])


class Carried:
    """What a loaded model knows beyond its weights."""

    name: str
    labels: tuple[str, ...]
    preprocess: Preprocess


class LoadedViT(Carried, ViT):
    """A Vision Transformer with its preprocessing and labels."""


class LoadedBiT(Carried, BiT):
    """A ResNet of Big Transfer with its preprocessing and labels."""


Loaded = LoadedViT | LoadedBiT


def load(path_or_name: Path | str) -> Loaded:
    """The model in a file or folder of any format, in evaluation, with `.preprocess`, `.labels` and `.config`.

    >>> import tempfile, vitkit
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     vitkit.save(vitkit.create("Ti/16", image_size=32, classes=2), folder, labels=["cat", "dog"])
    ...     model = vitkit.load(folder)
    >>> model.labels, model.preprocess.preprocessing.image_size
    (('cat', 'dog'), 32)
    """
    return ready(foreign.load(path_or_name))


def ready(artefact: Artefact) -> Loaded:
    """The model of an artefact, knowing what the artefact knows."""
    config = artefact.config
    with torch.device("meta"):
        made: Loaded = LoadedViT(config) if isinstance(config, ViTConfig) else LoadedBiT(config)
    try:
        made.load_state_dict(artefact.state, strict=True, assign=True)
    except RuntimeError as error:  # an artefact whose configuration is that of another model
        first = next((line.strip() for line in str(error).splitlines()[1:]), str(error))
        raise WeightsError(f"{artefact.name}: the weights are of another model: {first[:300]}") from error
    made.name, made.labels = artefact.name, tuple(map(as_text, artefact.labels))
    made.preprocess = Preprocess(artefact.preprocessing)
    return made.eval()


def save(
    model: Model,
    folder: Path | str,
    *,
    labels: Sequence[str] | None = None,
    preprocessing: Preprocessing | None = None,
) -> None:
    """Write a model into a folder that vitkit, timm and transformers load; as it is, not as it was loaded.

    Labels and preprocessing are those it was loaded with, where they are not given. A model that was created has
    numbers for labels, and the paper's preprocessing.
    """
    config = model.config
    loaded = model if isinstance(model, Carried) else None
    if labels is None:
        labels = loaded.labels if loaded else [str(number) for number in range(config.classes)]
    if len(labels) != config.classes:
        raise ConfigError("the labels are not the model's", expected=f"{config.classes} labels", got=len(labels))
    if preprocessing is None:
        preprocessing = loaded.preprocess.preprocessing if loaded else _paper(model)
    if preprocessing.channels != config.channels:
        raise ConfigError(
            "the preprocessing is not the model's",
            expected=f"{config.channels} channels",
            got=preprocessing.channels,
        )
    artefact = Artefact(
        name=loaded.name if loaded else name_of(config),
        config=config,
        state={name: tensor.detach() for name, tensor in model.state_dict().items()},
        preprocessing=preprocessing,
        labels=tuple(labels),
    )
    native.save(folder, artefact)


def _paper(model: Model) -> Preprocessing:
    return preprocessing_of("paper", image_size=model.config.image_size, channels=model.config.channels)
