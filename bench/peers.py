"""The same model of vitkit, timm and transformers, with equal weights."""

import importlib
import re
import warnings
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from repair import repair_torchvision
from torch import Tensor, nn

import vitkit
from vitkit.zoo.variants import SIZES

Candidate = Literal["vitkit", "timm", "transformers"]
Activation = Literal["gelu_erf", "gelu_tanh"]
CANDIDATES: tuple[Candidate, ...] = get_args(Candidate)

TIMM_NAMES = {
    "Ti/16": "vit_tiny_patch16_224",
    "S/16": "vit_small_patch16_224",
    "B/16": "vit_base_patch16_224",
}
TRANSFORMERS_ACTIVATIONS: dict[Activation, str] = {"gelu_erf": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
# Our parameter names (those of timm) as regular expressions, and what transformers calls the same tensor.
TRANSFORMERS_NAMES = (
    (r"cls_token", r"vit.embeddings.cls_token"),
    (r"pos_embed", r"vit.embeddings.position_embeddings"),
    (r"patch_embed\.proj\.(\w+)", r"vit.embeddings.patch_embeddings.projection.\1"),
    (r"blocks\.(\d+)\.norm1\.(\w+)", r"vit.layers.\1.layernorm_before.\2"),
    (r"blocks\.(\d+)\.attn\.proj\.(\w+)", r"vit.layers.\1.attention.o_proj.\2"),
    (r"blocks\.(\d+)\.norm2\.(\w+)", r"vit.layers.\1.layernorm_after.\2"),
    (r"blocks\.(\d+)\.mlp\.(fc[12]\.\w+)", r"vit.layers.\1.mlp.\2"),
    (r"norm\.(\w+)", r"vit.layernorm.\1"),
    (r"head\.(\w+)", r"classifier.\1"),
)
QKV = re.compile(r"blocks\.(\d+)\.attn\.qkv\.(\w+)")


def import_peer(name: str) -> Any:
    """Import another library or a module of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        repair_torchvision()
        return importlib.import_module(name)


def build(candidate: Candidate, model: str, *, activation: Activation) -> nn.Module:
    """Build a candidate's model with its own initial weights."""
    if candidate == "vitkit":
        return vitkit.create(model, settings={"block.activation": activation})
    if candidate == "timm":
        layer = None if activation == "gelu_erf" else activation
        return import_peer("timm").create_model(TIMM_NAMES[model], act_layer=layer)
    transformers = import_peer("transformers")
    sizes = SIZES[model.partition("/")[0]]
    config = transformers.ViTConfig(
        hidden_size=sizes.width,
        num_hidden_layers=sizes.depth,
        num_attention_heads=sizes.heads,
        intermediate_size=sizes.mlp_dim,
        num_labels=sizes.num_classes,
        layer_norm_eps=sizes.block.norm_eps,
        hidden_act=TRANSFORMERS_ACTIVATIONS[activation],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )
    return transformers.ViTForImageClassification(config)


def build_equal(model: str, *, activation: Activation) -> dict[Candidate, nn.Module]:
    """Build all candidates with the same random weights in float32."""
    candidates = {candidate: build(candidate, model, activation=activation) for candidate in CANDIDATES}
    draw_weights(candidates["vitkit"])
    weights = candidates["vitkit"].state_dict()
    candidates["timm"].load_state_dict(weights, strict=True)
    candidates["transformers"].load_state_dict(as_transformers(weights), strict=True)
    return candidates


@torch.no_grad()
def draw_weights(model: nn.Module) -> None:
    """Draw nonzero random weights at scales that keep activations and logits near 1."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            parameter.normal_(1.0, 0.1, generator=generator)
        elif parameter.ndim > 1 and name.endswith("weight"):
            parameter.normal_(0.0, parameter[0].numel() ** -0.5, generator=generator)
        else:
            parameter.normal_(0.0, 0.1, generator=generator)


def as_transformers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights under the names of transformers, with separate queries, keys and values."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if fused := QKV.fullmatch(name):
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                renamed[f"vit.layers.{fused[1]}.attention.{letter}_proj.{fused[2]}"] = part
            continue
        pattern, template = next(rule for rule in TRANSFORMERS_NAMES if re.fullmatch(rule[0], name))
        renamed[re.sub(pattern, template, name)] = tensor
    return renamed


def logits(model: nn.Module, images: Tensor) -> Tensor:
    """Return the logits from the output of a model."""
    output = model(images)
    return output if isinstance(output, Tensor) else output.logits
