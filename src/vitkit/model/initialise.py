"""A model goes in, its parameters are set as in the released code: one table from parameter names to values."""

import math
import re
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from vitkit.core.errors import VitkitError
from vitkit.core.shapes import Float, Tensor

Draw = Callable[[Tensor, torch.Generator | None], None]


def constant(tensor: Tensor, _: torch.Generator | None, *, value: float) -> None:
    """Every element the same."""
    tensor.fill_(value)


def normal(tensor: Tensor, generator: torch.Generator | None, *, deviation: float) -> None:
    """Independent normal elements."""
    tensor.normal_(0.0, deviation, generator=generator)


def lecun_normal(tensor: Tensor, generator: torch.Generator | None) -> None:
    """Normal, cut at two deviations, with variance 1 / inputs: the default kernel of the released code."""
    inputs = tensor[0].numel()
    # The cut takes away variance; this factor, the deviation of a unit normal cut at ±2, gives it back.
    deviation = math.sqrt(1 / inputs) / 0.87962566103423978
    nn.init.trunc_normal_(tensor, 0.0, deviation, -2 * deviation, 2 * deviation, generator=generator)


def xavier_uniform(tensor: Tensor, generator: torch.Generator | None, *, parts: int = 1) -> None:
    """Uniform with variance 2 / (inputs + outputs); a weight that fuses several layers is drawn part by part."""
    for part in tensor.chunk(parts):
        nn.init.xavier_uniform_(part, generator=generator)


def probe(tensor: Tensor, generator: torch.Generator | None) -> None:
    """The probe of attention pooling, drawn as a layer from one input to the width."""
    nn.init.xavier_uniform_(tensor.view(-1, 1), generator=generator)


def copy_of(tensor: Tensor, _: torch.Generator | None, *, value: Tensor) -> None:
    """The elements of another tensor."""
    tensor.copy_(value)


def table(
    *,
    head_bias: float,
    layer_scale: float | None,
    gated_mlp: bool,
    fixed_positions: Float[Tensor, "1 L D"] | None,
) -> tuple[tuple[str, Draw], ...]:
    """Which parameters start how. A name must match exactly one row, from its start to its end."""
    zeros, ones = partial(constant, value=0.0), partial(constant, value=1.0)
    small, tiny = partial(normal, deviation=0.02), partial(normal, deviation=1e-6)
    positions = small if fixed_positions is None else partial(copy_of, value=fixed_positions)
    return (
        # Equation 1: E, the class token and E_pos. Registers have no positions, so only noise tells them apart.
        (r"patch_embed\.proj\.weight", lecun_normal),
        (r"patch_embed\.proj\.bias", zeros),
        (r"cls_token", zeros),
        (r"dist_token", small),
        (r"reg_token", tiny),
        (r"(layer_)?pos_embed(\..+)?", positions),
        (r"relative\.\d+\.table", small),
        # Equation 2: attention, q, k and v each drawn as a layer of its own.
        (r"blocks\.\d+\.attn\.qkv\.weight", partial(xavier_uniform, parts=3)),
        (r"blocks\.\d+\.attn\.proj\.weight", xavier_uniform),
        (r"blocks\.\d+\.attn\.(qkv|proj)\.bias", zeros),
        (r"blocks\.\d+\.ls[12]\.gamma", partial(constant, value=layer_scale or 0.0)),
        # Equation 3: the MLP, in the blocks and in the pooling head.
        (r".+\.mlp\.fc1\.weight", partial(xavier_uniform, parts=2 if gated_mlp else 1)),
        (r".+\.mlp\.fc2\.weight", xavier_uniform),
        (r".+\.mlp\.fc[12]\.bias", tiny),
        # Pooling by attention, the pre-training head, and the zero-initialised classifier.
        (r"attn_pool\.latent", probe),
        (r"attn_pool\.kv\.weight", partial(xavier_uniform, parts=2)),
        (r"attn_pool\.(q|proj)\.weight", xavier_uniform),
        (r"attn_pool\.(q|kv|proj)\.bias", zeros),
        (r"pre_logits\.fc\.weight", lecun_normal),
        (r"pre_logits\.fc\.bias", zeros),
        (r"head(\.label|\.teacher)?\.weight", zeros),
        (r"head(\.label|\.teacher)?\.bias", partial(constant, value=head_bias)),
        # Norms, and the ResNets of hybrids and BiT. A post-activation unit starts as its shortcut.
        (r"(.+\.)?(q_|k_|fc_)?norm[12]?\.weight", ones),
        (r"(.+\.)?(q_|k_|fc_)?norm[123]?\.bias", zeros),
        (r"stages\..+\.norm3\.weight", ones),
        (r"patch_embed\.backbone\.stages\..+\.norm3\.weight", zeros),
        (r"(.+\.)?(stem|blocks\.\d+|downsample)\.conv[123]?\.weight", lecun_normal),
    )


@torch.no_grad()
def initialise(
    model: nn.Module,
    *,
    head_bias: float = 0.0,
    layer_scale: float | None = None,
    gated_mlp: bool = False,
    fixed_positions: Float[Tensor, "1 L D"] | None = None,
    generator: torch.Generator | None = None,
) -> None:
    """Set every parameter of a model by the table; a parameter that no row, or more than one, names is an error."""
    rows = table(head_bias=head_bias, layer_scale=layer_scale, gated_mlp=gated_mlp, fixed_positions=fixed_positions)
    for name, parameter in model.named_parameters():
        matching = [draw for pattern, draw in rows if re.fullmatch(pattern, name)]
        if len(matching) != 1:
            raise VitkitError(f"the initialisation table does not settle {name}", expected="one row", got=len(matching))
        if not parameter.is_meta:
            matching[0](parameter, generator)
