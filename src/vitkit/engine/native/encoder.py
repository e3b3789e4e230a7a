"""A Vision Transformer goes in, an engine that answers as it does comes out, on kernels compiled for this CPU.

It runs what the paper's ViTs and their close relatives are made of. `reason_against` says what it does not run.
"""

import ctypes
import math
import weakref
from copy import copy, deepcopy
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from vitkit.core.errors import ConfigError
from vitkit.core.shapes import Float, Tensor, pair
from vitkit.engine.engine import CPU, PRECISIONS, Precision
from vitkit.engine.native.binding import FLOATS, LayerWeights, ModelWeights, Sizes, bind
from vitkit.engine.native.build import EngineError, library
from vitkit.model.config import ViTConfig
from vitkit.model.encoder import Activation, Block, LayerScale, Mlp, SwiGlu
from vitkit.model.heads import DistilledHead, PreLogits
from vitkit.model.inputs import check_images
from vitkit.model.positions import rotary_2d
from vitkit.model.vit import ViT
from vitkit.zoo.lookup import Model

POOLING = {"class": 0, "mean": 1, "map": 2}
ACTIVATIONS: dict[Activation, int] = {"gelu_tanh": 0, "gelu_erf": 1, "swiglu": 2}
MOST_IN_INT8 = (2**31 - 1) // (255 * 127)
"""Values of a patch of which the products surely add up in 32 bits. All other sums are of fewer."""


def reason_against(model: Model, precision: Precision = "fp32") -> str | None:
    """Why the native engine does not run a model; None where it does.

    >>> import vitkit
    >>> reason_against(vitkit.create("B/16", device="meta"))
    >>> reason_against(vitkit.create("R50+B/16", device="meta"))
    'the native engine does not run hybrids: a ResNet stands in front of the encoder'
    """
    reason = _reason(model, precision) if precision in PRECISIONS else f"precision {precision}"
    return reason and f"the native engine does not run {reason}"


def _reason(model: Model, precision: Precision) -> str | None:
    if not isinstance(model, ViT):
        return "ResNets"
    config = model.config
    values = config.channels * math.prod(pair(config.patch_size))
    against = {
        "hybrids: a ResNet stands in front of the encoder": config.backbone is not None,
        "axial attention": config.block.axial,
        "relative positions, which act inside attention": model.config.positions.kind == "relative",
        f"patches of {values:,} values in int8": precision == "int8" and values > MOST_IN_INT8,
    }
    if reason := next((reason for reason, holds in against.items() if holds), None):
        return reason
    exchanged = _exchanged(model)
    return exchanged and f"a model whose {exchanged} is not the one that its configuration has"


def _exchanged(model: ViT) -> str | None:
    """The first part that is not what the configuration makes it; the kernels read as many numbers as that says."""
    found, expected = _parts(model), _parts_of(model.config)
    return next((name for name in sorted(found | expected) if found.get(name) != expected.get(name)), None)


def _parts(model: ViT) -> dict[str, object]:
    """What a model is made of, by name: the class of each module, a norm's epsilon, the shape of each parameter."""
    modules = {
        name: (type(part), getattr(part, "eps", None))
        for name, part in model.named_modules(remove_duplicate=False)
        if name  # what a loaded model is itself has another name
    }
    return modules | {name: tensor.shape for name, tensor in model.named_parameters(remove_duplicate=False)}


@lru_cache(maxsize=8)
def _parts_of(config: ViTConfig) -> dict[str, object]:
    """What a model of this configuration is made of; a start asks several times, and with H/14 it takes 50 ms."""
    with torch.device("meta"):
        return _parts(ViT(config))


