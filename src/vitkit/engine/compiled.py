"""A model and a GPU go in, an engine that torch.compile makes for it comes out, in fp32 or half precision.

What inductor makes is kept in vitkit's cache folder, so that the next start finds it. The first batches are answered
before anything is compiled: who asks about a few images never waits for it.
"""

import os
import warnings
from collections.abc import Callable

import torch

from vitkit.core.errors import ConfigError
from vitkit.core.shapes import Float, Tensor
from vitkit.engine.cache import make_private, private_folder
from vitkit.engine.engine import Engine, Precision
from vitkit.engine.written import Featured, ModuleEngine, shared_copy
from vitkit.zoo.lookup import Model

PATIENCE = 8
"""Batches that are answered as written before compiling seems worth its time, about a minute the first time."""
CACHE = "TORCHINDUCTOR_CACHE_DIR"


class CompiledEngine(ModuleEngine):
    """A torch module as an engine that is compiled once it has been asked often enough, and stays as it is if not."""

    def __init__(
        self, module: Featured, *, precision: Precision, dtype: torch.dtype, device: torch.device, patience: int
    ) -> None:
        name = f"torch, compiled for {device.type} in {str(dtype).removeprefix('torch.')}"
        super().__init__(module, name=name, precision=precision, dtype=dtype, device=device)
        self.patience = patience
        self._forward: Callable[[Tensor], tuple[Tensor, Tensor]] = self._plain
        self.asked = 0

    def features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B F"]:
        """What the head reads of each image."""
        return self.answer(images)[0]

    @torch.no_grad()
    def answer(self, images: Float[Tensor, "B C H W"]) -> tuple[Float[Tensor, "B F"], Float[Tensor, "B Y"]]:
        """Features and logits, in one pass."""
        moved = images.to(self.device, self.dtype)
        if self.asked == self.patience:
            self._forward = self._compiled(moved)
        self.asked += 1
        features, logits = self._forward(moved)
        return features.float().cpu(), logits.float().cpu()

    def _plain(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.module.features(images)
        return features, self.module.head(features)

    def _compiled(self, images: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """The compiled pass, tried once; without a working compiler, the plain one and a warning that says why."""
        try:
            _keep_privately()
            compiled: Callable[[Tensor], tuple[Tensor, Tensor]] = torch.compile(self._plain)
            compiled(images)
        except Exception as error:  # whatever a compiler dies of, the answers can be had without it
            self.name = self.name.replace("compiled for", "as written, on", 1)
            first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            warnings.warn(f"torch.compile does not work here, so it goes on without: {first}", stacklevel=4)
            return self._plain
        return compiled


def compiled(
    model: Model, *, precision: Precision = "fp32", device: torch.device, patience: int = PATIENCE
) -> CompiledEngine:
    """The engine for a GPU; its weights go there in the type that it computes in."""
    dtype = half_type(device) if precision == "bf16" else torch.float32
    if precision == "int8":
        raise ConfigError(
            "int8 is for the CPU",
            expected="fp32 or bf16",
            got=f"int8 on {device.type}",
            hint="use --precision bf16 there, or --device cpu",
        )
    module = shared_copy(model).to(device, dtype)
    return CompiledEngine(module, precision=precision, dtype=dtype, device=device, patience=patience)


def impatient(engine: Engine) -> Engine:
    """The same engine; if it is one that compiles, it does so at its next batch: for who times it or will ask often.

    >>> import vitkit
    >>> model = vitkit.create("Ti/16", image_size=32, settings=["depth=1"])
    >>> impatient(compiled(model, device=torch.device("cpu"))).patience
    0
    """
    if isinstance(engine, CompiledEngine):
        engine.patience = min(engine.patience, engine.asked)
    return engine


def _keep_privately() -> None:
    """Let inductor keep what it makes, which is code, in a folder that is this user's alone, if it has none yet."""
    if CACHE not in os.environ:
        folder = private_folder()
        for each in (folder, folder / "inductor"):
            make_private(each)
        os.environ[CACHE] = str(folder / "inductor")


def half_type(device: torch.device) -> torch.dtype:
    """bf16 where the device multiplies it, else fp16, which is as fast and whose numbers end sooner."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.float16 if device.type == "mps" else torch.bfloat16
