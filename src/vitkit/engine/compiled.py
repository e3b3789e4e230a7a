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
from vitkit.engine.cache import cache_folder
from vitkit.engine.engine import Precision
from vitkit.engine.written import Featured, ModuleEngine, shared_copy
from vitkit.zoo.lookup import Model

PATIENCE = 8
"""Batches that are answered as written before compiling seems worth its time, about a minute the first time."""


class CompiledEngine(ModuleEngine):
    """A torch module as an engine that is compiled once it has been asked often enough, and stays as it is if not."""

    def __init__(
        self, module: Featured, *, precision: Precision, dtype: torch.dtype, device: torch.device, patience: int
    ) -> None:
        name = f"torch, compiled for {device.type} in {str(dtype).removeprefix('torch.')}"
        super().__init__(module, name=name, precision=precision, dtype=dtype, device=device)
        self.patience = patience
        self._forward: Callable[[Tensor], tuple[Tensor, Tensor]] = self._plain
        self._asked = 0

    def features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B F"]:
        """What the head reads of each image."""
        return self.answer(images)[0]

    @torch.no_grad()
    def answer(self, images: Float[Tensor, "B C H W"]) -> tuple[Float[Tensor, "B F"], Float[Tensor, "B Y"]]:
        """Features and logits, in one pass."""
        moved = images.to(self.device, self.dtype)
        if self._asked == self.patience:
            self._forward = self._compiled(moved)
        self._asked += 1
        features, logits = self._forward(moved)
        return features.float().cpu(), logits.float().cpu()

    def _plain(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.module.features(images)
        return features, self.module.head(features)

    def _compiled(self, images: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """The compiled pass, tried once; without a working compiler, the plain one and a warning that says why."""
        try:
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))
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


def half_type(device: torch.device) -> torch.dtype:
    """bf16 where the device multiplies it, else fp16, which is as fast and whose numbers end sooner."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.float16 if device.type == "mps" else torch.bfloat16
