"""Inference of models from names and shapes of timm and of code with the same names.

What names and shapes do not determine (heads, image size, GELU form) comes from timm's `config.json` or from the
defaults of the origin.
"""

import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from vitkit.core.errors import WeightsError
from vitkit.model.config import (
    Activation,
    AttentionConfig,
    BackboneConfig,
    BiTConfig,
    BlockConfig,
    HeadConfig,
    InterpolationOrigin,
    PositionConfig,
    TokenConfig,
    ViTConfig,
)
from vitkit.weights.formats.base import FileMetadata, count_outputs, get_shape, invalid_model_errors, simplify_size
from vitkit.weights.formats.timm.config import POOLINGS, Pooling, get_image_size, get_setting
from vitkit.weights.rules import Shapes

ROTARY_BASE = 100.0
DINOV3_EPS = 1e-5
HEADS = {1152: 16, 1280: 16, 1408: 16, 1664: 16, 4096: 32}
"""Number of heads of widths whose heads are not 64 wide."""
REGISTERS = ("reg_token", "register_tokens", "storage_tokens")
UNSUPPORTED_NAMES = {
    r"rope\..*": "learned rotary positions",
    r"norm_pre\..*": "a norm before its blocks, as CLIP has",
    r"patch_embed\.norm\..*": "a norm after its patches",
    r".*(relative_position|rel_pos).*": "relative position biases, as BEiT has",
    r"blocks\.\d+\.(attn|mlp)\.norm\..*": "norms inside its blocks, as EVA-02 has",
    r"blocks\.\d+\.attn\.[qkv]_proj\..*": "separate projections of queries, keys and values, as EVA has",
    r"blocks\.\d+\.\D+\.\d+\..*": "blocks in parallel",
}
"""Tensor names of models that vitkit does not have."""
UNSUPPORTED_ARCHITECTURES = r"eva02|rope|beit|_xp_|intern"
"""timm's architectures that vitkit does not have although their tensor names are the same."""
ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu_erf", "gelu_erf": "gelu_erf", "gelu_tanh": "gelu_tanh"}


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Properties of an origin's models that a file does not store.

    `rows` tells which tokens before the patches have a row in the position table: all class tokens, all or none of
    them, or none if there are registers, as usual in timm.
    """

    origin: InterpolationOrigin
    rows: Literal["all", "all_or_patches", "by_registers"] = "all"
    rotary: bool = False
    eps: float = 1e-6


def normalize_names(shapes: Shapes) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Map timm's names to the names in the file and their shapes: without prefix, blocks numbered in one sequence."""
    anchor = "patch_embed.proj.weight"
    prefixes = [name.removesuffix(anchor) for name in shapes if name == anchor or name.endswith(f".{anchor}")]
    prefix = prefixes[0] if len(prefixes) == 1 else ""
    return {
        # DINOv2's training code groups blocks in chunks: blocks.chunk.layer, with layers numbered continuously.
        re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name.removeprefix(prefix)): (name, shape)
        for name, shape in shapes.items()
        if name.startswith(prefix)
    }


def is_bit(shapes: Shapes) -> bool:
    """Return whether these are the names of a BiT ResNet."""
    return {"stem.conv.weight", "stages.0.blocks.0.conv1.weight", "norm.weight"} <= shapes.keys()


