"""Files exchanged with timm through its own saving and loading."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from oracle.round_trip import (
    ERF,
    LABELS,
    SMALL,
    TANH,
    assert_loads_as_theirs,
    assert_same_logits,
    exact_logits,
    make_bundle,
    randomize_model,
    with_tanh_gelu,
    write_with_format,
)
from oracles import import_timm
from torch import nn

import vitkit
from vitkit.core.errors import WeightsError
from vitkit.model.config import (
    AttentionConfig,
    BackboneConfig,
    BiTConfig,
    HeadConfig,
    PositionConfig,
    TokenConfig,
    ViTConfig,
)
from vitkit.weights.bundle import ModelBundle
from vitkit.zoo.variants import ModelConfig

SIZES: Mapping[str, Any] = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 128,
    "depth": 2,
    "num_heads": 2,
    "mlp_ratio": 1.5,
}
"""SMALL as arguments of timm."""
PATCHES = PositionConfig(covers="patches", origin="timm")


@dataclass(frozen=True)
class Kind:
    """A model as our configuration and as a small version of a timm architecture."""

    ours: ModelConfig
    architecture: str = "vit_base_patch16_224"
    theirs: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        sizes = SIZES if isinstance(self.ours, ViTConfig) else {}
        return {**sizes, **self.theirs}

    def build(self, **changes: Any) -> Any:
        timm = import_timm()
        arguments = {"num_classes": self.ours.num_classes} | self.arguments() | changes
        return timm.create_model(self.architecture, **arguments)


def hybrid(units: tuple[int, ...], *, patch_size: int = 1, **changes: Any) -> ViTConfig:
    backbone = BackboneConfig(units=units, origin="timm")
    return replace(SMALL, image_size=64, patch_size=patch_size, backbone=backbone, depth=1, **changes)


HYBRID = {"img_size": 64, "patch_size": 1, "depth": 1}
KINDS = {
    "class token": Kind(SMALL),
    "tanh": Kind(replace(SMALL, block=TANH), theirs={"act_layer": "gelu_tanh"}),
    "wide": Kind(replace(SMALL, image_size=(24, 40)), theirs={"img_size": (24, 40)}),
    "1 channel": Kind(replace(SMALL, channels=1), theirs={"in_chans": 1}),
    "mean": Kind(
        replace(SMALL, pooling="mean"),
        theirs={"global_pool": "avg", "class_token": False, "fc_norm": False},
    ),
    "mean, norm after, beside a class token": Kind(
        replace(SMALL, pooling="mean", head=HeadConfig(norm="after_pooling"), tokens=TokenConfig(class_token=True)),
        theirs={"global_pool": "avg"},
    ),
    "attention pooling": Kind(replace(SMALL, pooling="map"), theirs={"global_pool": "map", "class_token": False}),
    "LayerScale": Kind(replace(SMALL, block=replace(ERF, layer_scale=1e-5)), theirs={"init_values": 1e-5}),
    "DeiT III": Kind(
        replace(SMALL, block=replace(ERF, layer_scale=1e-6), positions=PATCHES),
        architecture="deit3_small_patch16_224",
        theirs={"init_values": 1e-6},
    ),
    "normalized queries": Kind(
        replace(SMALL, block=replace(ERF, attention=AttentionConfig(qk_norm=True))), theirs={"qk_norm": True}
    ),
    "no qkv bias": Kind(
        replace(SMALL, block=replace(ERF, attention=AttentionConfig(qkv_bias=False))), theirs={"qkv_bias": False}
    ),
    "registers": Kind(
        replace(SMALL, tokens=TokenConfig(registers=4), positions=PATCHES),
        theirs={"reg_tokens": 4, "no_embed_class": True},
    ),
    "gated": Kind(
        replace(SMALL, mlp_dim=192, block=replace(ERF, activation="swiglu", layer_scale=1e-5)),
        architecture="vit_giant_patch14_dinov2",
        theirs={"mlp_ratio": 3.0},
    ),
    "distilled": Kind(
        replace(SMALL, tokens=TokenConfig(distillation=True)), architecture="deit_tiny_distilled_patch16_224"
    ),
    "no classes": Kind(replace(SMALL, num_classes=0)),
    "R+": Kind(hybrid((), patch_size=8), architecture="vit_tiny_r_s16_p8_224", theirs={"img_size": 64, "depth": 1}),
    "R26+": Kind(hybrid((2, 2, 2, 2)), architecture="vit_small_r26_s32_224", theirs=HYBRID),
    "BiT": Kind(
        BiTConfig(num_classes=5, image_size=64, origin="timm"),
        architecture="resnetv2_50x1_bit",
        theirs={"pretrained_cfg_overlay": {"input_size": (3, 64, 64)}},  # of 448, as its name alone would have it
    ),
}
LARGE = ("R26+", "BiT")
"""timm cannot make these small, so they are not in every test."""


def filled(model: nn.Module) -> nn.Module:
    """Fill a model with NaN, so that tensors that its loader does not set show."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    return model


