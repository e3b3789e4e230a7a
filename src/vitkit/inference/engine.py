"""Inference engines: their interface, precisions and devices, and the engines that run a model's own torch modules."""

import os
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
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
TrainingPrecision = Literal["fp32", "bf16", "fp16"]
TRAINING_DTYPES: Mapping[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Type of autocast by precision of training."""
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


def resolve_device(name: str | torch.device, *, local_rank: int = 0) -> torch.device:
    """Return a device; `auto` is CUDA, then MPS, then the CPU. `local_rank` selects the GPU of this process.

    A process that sees one GPU uses it, whatever its rank: `srun --gpus-per-task=1` hides those of other ranks.
    """
    name = str(name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{local_rank if torch.cuda.device_count() != 1 else 0}"
    return open_device(name)


def open_device(device: str | torch.device) -> torch.device:
    """Return a device of torch, or the best one for "auto"; raise ConfigError if this machine does not have it."""
    if str(device) == "auto":
        return resolve_device(device)
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"this machine has no device {device}", hint="vitkit doctor lists the devices") from error


def choose_training_precision(device: torch.device) -> TrainingPrecision:
    """Return what `parallel.precision=auto` is: bf16 on GPUs that have it, fp16 on older ones, fp32 elsewhere."""
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"


@dataclass(kw_only=True, eq=False)
class ModuleEngine:
    """A torch module as an engine; `chunk_size` limits the images per forward pass if smaller chunks are faster."""

    module: FeatureModule
    name: str
    precision: Precision = "fp32"
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    chunk_size: int | None = None

    def features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B F"]:
        """Return the input of the head for each image."""
        return self.forward(images)[0]

    @torch.no_grad()
    def forward(self, images: Float[Tensor, "B C H W"]) -> tuple[Float[Tensor, "B F"], Float[Tensor, "B Y"]]:
        """Return features and logits."""
        chunks = images.to(self.device, self.dtype).split(self.chunk_size or max(1, len(images)))
        features, logits = zip(*map(self._forward, chunks), strict=True)
        return torch.cat(features).float().cpu(), torch.cat(logits).float().cpu()

    def _forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.module.features(images)
        return features, self.module.head(features)


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
    return ModuleEngine(module=module, name="torch, eager", precision=precision, dtype=dtype, device=device)


def shared_copy(module: Module) -> Module:
    """Copy a module in evaluation mode. Tensors are shared until the copy is moved or its layers are replaced."""
    memo: dict[int, Tensor] = {id(tensor): tensor.detach() for tensor in module.buffers()}
    memo |= {id(tensor): nn.Parameter(tensor.detach(), requires_grad=False) for tensor in module.parameters()}
    return deepcopy(module, memo).eval()


@dataclass(kw_only=True, eq=False)
class CompiledEngine(ModuleEngine):
    """A torch module for GPUs that is compiled after `warmup_batches` batches, and stays eager if that fails.

    The first batches run eagerly, so a few images never wait for compilation. Compiled code is kept in vitkit's cache.
    """

    warmup_batches: int = WARMUP_BATCHES
    batch_count: int = 0
    compiled: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None

    def _forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        if self.batch_count == self.warmup_batches:
            self._compile(images)
        self.batch_count += 1
        return (self.compiled or super()._forward)(images)

    def _compile(self, images: Tensor) -> None:
        """Compile the forward pass and try it once, or stay eager with a warning if that fails."""
        try:
            # A directory that no other user can write to, unless one is configured.
            if INDUCTOR_CACHE not in os.environ:
                os.environ[INDUCTOR_CACHE] = str(create_cache_dir("inductor"))
            compiled: Callable[[Tensor], tuple[Tensor, Tensor]] = torch.compile(super()._forward)
            compiled(images)
            self.compiled = compiled
        except Exception as error:  # a broken compiler must not prevent predictions
            self.name = self.name.replace("compiled for", "eager, on", 1)
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            warnings.warn(f"torch.compile failed, continuing without it: {reason}", stacklevel=5)


def compiled_engine(
    model: Model, *, precision: Precision = "fp32", device: torch.device, warmup_batches: int = WARMUP_BATCHES
) -> CompiledEngine:
    """Create the engine for a GPU, in fp32 or half precision."""
    dtype = half_dtype(device) if precision == "bf16" else torch.float32
    if precision == "int8":
        hint = "use --precision bf16, or --device cpu"
        got = f"int8 on {device.type}"
        raise ConfigError("int8 runs only on the CPU", expected="fp32 or bf16", got=got, hint=hint)
    module, name = shared_copy(model).to(device, dtype), f"torch, compiled for {device.type} in {str(dtype)[6:]}"
    return CompiledEngine(
        module=module, name=name, precision=precision, dtype=dtype, device=device, warmup_batches=warmup_batches
    )


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
