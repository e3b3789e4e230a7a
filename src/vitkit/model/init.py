"""Parameter initialization as in the released code: one table of rules from parameter names to distributions."""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from vitkit.core.errors import VitkitError
from vitkit.core.shapes import Float, Tensor

Initializer = Callable[[Tensor, torch.Generator | None], None]


def constant(tensor: Tensor, _: torch.Generator | None, *, value: float) -> None:
    """Fill with a constant."""
    tensor.fill_(value)


def normal(tensor: Tensor, generator: torch.Generator | None, *, std: float) -> None:
    """Draw from a normal distribution."""
    tensor.normal_(0.0, std, generator=generator)


def lecun_normal(tensor: Tensor, generator: torch.Generator | None) -> None:
    """Draw from a normal distribution with variance 1 / fan_in, truncated at two standard deviations."""
    fan_in = tensor[0].numel()
    # Truncation reduces the variance; the divisor is the standard deviation of a unit normal truncated at ±2.
    std = math.sqrt(1 / fan_in) / 0.87962566103423978
    nn.init.trunc_normal_(tensor, 0.0, std, -2 * std, 2 * std, generator=generator)


def xavier_uniform(tensor: Tensor, generator: torch.Generator | None, *, parts: int = 1) -> None:
    """Draw from a uniform distribution with variance 2 / (fan_in + fan_out), separately for each fused layer."""
    for part in tensor.chunk(parts):
        nn.init.xavier_uniform_(part, generator=generator)


def pooling_query(tensor: Tensor, generator: torch.Generator | None) -> None:
    """Draw the query of attention pooling as the weight of a layer with one input."""
    nn.init.xavier_uniform_(tensor.view(-1, 1), generator=generator)


def initialization_rules(
    *,
    head_bias: float = 0.0,
    layer_scale: float | None = None,
    gated_mlp: bool = False,
    fixed_positions: Float[Tensor, "1 L D"] | None = None,
) -> tuple[tuple[str, Initializer], ...]:
    """Return pairs of a pattern and an initializer. Exactly one pattern must match a full parameter name."""
    zeros, ones = partial(constant, value=0.0), partial(constant, value=1.0)
    small, tiny = partial(normal, std=0.02), partial(normal, std=1e-6)
    positions = small if fixed_positions is None else lambda tensor, _: tensor.copy_(fixed_positions)
    return (
        # Equation 1: E, the class token and E_pos. Registers have no positions, so noise breaks their symmetry.
        (r"patch_embed\.proj\.weight", lecun_normal),
        (r"patch_embed\.proj\.bias", zeros),
        (r"cls_token", zeros),
        (r"dist_token", small),
        (r"reg_token", tiny),
        (r"(layer_)?pos_embed(\..+)?", positions),
        (r"relative\.\d+\..+", small),
        # Equation 2: attention; q, k and v are initialized as separate layers.
        (r"blocks\.\d+\.attn\.qkv\.weight", partial(xavier_uniform, parts=3)),
        (r"blocks\.\d+\.attn\.proj\.weight", xavier_uniform),
        (r"blocks\.\d+\.attn\.(qkv|proj)\.bias", zeros),
        (r"blocks\.\d+\.ls[12]\.gamma", partial(constant, value=layer_scale or 0.0)),
        # Equation 3: the MLP, in the blocks and in the pooling head.
        (r".+\.mlp\.fc1\.weight", partial(xavier_uniform, parts=2 if gated_mlp else 1)),
        (r".+\.mlp\.fc2\.weight", xavier_uniform),
        (r".+\.mlp\.fc[12]\.bias", tiny),
        # Pooling by attention, the pre-training head, and the zero-initialized classifier.
        (r"attn_pool\.latent", pooling_query),
        (r"attn_pool\.kv\.weight", partial(xavier_uniform, parts=2)),
        (r"attn_pool\.(q|proj)\.weight", xavier_uniform),
        (r"attn_pool\.(q|kv|proj)\.bias", zeros),
        (r"pre_logits\.fc\.weight", lecun_normal),
        (r"pre_logits\.fc\.bias", zeros),
        (r"head(\.label|\.teacher)?\.weight", zeros),
        (r"head(\.label|\.teacher)?\.bias", partial(constant, value=head_bias)),
        # Norms and ResNets. A post-activation unit starts as its shortcut: the scale of its last norm is zero.
        (r"(.+\.)?(q_|k_|fc_)?norm[12]?\.weight", ones),
        (r"(.+\.)?(q_|k_|fc_)?norm[123]?\.bias", zeros),
        (r"stages\..+\.norm3\.weight", ones),
        (r"patch_embed\.backbone\.stages\..+\.norm3\.weight", zeros),
        (r"(.+\.)?(stem|blocks\.\d+|downsample)\.conv[123]?\.weight", lecun_normal),
    )


@torch.no_grad()
def initialize(
    model: nn.Module, rules: Sequence[tuple[str, Initializer]], *, generator: torch.Generator | None = None
) -> None:
    """Initialize every parameter of a model; a parameter that not exactly one rule matches is an error."""
    for name, parameter in model.named_parameters():
        matching = [initializer for pattern, initializer in rules if re.fullmatch(pattern, name)]
        if len(matching) != 1:
            raise VitkitError(f"no unique initialization rule for {name}", expected="one rule", got=len(matching))
        if not parameter.is_meta:
            matching[0](parameter, generator)