# timm's folders


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_timm_model_equals_timm(kind: str, tmp_path: Path) -> None:
    kind_case = KINDS[kind]
    theirs = randomize_model(kind_case.build())
    arguments = {key: value for key, value in kind_case.arguments().items() if key != "pretrained_cfg_overlay"}
    import_timm().models.save_for_hf(theirs, tmp_path, model_args=arguments, safe_serialization=True)
    found = assert_loads_as_theirs(tmp_path, exact_logits(theirs, kind_case.ours), format_name="timm")
    assert found == like_timm(kind_case.ours)


def like_timm(config: ModelConfig) -> ModelConfig:
    """Return the configuration with timm's interpolation of positions."""
    return (
        config if isinstance(config, BiTConfig) else replace(config, positions=replace(config.positions, origin="timm"))
    )


def test_timm_pickle_is_read(tmp_path: Path) -> None:
    kind_case = KINDS["class token"]
    theirs = randomize_model(kind_case.build())
    import_timm().models.save_for_hf(theirs, tmp_path, model_args=kind_case.arguments(), safe_serialization=False)
    assert not list(tmp_path.glob("*.safetensors"))
    assert_loads_as_theirs(tmp_path, exact_logits(theirs, kind_case.ours), format_name="timm")


@pytest.mark.parametrize("kind", KINDS)
def test_timm_loads_our_directory(kind: str, tmp_path: Path) -> None:
    timm, ours = import_timm(), make_bundle(KINDS[kind].ours)
    folder = write_with_format(ours, "timm", tmp_path / "out")
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True)  # strict: no tensor more or less
    assert_same_logits(exact_logits(ours.build_model(), ours.config), exact_logits(theirs.eval(), ours.config))
    if ours.labels:
        assert tuple(theirs.pretrained_cfg["label_names"]) == LABELS


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in LARGE])
def test_timm_loads_our_weights_as_checkpoint(kind: str, tmp_path: Path) -> None:
    kind_case = KINDS[kind]
    ours = make_bundle(kind_case.ours)
    file = write_with_format(ours, "timm", tmp_path / "out") / "model.safetensors"
    theirs = kind_case.build(checkpoint_path=str(file))
    assert_same_logits(exact_logits(ours.build_model(), ours.config), exact_logits(theirs.eval(), ours.config))


# Google's files, by timm's own loader of them


def assert_whole(file: Path, model: nn.Module) -> None:
    """Check that the model has exactly the values of an npz file, because timm's loader ignores leftovers."""
    with np.load(file, allow_pickle=False) as arrays:
        held = sum(arrays[name].size for name in arrays.files)
    assert sum(parameter.numel() for parameter in model.parameters()) == held
    assert not any(parameter.isnan().any() for parameter in model.parameters())


def google_hybrid(units: tuple[int, ...], *, patch_size: int = 1) -> ViTConfig:
    return with_tanh_gelu(hybrid(units, patch_size=patch_size, positions=PositionConfig()))


GOOGLES = {
    "google: class token": Kind(with_tanh_gelu(SMALL)),
    "google: mean": Kind(
        with_tanh_gelu(replace(SMALL, pooling="mean")),
        theirs={"global_pool": "avg", "class_token": False, "fc_norm": False},
    ),
    "big_vision: class token": Kind(with_tanh_gelu(SMALL)),
    "big_vision: class token without a position": Kind(
        with_tanh_gelu(replace(SMALL, positions=PositionConfig(covers="patches"))), theirs={"no_embed_class": True}
    ),
    "big_vision: mean": Kind(
        with_tanh_gelu(replace(SMALL, pooling="mean", positions=PositionConfig(covers="patches"))),
        theirs={"global_pool": "avg", "class_token": False, "fc_norm": False},
    ),
    "big_vision: attention pooling": Kind(
        with_tanh_gelu(replace(SMALL, pooling="map", positions=PositionConfig(covers="patches"))),
        theirs={"global_pool": "map", "class_token": False},
    ),
    "google: R+": Kind(google_hybrid((), patch_size=8), "vit_tiny_r_s16_p8_224", {"img_size": 64, "depth": 1}),
    "google: R50+": Kind(google_hybrid((3, 4, 9)), "vit_base_r50_s16_224", HYBRID),
    "bit: BiT": Kind(BiTConfig(num_classes=5, image_size=64, origin="timm"), "resnetv2_50x1_bit"),
}
"""ResNets have timm's numerics, which timm uses for weights of every origin."""


