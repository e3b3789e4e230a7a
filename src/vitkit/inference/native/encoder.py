"""Inference engine for Vision Transformers on C++ kernels compiled for this CPU.

The engine covers the ViTs of the paper and their close relatives; `unsupported_reason` lists the rest.
"""

import ctypes
import math
import weakref
from copy import copy, deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from vitkit.core.errors import ConfigError
from vitkit.core.shapes import Float, Tensor
from vitkit.core.sizes import pair
from vitkit.inference.engine import CPU, PRECISIONS, Precision
from vitkit.inference.native.library import (
    FLOATS,
    EngineError,
    LayerWeights,
    ModelWeights,
    Sizes,
    build_library,
    load_library,
)
from vitkit.model.config import Activation, ViTConfig
from vitkit.model.encoder import Block, LayerScale
from vitkit.model.heads import DistilledHead, PreLogits
from vitkit.model.patches import check_images
from vitkit.model.positions import axial_rotary
from vitkit.model.vit import ViT
from vitkit.zoo.registry import Model

POOLING = {"class": 0, "mean": 1, "map": 2, "class_mean": 2}
"""Codes of the library; 2 returns all tokens, which torch pools."""
ACTIVATIONS: dict[Activation, int] = {"gelu_tanh": 0, "gelu_erf": 1, "swiglu": 2}
MAX_INT8_PATCH_VALUES = (2**31 - 1) // (255 * 127)
"""Longest int8 dot product that cannot overflow an int32 accumulator. Only the patch embedding can exceed it."""


def unsupported_reason(model: Model, precision: Precision = "fp32") -> str | None:
    """Return why the native engine cannot run a model, or None if it can.

    >>> import vitkit
    >>> unsupported_reason(vitkit.create("B/16", device="meta"))
    >>> unsupported_reason(vitkit.create("R50+B/16", device="meta"))
    'the native engine does not support hybrids with a ResNet stem'
    """
    feature = _unsupported_feature(model, precision) if precision in PRECISIONS else f"precision {precision}"
    return feature and f"the native engine does not support {feature}"


def _unsupported_feature(model: Model, precision: Precision) -> str | None:
    if not isinstance(model, ViT):
        return "ResNets"
    config = model.config
    patch_values = config.channels * math.prod(pair(config.patch_size))
    if config.backbone is not None:
        return "hybrids with a ResNet stem"
    if config.block.axial:
        return "axial attention"
    if config.positions.kind == "relative":
        return "relative positions"
    if precision == "int8" and patch_values > MAX_INT8_PATCH_VALUES:
        return f"patches of {patch_values:,} values in int8"
    # The kernels read as many values as the configuration says, so a replaced layer would be read out of bounds.
    actual, expected = _structure(model), _expected_structure(config)
    replaced = next((name for name in sorted(actual | expected) if actual.get(name) != expected.get(name)), None)
    return replaced and f"a model whose {replaced} was replaced after construction"


def _structure(model: ViT) -> dict[str, object]:
    """Return the class and epsilon of each module and the shape of each parameter, by name."""
    entries = model.named_modules(remove_duplicate=False)
    # The root itself, without a name, may be a subclass of ViT.
    modules = {name: (type(module), getattr(module, "eps", None)) for name, module in entries if name}
    return modules | {name: tensor.shape for name, tensor in model.named_parameters(remove_duplicate=False)}


@lru_cache(maxsize=8)  # needed several times during startup, and takes 50 ms for H/14
def _expected_structure(config: ViTConfig) -> dict[str, object]:
    with torch.device("meta"):
        return _structure(ViT(config))


