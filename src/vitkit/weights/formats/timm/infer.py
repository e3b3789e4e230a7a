"""Inference of models from names and shapes of timm and of code with the same names.

What names and shapes do not determine (heads, pooling, activation) comes from timm's `config.json` or from the name of
the architecture, for Facebook's files from the code that they are of. It is never guessed.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    Pooling,
    PositionConfig,
    TokenConfig,
    ViTConfig,
)
from vitkit.weights.formats.base import FileMetadata, count_outputs, get_shape, invalid_model_errors, simplify_size
from vitkit.weights.formats.timm.architectures import RESNETS, Architecture, find_architecture, find_name_in_file
from vitkit.weights.formats.timm.config import POOLINGS, check_model_args, get_image_size, get_setting
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
ARCHITECTURE_HINT = (
    "name timm's architecture: vitkit weights convert FILE OUT --to vitkit --format timm:vit_base_patch16_224, "
    'or add a config.json with "architecture" and "model_args"'
)
ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu_erf", "gelu_erf": "gelu_erf", "gelu_tanh": "gelu_tanh"}


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Properties of an origin's models that a file does not store.

    `rows` selects which tokens before the patches have a row in the position table: all class tokens, all or none of
    them, or none if there are registers, as usual in timm. `heads` are the numbers of heads of its published models by
    width. `file_names` is the pattern of published files, if the tensors alone do not identify the origin.
    """

    origin: InterpolationOrigin
    rows: Literal["all", "all_or_patches", "by_registers"] = "all"
    rotary: bool = False
    eps: float = 1e-6
    heads: Mapping[int, int] = field(default_factory=dict)
    file_names: str | None = None


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


def has_timm_rotary(shapes: Shapes) -> bool:
    """Return whether these are timm's names of a model with rotary positions."""
    return "pos_embed" not in shapes and bool({"blocks.0.gamma_1", "blocks.0.attn.q_bias"} & shapes.keys())


