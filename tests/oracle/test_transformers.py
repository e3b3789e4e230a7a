"""Our models against transformers: logits, hidden states, attention weights, gradients, fixed positions."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle.comparison import assert_close, assert_same_gradients, compute_gradients, random_images, randomize
from oracle.foreign_names import (
    huggingface_bit,
    huggingface_deit,
    huggingface_dinov2,
    huggingface_dinov2_gated,
    huggingface_dinov3,
    huggingface_dinov3_gated,
    huggingface_vit,
    huggingface_vit_with_pooler,
    load,
)
from oracles import import_transformers
from torch import Tensor, nn

from vitkit.model.config import BiTConfig, BlockConfig, HeadConfig, PositionConfig, TokenConfig, ViTConfig
from vitkit.model.encoder import Capture
from vitkit.model.positions import sincos_2d
from vitkit.model.resnet import BiT
from vitkit.model.vit import ViT

Rename = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])

ERF = BlockConfig(activation="gelu_erf")
SMALL = ViTConfig(image_size=32, patch_size=8, width=64, depth=3, heads=4, mlp_dim=256, num_classes=10, block=ERF)
SIZES = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
"""The same sizes as configuration of transformers."""
VIT = SIZES | {"intermediate_size": 256, "layer_norm_eps": 1e-6, "num_labels": 10}

HEADLESS = replace(SMALL, num_classes=0, block=replace(ERF, layer_scale=1.0))
GATED = replace(HEADLESS, mlp_dim=176, block=replace(HEADLESS.block, activation="swiglu"))  # ⌈4 · 64 · 2/3⌉ in eights
ROTARY = replace(HEADLESS, positions=PositionConfig(kind="rotary"), tokens=TokenConfig(registers=4))
DINOV3 = SIZES | {"intermediate_size": 256, "num_register_tokens": 4, "layer_norm_eps": 1e-6}


class LastHiddenState(nn.Module):
    """Our model up to the last norm for all tokens: the last hidden state of transformers."""

    def __init__(self, model: ViT) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model.norm(self.model.encode(self.model.embed(images)).tokens)


def build_transformers(name: str, **config: Any) -> Any:
    """Build a model of transformers by its class name, with its configuration class."""
    transformers = import_transformers()
    model = getattr(transformers, name)
    return model(model.config_class(**config))


def random_vit(config: ViTConfig, dtype: torch.dtype) -> ViT:
    model = ViT(config)
    randomize(model)
    return model.to(dtype)


def without_key_bias(model: ViT) -> None:
    """Zero the bias of keys, which DINOv3 does not have."""
    for block in model.blocks:
        nn.init.zeros_(block.attn.qkv.bias[model.config.width : 2 * model.config.width])


# ViT


@dtypes
@pytest.mark.parametrize(
    ("config", "theirs"),
    [
        pytest.param(SMALL, {}, id="square"),
        pytest.param(replace(SMALL, image_size=(24, 40)), {"image_size": (24, 40)}, id="wide"),
        pytest.param(replace(SMALL, channels=1), {"num_channels": 1}, id="1 channel"),
        pytest.param(
            replace(SMALL, block=BlockConfig(norm_eps=1e-2)),
            {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-2},
            id="tanh GELU, large eps",
        ),
    ],
)
def test_vit_logits_and_gradients_equal_transformers(
    config: ViTConfig, theirs: dict[str, Any], dtype: torch.dtype
) -> None:
    ours = random_vit(config, dtype)
    model = build_transformers("ViTForImageClassification", **(VIT | theirs)).to(dtype)
    load(model, huggingface_vit(ours.state_dict()))
    images = random_images(3, config.channels, *ours.patch_embed.image_size)
    actual, expected = (
        compute_gradients(ours, images),
        compute_gradients(model, images, read=lambda output: output.logits),
    )
    assert_same_gradients(actual, expected, rename=huggingface_vit)


@dtypes
def test_pre_logits_equal_the_pooler_of_transformers(dtype: torch.dtype) -> None:
    ours = random_vit(replace(SMALL, head=HeadConfig(pre_logits=64)), dtype)
    theirs = build_transformers("ViTModel", **VIT).to(dtype).eval()
    load(theirs, huggingface_vit_with_pooler(ours.state_dict()))
    images = random_images(3, 3, 32, 32).to(dtype)
    with torch.no_grad():
        assert_close(ours.eval().features(images), theirs(images).pooler_output)


def test_attention_weights_equal_transformers() -> None:
    """Compare in float32 only, because transformers computes the softmax in it."""
    ours = random_vit(SMALL, torch.float32).eval()
    theirs = build_transformers("ViTForImageClassification", **VIT, attn_implementation="eager").eval()
    load(theirs, huggingface_vit(ours.state_dict()))
    images = random_images(3, 3, 32, 32).float()
    with torch.no_grad():
        kept = ours.encode(ours.embed(images), capture=Capture(attention=[0, 1, -1])).attention
        expected = theirs(images, output_attentions=True).attentions
    assert sorted(kept) == [0, 1, 2]
    for layer, weights in enumerate(expected):
        assert_close(kept[layer], weights, name=f"attention of layer {layer}")


def test_rotary_attention_weights_equal_transformers() -> None:
    ours = random_vit(ROTARY, torch.float32).eval()
    without_key_bias(ours)
    theirs = build_transformers("DINOv3ViTModel", **DINOV3, attn_implementation="eager").eval()
    load(theirs, huggingface_dinov3(ours.state_dict()), unused=("embeddings.mask_token",))
    images = random_images(3, 3, 32, 32).float()
    with torch.no_grad():
        kept = ours.encode(ours.embed(images), capture=Capture(attention=[0, 2])).attention
        expected = theirs(images, output_attentions=True).attentions
    for layer, weights in kept.items():
        assert_close(weights, expected[layer], name=f"attention of layer {layer}")


@dtypes
def test_distilled_logits_and_gradients_equal_deit(dtype: torch.dtype) -> None:
    ours = random_vit(replace(SMALL, tokens=TokenConfig(distillation=True)), dtype)
    theirs = build_transformers("DeiTForImageClassificationWithTeacher", **VIT)
    load(theirs.to(dtype), huggingface_deit(ours.state_dict()))
    images = random_images(3, 3, 32, 32)
    actual, expected = (
        compute_gradients(ours, images),
        compute_gradients(theirs, images, read=lambda output: output.logits),
    )
    assert_same_gradients(actual, expected, rename=huggingface_deit)


@dtypes
def test_both_distilled_heads_equal_deit(dtype: torch.dtype) -> None:
    ours = random_vit(replace(SMALL, tokens=TokenConfig(distillation=True)), dtype).eval()
    theirs = build_transformers("DeiTForImageClassificationWithTeacher", **VIT)
    load(theirs.to(dtype).eval(), huggingface_deit(ours.state_dict()))
    images = random_images(3, 3, 32, 32).to(dtype)
    with torch.no_grad():
        label, teacher = ours.head.forward_both(ours.features(images))
        expected = theirs(images)
    assert_close(label, expected.cls_logits)
    assert_close(teacher, expected.distillation_logits)


# DINO


def assert_same_hidden_states(ours: ViT, theirs: nn.Module, images: Tensor, *, rename: Rename) -> None:
    """Compare the last hidden state of all tokens, its gradients and the class token's features."""
    load(theirs, rename(ours.state_dict()), unused=("embeddings.mask_token",))
    hidden = LastHiddenState(ours)
    actual, expected = (
        compute_gradients(hidden, images),
        compute_gradients(theirs, images, read=lambda output: output.last_hidden_state),
    )
    assert_same_gradients(
        actual,
        expected,
        rename=lambda tensors: rename({name.removeprefix("model."): tensor for name, tensor in tensors.items()}),
    )
    with torch.no_grad():
        features = ours.features(images.to(actual.output.dtype))
    assert_close(features, expected.output[:, 0], name="class token")