class NativeEngine:
    """A Vision Transformer on the native kernels. Outputs are bit-identical for every batch composition.

    The engine holds its own packed copy of the weights (about 4 bytes per parameter in fp32, 2 in bf16, 1 in int8), so
    later changes to the model have no effect. Attention pooling and class_mean pooling run in torch. Work buffers are
    kept between calls: for B/16 about 8 MB per thread, plus the same for every concurrent single-threaded caller.

    In bf16 and int8 the residual stream, LayerNorm, softmax, GELU and head stay float32. int8 uses one scale per output
    channel and a dynamic range per token, so no calibration is needed. The first engine on a machine compiles the
    kernels.

    >>> import vitkit
    >>> model = vitkit.create("Ti/16", image_size=32, num_classes=10, settings={"depth": 1}).eval()
    >>> images = torch.rand(2, 3, 32, 32)
    >>> features, logits = NativeEngine(model).forward(images)
    >>> bool((logits - model(images)).abs().max() < 1e-4)
    True
    """

    def __init__(
        self,
        model: Model,
        *,
        precision: Precision = "fp32",
        threads: int | None = None,
        library_path: Path | None = None,
    ) -> None:
        if reason := unsupported_reason(model, precision):
            raise ConfigError(reason)
        assert isinstance(model, ViT)
        if threads is not None and threads < 1:
            raise ConfigError("an engine needs at least one thread", got=threads)
        self.config, self.precision, self.threads = model.config, precision, threads
        self._library = load_library(library_path or build_library())
        with torch.no_grad():
            self._engine = _create(self._library, model, precision)
        self._finalizer = weakref.finalize(self, self._library.vitkit_destroy, self._engine)
        self._finalizer.atexit = False  # a daemon thread may still be running it, and the process ends anyway
        self._torch_head = _copy_head(model) if POOLING[model.config.pooling] == 2 else None
        self._weights_owner: NativeEngine | None = None  # keeps shared weights alive

    @property
    def name(self) -> str:
        """Instruction set and thread count, for display."""
        threads = self._num_threads()
        instructions = self._library.vitkit_instructions().decode()
        return f"native, {instructions}, {threads} thread{'s' if threads > 1 else ''}"

    @property
    def weight_bytes(self) -> int:
        """Size of the packed weights."""
        return int(self._library.vitkit_bytes(self._engine))

    def with_threads(self, threads: int) -> "NativeEngine":
        """Return an engine that shares these weights and uses `threads` threads.

        With one thread the work runs on the calling thread, so concurrent callers do not wait for each other.
        """
        engine = copy(self)
        engine.threads, engine._weights_owner = threads, self
        return engine

    def features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B F"]:
        """Return the input of the head for each image."""
        return self._run(images, with_logits=False)[0]

    def forward(self, images: Float[Tensor, "B C H W"]) -> tuple[Float[Tensor, "B F"], Float[Tensor, "B Y"]]:
        """Return features and logits. A model without classes returns its features twice."""
        return self._run(images, with_logits=True)

    @torch.no_grad()
    def _run(self, images: Tensor, *, with_logits: bool) -> tuple[Tensor, Tensor]:
        config = self.config
        check_images(images, channels=config.channels, image_size=pair(config.image_size))
        images = images.detach().to("cpu", torch.float32).contiguous()
        batch = images.shape[0]
        features = torch.empty(batch, config.num_features)
        logits = torch.empty(batch, config.num_classes) if with_logits and config.num_classes else None
        if self._torch_head is not None:
            tokens = torch.empty(batch, config.prefix + config.patches, config.width)
            self._call(images, tokens=tokens)
            for index, image in enumerate(tokens):  # in torch the batch size changes the last bits
                features[index] = self._torch_head.forward_head(image[None], pre_logits=True)[0]
                if logits is not None:
                    logits[index] = self._torch_head.head(features[index][None])[0]
        else:
            self._call(images, features=features, logits=logits)
        return features, features if logits is None else logits

    def _call(
        self,
        images: Tensor,
        *,
        tokens: Tensor | None = None,
        features: Tensor | None = None,
        logits: Tensor | None = None,
    ) -> None:
        outputs = (None if tensor is None else tensor.data_ptr() for tensor in (tokens, features, logits))
        arguments = images.data_ptr(), len(images), *outputs, self._num_threads()
        if len(images) and self._library.vitkit_run(self._engine, *arguments):
            hint = "free memory, or use smaller batches"
            raise EngineError("the native engine cannot allocate its work buffers", hint=hint)

    def _num_threads(self) -> int:
        return self.threads or torch.get_num_threads()


def _copy_head(model: ViT) -> ViT:
    """Copy the layers after the last norm, without the encoder."""
    head, names = copy(model), ("attn_pool", "fc_norm", "pre_logits", "head")
    modules = {name: module for name, module in model.named_children() if name in names}
    head._modules = {name: deepcopy(module).to(CPU, torch.float32).eval() for name, module in modules.items()}
    return head