def googles(config: ModelConfig) -> ModelConfig:
    """Return the model with the numerics of Google's code."""
    if isinstance(config, BiTConfig):
        return replace(config, origin="google")
    return replace(config, backbone=config.backbone and replace(config.backbone, origin="google"))


@pytest.mark.parametrize("kind", GOOGLES)
def test_timm_reads_our_google_files(kind: str, tmp_path: Path) -> None:
    timm, kind_case = import_timm(), GOOGLES[kind]
    ours = make_bundle(kind_case.ours)
    published = replace(ours, config=googles(ours.config))
    file = write_with_format(published, kind.partition(":")[0], tmp_path / "weights.npz")
    tanh = {"act_layer": "gelu_tanh"} if isinstance(ours.config, ViTConfig) else {}
    theirs = filled(kind_case.build(**tanh))
    timm.models.load_checkpoint(theirs, str(file))  # what create_model does with a checkpoint_path
    assert_whole(file, theirs)
    expected = exact_logits(theirs.eval(), ours.config)
    assert_same_logits(exact_logits(ours.build_model(), ours.config), expected)
    if published.config == ours.config:
        assert_loads_as_theirs(file, expected, format_name=kind.partition(":")[0])
    else:  # timm computes with other numbers than the weights were trained with, and we with those
        difference = (exact_logits(published.build_model(), ours.config) - expected).abs().max()
        assert 5e-6 < difference < 1e-2  # BiT's is 7.7e-6; in float32 rounding alone kind_case more of it


# From timm and back


def save_timm(folder: Path, architecture: str, **args: Any) -> Any:
    timm = import_timm()
    model = randomize_model(timm.create_model(architecture, depth=1, num_classes=5, **args))
    timm.models.save_for_hf(model, folder, model_args=args)
    return model