@dtypes
@pytest.mark.parametrize(
    ("name", "config", "theirs", "rename"),
    [
        pytest.param("Dinov2Model", HEADLESS, {"use_mask_token": False}, huggingface_dinov2, id="DINOv2"),
        pytest.param("Dinov2Model", GATED, {"use_swiglu_ffn": True}, huggingface_dinov2_gated, id="DINOv2, SwiGLU"),
        pytest.param(
            "Dinov2WithRegistersModel",
            replace(HEADLESS, tokens=TokenConfig(registers=4)),
            {"num_register_tokens": 4},
            huggingface_dinov2,
            id="DINOv2, registers",
        ),
        pytest.param(
            "Dinov2WithRegistersModel",
            replace(GATED, tokens=TokenConfig(registers=4)),
            {"num_register_tokens": 4, "use_swiglu_ffn": True},
            huggingface_dinov2_gated,
            id="DINOv2, registers, SwiGLU",
        ),
    ],
)
def test_dinov2_states_and_gradients_equal_transformers(
    name: str, config: ViTConfig, theirs: dict[str, Any], rename: Rename, dtype: torch.dtype
) -> None:
    ours = random_vit(config, dtype)
    model = build_transformers(name, **(SIZES | {"mlp_ratio": 4} | theirs)).to(dtype)
    assert_same_hidden_states(ours, model, random_images(3, 3, 32, 32), rename=rename)


