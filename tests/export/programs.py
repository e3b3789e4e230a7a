"""Small models, and a folder in which one of them was exported, for the tests of programs."""

from dataclasses import replace

import torch
from model_cases import randomised

from vitkit.checkpoints.native import Artefact
from vitkit.data.transforms import preprocessing
from vitkit.zoo.lookup import create, name_of
from vitkit.zoo.variants import ModelConfig


def artefact_of(config: ModelConfig, *, origin: str = "timm_augreg", deviation: float = 0.1) -> Artefact:
    """A model of this configuration with random numbers everywhere."""
    model = randomised(create(config, generator=torch.Generator().manual_seed(1)), deviation=deviation)
    return Artefact(
        name=name_of(config),
        config=config,
        state={name: tensor.detach() for name, tensor in model.state_dict().items()},
        preprocessing=preprocessing(origin, image_size=config.image_size, channels=config.channels),
        labels=tuple(f"class {number}" for number in range(config.classes)),
    )


def with_larger_head(artefact: Artefact, factor: float) -> Artefact:
    """The same model with logits that are larger by a factor."""
    scaled = {name: tensor * factor for name, tensor in artefact.state.items() if name.startswith("head.")}
    return replace(artefact, state=artefact.state | scaled)