def _create(library: ctypes.CDLL, model: ViT, precision: Precision) -> int:
    """Create the library's engine object, which copies and packs the weights."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError("the model has no weights", expected="a model on a device", got="a model on meta")
    config, copies = model.config, list[Tensor]()  # float32 copies of the weights, which live until they are packed

    def fill(structure: type[Any], tensors: dict[str, Tensor]) -> Any:
        floats = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in tensors.items()}
        copies.extend(floats.values())
        return structure(**{name: ctypes.cast(each.data_ptr(), FLOATS) for name, each in floats.items()})

    (height, width), (patch_height, patch_width) = pair(config.image_size), pair(config.patch_size)
    has_torch_head = POOLING[config.pooling] == 2
    images = {"channels": config.channels, "image_height": height, "image_width": width}
    patches = {"patch_height": patch_height, "patch_width": patch_width}
    encoder = {name: getattr(config, name) for name in ("width", "heads", "mlp_dim", "prefix", "class_tokens")}
    encoder |= {"depth": len(model.blocks), "activation": ACTIVATIONS[config.block.activation]}
    head = {"pooling": POOLING[config.pooling], "norm_first": config.head.norm == "before_pooling"}
    head |= {"pre_logits": 0 if has_torch_head else config.head.pre_logits or 0}
    head |= {"num_classes": 0 if has_torch_head else config.num_classes}
    sizes = Sizes(**images, **patches, **encoder, **head, norm_epsilon=config.block.norm_eps)
    layers = [fill(LayerWeights, _layer_weights(model, layer)) for layer in range(len(model.blocks))]
    weights, blocks = fill(ModelWeights, _weights(model)), (LayerWeights * len(layers))(*layers)
    engine = library.vitkit_create(sizes, weights, blocks, PRECISIONS.index(precision))
    if not engine:
        hint = "bf16 needs half as much memory, int8 a quarter"
        raise EngineError("not enough memory for the packed weights", hint=hint)
    return int(engine)


def _weights(model: ViT) -> dict[str, Tensor]:
    config, norm = model.config, model.norm if isinstance(model.norm, nn.LayerNorm) else model.fc_norm
    tensors = {"initial_tokens": _initial_tokens(model), "patch_weight": model.patch_embed.proj.weight}
    if config.positions.kind == "rotary":
        rotary = axial_rotary(config)
        tensors |= {"cosine": rotary.cosine, "sine": rotary.sine}
    pre_logits = model.pre_logits.fc if isinstance(model.pre_logits, PreLogits) else model.pre_logits
    tensors |= _parameters(norm=norm, pre_logits=pre_logits, head=model.head)
    if isinstance(model.head, DistilledHead):
        # The mean of two classifiers, each on half of the features, is one classifier on all features.
        label, teacher = model.head.label, model.head.teacher
        tensors["head_weight"] = torch.cat([label.weight, teacher.weight], dim=1) / 2
        tensors["head_bias"] = (label.bias + teacher.bias) / 2
    return tensors


def _parameters(**layers: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of linear layers and norms as `NAME_weight` and `NAME_bias`; other modules have none."""
    leaves = {layer: module for layer, module in layers.items() if isinstance(module, nn.Linear | nn.LayerNorm)}
    return {f"{layer}_{name}": each for layer in leaves for name, each in leaves[layer].named_parameters()}


def _initial_tokens(model: ViT) -> Float[Tensor, "L D"]:
    """Return the tokens before the patches are added: positions, learned tokens and the embedding's bias."""
    config = model.config
    tokens = torch.zeros(config.prefix + config.patches, config.width)
    learned = (model.cls_token, model.dist_token, model.reg_token)
    if prefix := [token[0].float() for token in learned if token is not None]:
        tokens[: config.prefix] = torch.cat(prefix)
    tokens[config.prefix :] = model.patch_embed.proj.bias.float()
    if model.pos_embed is not None and config.positions.injection_point == "stem":
        tokens += model.token_positions(model.pos_embed)[0].float()
    return tokens


def _layer_weights(model: ViT, layer: int) -> dict[str, Tensor]:
    block, shared = cast("Block", model.blocks[layer]), model.config.positions.injection_point == "shared"
    tensors: dict[str, Tensor] = {}
    for parent, names in ((block, "norm1 norm2"), (block.attn, "qkv q_norm k_norm proj"), (block.mlp, "fc1 fc2")):
        tensors |= _parameters(**{name: getattr(parent, name) for name in names.split()})
    for name, scale in (("scale1", block.ls1), ("scale2", block.ls2)):
        if isinstance(scale, LayerScale):
            tensors[name] = scale.gamma
    positions = model.layer_pos_embed[layer] if model.layer_pos_embed else model.pos_embed if shared else None
    if positions is not None:
        tensors["positions"] = model.token_positions(positions)
    return tensors
