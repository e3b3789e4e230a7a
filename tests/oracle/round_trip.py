"""Helpers for files with random weights: theirs that we load, and ours that their code loads."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from oracle.comparison import random_images, randomize
from torch import Tensor, nn

import vitkit
from vitkit.core.sizes import pair
from vitkit.data.preprocessing import get_preprocessing
from vitkit.model.config import BlockConfig, ViTConfig
from vitkit.weights.bundle import ModelBundle
from vitkit.weights.convert import write_format
from vitkit.weights.formats.registry import detect_format, get_format
from vitkit.weights.io.readers import open_tensors
from vitkit.zoo.registry import create, get_model_name
from vitkit.zoo.variants import ModelConfig

LARGEST_DIFFERENCE = 1e-5
"""Tolerance of float32 logits of order 1: kernels differ in summation order."""
KERNELS = 0.02
"""The deviation of a ResNet's kernels, so small that an eps of 1e-5 beside it shows in float32. One of 1e-8 beside its
square hardly does: `test_timm.py` checks that in float64."""
LABELS = ("cat", "dög", "tench, Tinca tinca", "<b>", "0")

ERF = BlockConfig(activation="gelu_erf")
TANH = BlockConfig(activation="gelu_tanh")
SMALL = ViTConfig(image_size=32, patch_size=8, width=128, depth=2, heads=2, mlp_dim=192, num_classes=5, block=ERF)
"""Heads are 64 wide, as files take for granted that cannot say how many there are."""


def randomize_model(model: nn.Module) -> nn.Module:
    """Randomize the parameters of a model and set it to evaluation mode."""
    randomize(model, kernels=KERNELS)
    return model.eval()


def make_bundle(config: ModelConfig) -> ModelBundle:
    """Make a randomized model of ours with labels."""
    model = randomize_model(create(config, device="meta").to_empty(device="cpu"))
    return ModelBundle(
        name=get_model_name(config),
        config=config,
        state={name: tensor.detach() for name, tensor in model.state_dict().items()},
        preprocessing=get_preprocessing("timm_augreg", image_size=config.image_size, channels=config.channels),
        labels=LABELS[: config.num_classes],
    )


def write_with_format(artifact: ModelBundle, to: str, path: Path) -> Path:
    """Write a model in a format and return its path."""
    write_format(get_format(to), path, artifact)
    return path


def images_for(config: ModelConfig) -> Tensor:
    return random_images(2, config.channels, *pair(config.image_size)).float()


@torch.no_grad()
def compute_logits(model: Any, config: ModelConfig) -> Tensor:
    return model(images_for(config))


@torch.no_grad()
def exact_logits(model: Any, config: ModelConfig) -> Tensor:
    """Compute logits in float64, because rounding of float32 convolutions depends on the CPU."""
    return deepcopy(model).double()(images_for(config).double()).float()


def assert_same_logits(ours: Tensor, theirs: Tensor) -> None:
    """Check that logits agree up to `LARGEST_DIFFERENCE` and are not constant."""
    assert ours.shape == theirs.shape
    assert theirs.std() > 0.1
    allowed = LARGEST_DIFFERENCE * max(1.0, float(theirs.abs().max()))
    difference = float((ours - theirs).abs().max())
    assert difference <= allowed, f"logits differ by {difference:.1e}, where {allowed:.1e} is allowed"


def assert_loads_as_theirs(path: Path, theirs: Tensor, *, format_name: str) -> ModelConfig:
    """Check that their file, loaded by us, gives their logits; return the inferred configuration."""
    with open_tensors(path) as tensors:
        detected = detect_format(tensors.shapes, tensors.metadata)
    assert detected is not None
    assert detected.name == format_name
    ours = vitkit.load(path, format=format_name)
    assert_same_logits(exact_logits(ours, ours.config), theirs)
    return ours.config


def with_tanh_gelu(config: ViTConfig) -> ViTConfig:
    """Return the configuration with tanh GELU, as in Google's files."""
    return replace(config, block=replace(config.block, activation="gelu_tanh"))
