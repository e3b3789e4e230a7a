"""A model goes in, an engine comes out that has put its weights in order once: a CPU and torch, and no compiler.

Each linear layer is reordered for oneDNN when the engine is made, with the GELU fused into it; layer scales are
multiplied into the weights before them; the ResNets' kernels are standardised once. int8 takes the linear layers of the
encoder, with a scale for each output channel of the weights and one for each token, so that an image's answer does not
depend on what else is in the batch; all else stays in fp32. oneDNN's fused addition is left alone: it copies, and takes
longer than two steps.
"""

import math
from functools import cache
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from vitkit.core.shapes import Float, Int, Tensor
from vitkit.engine.engine import CPU, Precision
from vitkit.engine.written import ModuleEngine, shared_copy, written
from vitkit.model.encoder import Block, LayerScale, Mlp
from vitkit.model.patches import PatchProjection, patchify
from vitkit.model.resnet import StandardisedConv, pad_same
from vitkit.model.vit import ViT
from vitkit.zoo.lookup import Model

ROWS = 197
"""The rows that oneDNN is told to expect: tokens of a 224-pixel image. Any other number works, too."""
CACHE = 2**20
"""Bytes that fit into a core's second cache beside all else."""
HALF_SETS = ("avx512_bf16", "amx_bf16", "bf16")
"""Instruction sets, as torch names them, that multiply bf16 numbers."""


def prepacked(model: Model, *, precision: Precision = "fp32") -> ModuleEngine:
    """The model with prepacked layers; as written where this torch cannot pack, never an error.

    >>> import vitkit
    >>> model = vitkit.create("Ti/16", image_size=32, classes=10, settings=["depth=1"]).eval()
    >>> images = torch.rand(2, 3, 32, 32)
    >>> bool(torch.allclose(prepacked(model).answer(images)[1], model(images), atol=1e-4))
    True
    """
    if precision != "int8" and reason_against_packing() is not None:
        return written(model, precision=precision)
    module, dtype, name = shared_copy(model).to(CPU, torch.float32), torch.float32, "torch, prepacked"
    if precision == "bf16" and multiplies_bf16():
        dtype = torch.bfloat16
        module.to(dtype)
    elif precision == "bf16":
        round_weights(module)
        name = "torch, prepacked, bf16 weights multiplied in fp32: this CPU has no bf16 instructions"
    elif precision == "int8" and not isinstance(model, ViT):
        name = "torch, prepacked, in fp32: only the layers of an encoder have an int8 form, and this is a ResNet"
    pack(module, int8=precision == "int8")
    at_once = fitting(model) if precision == "int8" else None
    return ModuleEngine(module, name=name, precision=precision, dtype=dtype, at_once=at_once)


