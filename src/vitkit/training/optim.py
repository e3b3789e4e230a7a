"""Optimizers, Muon among them, with learning-rate schedule, moving average and LoRA."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from torch.optim.adamw import adamw
from torch.optim.swa_utils import get_ema_multi_avg_fn

from vitkit.core.errors import ConfigError
from vitkit.core.shapes import Float, Tensor
from vitkit.model.pretraining import ENCODER_PREFIX
from vitkit.training.config import OptimizerConfig, ScheduleConfig
from vitkit.training.distributed import distribute_like

NamedParameters = Mapping[str, nn.Parameter]
MUON_COEFFICIENTS, MUON_STEPS, MUON_EPSILON = (3.4445, -4.7750, 2.0315), 5, 1e-7


def learning_rate(config: ScheduleConfig, *, step: int, total_steps: int) -> float:
    """Return the learning rate of the update after `step` updates, as in the paper's released code.

    >>> config = ScheduleConfig(lr=0.1, warmup_steps=10)
    >>> [round(learning_rate(config, step=step, total_steps=110), 3) for step in (0, 5, 10, 60, 110)]
    [0.0, 0.05, 0.1, 0.05, 0.0]
    """
    progress = min(max((step - config.warmup_steps) / max(total_steps - config.warmup_steps, 1), 0.0), 1.0)
    lr = config.lr
    if config.decay == "linear":
        lr = config.end_lr + (config.lr - config.end_lr) * (1.0 - progress)
    elif config.decay == "cosine":
        lr = config.end_lr + (config.lr - config.end_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return lr * min(1.0, step / config.warmup_steps) if config.warmup_steps else lr


def layer_index(name: str, *, depth: int) -> int:
    """Return the layer of a parameter: 0 is the embedding, depth + 1 what follows the blocks.

    Names inside a pre-training wrapper are accepted too; what follows the encoder there is depth + 1.
    """
    name = name.removeprefix(ENCODER_PREFIX)
    if block := re.match(r"(blocks|stages|layer_pos_embed)\.(\d+)", name):
        return int(block[2]) + 1
    embedding = ("patch_embed.", "cls_token", "dist_token", "reg_token", "pos_embed", "stem.", "relative.")
    return 0 if name.startswith(embedding) else depth + 1


def is_kernel(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter has weight decay: kernels do; biases, norms, tokens and positions do not (B.1)."""
    tables = ("cls_token", "dist_token", "reg_token", "pos_embed", "layer_pos_embed", "relative.", "attn_pool.latent")
    return parameter.ndim >= 2 and not name.removeprefix(ENCODER_PREFIX).startswith((*tables, "mask_token"))


def parameter_groups(parameters: NamedParameters, config: OptimizerConfig, *, depth: int) -> list[dict[str, object]]:
    """Group parameters by algorithm, weight decay and learning-rate scale."""
    groups: dict[tuple[str, float, float], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        kernel = is_kernel(name, parameter)
        algorithm = choose_algorithm(name, is_kernel=kernel) if config.name == "muon" else config.name
        decay = config.weight_decay if kernel else 0.0
        scale = config.layer_decay ** (depth + 1 - layer_index(name, depth=depth))
        if algorithm == "adamw":
            scale *= config.adam_lr_scale
        groups.setdefault((algorithm, scale, decay), []).append(parameter)
    return [
        {"params": members, "weight_decay": decay, "scale": scale, "algorithm": algorithm}
        for (algorithm, scale, decay), members in groups.items()
    ]


def build_optimizer(parameters: NamedParameters, config: OptimizerConfig, *, depth: int) -> torch.optim.Optimizer:
    """Build Adam with decoupled weight decay, SGD with momentum, or Muon."""
    groups = parameter_groups(parameters, config, depth=depth)
    if config.name == "adam":
        return torch.optim.AdamW(groups, lr=0.0, betas=(config.beta1, config.beta2), fused=True)
    if config.name == "muon":
        # Most CPUs emulate bfloat16; a fixed precision also makes runs independent of the kind of CPU.
        on_cpu = all(parameter.device.type == "cpu" for parameter in parameters.values())
        dtype = torch.float32 if on_cpu else torch.bfloat16
        return Muon(groups, lr=0.0, momentum=config.momentum, betas=(config.beta1, config.beta2), dtype=dtype)
    if config.weight_decay:
        raise ConfigError(
            "SGD's weight decay would be coupled to its momentum", hint="set optimizer.weight_decay=0, as in Table 4"
        )
    # PyTorch has no fused SGD for sharded parameters.
    sharded = any(isinstance(parameter, DTensor) for parameter in parameters.values())
    return torch.optim.SGD(groups, lr=0.0, momentum=config.momentum, fused=not sharded)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group to its scale times `lr`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["scale"]


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def freeze_parameters(model: nn.Module, config: OptimizerConfig, *, generator: torch.Generator) -> None:
    """Freeze all parameters but the trainable ones, and add LoRA if configured."""
    if config.trainable == "all":
        return
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("head.", "pre_logits.")))
    if config.trainable == "lora":
        add_lora(model, rank=config.lora_rank, generator=generator)