def find_published_heads(width: int, *, gated: bool = False) -> int | None:
    """Return the number of heads of published models with this width, or None."""
    if width == 1536:
        return 24 if gated else 16  # DINOv2's giant, and SigLIP 2's
    return HEADS.get(width) or (width // 64 if width % 64 == 0 else None)


@invalid_model_errors()
def infer_bit(shapes: Shapes, metadata: FileMetadata) -> BiTConfig:
    """Infer a BiT ResNet from names and shapes."""
    stem = get_shape(shapes, "stem.conv.weight", axes=4)
    return BiTConfig(
        units=_count_units(shapes, "stages"),
        width_factor=stem[0] // 64,
        channels=stem[1],
        image_size=simplify_size(*(get_image_size(metadata) or (224, 224))),
        num_classes=get_shape(shapes, "head.fc.weight", axes=4)[0] if "head.fc.weight" in shapes else 0,
        origin="timm",
    )


def _count_units(shapes: Shapes, stages: str) -> tuple[int, ...]:
    """Count the units of each stage of a ResNet."""
    pattern = re.compile(re.escape(stages) + r"\.(\d{1,9})\.blocks\.(\d{1,9})\.conv1\.weight")
    numbers = {(int(match[1]), int(match[2])) for name in shapes if (match := pattern.fullmatch(name))}
    count = len({stage for stage, _ in numbers})
    units = tuple(sum(other == stage for other, _ in numbers) for stage in range(count))
    if numbers != {(stage, unit) for stage in range(count) for unit in range(units[stage])}:
        raise WeightsError("stages or units of the ResNet are missing", hint="it is incomplete")
    return units


@invalid_model_errors()
def infer_vit(shapes: Shapes, metadata: FileMetadata, *, defaults: Defaults) -> ViTConfig:
    """Infer a Vision Transformer from normalized names and shapes."""
    return _VitInference(shapes, metadata, defaults).infer()


@dataclass(frozen=True)
class _VitInference:
    shapes: Shapes
    metadata: FileMetadata
    defaults: Defaults

    def infer(self) -> ViTConfig:
        self.check_supported()
        shapes = self.shapes
        width, channels, *patch = get_shape(shapes, "patch_embed.proj.weight", axes=4)
        backbone, root = self.infer_backbone()
        stride = backbone.stride if backbone else 1
        cell = (stride * patch[0], stride * patch[1])
        registers = next((shapes[name][1] for name in REGISTERS if len(shapes.get(name, ())) == 3), 0)
        class_tokens = int("cls_token" in shapes) + int("dist_token" in shapes)
        pooling = self.infer_pooling(prefix=class_tokens + registers)
        grid, covers = self.infer_grid(cell=cell, class_tokens=class_tokens, registers=registers)
        block, mlp_dim = self.infer_block()
        return ViTConfig(
            image_size=simplify_size(grid[0] * cell[0], grid[1] * cell[1]),
            patch_size=simplify_size(patch[0], patch[1]),
            channels=root[1] if root else channels,
            width=width,
            depth=self.count_blocks(),
            heads=self.infer_heads(width=width, gated=block.activation == "swiglu"),
            mlp_dim=mlp_dim,
            num_classes=count_outputs(shapes, "head.weight") or 0,
            pooling=pooling,
            backbone=backbone,
            positions=self.infer_positions(covers=covers, registers=registers),
            tokens=TokenConfig(
                class_token=True if "cls_token" in shapes and pooling != "class" else None,
                distillation="dist_token" in shapes,
                registers=registers,
            ),
            block=block,
            head=self.infer_head(),
        )

    def get(self, key: str, kind: type) -> Any:
        return get_setting(self.metadata, key, kind)

    @cached_property
    def architecture(self) -> str:
        return self.get("architecture", str) or ""

    def unsupported(self, reason: str) -> WeightsError:
        return WeightsError(f"unsupported model: {reason}", hint="vitkit does not implement it")

    def check_supported(self) -> None:
        """Reject models that have our tensor names, or nearly, but compute something else."""
        shapes, architecture = self.shapes, self.architecture
        for name in shapes:
            for pattern, reason in UNSUPPORTED_NAMES.items():
                if re.fullmatch(pattern, name):
                    raise self.unsupported(f"it has {reason}: {name}")
        if re.search(UNSUPPORTED_ARCHITECTURES, architecture):
            raise self.unsupported(f"timm's {architecture}")
        if self.defaults.rotary and ("blocks.0.gamma_1" in shapes or "blocks.0.attn.q_bias" in shapes):
            has_tokens = {"cls_token", "reg_token", "norm.weight"} <= shapes.keys()
            is_dinov3 = has_tokens and "blocks.0.attn.qkv.bias" not in shapes
            if not ("dinov3" in architecture if architecture else is_dinov3):
                raise self.unsupported("its rotary positions are not DINOv3's")

    def count_blocks(self) -> int:
        layers = {int(match[1]) for name in self.shapes if (match := re.match(r"blocks\.(\d{1,9})\.", name))}
        if missing := set(range(len(layers))) - layers:
            raise WeightsError(f"block {min(missing)} is missing", hint="it is incomplete")
        return len(layers)

    def infer_backbone(self) -> tuple[BackboneConfig | None, tuple[int, ...]]:
        """Infer the ResNet of a hybrid, and the shape of its first kernel."""
        start = "patch_embed.backbone."
        if not any(name.startswith(start) for name in self.shapes):
            return None, ()
        units = _count_units(self.shapes, f"{start}stages")
        root = f"{start}stem.conv.weight" if units else f"{start}conv.weight"
        if root not in self.shapes:
            raise WeightsError("unsupported hybrid: its ResNet is not one of the paper's")
        kernel = get_shape(self.shapes, root, axes=4)
        return BackboneConfig(units=units, root_width=kernel[0], origin="timm"), kernel

    def infer_head(self) -> HeadConfig:
        after = "fc_norm.weight" in self.shapes
        if after == ("norm.weight" in self.shapes):
            message = "the last norm must be before or after pooling"
            raise WeightsError(message, expected="norm or fc_norm", got="both" if after else "neither")
        hidden = count_outputs(self.shapes, "pre_logits.fc.weight")
        return HeadConfig(pre_logits=hidden, norm="after_pooling" if after else "before_pooling")

    def infer_block(self) -> tuple[BlockConfig, int]:
        """Infer the parts of a block and the width of its MLP."""
        names = {name.removeprefix("blocks.0.") for name in self.shapes if name.startswith("blocks.0.")}
        last = "mlp.w3.weight" if "mlp.w3.weight" in names else "mlp.fc2.weight"
        mlp_dim = get_shape(self.shapes, f"blocks.0.{last}", axes=2)[1]
        gated = "mlp.fc1.weight" not in names or self.shapes["blocks.0.mlp.fc1.weight"][:1] == (2 * mlp_dim,)
        if gated and "attn.q_bias" in names and not self.defaults.rotary:
            raise self.unsupported("it has both rotary and learned positions, as EVA-02")
        qkv_bias, qk_norm = bool({"attn.qkv.bias", "attn.q_bias"} & names), "attn.q_norm.weight" in names
        scaled = bool({"ls1.gamma", "gamma_1"} & names)
        block = BlockConfig(
            attention=AttentionConfig(qkv_bias=qkv_bias, qk_norm=qk_norm),
            activation="swiglu" if gated else self.infer_activation(),
            norm_eps=self.defaults.eps,
            layer_scale=(self.get("init_values", float) or 1e-5) if scaled else None,
        )
        return block, mlp_dim

    def infer_activation(self) -> Activation:
        has_tanh = re.search(r"siglip.*_512|(patch32|so400m_patch16|giantopt).*siglip", self.architecture)
        default = "quick_gelu" if "quickgelu" in self.architecture else "gelu_tanh" if has_tanh else "gelu"
        name = self.get("act_layer", str) or default
        if name not in ACTIVATIONS:
            raise WeightsError("unsupported activation", expected="gelu or gelu_tanh", got=name)
        return ACTIVATIONS[name]

    def infer_heads(self, *, width: int, gated: bool) -> int:
        if "rope_embed.periods" in self.shapes:  # one for each quarter of a head
            return max(1, width // (4 * get_shape(self.shapes, "rope_embed.periods", axes=1)[0]))
        heads = self.get("num_heads", int)
        if not heads and self.architecture.startswith("vit_base_patch16_gap_224"):
            heads = 16
        if not heads and self.defaults.rotary and width in (1280, 1536):
            heads = width // 64
        heads = heads or find_published_heads(width, gated=gated)
        if heads is None:
            hint = 'add a config.json with "model_args": {"num_heads": …}'
            raise WeightsError(f"the number of heads is unknown for a width of {width}", hint=hint)
        return int(heads)

    def infer_pooling(self, *, prefix: int) -> Pooling:
        name, shapes = self.get("global_pool", str), self.shapes
        if name and name not in POOLINGS:
            raise WeightsError("unsupported pooling", expected=" or ".join(POOLINGS), got=name)
        # timm's DINOv3 models use mean pooling by default, Meta's the class token.
        is_mean = "fc_norm.weight" in shapes or (self.defaults.rotary and "blocks.0.gamma_1" in shapes)
        default: Pooling = "mean" if is_mean or "cls_token" not in shapes else "class"
        pooling = POOLINGS[name] if name else "map" if "attn_pool.latent" in shapes else default
        # Our attention pooling reads all tokens, mean pooling only patches.
        includes_prefix = self.get("pool_include_prefix", bool) or False
        if pooling != "class" and prefix and includes_prefix != (pooling == "map"):
            expected = f"pool_include_prefix = {str(pooling == 'map').lower()} in its config.json"
            raise WeightsError("unsupported pooling", expected=expected, got=str(includes_prefix).lower())
        return pooling

    def infer_positions(self, *, covers: Literal["all", "patches"], registers: int) -> PositionConfig:
        origin = self.defaults.origin
        if self.defaults.rotary:
            base = float(self.get("rope_temperature", float) or ROTARY_BASE)
            return PositionConfig(kind="rotary", origin=origin, rotary_base=base)
        origin = "dinov2-registers" if origin == "dinov2" and registers else origin
        return PositionConfig(kind="learned_1d" if "pos_embed" in self.shapes else "none", covers=covers, origin=origin)

    def infer_grid(
        self, *, cell: tuple[int, int], class_tokens: int, registers: int
    ) -> tuple[tuple[int, int], Literal["all", "patches"]]:
        """Infer rows and columns of patches, and which tokens have positions."""
        image = get_image_size(self.metadata)
        expected = (image[0] // cell[0], image[1] // cell[1]) if image else None
        if "pos_embed" not in self.shapes:
            return expected or (max(1, 224 // cell[0]), max(1, 224 // cell[1])), "all"
        if self.defaults.rotary:
            raise self.unsupported("it has both rotary and learned positions")
        rows = get_shape(self.shapes, "pos_embed", axes=3)[1]
        all_tokens = class_tokens + registers
        choices = {"all": (class_tokens,), "all_or_patches": (class_tokens, 0), "by_registers": (all_tokens, 0)}
        prefixes = choices[self.defaults.rows]
        no_class_rows = self.get("no_embed_class", bool)
        if self.defaults.rows == "by_registers" and (no_class_rows or (no_class_rows is None and registers)):
            prefixes = (0,) if no_class_rows else (0, all_tokens)
        counts = [(prefix, rows - prefix, math.isqrt(max(rows - prefix, 0))) for prefix in prefixes]
        fitting = [(prefix, expected) for prefix, patches, _ in counts if expected and math.prod(expected) == patches]
        square = [(prefix, (side, side)) for prefix, patches, side in counts if side and side**2 == patches]
        for prefix, grid in (*fitting, *square):
            return grid, "all" if prefix or not class_tokens else "patches"
        raise WeightsError(
            "the position table does not have a square grid",
            expected=f"{' or '.join(map(str, prefixes))} rows and a square number",
            got=f"{rows} rows",
            hint='add a config.json with "model_args": {"img_size": [height, width]}',
        )