def test_register_positions_are_not_lost_silently(tmp_path: Path) -> None:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "num_heads": 2}
    theirs = save_timm(tmp_path / "theirs", "vit_so150m_patch16_reg4_gap_256", **sizes)
    with pytest.raises(WeightsError, match="left out or combined: reg_token, pos_embed"):
        vitkit.convert(tmp_path / "theirs", tmp_path / "out", to="timm")
    vitkit.convert(tmp_path / "theirs", tmp_path / "out", to="timm", allow_loss=True)
    expected = exact_logits(theirs, vitkit.load(tmp_path / "out").config)
    theirs.load_state_dict(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"), strict=True)
    assert_same_logits(exact_logits(theirs, vitkit.load(tmp_path / "out").config), expected)
    result = vitkit.convert(tmp_path / "out", tmp_path / "again", to="timm")  # the rows of registers are zero now
    assert result.dropped == ()


@pytest.mark.parametrize("architecture", ["vit_small_patch16_dinov3", "vit_small_plus_patch16_dinov3_qkvb"])
def test_dinov3_of_timm_is_converted_to_timm(architecture: str, tmp_path: Path) -> None:
    theirs = save_timm(tmp_path / "theirs", architecture, img_size=32, patch_size=8, embed_dim=64, num_heads=2)
    vitkit.convert(tmp_path / "theirs", tmp_path / "out", to="timm")
    ours = vitkit.load(tmp_path / "out")
    again = import_timm().create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    for model in (ours, again):
        assert_same_logits(exact_logits(model, ours.config), exact_logits(theirs, ours.config))


def test_edited_config_json_sets_preprocessing(tmp_path: Path) -> None:
    write_with_format(make_bundle(SMALL), "timm", tmp_path / "out")
    assert vitkit.describe_weights(tmp_path / "out").notes == ()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["pretrained_cfg"]["interpolation"] = "nearest"
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    info = vitkit.describe_weights(tmp_path / "out")
    assert info.preprocessing.interpolation == "nearest"
    assert info.notes == ("preprocessor_config.json ignored: config.json, which timm reads, has another interpolation",)


# Facebook's files, by timm's own filters of them


@dataclass(frozen=True)
class Published(Kind):
    """A published model of Facebook's and timm's architecture whose filter reads its file."""

    def loaded(self, file: Path, **changes: Any) -> Any:
        overlay = {"file": str(file), "custom_load": False, "num_classes": self.ours.num_classes}
        return self.build(pretrained=True, pretrained_cfg_overlay=overlay, **changes)


BARE = replace(SMALL, num_classes=0)
SCALED = replace(BARE, block=replace(ERF, layer_scale=1e-5))
ROTARY = PositionConfig(kind="rotary", origin="dinov2")
THIRD = replace(BARE, image_size=224, patch_size=16, positions=ROTARY, tokens=TokenConfig(registers=4))
# timm's own DINOv3 models leave out a bias that is next to nothing in the published weights; these have it.
DINOV3 = {"img_size": 224, "patch_size": 16, "global_pool": "token"}
FACEBOOKS = {
    "deit: class token": Published(SMALL, "deit_small_patch16_224"),
    "deit: distilled": Published(
        replace(SMALL, tokens=TokenConfig(distillation=True)), "deit_small_distilled_patch16_224"
    ),
    "deit: the third": Published(
        replace(SMALL, block=replace(ERF, layer_scale=1e-6), positions=PositionConfig(covers="patches")),
        "deit3_small_patch16_224",
    ),
    "mae: pre-trained": Published(BARE, "vit_base_patch16_224.mae"),
    "mae: fine-tuned": Published(
        replace(SMALL, pooling="mean", head=HeadConfig(norm="after_pooling"), tokens=TokenConfig(class_token=True)),
        "vit_base_patch16_224",
        {"global_pool": "avg"},
    ),
    "dinov2: plain": Published(SCALED, "vit_small_patch14_dinov2"),
    "dinov2: gated": Published(
        replace(SCALED, block=replace(SCALED.block, activation="swiglu")),
        "vit_giant_patch14_dinov2",
        {"mlp_ratio": 3.0},
    ),
    "dinov2: registers": Published(replace(SCALED, tokens=TokenConfig(registers=4)), "vit_small_patch14_reg4_dinov2"),
    "dinov3: plain": Published(
        replace(THIRD, block=replace(ERF, layer_scale=1e-5, norm_eps=1e-5)), "vit_small_patch16_dinov3_qkvb", DINOV3
    ),
    "dinov3: gated": Published(
        replace(THIRD, block=replace(ERF, layer_scale=1e-5, norm_eps=1e-5, activation="swiglu")),
        "vit_small_plus_patch16_dinov3_qkvb",
        DINOV3,
    ),
}


def as_trained(ours: ModelBundle, kind: str) -> ModelBundle:
    """Zero the bias of keys, which DINOv3 does not have."""
    if kind.startswith("dinov3"):
        for name, tensor in ours.state.items():
            if name.endswith("qkv.bias"):
                tensor.chunk(3)[1].zero_()
    return ours


@pytest.mark.parametrize("kind", FACEBOOKS)
def test_timm_filters_read_our_facebook_files(kind: str, tmp_path: Path) -> None:
    kind_case = FACEBOOKS[kind]
    ours = as_trained(make_bundle(kind_case.ours), kind)
    file = write_with_format(ours, kind.partition(":")[0], tmp_path / "weights.pth")
    expected = exact_logits(kind_case.loaded(file).eval(), ours.config)
    assert_same_logits(exact_logits(ours.build_model(), ours.config), expected)
    assert_loads_as_theirs(file, expected, format_name=kind.partition(":")[0])


SAVED = [kind for kind in FACEBOOKS if kind.partition(":")[0] in ("deit", "mae") or kind == "dinov2: plain"]
"""Models for which timm's state dict is also a file of Facebook's."""


@pytest.mark.parametrize("kind", SAVED)
def test_loaded_facebook_files_equal_timm(kind: str, tmp_path: Path) -> None:
    kind_case, origin = FACEBOOKS[kind], kind.partition(":")[0]
    theirs = randomize_model(kind_case.build())
    tensors = {
        re.sub(r"ls(\d)\.gamma", r"gamma_\1", name) if origin == "deit" else name: tensor
        for name, tensor in theirs.state_dict().items()
    }
    if origin == "dinov2":
        torch.save(tensors | {"mask_token": torch.zeros(1, 128)}, tmp_path / "weights.pth")
    else:
        torch.save({"model": tensors, "epoch": 300}, tmp_path / "weights.pth")
    assert_loads_as_theirs(tmp_path / "weights.pth", exact_logits(theirs, kind_case.ours), format_name=origin)
