"""A model's parameters go in; what learns, how fast and with what decay comes out: groups, schedule, average."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import parametrize

from vitkit.core.errors import ConfigError
from vitkit.core.shapes import Float, Tensor
from vitkit.model.masked import ENCODER
from vitkit.train.config import OptimizerConfig, ScheduleConfig
from vitkit.train.parallel import is_sharded

Named = Mapping[str, nn.Parameter]


def learning_rate(config: ScheduleConfig, *, step: int, steps: int) -> float:
    """The learning rate of the update after `step` updates, as in the released code.

    >>> config = ScheduleConfig(lr=0.1, warmup_steps=10)
    >>> [round(learning_rate(config, step=step, steps=110), 3) for step in (0, 5, 10, 60, 110)]
    [0.0, 0.05, 0.1, 0.05, 0.0]
    """
    progress = min(max((step - config.warmup_steps) / max(steps - config.warmup_steps, 1), 0.0), 1.0)
    rate = config.lr
    if config.decay == "linear":
        rate = config.end_lr + (config.lr - config.end_lr) * (1.0 - progress)
    elif config.decay == "cosine":
        rate = config.end_lr + (config.lr - config.end_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return rate * min(1.0, step / config.warmup_steps) if config.warmup_steps else rate


def layer_of(name: str, *, depth: int) -> int:
    """How far above the image a parameter stands: 0 for the embedding, depth + 1 for what follows the blocks.

    The name is that in a model by itself, or in one of pre-training; what stands around the encoder there follows it.

    >>> [layer_of(name, depth=12) for name in ("patch_embed.proj.weight", "blocks.3.norm1.bias", "head.bias")]
    [0, 4, 13]
    """
    name = name.removeprefix(ENCODER)
    if block := re.match(r"(blocks|stages|layer_pos_embed)\.(\d+)", name):
        return int(block[2]) + 1
    embedding = ("patch_embed.", "cls_token", "dist_token", "reg_token", "pos_embed", "stem.", "relative.")
    return 0 if name.startswith(embedding) else depth + 1


def is_kernel(name: str, parameter: Tensor) -> bool:
    """Whether weight decay touches a parameter: kernels only, no bias, norm, token or position (appendix B.1).

    >>> is_kernel("head.weight", torch.zeros(10, 8)), is_kernel("cls_token", torch.zeros(1, 1, 8))
    (True, False)
    """
    tables = ("cls_token", "dist_token", "reg_token", "pos_embed", "layer_pos_embed", "relative.", "attn_pool.latent")
    return parameter.ndim >= 2 and not name.removeprefix(ENCODER).startswith((*tables, "mask_token"))


def groups(parameters: Named, config: OptimizerConfig, *, depth: int) -> list[dict[str, object]]:
    """The optimizer's groups: parameters of one weight decay and one share of the learning rate."""
    made: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        decay = config.weight_decay if is_kernel(name, parameter) else 0.0
        scale = config.layer_decay ** (depth + 1 - layer_of(name, depth=depth))
        made.setdefault((scale, decay), []).append(parameter)
    return [{"params": members, "weight_decay": decay, "scale": scale} for (scale, decay), members in made.items()]


def optimizer(parameters: Named, config: OptimizerConfig, *, depth: int) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay, or SGD with momentum, on torch's fused kernels."""
    members = groups(parameters, config, depth=depth)
    if config.name == "adam":
        return torch.optim.AdamW(members, lr=0.0, betas=(config.beta1, config.beta2), fused=True)
    if config.weight_decay:
        raise ConfigError(
            "SGD's weight decay would be coupled to its momentum", hint="set optimizer.weight_decay=0, as in Table 4"
        )
    # torch has no fused SGD for sharded parameters.
    sharded = any(map(is_sharded, parameters.values()))
    return torch.optim.SGD(members, lr=0.0, momentum=config.momentum, fused=not sharded)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group its share of the learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["scale"]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that learn, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def choose_what_learns(model: nn.Module, config: OptimizerConfig, *, generator: torch.Generator) -> None:
    """Freeze all but the head, or all but the head and low-rank additions, as the configuration says."""
    if config.tune == "full":
        return
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("head.", "pre_logits.")))
    if config.tune == "lora":
        add_low_rank(model, rank=config.lora_rank, generator=generator)


class LowRank(nn.Module):
    """W + BA on the rows of a fused qkv weight that make queries and values; zero at the start (LoRA)."""

    def __init__(self, weight: Float[Tensor, "O D"], *, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        width = weight.shape[1]
        down = torch.empty(2, rank, width).uniform_(-1.0, 1.0, generator=generator) / math.sqrt(width)
        self.down = nn.Parameter(down.to(weight))
        self.up = nn.Parameter(torch.zeros(2, weight.shape[0] // 3, rank).to(weight))

    def forward(self, weight: Float[Tensor, "O D"]) -> Float[Tensor, "O D"]:
        """The weight with its addition."""
        queries, values = self.up @ self.down
        return weight + torch.cat([queries, torch.zeros_like(queries), values])


def add_low_rank(model: nn.Module, *, rank: int, generator: torch.Generator) -> None:
    """Let the queries and values of every block learn by an addition of low rank."""
    layers = [layer for name, layer in model.named_modules() if name.endswith(".qkv") and isinstance(layer, nn.Linear)]
    if not layers:
        raise ConfigError("LoRA needs attention, which this model has not", hint="use optimizer.tune=full or head")
    for layer in layers:
        parametrize.register_parametrization(
            layer, "weight", LowRank(layer.weight.detach(), rank=rank, generator=generator)
        )


def merge_low_rank(model: nn.Module) -> None:
    """Make the additions part of the weights: the model is then a plain one again."""
    for module in model.modules():
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)


@dataclass
class Average:
    """The Polyak average of parameters: average ← decay · average + (1 − decay) · parameter, after each update.

    As many updates as have been made bound the decay, (1 + n) / (10 + n), so that the start is soon forgotten.
    """

    decay: float
    values: dict[str, Tensor]

    @classmethod
    def of(cls, parameters: Named, decay: float) -> "Average":
        """An average that starts at the parameters as they are."""
        return cls(decay, {name: parameter.detach().clone() for name, parameter in parameters.items()})

    @torch.no_grad()
    def update(self, parameters: Named, *, updates: int) -> None:
        """Move towards the parameters."""
        decay = min(self.decay, (1 + updates) / (10 + updates))
        torch._foreach_lerp_(list(self.values.values()), [parameters[name].data for name in self.values], 1 - decay)

    @torch.no_grad()
    def swap(self, parameters: Named) -> None:
        """Exchange the average and the parameters; a second time puts them back."""
        for name, average in self.values.items():
            held = average.clone()
            average.copy_(parameters[name].data)
            parameters[name].data.copy_(held)


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The global norm of all gradients."""
    norm = torch.nn.utils.get_total_norm(
        [parameter.grad for parameter in parameters if parameter.grad is not None], foreach=True
    )
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def clip(parameters: Iterable[nn.Parameter], *, limit: float, norm: Tensor) -> None:
    """Scale all gradients so that their global norm is at most the limit."""
    if norm > limit:  # torch would multiply by 1
        torch.nn.utils.clip_grads_with_norm_(list(parameters), limit, norm, foreach=True)
