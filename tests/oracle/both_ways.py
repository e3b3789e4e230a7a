"""Random weights in files, as a user has them: theirs that we load, and ours that their own code loads."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from oracle.comparison import random_images, randomise
from torch import Tensor, nn

import vitkit
from vitkit.checkpoints.convert import write_as
from vitkit.checkpoints.files.readers import open_tensors
from vitkit.checkpoints.foreign import format_called, identify
from vitkit.checkpoints.native import Artefact
from vitkit.core.shapes import pair
from vitkit.data.transforms import preprocessing
from vitkit.model.config import ViTConfig
from vitkit.model.encoder import BlockConfig
from vitkit.zoo.lookup import create, name_of
from vitkit.zoo.variants import ModelConfig

LARGEST_DIFFERENCE = 1e-5
"""Of two logits in float32, where the largest is of order 1: other kernels sum in another order."""
KERNELS = 0.02
"""The deviation of a ResNet's kernels, so small that an eps of 1e-5 beside it shows in float32. One of 1e-8 beside its
square hardly does: `test_timm.py` judges that in float64."""
LABELS = ("cat", "dög", "tench, Tinca tinca", "<b>", "0")

ERF = BlockConfig(activation="gelu_erf")
TANH = BlockConfig(activation="gelu_tanh")
SMALL = ViTConfig(image_size=32, patch_size=8, width=128, depth=2, heads=2, mlp_dim=192, classes=5, block=ERF)
"""Heads are 64 wide, as files take for granted that cannot say how many there are."""


def drawn(model: nn.Module) -> nn.Module:
    """A model of anyone's with numbers that hide nothing, in evaluation."""
    randomise(model, kernels=KERNELS)
    return model.eval()


def of_ours(config: ModelConfig) -> Artefact:
    """A model of ours with such numbers, and names for its classes."""
    model = drawn(create(config, device="meta").to_empty(device="cpu"))
    return Artefact(
        name=name_of(config),
        config=config,
        state={name: tensor.detach() for name, tensor in model.state_dict().items()},
        preprocessing=preprocessing("timm_augreg", image_size=config.image_size, channels=config.channels),
        labels=LABELS[: config.classes],
    )


def written(artefact: Artefact, to: str, place: Path) -> Path:
    """The file or folder that we make of it."""
    write_as(format_called(to), place, artefact)
    return place


def images_for(config: ModelConfig) -> Tensor:
    return random_images(2, config.channels, *pair(config.image_size)).float()


@torch.no_grad()
def answer(model: Any, config: ModelConfig) -> Tensor:
    return model(images_for(config))


@torch.no_grad()
def exact_answer(model: Any, config: ModelConfig) -> Tensor:
    """The logits, in float64: how float32 rounds a convolution depends on the CPU, and a wrong number shows in both."""
    return deepcopy(model).double()(images_for(config).double()).float()


def assert_same_logits(ours: Tensor, theirs: Tensor) -> None:
    """Equal up to `LARGEST_DIFFERENCE`, and not because there is nothing to see."""
    assert ours.shape == theirs.shape
    assert theirs.std() > 0.1
    allowed = LARGEST_DIFFERENCE * max(1.0, float(theirs.abs().max()))
    difference = float((ours - theirs).abs().max())
    assert difference <= allowed, f"logits differ by {difference:.1e}, where {allowed:.1e} is allowed"


def loads_as_theirs(place: Path, theirs: Tensor, *, format_name: str) -> ModelConfig:
    """Their file, loaded by us, answers as their model did; what model it was found to be."""
    with open_tensors(place) as tensors:
        assert identify(tensors).format.name == format_name
    ours = vitkit.load(place)
    assert_same_logits(exact_answer(ours, ours.config), theirs)
    return ours.config


def google_like(config: ViTConfig) -> ViTConfig:
    """As Google's files mean it: the tanh form of GELU."""
    return replace(config, block=replace(config.block, activation="gelu_tanh"))
