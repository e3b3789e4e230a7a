"""Inference engines: their interface, precisions and devices, and the engines that run a model's own torch modules."""

import os
import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn

from vitkit.core.cache_dir import create_cache_dir
from vitkit.core.errors import ConfigError, did_you_mean
from vitkit.core.shapes import Float, Tensor
from vitkit.inference.token_merging import TokenMergingViT
from vitkit.model.resnet import BiT
from vitkit.model.vit import ViT
from vitkit.zoo.registry import Model

Precision = Literal["fp32", "bf16", "int8"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8")
CPU = torch.device("cpu")
WARMUP_BATCHES = 8
"""Batches that run eagerly before compiling, which takes about a minute the first time."""
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
Module = TypeVar("Module", bound=nn.Module)
FeatureModule = ViT | BiT | TokenMergingViT
"""Modules with `features` and a `head`."""


@runtime_checkable
class Engine(Protocol):
    """A model prepared for inference.

    Images are float32 pixels as returned by `Preprocessing.normalize`. Outputs are float32 on the CPU, whatever the
    precision of the matrix products.
    """

    @property
    def name(self) -> str:
        """Implementation and its settings, for display."""

    @property
    def precision(self) -> Precision:
        """Precision of the matrix products."""

    def features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B F"]:
        """Return the input of the head for each image."""

    def forward(self, images: Float[Tensor, "B C H W"]) -> tuple[Float[Tensor, "B F"], Float[Tensor, "B Y"]]:
        """Return features and logits. A model without classes returns its features twice."""


@runtime_checkable
class ThreadedEngine(Engine, Protocol):
    """An engine whose number of threads can be chosen."""

    def with_threads(self, threads: int) -> Engine:
        """Return the engine with another number of threads. With one, concurrent callers do not wait for each other."""


def check_precision(name: str) -> Precision:
    """Return the precision of that name."""
    for precision in PRECISIONS:
        if precision == name:
            return precision
    hint = did_you_mean(name, PRECISIONS) or "vitkit bench shows which is fastest on this machine"
    raise ConfigError("no such precision", expected="fp32, bf16 or int8", got=name, hint=hint)


def resolve_device(name: str, *, local_rank: int = 0) -> torch.device:
    """Return the named device; `auto` is CUDA, then MPS, then the CPU. `local_rank` selects the GPU of this process."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{local_rank}"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"this machine has no device {name}", hint="vitkit doctor lists the devices") from error


class ModuleEngine:
    """A torch module as an engine.

    Args:
        chunk_size: Maximum number of images per forward pass, if smaller chunks than the batch are faster.
    """

    def __init__(
        self,
        module: FeatureModule,
        *,
        name: str,
        precision: Precision = "fp32",
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        chunk_size: int | None = None,
    ) -> None:
        self.module, self.name, self.precision, self.dtype, self.device = module, name, precision, dtype, device
        self.chunk_size = chunk_size

    @torch.no_grad()
    def features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B F"]:
        """Return the input of the head for each image."""
        return self._features(images).float().cpu()

    @torch.no_grad()
    def forward(self, images: Float[Tensor, "B C H W"]) -> tuple[Float[Tensor, "B F"], Float[Tensor, "B Y"]]:
        """Return features and logits."""
        features = self._features(images)
        return features.float().cpu(), self.module.head(features).float().cpu()

    def _features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B F"]:
        images = images.to(self.device, self.dtype)
        if self.chunk_size is None or len(images) <= self.chunk_size:
            return self.module.features(images)
        return torch.cat([self.module.features(chunk) for chunk in images.split(self.chunk_size)])


def eager_engine(model: Model, *, precision: Precision = "fp32", device: torch.device = CPU) -> ModuleEngine:
    """Create an engine for the model's own forward pass, in fp32 or entirely in bf16.

    >>> import vitkit
    >>> model = vitkit.create("Ti/16", image_size=32, num_classes=10, settings={"depth": 1}).eval()
    >>> images = torch.rand(2, 3, 32, 32)
    >>> bool((eager_engine(model).forward(images)[1] == model(images)).all())
    True
    """
    if precision == "int8":
        raise ConfigError("the eager engine has no int8", expected="fp32 or bf16", got="int8")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    module = shared_copy(model).to(device, dtype)
    return ModuleEngine(module, name="torch, eager", precision=precision, dtype=dtype, device=device)


def shared_copy(module: Module) -> Module:
    """Copy a module in evaluation mode. Tensors are shared until the copy is moved or its layers are replaced."""
    memo: dict[int, Tensor] = {
        id(tensor): nn.Parameter(tensor.detach(), requires_grad=False) for tensor in module.parameters()
    }
    memo |= {id(tensor): tensor.detach() for tensor in module.buffers()}
    return deepcopy(module, memo).eval()


class CompiledEngine(ModuleEngine):
    """A torch module for GPUs that is compiled after `warmup_batches` batches, and stays eager if that fails.

    The first batches run eagerly, so a few images never wait for compilation. Compiled code is kept in vitkit's cache.
    """

    def __init__(
        self,
        module: FeatureModule,
        *,
        precision: Precision,
        dtype: torch.dtype,
        device: torch.device,
        warmup_batches: int,
    ) -> None:
        name = f"torch, compiled for {device.type} in {str(dtype).removeprefix('torch.')}"
        super().__init__(module, name=name, precision=precision, dtype=dtype, device=device)
        self.warmup_batches = warmup_batches
        self._forward: Callable[[Tensor], tuple[Tensor, Tensor]] = self._eager
        self.batch_count = 0

    def features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B F"]:
        """Return the input of the head for each image."""
        return self.forward(images)[0]

    @torch.no_grad()
    def forward(self, images: Float[Tensor, "B C H W"]) -> tuple[Float[Tensor, "B F"], Float[Tensor, "B Y"]]:
        """Return features and logits."""
        images = images.to(self.device, self.dtype)
        if self.batch_count == self.warmup_batches:
            self._forward = self._compile(images)
        self.batch_count += 1
        features, logits = self._forward(images)
        return features.float().cpu(), logits.float().cpu()

    def _eager(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.module.features(images)
        return features, self.module.head(features)

    def _compile(self, images: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Return the compiled forward pass after one trial, or the eager one with a warning if compiling fails."""
        try:
            _use_private_cache()
            compiled: Callable[[Tensor], tuple[Tensor, Tensor]] = torch.compile(self._eager)
            compiled(images)
        except Exception as error:  # a broken compiler must not prevent predictions
            self.name = self.name.replace("compiled for", "eager, on", 1)
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            warnings.warn(f"torch.compile failed, continuing without it: {reason}", stacklevel=4)
            return self._eager
        return compiled


def compiled_engine(
    model: Model, *, precision: Precision = "fp32", device: torch.device, warmup_batches: int = WARMUP_BATCHES
) -> CompiledEngine:
    """Create the engine for a GPU, in fp32 or half precision."""
    dtype = half_dtype(device) if precision == "bf16" else torch.float32
    if precision == "int8":
        raise ConfigError(
            "int8 runs only on the CPU",
            expected="fp32 or bf16",
            got=f"int8 on {device.type}",
            hint="use --precision bf16, or --device cpu",
        )
    module = shared_copy(model).to(device, dtype)
    return CompiledEngine(module, precision=precision, dtype=dtype, device=device, warmup_batches=warmup_batches)


def compile_now(engine: Engine) -> Engine:
    """End the warm-up of an engine, if it has one: it compiles at its next batch."""
    if isinstance(engine, CompiledEngine):
        engine.warmup_batches = min(engine.warmup_batches, engine.batch_count)
    return engine


def half_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 where the device supports it, else float16, which is as fast and has a smaller range."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.float16 if device.type == "mps" else torch.bfloat16


def _use_private_cache() -> None:
    """Make inductor keep its compiled code in a directory that no other user can write to, unless it is configured."""
    if INDUCTOR_CACHE not in os.environ:
        os.environ[INDUCTOR_CACHE] = str(create_cache_dir("inductor"))
