"""Format of torchvision: its files in our models, ours in its class, and unsupported models."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle.comparison import assert_close, random_images
from oracles import import_torchvision
from torch import Tensor, nn

from vitkit.core.errors import WeightsError
from vitkit.model.config import (
    AttentionConfig,
    BackboneConfig,
    BiTConfig,
    BlockConfig,
    HeadConfig,
    PositionConfig,
    TokenConfig,
    ViTConfig,
)
from vitkit.model.vit import ViT
from vitkit.weights.formats.base import FileMetadata
from vitkit.weights.formats.torchvision import TORCHVISION
from vitkit.weights.rules import apply_rules, invert_rules, match_keys
from vitkit.zoo.registry import create

BLOCK = BlockConfig(activation="gelu_erf")
OURS = ViTConfig(
    image_size=32,
    patch_size=8,
    width=64,
    depth=2,
    heads=4,
    mlp_dim=96,
    num_classes=5,
    positions=PositionConfig(origin="torchvision"),
    block=BLOCK,
)
FOUR_HEADS = FileMetadata(file_type="torch", config={"num_heads": 4})
variants = pytest.mark.parametrize("pre_logits", [None, 48], ids=["linear head", "pre-logits"])


@torch.no_grad()
def random_weights(model: nn.Module) -> None:
    """Randomize all parameters: none is zero, no norm is trivial, activations are of order 1."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1 and not name.endswith(("token", "embedding", "embed")):
            parameter.copy_(noise * parameter[0].numel() ** -0.5)
        else:
            parameter.copy_(0.3 * noise + (name.endswith("weight")))


def theirs(pre_logits: int | None = None) -> Any:
    model = import_torchvision().models.vision_transformer.VisionTransformer(
        image_size=32,
        patch_size=8,
        num_layers=2,
        num_heads=4,
        hidden_dim=64,
        mlp_dim=96,
        num_classes=5,
        representation_size=pre_logits,
    )
    random_weights(model)
    return model.eval()


def ours(pre_logits: int | None = None) -> ViT:
    model = ViT(replace(OURS, head=HeadConfig(pre_logits=pre_logits)))
    random_weights(model)
    return model.eval()