def find_published_heads(width: int, *, gated: bool = False) -> int | None:
    """Return the number of heads of published models with this width, or None."""
    if width == 1536:
        return 24 if gated else 16  # DINOv2's giant, and SigLIP 2's
    return HEADS.get(width) or (width // 64 if width % 64 == 0 else None)


@invalid_model_errors()
def infer_bit(shapes: Shapes, metadata: FileMetadata) -> BiTConfig:
    """Infer a BiT ResNet from names and shapes."""
    architecture = metadata.architecture or get_setting(metadata, "architecture", str)
    if architecture and not re.match(RESNETS, architecture):
        raise _unsupported_error(f"timm's {architecture}")
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


def _unsupported_error(reason: str) -> WeightsError:
    return WeightsError(f"unsupported model: {reason}", hint="vitkit does not implement it")


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
        """Name of the architecture that the user, config.json or the file's name gives, or an empty string."""
        stated = self.metadata.architecture or self.get("architecture", str)
        return stated or find_name_in_file(self.metadata.file_name) or ""

    @cached_property
    def facts(self) -> Architecture | None:
        return find_architecture(self.architecture)

    @property
    def follows_origin(self) -> bool:
        """Whether the file is of the origin's own code, which has one way to compute a model of these tensors."""
        if self.defaults.origin == "timm":
            return False
        pattern = self.defaults.file_names
        is_published = pattern is None or re.match(pattern, self.metadata.file_name) is not None
        return self.metadata.is_declared or is_published or "decoder_embed.weight" in self.shapes

    def undetermined_error(self, fact: str) -> WeightsError:
        hint = ARCHITECTURE_HINT
        if self.defaults.origin != "timm":
            code = self.defaults.origin
            hint = f"if it is of the code of {code}, with heads of its usual width: --format {code}; else {hint}"
        return WeightsError(f"neither tensors nor names determine the {fact} of this model", hint=hint)

    def check_supported(self) -> None:
        """Reject models that have our tensor names, or nearly, but compute something else."""
        shapes, architecture = self.shapes, self.architecture
        for name in shapes:
            for pattern, reason in UNSUPPORTED_NAMES.items():
                if re.fullmatch(pattern, name):
                    raise _unsupported_error(f"it has {reason}: {name}")
        if architecture and self.facts is None:
            raise _unsupported_error(f"timm's {architecture}")
        if self.facts and has_timm_rotary(shapes) != ("dinov3" in architecture):
            raise _unsupported_error(f"its rotary positions are not DINOv3's, or not those of {architecture}")
        if "pos_embed" not in shapes and not self.defaults.rotary and self.get("pos_embed", str) != "none":
            raise self.undetermined_error("positions")
        check_model_args(self.metadata)

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
            raise _unsupported_error("it has both rotary and learned positions, as EVA-02")
        qkv_bias, qk_norm = bool({"attn.qkv.bias", "attn.q_bias"} & names), "attn.q_norm.weight" in names
        scaled = bool({"ls1.gamma", "gamma_1"} & names)
        block = BlockConfig(
            attention=AttentionConfig(qkv_bias=qkv_bias, qk_norm=qk_norm),
            activation=self.infer_activation(gated=gated),
            norm_eps=self.defaults.eps,
            layer_scale=(self.get("init_values", float) or 1e-5) if scaled else None,
        )
        return block, mlp_dim

    def infer_activation(self, *, gated: bool) -> Activation:
        """Infer the activation; that of a gated MLP is a SwiGLU's."""
        name = self.get("act_layer", str)
        if name and name not in ACTIVATIONS:
            expected = " or ".join(ACTIVATIONS)
            raise WeightsError("unsupported activation", expected=expected, got=name)
        if name and not gated:
            return ACTIVATIONS[name]
        default: Activation = "swiglu" if gated else "gelu_erf"
        if self.facts and (self.facts.activation == "swiglu") != gated:
            raise WeightsError(f"the MLP is not that of {self.architecture}", hint="the file is of another model")
        if self.facts or name or self.follows_origin:
            return self.facts.activation if self.facts else default
        raise self.undetermined_error("activation")

    def infer_heads(self, *, width: int, gated: bool) -> int:
        if "rope_embed.periods" in self.shapes:  # one for each quarter of a head
            return max(1, width // (4 * get_shape(self.shapes, "rope_embed.periods", axes=1)[0]))
        heads = self.get("num_heads", int) or (self.facts.heads if self.facts else None)
        if not heads and self.follows_origin:
            heads = self.defaults.heads.get(width)
            if not heads and self.metadata.is_declared:
                heads = width // 64 if self.defaults.rotary else find_published_heads(width, gated=gated)
        if not heads:
            raise self.undetermined_error(f"number of heads (width {width})")
        return int(heads)

    def infer_pooling(self, *, prefix: int) -> Pooling:
        name, shapes = self.get("global_pool", str), self.shapes
        if name and name not in POOLINGS:
            raise WeightsError("unsupported pooling", expected=" or ".join(POOLINGS), got=name)
        if not name and self.facts:
            name = self.facts.pooling
        if name:
            pooling = POOLINGS[name]
        elif self.follows_origin:
            pooling = "mean" if "fc_norm.weight" in shapes else "class"
        else:
            raise self.undetermined_error("pooling")
        # Our attention pooling reads all tokens, mean pooling only patches.
        includes_prefix = self.get("pool_include_prefix", bool)
        if includes_prefix is None:
            includes_prefix = self.facts is not None and self.facts.pools_prefix
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
            raise _unsupported_error("it has both rotary and learned positions")
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
            return grid, "all" if prefix or not all_tokens else "patches"
        raise WeightsError(
            "the position table does not have a square grid",
            expected=f"{' or '.join(map(str, prefixes))} rows and a square number",
            got=f"{rows} rows",
            hint='add a config.json with "model_args": {"img_size": [height, width]}',
        )
