"""A model goes in, the module that is exported comes out: pixels to logits and features, nothing left to recompute.

`pixels` are normalised, as `Preprocessing.normalise` gives them. So the word means one thing in a program, in the model
itself and in the server's tensors; and a pipeline that normalises already, as most do, does not do it twice unseen.
"""

import torch
from torch import nn
from torch.nn import functional

from vitkit.checkpoints.native import Artefact
from vitkit.core.shapes import Float, Tensor, pair
from vitkit.model.resnet import BiTStem, StandardisedConv, pad_same
from vitkit.zoo.lookup import Model

INPUT, LOGITS, FEATURES = "pixels", "logits", "features"


class Program(nn.Module):
    """A model by its answers' names; one without classes gives features alone.

    >>> from vitkit.zoo.lookup import create
    >>> program = Program(create("Ti/16", image_size=32, classes=2))
    >>> {name: tuple(answer.shape) for name, answer in program(torch.zeros(1, 3, 32, 32)).items()}
    {'logits': (1, 2), 'features': (1, 192)}
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.outputs = (LOGITS, FEATURES) if model.config.classes else (FEATURES,)

    def forward(self, pixels: Float[Tensor, "B C H W"]) -> dict[str, Tensor]:
        """The answers by name."""
        features = self.model.features(pixels)
        answers = {LOGITS: self.model.head(features), FEATURES: features}
        return {name: answers[name] for name in self.outputs}


def program_of(artefact: Artefact) -> Program:
    """The program of an artefact, in float32 and in evaluation; it shares the artefact's numbers."""
    model = artefact.model().float()
    freeze(model, image_size=pair(model.config.image_size))
    return Program(model).eval().requires_grad_(False)


def example_pixels(model: Model) -> Float[Tensor, "2 C H W"]:
    """What a program is traced with: a batch of two, for a batch of one would be taken for a constant."""
    return torch.zeros(2, model.config.channels, *pair(model.config.image_size))


# ResNets


class FrozenConv(nn.Module):
    """A standardised convolution with its kernel computed once and for all."""

    def __init__(self, conv: StandardisedConv) -> None:
        super().__init__()
        self.weight = nn.Parameter(conv.standardised().detach(), requires_grad=False)
        (self.kernel, _), (self.stride, _) = conv.kernel_size, conv.stride
        self.pads_same = conv.numbers.pads_same

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C2 H2 W2"]:
        """What the convolution itself gives."""
        if self.pads_same:
            images = pad_same(images, kernel=self.kernel, stride=self.stride)
            return functional.conv2d(images, self.weight, stride=self.stride)
        return functional.conv2d(images, self.weight, stride=self.stride, padding=self.kernel // 2)


class FrozenStem(nn.Module):
    """BiT's root for images of one size, its border of zeros taken into the maximum afterwards.

    The same numbers. ONNX Runtime merges a padding of any value into the pooling behind it, and there a border counts
    for nothing: where all of a window is negative, BiT's zero would be lost.
    """

    def __init__(self, stem: BiTStem, *, image_size: tuple[int, int]) -> None:
        super().__init__()
        self.conv = FrozenConv(stem.conv)
        with torch.no_grad():
            inside = self.conv(torch.zeros(1, stem.conv.in_channels, *image_size))[:, :1]
        lowest = torch.full_like(inside, torch.finfo(inside.dtype).min)
        border = functional.max_pool2d(functional.pad(lowest, (1, 1, 1, 1)), 3, stride=2)
        self.register_buffer("border", border)

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C2 H2 W2"]:
        """What the stem itself gives."""
        pooled = functional.max_pool2d(self.conv(images), 3, stride=2, padding=1)
        return torch.maximum(pooled, self.get_buffer("border"))


def freeze(module: nn.Module, *, image_size: tuple[int, int]) -> None:
    """Put frozen parts in the place of a ResNet's own; a Vision Transformer has none, and stays as it is."""
    for name, child in list(module.named_children()):
        if isinstance(child, BiTStem):
            setattr(module, name, FrozenStem(child, image_size=image_size))
        elif isinstance(child, StandardisedConv):
            setattr(module, name, FrozenConv(child))
        else:
            freeze(child, image_size=image_size)