def fitting(model: Model) -> int | None:
    """How many images' hidden layers stay in a core's cache: int8 products are so fast that memory would be slower.

    >>> import vitkit
    >>> fitting(vitkit.create("Ti/16", device="meta")), fitting(vitkit.create("Ti/16", image_size=32, device="meta"))
    (1, 68)
    """
    if not isinstance(model, ViT):
        return None
    config = model.config
    hidden = 4 * (config.prefix + config.patches) * config.mlp_dim
    return max(1, CACHE // hidden)


@cache
def reason_against_packing() -> str | None:
    """Why oneDNN's packed layers cannot be had here; None where they can."""
    if not torch.backends.mkldnn.is_available():
        return "this torch has no oneDNN"
    try:
        found = PackedLinear(torch.eye(2), torch.zeros(2), activation="gelu", approximate="tanh")(torch.ones(1, 2))
    except (AttributeError, RuntimeError, NotImplementedError, TypeError) as error:
        return f"torch {torch.__version__} does not pack layers: {str(error).splitlines()[0][:200]}"
    right = functional.gelu(torch.ones(1, 2), approximate="tanh")
    return None if torch.allclose(found, right, atol=1e-5) else "oneDNN's packed layers give other numbers"


@cache
def multiplies_bf16() -> bool:
    """Whether the CPU has instructions for bf16; without them torch's bf16 takes several times as long as fp32."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in HALF_SETS)


@torch.no_grad()
def round_weights(module: nn.Module) -> None:
    """Give every matrix of a copied module the numbers that bf16 can hold, in float32."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv2d | PatchProjection):
            part.weight = nn.Parameter(part.weight.bfloat16().float(), requires_grad=False)


@torch.no_grad()
def pack(module: nn.Module, *, int8: bool) -> None:
    """Exchange the parts of a copied model for packed ones; in int8 the encoder's layers first."""
    for block in [part for part in module.modules() if isinstance(part, Block)]:
        fold_layer_scale(block)
        if int8:
            quantise(block)
    for parent in list(module.modules()):
        for name, part in list(parent.named_children()):
            if (exchanged := packed(part)) is not None:
                setattr(parent, name, exchanged)


def packed(part: nn.Module) -> nn.Module | None:
    """What takes the place of a part; None where nothing does."""
    if isinstance(part, StandardisedConv):
        return StandardisedOnce(part)
    if reason_against_packing() is not None:
        return None
    if isinstance(part, Mlp) and all(isinstance(layer, nn.Linear) for layer in (part.fc1, part.fc2)):
        return PackedMlp(part)
    if isinstance(part, nn.Linear):
        return PackedLinear(part.weight, part.bias)
    return PackedPatches(part) if isinstance(part, PatchProjection) else None


def fold_layer_scale(block: Block) -> None:
    """Multiply the block's layer scales into the layers before them: the same sums, one pass fewer."""
    for parent, own, name in ((block.attn, "proj", "ls1"), (block.mlp, "fc2", "ls2")):
        layer, scale = getattr(parent, own, None), getattr(block, name)
        if isinstance(scale, LayerScale) and isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(layer.weight * scale.gamma[:, None], requires_grad=False)
            if layer.bias is not None:
                layer.bias = nn.Parameter(layer.bias * scale.gamma, requires_grad=False)
            setattr(block, name, nn.Identity())


def quantise(block: Block) -> None:
    """Exchange the four linear layers of a block for int8 ones; what somebody else put there stays as it is."""
    for parent, name in ((block.attn, "qkv"), (block.attn, "proj"), (block.mlp, "fc1"), (block.mlp, "fc2")):
        layer = getattr(parent, name, None)
        if isinstance(layer, nn.Linear):
            setattr(parent, name, Int8Linear(layer.weight, layer.bias))
    if isinstance(block.mlp, Mlp):
        block.mlp = SteppedMlp(block.mlp)


class PackedLinear(nn.Module):
    """A linear layer whose weight oneDNN has reordered, and a GELU in the same pass if wanted."""

    def __init__(
        self,
        weight: Float[Tensor, "M D"],
        bias: Float[Tensor, " M"] | None,
        *,
        activation: Literal["none", "gelu"] = "none",
        approximate: str = "",
    ) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS)
        self.bias = None if bias is None else bias.detach()
        self.activation, self.approximate = activation, approximate

    def forward(self, tokens: Tensor) -> Tensor:
        """One call of oneDNN."""
        layer = torch.ops.mkldnn._linear_pointwise
        result: Tensor = layer(tokens, self.weight, self.bias, self.activation, [], self.approximate)
        return result