class NativeEngine:
    """A Vision Transformer on the native kernels; an image's answer is the same bits in whatever batch it comes.

    It holds its own copy of the weights, packed: about 4 bytes a parameter in fp32, 2 in bf16 and 1 in int8; what
    pooling by attention does, it does in torch, with a copy too. The model may be changed, moved or dropped after this:
    the engine does not see it. Room to work in is kept between calls: with B/16 about 8 MB a thread, and as much again
    for each caller there was at a time on a thread of its own.

    In bf16 and int8 the residual stream, LayerNorm, softmax, GELU and the head are still float32. int8 has a scale for
    each output of a layer, and for each token a range that is found as it comes: no calibration is needed.
    """

    def __init__(
        self, model: Model, *, precision: Precision = "fp32", threads: int | None = None, compiled: Path | None = None
    ) -> None:
        if reason := reason_against(model, precision):
            raise ConfigError(reason)
        assert isinstance(model, ViT)
        if threads is not None and threads < 1:
            raise ConfigError("an engine has at least one thread", got=threads)
        self.config, self.precision, self.threads = model.config, precision, threads
        self._library = bind(compiled or library())
        with torch.no_grad():
            self._engine = _packed(self._library, model, precision)
        self._finalizer = weakref.finalize(self, self._library.vitkit_destroy, self._engine)
        self._finalizer.atexit = False  # a daemon thread may still be running it then, and the process ends anyway
        self._pooling = _Pooling(model) if model.config.pooling == "map" else None
        self._whole: NativeEngine | None = None
        """Whose weights it reads, if they are not its own."""

    @property
    def name(self) -> str:
        """What runs, for people."""
        threads = self._threads()
        instructions = self._library.vitkit_instructions().decode()
        return f"native, {instructions}, {threads} thread{'s' if threads > 1 else ''}"

    @property
    def bytes(self) -> int:
        """The memory of the packed weights."""
        return int(self._library.vitkit_bytes(self._engine))

    def on_threads(self, threads: int) -> "NativeEngine":
        """The same engine on so many threads; on one, the caller's, callers at the same time are in nobody's way."""
        one = copy(self)
        one.threads, one._whole = threads, self
        return one

    def features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B F"]:
        """What the head reads of each image."""
        return self._run(images, wants_logits=False)[0]

    def answer(self, images: Float[Tensor, "B C H W"]) -> tuple[Float[Tensor, "B F"], Float[Tensor, "B Y"]]:
        """Features and logits, in one pass; a model without classes gives its features twice."""
        return self._run(images, wants_logits=True)

    @torch.no_grad()
    def _run(self, images: Tensor, *, wants_logits: bool) -> tuple[Tensor, Tensor]:
        config = self.config
        check_images(images, channels=config.channels, image_size=pair(config.image_size))
        images = images.detach().to("cpu", torch.float32).contiguous()
        batch = images.shape[0]
        if self._pooling is not None:
            tokens = torch.empty(batch, config.prefix + config.patches, config.width)
            self._call(images, tokens=tokens)
            return self._pooling(tokens)
        features = torch.empty(batch, config.features)
        logits = torch.empty(batch, config.classes) if wants_logits and config.classes else None
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
        if not len(images):
            return
        places = (None if tensor is None else tensor.data_ptr() for tensor in (tokens, features, logits))
        if self._library.vitkit_run(self._engine, images.data_ptr(), len(images), *places, self._threads()):
            raise EngineError("the native engine has no room to work in", hint="free memory, or use smaller batches")

    def _threads(self) -> int:
        return self.threads or torch.get_num_threads()


def native(model: Model, *, precision: Precision = "fp32", threads: int | None = None) -> NativeEngine:
    """The native engine for a model; the first time on a machine this compiles it.

    >>> import vitkit
    >>> model = vitkit.create("Ti/16", image_size=32, classes=10, settings=["depth=1"]).eval()
    >>> images = torch.rand(2, 3, 32, 32)
    >>> features, logits = native(model).answer(images)
    >>> bool((logits - model(images)).abs().max() < 1e-4)
    True
    """
    return NativeEngine(model, precision=precision, threads=threads)


class _Pooling:
    """A copy of what comes after the encoder where attention pools, in evaluation, in float32 on the CPU."""

    def __init__(self, model: ViT) -> None:
        assert model.attn_pool is not None
        self.config = model.config
        self.probe, self.norm, self.pre_logits, self.head = (
            deepcopy(part).to(CPU, torch.float32).eval()
            for part in (model.attn_pool, model.fc_norm, model.pre_logits, model.head)
        )

    def __call__(self, tokens: Float[Tensor, "B L D"]) -> tuple[Tensor, Tensor]:
        """Features and logits, an image at a time: in torch, a batch of others changes last bits."""
        features = [self.pre_logits(self.norm(self.probe(image[None]))) for image in tokens]
        if not features:
            return torch.empty(0, self.config.features), torch.empty(0, self.config.classes)
        return torch.cat(features), torch.cat([self.head(feature) for feature in features])


