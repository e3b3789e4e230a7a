"""CPU engine on torch with prepacked oneDNN layers; needs no compiler.

Linear layers are reordered for oneDNN once, with GELU fused; layer scales are folded into the preceding weights, and
the kernels of ResNets are standardized once. int8 covers the linear layers of the encoder, with one scale per output
channel and one per token, so that outputs do not depend on the rest of the batch; everything else stays in fp32.
oneDNN's fused addition is not used: it copies, and takes longer than two operations.
"""

import math
from functools import cache
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from vitkit.core.shapes import Float, Int, Tensor
from vitkit.inference.engine import CPU, ModuleEngine, Precision, eager_engine, shared_copy
from vitkit.model.encoder import Block, LayerScale, Mlp
from vitkit.model.patches import PatchProjection, patchify
from vitkit.model.resnet import StandardizedConv
from vitkit.model.vit import ViT
from vitkit.zoo.registry import Model

EXPECTED_ROWS = 197
"""Rows that the weight layout is optimized for: the tokens of a 224-pixel image. Other numbers work too."""
L2_BYTES = 2**20
"""Bytes of activations that fit into the L2 cache of a core next to other data."""
BF16_INSTRUCTION_SETS = ("avx512_bf16", "amx_bf16", "bf16")
"""Instruction sets with bf16 matrix products, as torch names them."""


@torch.no_grad()
def packed_engine(model: Model, *, precision: Precision = "fp32") -> ModuleEngine:
    """Create an engine with packed layers; an eager one where this torch cannot pack."""
    if precision != "int8" and packing_unavailable_reason() is not None:
        return eager_engine(model, precision=precision)
    module, dtype, name = shared_copy(model).to(CPU, torch.float32), torch.float32, "torch, packed"
    if precision == "bf16" and has_bf16_instructions():
        dtype = torch.bfloat16
        module.to(dtype)
    elif precision == "bf16":
        for part in module.modules():
            if isinstance(part, nn.Linear | nn.Conv2d | PatchProjection):
                part.weight = nn.Parameter(part.weight.bfloat16().float(), requires_grad=False)
        name = "torch, packed, bf16 weights in fp32 arithmetic (this CPU has no bf16 instructions)"
    elif precision == "int8" and not isinstance(model, ViT):
        name = "torch, packed, in fp32 (int8 is not supported for ResNets)"
    pack_model(module, int8=precision == "int8")
    chunk_size = None
    if precision == "int8" and isinstance(model, ViT):  # beyond the L2 cache, int8 is limited by memory bandwidth
        hidden_bytes = 4 * (model.config.prefix + model.config.patches) * model.config.mlp_dim
        chunk_size = max(1, L2_BYTES // hidden_bytes)
    return ModuleEngine(module=module, name=name, precision=precision, dtype=dtype, chunk_size=chunk_size)


@cache
def packing_unavailable_reason() -> str | None:
    """Return why oneDNN's packed layers are not available, or None if they are."""
    if not torch.backends.mkldnn.is_available():
        return "this torch has no oneDNN"
    try:
        output = PackedLinear(torch.eye(2), torch.zeros(2), gelu="tanh")(torch.ones(1, 2))
    except (AttributeError, RuntimeError, NotImplementedError, TypeError) as error:
        return f"torch {torch.__version__} does not pack layers: {str(error).splitlines()[0][:200]}"
    expected = functional.gelu(torch.ones(1, 2), approximate="tanh")
    return None if torch.allclose(output, expected, atol=1e-5) else "oneDNN's packed layers give wrong results"


@cache
def has_bf16_instructions() -> bool:
    """Return whether the CPU has bf16 instructions; without them torch's bf16 is several times slower than fp32."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in BF16_INSTRUCTION_SETS)


def pack_model(module: nn.Module, *, int8: bool) -> None:
    """Replace the layers of a copied model by packed ones, in place."""
    for block in [part for part in module.modules() if isinstance(part, Block)]:
        fold_layer_scale(block)
        if int8:
            quantize_block(block)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if (replacement := pack_module(child)) is not None:
                setattr(parent, name, replacement)


def pack_module(module: nn.Module) -> nn.Module | None:
    """Return the packed replacement of a module, or None if it has none."""
    if isinstance(module, StandardizedConv):
        return PrestandardizedConv(module)
    if packing_unavailable_reason() is not None:
        return None
    if isinstance(module, Mlp) and all(isinstance(layer, nn.Linear) for layer in (module.fc1, module.fc2)):
        return PackedMlp(module)
    if isinstance(module, nn.Linear):
        return PackedLinear(module.weight, module.bias)
    return PackedPatchProjection(module) if isinstance(module, PatchProjection) else None


def fold_layer_scale(block: Block) -> None:
    """Fold the layer scales of a block into the preceding linear layers."""
    for parent, layer_name, scale_name in ((block.attn, "proj", "ls1"), (block.mlp, "fc2", "ls2")):
        layer, scale = getattr(parent, layer_name, None), getattr(block, scale_name)
        if isinstance(scale, LayerScale) and isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(layer.weight * scale.gamma[:, None], requires_grad=False)
            if layer.bias is not None:
                layer.bias = nn.Parameter(layer.bias * scale.gamma, requires_grad=False)
            setattr(block, scale_name, nn.Identity())


def quantize_block(block: Block) -> None:
    """Replace the four linear layers of a block by int8 ones; other modules in their place are kept."""
    for parent, name in ((block.attn, "qkv"), (block.attn, "proj"), (block.mlp, "fc1"), (block.mlp, "fc2")):
        layer = getattr(parent, name, None)
        if isinstance(layer, nn.Linear):
            setattr(parent, name, Int8Linear(layer.weight, layer.bias))
    if isinstance(block.mlp, Mlp):
        block.mlp = UnfusedMlp(block.mlp)


class PackedLinear(nn.Module):
    """Linear layer with a weight in oneDNN's layout, optionally fused with GELU of the kind `gelu`."""

    def __init__(
        self, weight: Float[Tensor, "M D"], bias: Float[Tensor, " M"] | None, *, gelu: str | None = None
    ) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), EXPECTED_ROWS)
        self.bias = None if bias is None else bias.detach()
        self.activation, self.approximate = ("none", "") if gelu is None else ("gelu", gelu)

    def forward(self, tokens: Tensor) -> Tensor:
        layer = torch.ops.mkldnn._linear_pointwise
        return cast("Tensor", layer(tokens, self.weight, self.bias, self.activation, [], self.approximate))


