"""Small models for the tests of exporters."""

from dataclasses import replace

import torch
from model_cases import randomized

from vitkit.data.preprocessing import get_preprocessing
from vitkit.weights.bundle import ModelBundle
from vitkit.zoo.registry import create, get_model_name
from vitkit.zoo.variants import ModelConfig


def artifact_of(config: ModelConfig, *, origin: str = "timm_augreg", deviation: float = 0.1) -> ModelBundle:
    """Return a model with random weights in all tensors."""
    model = randomized(create(config, generator=torch.Generator().manual_seed(1)), deviation=deviation)
    return ModelBundle(
        name=get_model_name(config),
        config=config,
        state={name: tensor.detach() for name, tensor in model.state_dict().items()},
        preprocessing=get_preprocessing(origin, image_size=config.image_size, channels=config.channels),
        labels=tuple(f"class {number}" for number in range(config.num_classes)),
    )


def with_larger_head(artifact: ModelBundle, factor: float) -> ModelBundle:
    """Return the model with its logits scaled by a factor."""
    scaled = {name: tensor * factor for name, tensor in artifact.state.items() if name.startswith("head.")}
    return replace(artifact, state=artifact.state | scaled)