class PackedMlp(nn.Module):
    """The two dense layers of a block, the first with its GELU."""

    def __init__(self, mlp: Mlp) -> None:
        super().__init__()
        first, second = mlp.fc1, mlp.fc2
        self.fc1 = PackedLinear(first.weight, first.bias, activation="gelu", approximate=mlp.approximate)
        self.fc2 = PackedLinear(second.weight, second.bias)

    def forward(self, tokens: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        """Two calls of oneDNN."""
        return self.fc2(self.fc1(tokens))


class SteppedMlp(nn.Module):
    """The two dense layers of a block and its GELU, one after the other, where they cannot be one step."""

    def __init__(self, mlp: Mlp) -> None:
        super().__init__()
        self.fc1, self.fc2, self.approximate = mlp.fc1, mlp.fc2, mlp.approximate

    def forward(self, tokens: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        """Dense, GELU, dense."""
        hidden = self.fc1(tokens)
        return self.fc2(tanh_gelu(hidden) if self.approximate == "tanh" else torch.ops.aten.gelu_(hidden))


def tanh_gelu(hidden: Tensor) -> Tensor:
    """The GELU with tanh, as x · sigmoid(2 √(2/π) (x + 0.044715 x³)): equal, and in torch four times as fast.

    >>> numbers = torch.linspace(-6, 6, 100)
    >>> torch.allclose(tanh_gelu(numbers), functional.gelu(numbers, approximate="tanh"), atol=1e-6)
    True
    """
    slope = 2 * math.sqrt(2 / math.pi)
    return hidden.square().mul_(0.044715 * slope).add_(slope).mul_(hidden).sigmoid_().mul_(hidden)


class PackedPatches(nn.Module):
    """E of equation 1, packed."""

    def __init__(self, projection: PatchProjection) -> None:
        super().__init__()
        self.patch_size = projection.patch_size
        self.layer = PackedLinear(projection.weight.flatten(1), projection.bias)

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B N D"]:
        """Patches, then one call of oneDNN."""
        return self.layer(patchify(images, patch_size=self.patch_size))


class StandardisedOnce(nn.Module):
    """A convolution whose kernel is standardised when it is made, not each time."""

    def __init__(self, conv: StandardisedConv) -> None:
        super().__init__()
        self.kernel = conv.standardised().detach()
        self.side, self.stride, self.pads_same = conv.kernel_size[0], conv.stride[0], conv.numbers.pads_same

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C2 H2 W2"]:
        """The convolution, padded as its origin pads."""
        if self.pads_same:
            images = pad_same(images, kernel=self.side, stride=self.stride)
        return functional.conv2d(
            images, self.kernel, stride=self.stride, padding=0 if self.pads_same else self.side // 2
        )


class Int8Linear(nn.Module):
    """A linear layer of 8-bit integers: weights with a scale for each output, inputs with one for each token."""

    def __init__(self, weight: Float[Tensor, "M D"], bias: Float[Tensor, " M"] | None) -> None:
        super().__init__()
        self.weight, self.scale = in_int8(weight.detach())
        self.scale = self.scale[:, 0]
        self.bias = torch.zeros(len(weight)) if bias is None else bias.detach()

    def forward(self, tokens: Tensor) -> Tensor:
        """Integers in, integer sums, and back to float32."""
        rows, scale = in_int8(tokens.flatten(0, -2))
        sums = integer_product(rows, self.weight).float().mul_(scale)
        return torch.addcmul(self.bias, sums, self.scale).unflatten(0, tokens.shape[:-1])


def in_int8(rows: Float[Tensor, "R D"]) -> tuple[Int[Tensor, "R D"], Float[Tensor, "R 1"]]:
    """Each row as integers from -127 to 127 and the scale that gives its numbers back; a row of zeros stays one.

    >>> in_int8(torch.tensor([[1.0, -2.0, 0.5]]))[0].tolist()
    [[64, -127, 32]]
    """
    scale = rows.abs().amax(dim=1, keepdim=True).clamp_(min=1e-30).div_(127)
    return (rows * scale.reciprocal()).round_().to(torch.int8), scale


def integer_product(rows: Int[Tensor, "R D"], weight: Int[Tensor, "M D"]) -> Tensor:
    """The exact sums of products, as int32; in floating point where this torch multiplies no integers.

    >>> integer_product(torch.tensor([[1, 2]], dtype=torch.int8), torch.tensor([[3, 4]], dtype=torch.int8)).item()
    11
    """
    if has_integer_product():
        return torch._int_mm(rows, weight.t())
    return rows.float() @ weight.t().float()


@cache
def has_integer_product() -> bool:
    """Whether torch multiplies matrices of integers on this CPU, and right."""
    ones = torch.ones(3, 5, dtype=torch.int8)
    try:
        return bool((torch._int_mm(ones, ones.t()) == 5).all())
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