def legacy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the file with the names of torchvision 0.12."""
    return {
        name.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): tensors[name] for name in tensors
    }


def shapes_of(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def loaded(tensors: dict[str, Tensor]) -> ViT:
    shapes = shapes_of(tensors)
    assert TORCHVISION.matches(shapes, FOUR_HEADS)
    described = TORCHVISION.infer_config(shapes, FOUR_HEADS)
    table = TORCHVISION.rules(described, shapes)
    match_keys(table, tensors, ignored=TORCHVISION.ignored_names).check()
    model = create(described, device="meta")
    model.load_state_dict(dict(apply_rules(table, tensors)), strict=True, assign=True)
    assert isinstance(model, ViT)
    return model.eval()


@variants
@pytest.mark.parametrize("names", [dict, legacy], ids=["new names", "legacy names"])
@torch.no_grad()
def test_loaded_file_equals_torchvision(pre_logits: int | None, names: Any, tmp_path: Path) -> None:
    model, images = theirs(pre_logits), random_images(3, 3, 32, 32).float()
    torch.save(names(model.state_dict()), tmp_path / "weights.pth")
    result = loaded(torch.load(tmp_path / "weights.pth", weights_only=True))
    assert result.config == replace(OURS, head=HeadConfig(pre_logits=pre_logits))
    assert_close(result(images), model(images))


@variants
@torch.no_grad()
def test_torchvision_loads_our_file(pre_logits: int | None) -> None:
    model, images = ours(pre_logits), random_images(3, 3, 32, 32).float()
    assert TORCHVISION.unsupported_reason(replace(model.config, heads=1)) is None  # of four, the file would not tell
    other = theirs(pre_logits)
    other.load_state_dict(dict(invert_rules(TORCHVISION.rules(model.config, None), model.state_dict())), strict=True)
    assert_close(model(images), other(images))


@variants
@pytest.mark.parametrize("names", [dict, legacy], ids=["new names", "legacy names"])
def test_torchvision_file_survives_round_trip(pre_logits: int | None, names: Any) -> None:
    tensors = names(theirs(pre_logits).state_dict())
    result = loaded(tensors)
    again = dict(invert_rules(TORCHVISION.rules(result.config, shapes_of(tensors)), result.state_dict()))
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head": HeadConfig(pre_logits=48)},
        {"num_classes": 0},
        {"num_classes": 0, "head": HeadConfig(pre_logits=48)},
    ],
    ids=["linear head", "pre-logits", "headless", "pre-logits, headless"],
)
def test_our_file_survives_round_trip(changes: dict[str, Any]) -> None:
    model = ViT(replace(OURS, **changes))
    random_weights(model)
    back = loaded(dict(invert_rules(TORCHVISION.rules(model.config, None), model.state_dict())))
    assert back.config == model.config
    assert back.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in back.state_dict().items())


def file_of(config: ViTConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return shapes_of(dict(invert_rules(TORCHVISION.rules(config, None), ViT(config).state_dict())))


@pytest.mark.parametrize(("width", "heads"), [(64, 1), (192, 3), (1024, 16), (1280, 16)])
def test_default_heads_are_those_of_published_models(width: int, heads: int) -> None:
    shapes = file_of(replace(OURS, width=width, depth=1, mlp_dim=8))
    declared = FileMetadata(file_type="torch", is_declared=True)
    assert TORCHVISION.infer_config(shapes, declared).heads == heads
    if width < 768:  # torchvision has no such model
        with pytest.raises(WeightsError, match="determine the number of heads") as caught:
            TORCHVISION.infer_config(shapes, FileMetadata(file_type="torch"))
        assert "--format torchvision" in str(caught.value.hint)


def test_unknown_heads_are_an_error() -> None:
    with pytest.raises(WeightsError, match="determine the number of heads"):
        TORCHVISION.infer_config(file_of(replace(OURS, width=32)), FileMetadata(file_type="torch"))
    with pytest.raises(WeightsError, match="num_heads"):
        TORCHVISION.infer_config(file_of(OURS), FileMetadata(file_type="torch", config={"num_heads": "4"}))


def test_non_square_grid_is_rejected() -> None:
    with pytest.raises(WeightsError, match="square"):
        TORCHVISION.infer_config(file_of(replace(OURS, image_size=(24, 40))), FOUR_HEADS)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("conv_proj.weight", (64, 3, 0, 0)),
        ("encoder.pos_embedding", (1, 1, 64)),
        ("heads.head.weight", ()),
        ("heads.pre_logits.weight", (0, 64)),
    ],
)
def test_invalid_shapes_are_rejected(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(WeightsError):
        TORCHVISION.infer_config({**file_of(OURS), name: shape}, FOUR_HEADS)


def test_inconsistent_sizes_are_rejected() -> None:
    with pytest.raises(WeightsError, match="invalid model in the file: the heads do not divide"):
        TORCHVISION.infer_config(file_of(OURS), FileMetadata(file_type="torch", config={"num_heads": 7}))


def test_missing_and_extra_tensors_have_file_names() -> None:
    gone, odd = "encoder.layers.encoder_layer_1.mlp.3.bias", "encoder.layers.encoder_layer_1.gate"
    shapes = {name: shape for name, shape in file_of(OURS).items() if name != gone} | {odd: (64,)}
    result = match_keys(TORCHVISION.rules(TORCHVISION.infer_config(shapes, FOUR_HEADS), shapes), shapes)
    assert (result.missing, result.extra) == ((gone,), (odd,))


def test_convolutional_stem_does_not_match() -> None:
    vision_transformer = import_torchvision().models.vision_transformer
    stem = [vision_transformer.ConvStemConfig(out_channels=8, kernel_size=3, stride=2) for _ in range(3)]
    model = partial(vision_transformer.VisionTransformer, image_size=32, patch_size=8, num_layers=1, num_heads=1)
    tensors = model(hidden_dim=64, mlp_dim=64, conv_stem_configs=stem).state_dict()
    assert not TORCHVISION.matches(shapes_of(tensors), FOUR_HEADS)
    assert not TORCHVISION.matches({}, FOUR_HEADS)


REFUSED = [
    (BiTConfig(), "a ResNet"),
    (replace(OURS, backbone=BackboneConfig(units=()), patch_size=1), "a hybrid"),
    (replace(OURS, pooling="mean"), "mean pooling"),
    (replace(OURS, pooling="map"), "attention pooling"),
    (replace(OURS, pooling="mean", block=BlockConfig(axial=True)), "axial attention"),
    (replace(OURS, positions=PositionConfig(kind="none")), "no positions"),
    (replace(OURS, positions=PositionConfig(kind="learned_2d")), "learned positions of rows and columns"),
    (replace(OURS, positions=PositionConfig(kind="relative")), "relative positions"),
    (replace(OURS, positions=PositionConfig(kind="rotary")), "rotary positions"),
    (replace(OURS, positions=PositionConfig(injection="shared")), "positions at every layer"),
    (replace(OURS, positions=PositionConfig(covers="patches")), "a class token without a position"),
    (replace(OURS, head=HeadConfig(norm="after_pooling")), "a norm after pooling"),
    (replace(OURS, block=replace(BLOCK, attention=AttentionConfig(qk_norm=True))), "normalized queries and keys"),
    (replace(OURS, block=replace(BLOCK, attention=AttentionConfig(qkv_bias=False))), "no qkv biases"),
    (replace(OURS, block=replace(BLOCK, layer_scale=0.1)), "LayerScale"),
    (replace(OURS, block=replace(BLOCK, activation="swiglu")), "SwiGLU"),
    (replace(OURS, block=replace(BLOCK, activation="gelu_tanh")), "tanh GELU"),
    (replace(OURS, block=replace(BLOCK, norm_eps=1e-12)), "a norm with an eps of 1e-12"),
    (replace(OURS, tokens=TokenConfig(distillation=True)), "a distillation token"),
    (replace(OURS, tokens=TokenConfig(registers=2)), "registers"),
    (replace(OURS, channels=1), "images of other than 3 channels"),
    (replace(OURS, image_size=(24, 40)), "images or patches that are not square"),
    (replace(OURS, patch_size=(4, 8)), "images or patches that are not square"),
    (OURS, "a number of heads that does not follow from the width"),
    (replace(OURS, width=80, heads=1), "a number of heads that does not follow from the width"),
]


@pytest.mark.parametrize(("config", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_unsupported_model_gives_a_reason(config: Any, reason: str) -> None:
    assert TORCHVISION.unsupported_reason(config) == reason


def test_rules_reject_a_resnet() -> None:
    with pytest.raises(WeightsError, match="ResNet"):
        TORCHVISION.rules(BiTConfig(), None)