class PackedMlp(nn.Module):
    """MLP of a block with packed layers; GELU is fused into the first."""

    def __init__(self, mlp: Mlp) -> None:
        super().__init__()
        self.fc1 = PackedLinear(mlp.fc1.weight, mlp.fc1.bias, gelu=mlp.approximate)
        self.fc2 = PackedLinear(mlp.fc2.weight, mlp.fc2.bias)

    def forward(self, tokens: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        return self.fc2(self.fc1(tokens))


class UnfusedMlp(nn.Module):
    """MLP of a block for int8 layers, which cannot be fused with GELU."""

    def __init__(self, mlp: Mlp) -> None:
        super().__init__()
        self.fc1, self.fc2, self.approximate = mlp.fc1, mlp.fc2, mlp.approximate

    def forward(self, tokens: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        hidden = self.fc1(tokens)
        return self.fc2(tanh_gelu(hidden) if self.approximate == "tanh" else torch.ops.aten.gelu_(hidden))


def tanh_gelu(hidden: Tensor) -> Tensor:
    """Compute GELU (tanh) as x · sigmoid(2 √(2/π) (x + 0.044715 x³)): equal, and four times as fast in torch."""
    slope = 2 * math.sqrt(2 / math.pi)
    return hidden.square().mul_(0.044715 * slope).add_(slope).mul_(hidden).sigmoid_().mul_(hidden)


class PackedPatchProjection(nn.Module):
    """Patch projection (E of equation 1) as a packed linear layer."""

    def __init__(self, projection: PatchProjection) -> None:
        super().__init__()
        self.patch_size = projection.patch_size
        self.layer = PackedLinear(projection.weight.flatten(1), projection.bias)

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B N D"]:
        return self.layer(patchify(images, patch_size=self.patch_size))


class PrestandardizedConv(StandardizedConv):
    """Convolution whose kernel was standardized once."""

    def __init__(self, conv: StandardizedConv) -> None:
        kernel, stride, conventions = conv.kernel_size[0], conv.stride[0], conv.conventions
        super().__init__(conv.in_channels, conv.out_channels, kernel=kernel, stride=stride, conventions=conventions)
        self.weight = nn.Parameter(conv.standardized_weight().detach(), requires_grad=False)

    def standardized_weight(self) -> Float[Tensor, "outputs inputs k k"]:
        return self.weight


class Int8Linear(nn.Module):
    """Linear layer in int8 with one scale per output channel and one per token."""

    def __init__(self, weight: Float[Tensor, "M D"], bias: Float[Tensor, " M"] | None) -> None:
        super().__init__()
        self.weight, self.scale = quantize_rows(weight.detach())
        self.scale = self.scale[:, 0]
        self.bias = torch.zeros(len(weight)) if bias is None else bias.detach()

    def forward(self, tokens: Tensor) -> Tensor:
        rows, scale = quantize_rows(tokens.flatten(0, -2))
        sums = int8_matmul(rows, self.weight).float().mul_(scale)
        return torch.addcmul(self.bias, sums, self.scale).unflatten(0, tokens.shape[:-1])


def quantize_rows(rows: Float[Tensor, "R D"]) -> tuple[Int[Tensor, "R D"], Float[Tensor, "R 1"]]:
    """Quantize each row symmetrically to int8 and return it with its scale. Rows of zeros stay zero."""
    scale = rows.abs().amax(dim=1, keepdim=True).clamp_(min=1e-30).div_(127)
    return (rows * scale.reciprocal()).round_().to(torch.int8), scale


def int8_matmul(rows: Int[Tensor, "R D"], weight: Int[Tensor, "M D"]) -> Tensor:
    """Multiply int8 matrices exactly, in int32, or in floating point where torch has no int8 matmul."""
    if has_int8_matmul():
        return torch._int_mm(rows, weight.t())
    return rows.float() @ weight.t().float()


@cache
def has_int8_matmul() -> bool:
    """Return whether torch multiplies int8 matrices correctly on this CPU."""
    ones = torch.ones(3, 5, dtype=torch.int8)
    try:
        return bool((torch._int_mm(ones, ones.t()) == 5).all())
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
