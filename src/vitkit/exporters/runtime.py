"""Interface of export runtimes, the module that they export, and helpers for them.

The module's input is normalized, like that of the model and of the server's tensor API. A pipeline that normalizes by
itself, as most do, then does not normalize twice unnoticed.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from string import Template

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from vitkit.core.errors import ConfigError
from vitkit.core.shapes import Float, Tensor
from vitkit.core.sizes import pair
from vitkit.inference.packed import PrestandardizedConv
from vitkit.model.resnet import BiTStem, StandardizedConv
from vitkit.weights.bundle import ModelBundle
from vitkit.zoo.registry import Model

INPUT, LOGITS, FEATURES = "pixels", "logits", "features"
"""Names of the input and the outputs of an exported program."""
FloatArray = NDArray[np.float32]
Runner = Callable[[FloatArray], Mapping[str, FloatArray]]
"""Maps normalized pixels (B × C × H × W) to outputs by name."""
VERBOSE_LOGGERS = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "torch._dynamo", "torch._export")


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """A kind of program. To add one, write a module with an instance and add it to `exporter.RUNTIMES`."""

    name: str
    title: str
    load_command: str
    """Python expression that loads it, with {out} for its directory."""
    package: str
    """The package that runs it."""
    requires: tuple[str, ...]
    """Modules needed to write and run it."""
    extra: str
    """Extra of vitkit that installs them."""
    example: str
    """Code for example.py that defines `run(pixels)`; FOLDER is its directory, $output the name of the output."""
    write: Callable[[ModelBundle, Path], None]
    """Write the program into a directory."""
    load: Callable[[Path], Runner]
    """Load the program from a directory."""

    @property
    def version(self) -> str:
        """Name and version of the installed package."""
        return f"{self.package} {metadata.version(self.package)}"

    def check_installed(self) -> None:
        """Raise ConfigError if a required module is not installed."""
        if missing := [name for name in self.requires if find_spec(name) is None]:
            verb = "which is" if len(missing) == 1 else "which are"
            raise ConfigError(
                f"{self.title} needs {' and '.join(missing)}, {verb} not installed",
                hint=f"pip install 'vitkit[{self.extra}]'",
            )

    def example_code(self, *, num_classes: int) -> str:
        """Return the code that loads and runs the program in example.py."""
        return Template(self.example).substitute(output=LOGITS if num_classes else FEATURES)


@contextlib.contextmanager
def suppress_output() -> Iterator[None]:
    """Suppress output, log records and warnings of other libraries. Errors are still raised."""
    levels = {logger: logger.level for logger in map(logging.getLogger, VERBOSE_LOGGERS)}
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


class ExportModule(nn.Module):
    """A model with named outputs: logits and features, or only features for a model without classes."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.outputs = (LOGITS, FEATURES) if model.config.num_classes else (FEATURES,)

    def forward(self, pixels: Float[Tensor, "B C H W"]) -> dict[str, Tensor]:
        """Return the outputs by name."""
        features = self.model.features(pixels)
        outputs = {LOGITS: self.model.head(features), FEATURES: features}
        return {name: outputs[name] for name in self.outputs}


def as_runner(module: Callable[[Tensor], Mapping[str, Tensor]]) -> Runner:
    """Wrap a torch module with named outputs as a runner."""

    def run(pixels: FloatArray) -> dict[str, FloatArray]:
        with torch.inference_mode():
            return {name: output.numpy() for name, output in module(torch.from_numpy(pixels)).items()}

    return run


def build_export_module(bundle: ModelBundle) -> ExportModule:
    """Build the module to export, in float32 and evaluation mode. It shares the bundle's tensors."""
    model = bundle.build_model().float()
    freeze(model, image_size=pair(model.config.image_size))
    return ExportModule(model).eval().requires_grad_(False)


class FrozenStem(nn.Module):
    """Stem of BiT for one image size that applies the zero padding after pooling, as a maximum.

    The values are the same. ONNX Runtime fuses a padding of any value into the following pooling, which ignores it:
    where all of a window is negative, BiT's zero would be lost.
    """

    def __init__(self, stem: BiTStem, *, image_size: tuple[int, int]) -> None:
        super().__init__()
        self.conv = PrestandardizedConv(stem.conv)
        with torch.no_grad():
            inside = self.conv(torch.zeros(1, stem.conv.in_channels, *image_size))[:, :1]
        lowest = torch.full_like(inside, torch.finfo(inside.dtype).min)
        border = functional.max_pool2d(functional.pad(lowest, (1, 1, 1, 1)), 3, stride=2)
        self.register_buffer("border", border)

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C2 H2 W2"]:
        """Return the output of the stem."""
        pooled = functional.max_pool2d(self.conv(images), 3, stride=2, padding=1)
        return torch.maximum(pooled, self.get_buffer("border"))


def freeze(module: nn.Module, *, image_size: tuple[int, int]) -> None:
    """Replace the standardized convolutions and stems of a ResNet, in place."""
    for name, child in list(module.named_children()):
        if isinstance(child, BiTStem) and child.pools:
            setattr(module, name, FrozenStem(child, image_size=image_size))
        elif isinstance(child, StandardizedConv):
            setattr(module, name, PrestandardizedConv(child))
        else:
            freeze(child, image_size=image_size)