class LoRA(nn.Module):
    """Low-rank update W + BA of the query and value rows of a fused qkv weight; zero at the start."""

    def __init__(self, weight: Float[Tensor, "O D"], *, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        width = weight.shape[1]
        down = torch.empty(2, rank, width).uniform_(-1.0, 1.0, generator=generator) / math.sqrt(width)
        self.down = nn.Parameter(down.to(weight))
        self.up = nn.Parameter(torch.zeros(2, weight.shape[0] // 3, rank).to(weight))

    def forward(self, weight: Float[Tensor, "O D"]) -> Float[Tensor, "O D"]:
        """Return the updated weight."""
        queries, values = self.up @ self.down
        return weight + torch.cat([queries, torch.zeros_like(queries), values])


def add_lora(model: nn.Module, *, rank: int, generator: torch.Generator) -> None:
    """Add a low-rank update to the queries and values of every block."""
    layers = [layer for name, layer in model.named_modules() if name.endswith(".qkv") and isinstance(layer, nn.Linear)]
    if not layers:
        raise ConfigError("LoRA needs attention layers", hint="use optimizer.trainable=all or head")
    for layer in layers:
        parametrize.register_parametrization(
            layer, "weight", LoRA(layer.weight.detach(), rank=rank, generator=generator)
        )


def merge_lora(model: nn.Module) -> None:
    """Merge the low-rank updates into the weights."""
    for module in model.modules():
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)


@dataclass
class EMA:
    """Exponential moving average of parameters: average ← decay · average + (1 − decay) · parameter.

    After n updates the decay is at most (1 + n) / (10 + n), so that the initial values are soon forgotten.
    """

    decay: float
    values: dict[str, Tensor]

    @classmethod
    def of(cls, parameters: NamedParameters, decay: float) -> "EMA":
        """Start an average at the current parameters."""
        return cls(decay, {name: parameter.detach().clone() for name, parameter in parameters.items()})

    @torch.no_grad()
    def update(self, parameters: NamedParameters, *, updates: int) -> None:
        """Include the current parameters."""
        decay = min(self.decay, (1 + updates) / (10 + updates))
        current = [parameters[name].data for name in self.values]
        get_ema_multi_avg_fn(decay)(list(self.values.values()), current, updates)

    @torch.no_grad()
    def swap(self, parameters: NamedParameters) -> None:
        """Exchange the average and the parameters; a second call restores both."""
        for name, average in self.values.items():
            copy = average.clone()
            average.copy_(parameters[name].data)
            parameters[name].data.copy_(copy)


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the global norm of all gradients."""
    norm = torch.nn.utils.get_total_norm(
        [parameter.grad for parameter in parameters if parameter.grad is not None], foreach=True
    )
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def clip_gradients(parameters: Iterable[nn.Parameter], *, limit: float, norm: Tensor) -> None:
    """Scale all gradients so that their global norm is at most the limit."""
    if norm > limit:  # otherwise torch would multiply by 1
        torch.nn.utils.clip_grads_with_norm_(list(parameters), limit, norm, foreach=True)


class Muon(torch.optim.Optimizer):
    """Muon and AdamW in one optimizer, so that checkpoints, schedules and clipping see a single one.

    Muon replaces the Nesterov momentum of a weight by the nearest semi-orthogonal matrix (Jordan et al., 2024,
    https://kellerjordan.github.io/posts/muon/). On 2-D weights the results equal those of `torch.optim.Muon`, which
    refuses other shapes and leaves the remaining parameters to a second optimizer.

    A parameter group has `algorithm="muon"` (parameters of two or more dimensions, flattened to (out, rest)) or
    `algorithm="adamw"`. Weight decay is decoupled in both. `dtype` is the precision of the orthogonalization: bfloat16
    is that of `torch.optim.Muon`; on CPUs without bfloat16 instructions float32 is faster.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, object]],
        *,
        lr: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "weight_decay": weight_decay, "dtype": dtype}
        super().__init__(list(groups), defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters and group["algorithm"] == "muon":
                self._step_muon(parameters, group)
            elif parameters:
                self._step_adamw(parameters, group)

    def _step_muon(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        lr, momentum, weight_decay = group["lr"], group["momentum"], group["weight_decay"]
        for parameter in parameters:
            gradient = parameter.grad
            assert gradient is not None
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            buffer = state["momentum_buffer"]
            buffer.lerp_(gradient, 1 - momentum)
            update = orthogonalize(gradient.lerp(buffer, momentum), dtype=group["dtype"])
            parameter.mul_(1 - lr * weight_decay)
            rows, columns = parameter.shape[0], math.prod(parameter.shape[1:])
            parameter.add_(update, alpha=-lr * math.sqrt(max(1.0, rows / columns)))

    def _step_adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=1e-8,
            maximize=False,
        )


def orthogonalize(update: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the approximately nearest semi-orthogonal matrix, by five quintic Newton-Schulz steps.

    Dimensions after the first are flattened. A sharded update is gathered and computed on every rank, because the
    result depends on the whole matrix.
    """
    if isinstance(update, DTensor):
        return distribute_like(orthogonalize(update.full_tensor(), dtype=dtype), update)
    a, b, c = MUON_COEFFICIENTS
    matrix = update.flatten(1).to(dtype, copy=True)
    is_tall = matrix.shape[0] > matrix.shape[1]
    if is_tall:
        matrix = matrix.T
    matrix.div_(matrix.norm().clamp(min=MUON_EPSILON))
    for _ in range(MUON_STEPS):
        gram = matrix @ matrix.T
        matrix = torch.addmm(matrix, torch.addmm(gram, gram, gram, beta=b, alpha=c), matrix, beta=a)
    return (matrix.T if is_tall else matrix).reshape(update.shape).to(update.dtype)


def choose_algorithm(name: str, *, is_kernel: bool) -> Literal["muon", "adamw"]:
    """Return which algorithm updates a parameter: Muon for kernels, except those of the classifier."""
    is_classifier = name.removeprefix(ENCODER_PREFIX).startswith("head.")
    return "muon" if is_kernel and not is_classifier else "adamw"