@pytest.mark.parametrize(
    ("config", "theirs", "rename"),
    [
        pytest.param(ROTARY, {}, huggingface_dinov3, id="square"),
        pytest.param(replace(ROTARY, image_size=(24, 40)), {}, huggingface_dinov3, id="wide"),
        pytest.param(replace(ROTARY, image_size=(40, 24)), {}, huggingface_dinov3, id="tall"),
        pytest.param(
            replace(ROTARY, positions=PositionConfig(kind="rotary", rotary_base=10.0)),
            {"rope_theta": 10.0},
            huggingface_dinov3,
            id="another base",
        ),
        pytest.param(
            replace(ROTARY, block=replace(ROTARY.block, activation="swiglu")),
            {"use_gated_mlp": True, "hidden_act": "silu"},
            huggingface_dinov3_gated,
            id="SwiGLU",
        ),
    ],
)
def test_dinov3_states_and_gradients_equal_transformers(
    config: ViTConfig, theirs: dict[str, Any], rename: Rename
) -> None:
    """Compare in float32 only, because both compute rotations in it."""
    ours = random_vit(config, torch.float32)
    without_key_bias(ours)
    model = build_transformers("DINOv3ViTModel", **(DINOV3 | theirs))
    assert_same_hidden_states(ours, model, random_images(3, 3, *ours.patch_embed.image_size), rename=rename)


# BiT, in float64 alone: relu and max pooling have kinks, and float32 puts a few activations on their other side


@pytest.mark.parametrize("origin", ["google", "timm"])
def test_bit_logits_and_gradients_equal_transformers(origin: Any) -> None:
    ours = BiT(BiTConfig(units=(2, 1, 1), num_classes=10, origin=origin))
    randomize(ours, kernels=0.02)
    theirs = build_transformers(
        "BitForImageClassification", depths=(2, 1, 1), hidden_sizes=(256, 512, 1024), num_labels=10
    )
    for module in theirs.modules():
        if origin == "google" and isinstance(module, nn.Conv2d):
            module.eps = 1e-10  # the released code's, where transformers has 1e-8, as timm
    load(theirs.double(), huggingface_bit(ours.double().state_dict()))
    images = random_images(2, 3, 49, 34)
    actual, expected = (
        compute_gradients(ours, images),
        compute_gradients(theirs, images, read=lambda output: output.logits),
    )
    assert_same_gradients(actual, expected, rename=huggingface_bit)


# Fixed positions


@pytest.mark.parametrize(("image_size", "width"), [(32, 64), (48, 8), (56, 32)])
def test_sine_cosine_positions_equal_mae(image_size: int, width: int) -> None:
    sizes = {"image_size": image_size, "patch_size": 8, "hidden_size": width, "num_attention_heads": 2}
    decoder = {"decoder_hidden_size": 8, "decoder_num_attention_heads": 2, "decoder_num_hidden_layers": 1}
    theirs = build_transformers("ViTMAEModel", **sizes, **decoder, num_hidden_layers=1).embeddings
    # transformers 5 takes a fresh model's positions for loaded ones, as this mark is set, and leaves them zero.
    theirs.patch_embeddings.projection._is_hf_initialized = False
    theirs.initialize_weights()
    grid = (image_size // 8, image_size // 8)
    assert_close(sincos_2d(grid, width=width, like="mae", prefix=1), theirs.position_embeddings.detach())