class _Numbers:
    """Pointers to tensors' numbers in float32, which live as long as this does."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def __call__(self, tensor: Tensor | None) -> object:
        if tensor is None:
            return None
        self.kept.append(tensor.detach().to("cpu", torch.float32).contiguous())
        return ctypes.cast(self.kept[-1].data_ptr(), FLOATS)


def _packed(library: ctypes.CDLL, model: ViT, precision: Precision) -> int:
    """The library's own copy of a model."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError("the model has shapes and no numbers", expected="a model on a device", got="one on meta")
    config, numbers = model.config, _Numbers()
    (height, width), (patch_height, patch_width) = pair(config.image_size), pair(config.patch_size)
    sizes = Sizes(
        channels=config.channels,
        image_height=height,
        image_width=width,
        patch_height=patch_height,
        patch_width=patch_width,
        width=config.width,
        depth=len(model.blocks),
        heads=config.heads,
        mlp_dim=config.mlp_dim,
        prefix=config.prefix,
        class_tokens=config.class_tokens,
        pooling=POOLING[config.pooling],
        activation=ACTIVATIONS[config.block.activation],
        norm_first=config.head.norm == "before_pooling",
        pre_logits=0 if config.pooling == "map" else config.head.pre_logits or 0,
        classes=0 if config.pooling == "map" else config.classes,
        norm_epsilon=config.block.norm_eps,
    )
    layers = (LayerWeights * len(model.blocks))(*(_layer(model, layer, numbers) for layer in range(len(model.blocks))))
    engine = library.vitkit_create(sizes, _weights(model, numbers), layers, PRECISIONS.index(precision))
    if not engine:
        raise EngineError("not enough memory for the packed weights", hint="bf16 takes half of it, int8 a quarter")
    return int(engine)


def _weights(model: ViT, numbers: _Numbers) -> ModelWeights:
    config, norm = model.config, model.norm if isinstance(model.norm, nn.LayerNorm) else model.fc_norm
    weights = ModelWeights(start=numbers(_start(model)), patch_weight=numbers(model.patch_embed.proj.weight))
    if config.positions.kind == "rotary":
        rotary = rotary_2d(config.grid, head_width=config.head_width, base=config.positions.rotary_base)
        weights.cosine, weights.sine = numbers(rotary.cosine), numbers(rotary.sine)
    if isinstance(norm, nn.LayerNorm):
        weights.norm_weight, weights.norm_bias = numbers(norm.weight), numbers(norm.bias)
    if isinstance(model.pre_logits, PreLogits):
        weights.pre_logits_weight = numbers(model.pre_logits.fc.weight)
        weights.pre_logits_bias = numbers(model.pre_logits.fc.bias)
    if isinstance(model.head, nn.Linear):
        weights.head_weight, weights.head_bias = numbers(model.head.weight), numbers(model.head.bias)
    elif isinstance(model.head, DistilledHead):
        # The mean of two classifiers, each on its half of the features, is one classifier on all of them.
        label, teacher = model.head.label, model.head.teacher
        weights.head_weight = numbers(torch.cat([label.weight, teacher.weight], dim=1) / 2)
        weights.head_bias = numbers((label.bias + teacher.bias) / 2)
    return weights


def _start(model: ViT) -> Float[Tensor, "L D"]:
    """What the tokens are before patches are added: positions, learned tokens, and the embedding's bias."""
    config = model.config
    start = torch.zeros(config.prefix + config.patches, config.width)
    learned = (model.cls_token, model.dist_token, model.reg_token)
    if prefix := [token[0].float() for token in learned if token is not None]:
        start[: config.prefix] = torch.cat(prefix)
    start[config.prefix :] = model.patch_embed.proj.bias.float()
    if model.pos_embed is not None and config.positions.place == "stem":
        start += model.token_positions(model.pos_embed)[0].float()
    return start


def _layer(model: ViT, layer: int, numbers: _Numbers) -> LayerWeights:
    block = model.blocks[layer]
    assert isinstance(block, Block)
    assert isinstance(block.mlp, Mlp | SwiGlu)
    attention, mlp, shared = block.attn, block.mlp, model.config.positions.place == "shared"
    positions = model.layer_pos_embed[layer] if model.layer_pos_embed else model.pos_embed if shared else None

    def of_norm(norm: nn.Module) -> tuple[object, object]:
        return (numbers(norm.weight), numbers(norm.bias)) if isinstance(norm, nn.LayerNorm) else (None, None)

    def of_scale(scale: nn.Module) -> object:
        return numbers(scale.gamma) if isinstance(scale, LayerScale) else None

    weights = LayerWeights(
        positions=numbers(None if positions is None else model.token_positions(positions)),
        qkv_weight=numbers(attention.qkv.weight),
        qkv_bias=numbers(attention.qkv.bias),
        proj_weight=numbers(attention.proj.weight),
        proj_bias=numbers(attention.proj.bias),
        scale1=of_scale(block.ls1),
        fc1_weight=numbers(mlp.fc1.weight),
        fc1_bias=numbers(mlp.fc1.bias),
        fc2_weight=numbers(mlp.fc2.weight),
        fc2_bias=numbers(mlp.fc2.bias),
        scale2=of_scale(block.ls2),
    )
    weights.norm1_weight, weights.norm1_bias = of_norm(block.norm1)
    weights.norm2_weight, weights.norm2_bias = of_norm(block.norm2)
    weights.q_norm_weight, weights.q_norm_bias = of_norm(attention.q_norm)
    weights.k_norm_weight, weights.k_norm_bias = of_norm(attention.k_norm)
    return weights
