"""Files exchanged with transformers through `save_pretrained` and `from_pretrained`."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle.round_trip import (
    ERF,
    LABELS,
    SMALL,
    TANH,
    assert_same_logits,
    compute_logits,
    images_for,
    make_bundle,
    randomize_model,
    write_with_format,
)
from oracles import import_timm, import_transformers
from torch import Tensor

import vitkit
from vitkit.core.errors import WeightsError
from vitkit.core.sizes import pair
from vitkit.model.config import AttentionConfig, BackboneConfig, HeadConfig, TokenConfig, ViTConfig
from vitkit.model.patches import select_patches
from vitkit.weights import artifact as artifact_io
from vitkit.weights.io.readers import open_tensors
from vitkit.weights.load import identify, load_stored_bundle
from vitkit.weights.pretraining import load_mae_model

SIZES: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
"""SMALL as configuration of transformers."""
VIT = SIZES | {"intermediate_size": 192, "num_labels": 5}
DECODER = {"decoder_hidden_size": 32, "decoder_num_attention_heads": 2, "decoder_num_hidden_layers": 1}
MAE = VIT | DECODER | {"decoder_intermediate_size": 48, "mask_ratio": 0.0}
DINO = SIZES | {"mlp_ratio": 3}
NAMED = {"id2label": dict(enumerate(LABELS)), "label2id": {label: number for number, label in enumerate(LABELS)}}


def logits(output: Any) -> Tensor:
    return output.logits


def class_token(output: Any) -> Tensor:
    return output.last_hidden_state[:, 0]


def two_tokens(output: Any) -> Tensor:
    return output.last_hidden_state[:, :2].flatten(1)


def pooled(output: Any) -> Tensor:
    return output.pooler_output


@dataclass(frozen=True)
class Kind:
    """A model as our configuration and as one of transformers, and the output to compare.

    `unread` are its tensors that no image needs, and that a file of ours has no numbers for.
    """

    format: str
    ours: ViTConfig
    name: str
    theirs: dict[str, Any]
    reads: Callable[[Any], Tensor] = logits
    arguments: dict[str, Any] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()

    def build(self) -> Any:
        model = getattr(import_transformers(), self.name)
        return randomize_model(model(model.config_class(**self.theirs), **self.arguments))


EPS = replace(ERF, norm_eps=1e-12)
PLAIN, BARE = replace(SMALL, block=EPS), replace(SMALL, block=EPS, num_classes=0)
SCALED = replace(SMALL, num_classes=0, mlp_dim=384, block=replace(ERF, layer_scale=1.0))
CLASS_MEAN = replace(SCALED, num_classes=5, pooling="class_mean")
GATED = replace(SCALED, mlp_dim=256, block=replace(SCALED.block, activation="swiglu"))
POOLER = frozenset({"pooler.dense.weight", "pooler.dense.bias"})
MASK = frozenset({"embeddings.mask_token"})
CLASSIFIER, TEACHER = "ViTForImageClassification", "DeiTForImageClassificationWithTeacher"
FOUR, DISTILLED = TokenConfig(registers=4), TokenConfig(distillation=True)

KINDS = {
    "ViT": Kind("huggingface", PLAIN, CLASSIFIER, VIT | NAMED),
    "ViT, Google's GELU and eps": Kind(
        "huggingface",
        replace(SMALL, block=TANH),
        CLASSIFIER,
        VIT | {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
    ),
    "ViT, large eps": Kind(
        "huggingface", replace(SMALL, block=replace(ERF, norm_eps=1e-2)), CLASSIFIER, VIT | {"layer_norm_eps": 1e-2}
    ),
    "ViT, wide, 1 channel": Kind(
        "huggingface",
        replace(PLAIN, image_size=(24, 40), channels=1),
        CLASSIFIER,
        VIT | {"image_size": (24, 40), "num_channels": 1},
    ),
    "ViT, no qkv bias": Kind(
        "huggingface",
        replace(PLAIN, block=replace(EPS, attention=AttentionConfig(qkv_bias=False))),
        CLASSIFIER,
        VIT | {"qkv_bias": False},
    ),
    "ViT, headless": Kind(
        "huggingface", BARE, "ViTModel", VIT, class_token, arguments={"add_pooling_layer": False}, unread=POOLER
    ),
    "ViT, pooler": Kind("huggingface", replace(BARE, head=HeadConfig(pre_logits=128)), "ViTModel", VIT, pooled),
    "DeiT": Kind("huggingface-deit", replace(PLAIN, tokens=DISTILLED), TEACHER, VIT | NAMED),
    "DeiT, headless": Kind(
        "huggingface-deit",
        replace(BARE, tokens=DISTILLED),
        "DeiTModel",
        VIT,
        two_tokens,
        arguments={"add_pooling_layer": False},
        unread=POOLER,
    ),
    "MAE": Kind("huggingface-mae", BARE, "ViTMAEModel", MAE, class_token),
    "DINOv2": Kind("huggingface-dinov2", SCALED, "Dinov2Model", DINO, pooled),
    "DINOv2, gated": Kind("huggingface-dinov2", GATED, "Dinov2Model", DINO | {"use_swiglu_ffn": True}, pooled),
    "DINOv2, registers": Kind(
        "huggingface-dinov2", replace(SCALED, tokens=FOUR), "Dinov2WithRegistersModel", DINO, pooled, unread=MASK
    ),
    "DINOv2, registers, gated": Kind(
        "huggingface-dinov2",
        replace(GATED, tokens=FOUR),
        "Dinov2WithRegistersModel",
        DINO | {"use_swiglu_ffn": True},
        pooled,
        unread=MASK,
    ),
    "DINOv2, classifier": Kind("huggingface-dinov2", CLASS_MEAN, "Dinov2ForImageClassification", DINO | NAMED),
    "DINOv2, registers, classifier": Kind(
        "huggingface-dinov2",
        replace(CLASS_MEAN, tokens=FOUR),
        "Dinov2WithRegistersForImageClassification",
        DINO | NAMED,
        unread=frozenset({"dinov2_with_registers.embeddings.mask_token"}),
    ),
}
kinds = pytest.mark.parametrize("kind", KINDS)


@torch.no_grad()
def their_answer(model: Any, config: ViTConfig, reads: Callable[[Any], Tensor]) -> Tensor:
    # An MAE shuffles patches by this noise even if it hides none: in order, so that both sum in the same order.
    order = {"noise": torch.arange(config.patches).expand(2, -1)} if "MAE" in type(model).__name__ else {}
    return reads(model(images_for(config), **order))


@kinds
def test_loaded_transformers_model_equals_transformers(kind: str, tmp_path: Path) -> None:
    kind_case = KINDS[kind]
    theirs = kind_case.build()
    theirs.save_pretrained(tmp_path)
    with open_tensors(tmp_path) as tensors:
        assert identify(tensors).format.name == kind_case.format
    ours = vitkit.load(tmp_path)
    kernel = ours.config.positions.origin
    assert ours.config == replace(kind_case.ours, positions=replace(kind_case.ours.positions, origin=kernel))
    assert_same_logits(compute_logits(ours, ours.config), their_answer(theirs, kind_case.ours, kind_case.reads))
    if "id2label" in kind_case.theirs:
        assert ours.labels == LABELS


@kinds
def test_transformers_loads_our_directory(kind: str, tmp_path: Path) -> None:
    kind_case = KINDS[kind]
    ours = make_bundle(kind_case.ours)
    write_with_format(ours, kind_case.format, tmp_path / "out")
    visible = {"mask_ratio": 0.0} if kind_case.format == "huggingface-mae" else {}
    model = getattr(import_transformers(), kind_case.name)
    theirs, report = model.from_pretrained(tmp_path / "out", output_loading_info=True, **visible)
    assert set(report["missing_keys"]) == kind_case.unread
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert_same_logits(
        compute_logits(ours.build_model(), ours.config), their_answer(theirs.eval(), kind_case.ours, kind_case.reads)
    )
    if ours.config.num_classes:
        assert tuple(theirs.config.id2label[number] for number in range(5)) == LABELS


def test_deit_that_ignores_its_distillation_token(tmp_path: Path) -> None:
    theirs = replace(KINDS["DeiT"], name="DeiTForImageClassification").build()
    theirs.save_pretrained(tmp_path)
    ours = vitkit.load(tmp_path)
    assert (ours.config.tokens, ours.labels) == (TokenConfig(registers=1), LABELS)
    assert_same_logits(compute_logits(ours, ours.config), their_answer(theirs, ours.config, logits))
    with pytest.raises(WeightsError, match="registers"):
        write_with_format(load_stored_bundle(tmp_path), "huggingface-deit", tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["ViTMSN", "IJepa", "Beit", "Data2VecVision", "DINOv3ViT", "SiglipVision", "CLIPVision"]
)
def test_other_model_types_are_named(name: str, tmp_path: Path) -> None:
    model = getattr(import_transformers(), f"{name}Model")
    sizes = SIZES | {"intermediate_size": 192, "num_register_tokens": 4}
    model(model.config_class(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match=f"transformers' {model.config_class.model_type} is not supported") as caught:
        vitkit.load(tmp_path)
    assert "dinov2" in str(caught.value.hint)


def test_mae_encoder_is_read_without_its_decoder(tmp_path: Path) -> None:
    theirs = replace(KINDS["MAE"], name="ViTMAEForPreTraining").build()
    theirs.save_pretrained(tmp_path)
    assert_same_logits(compute_logits(vitkit.load(tmp_path), BARE), their_answer(theirs.vit, BARE, class_token))


def test_decoder_and_mask_token_are_not_lost_silently(tmp_path: Path) -> None:
    mae = replace(KINDS["MAE"], name="ViTMAEForPreTraining").build()
    for name, model, prefix in (("mae", mae, "decoder."), ("dinov2", KINDS["DINOv2"].build(), "embeddings.mask_token")):
        model.save_pretrained(tmp_path / name)
        out, to = tmp_path / f"{name}-out", f"huggingface-{name}"
        with pytest.raises(WeightsError, match=f"left out or combined: {prefix}"):
            vitkit.convert(tmp_path / name, out, to=to)
        assert not out.exists()
        result = vitkit.convert(tmp_path / name, out, to=to, allow_loss=True)
        with open_tensors(tmp_path / name) as tensors:
            lost = {each for each in tensors if each.startswith(prefix)}
        assert {each for each in result.dropped if each.startswith(prefix)} == lost
        assert set(vitkit.describe_weights(tmp_path / name).dropped) == lost


def test_mae_for_training_loads_our_encoder(tmp_path: Path) -> None:
    ours = make_bundle(BARE)
    write_with_format(ours, "huggingface-mae", tmp_path / "out")
    model = import_transformers().ViTMAEForPreTraining
    theirs, report = model.from_pretrained(tmp_path / "out", output_loading_info=True, mask_ratio=0.0)
    assert all(name.startswith("decoder.") for name in report["missing_keys"])
    assert not report["unexpected_keys"]
    assert_same_logits(compute_logits(ours.build_model(), BARE), their_answer(theirs.vit.eval(), BARE, class_token))


# Through timm: transformers takes a folder of timm's, and so one of ours

THROUGH_TIMM = {
    "class token": SMALL,
    "tanh": replace(SMALL, block=TANH),
    "mean": replace(SMALL, pooling="mean"),
    "distilled": replace(SMALL, tokens=DISTILLED),
    "registers": replace(SMALL, tokens=FOUR),
    "R+": replace(SMALL, image_size=64, backbone=BackboneConfig(units=(), origin="timm")),
}


@pytest.mark.parametrize("kind", THROUGH_TIMM)
@pytest.mark.parametrize("to", ["timm", "vitkit"])
def test_transformers_timm_wrapper_loads_our_directory(to: str, kind: str, tmp_path: Path) -> None:
    timm, transformers = import_timm(), import_transformers()
    ours = make_bundle(THROUGH_TIMM[kind])
    if to == "vitkit":
        artifact_io.write_artifact(tmp_path / "out", ours)
    else:
        write_with_format(ours, to, tmp_path / "out")
    theirs, report = transformers.TimmWrapperForImageClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    wrapped = their_answer(theirs.eval(), ours.config, logits)
    assert_same_logits(compute_logits(ours.build_model(), ours.config), wrapped)
    assert tuple(theirs.config.id2label[number] for number in range(5)) == LABELS
    bare = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    assert torch.equal(compute_logits(bare, ours.config), wrapped)


@pytest.mark.parametrize("kind", [name for name in KINDS if name.startswith("DINOv2")])
def test_dinov2_is_loaded_at_its_evaluation_size(kind: str, tmp_path: Path) -> None:
    kind_case = KINDS[kind]
    theirs = kind_case.build()
    theirs.save_pretrained(tmp_path)
    stored = load_stored_bundle(tmp_path)
    fed = stored.config.image_size // 2
    how = replace(stored.preprocessing, image_size=fed).to_hub()
    del how["vitkit"]  # as Hugging Face's own file says it
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(how))
    ours = vitkit.load(tmp_path)
    assert ours.config.image_size == pair(fed)
    assert load_stored_bundle(tmp_path).config.image_size == stored.config.image_size
    # Their model takes images of any size, and resamples its positions to them.
    assert_same_logits(compute_logits(ours, ours.config), their_answer(theirs, ours.config, kind_case.reads))


@pytest.mark.parametrize("own_names", [False, True])
def test_mae_reconstruction_equals_transformers(own_names: bool, tmp_path: Path) -> None:
    sizes = {"decoder_intermediate_size": 128, "mask_ratio": 0.75}  # a decoder's MLP is four times its width
    kind_case = replace(KINDS["MAE"], name="ViTMAEForPreTraining", theirs=KINDS["MAE"].theirs | sizes)
    theirs = kind_case.build()
    theirs.save_pretrained(tmp_path / "theirs")
    place = tmp_path / "theirs"
    if own_names:  # as MAE's own code writes it
        ours = load_mae_model(place)
        state = {name.removeprefix("encoder."): tensor for name, tensor in ours.state_dict().items()}
        place = tmp_path / "mae_visualize_vit_small.pth"
        torch.save({"model": state}, place)
        args = {"num_heads": kind_case.ours.heads}
        (tmp_path / "config.json").write_text(json.dumps({"model_args": args}))
        with open_tensors(place) as tensors:
            assert identify(tensors).format.name == "mae"
    model = load_mae_model(place)
    assert not model.config.normalize
    if own_names:  # what such a file cannot say: Hugging Face's eps, and how many heads the decoder has
        assert model.config.heads == 16
        return
    images, patches = images_for(kind_case.ours), kind_case.ours.patches
    noise = torch.rand(2, patches, generator=torch.Generator().manual_seed(0))
    order = noise.argsort(dim=1)
    visible, places = order[:, : patches // 4].sort(dim=1).values, order[:, patches // 4 :].sort(dim=1).values
    with torch.no_grad():
        expected = select_patches(theirs(images, noise=noise).logits, places)
        assert_same_logits(model(images, visible, places), expected)
    assert load_mae_model(tmp_path / "theirs").config.mask_ratio == 0.75


def test_mae_without_decoder_cannot_reconstruct(tmp_path: Path) -> None:
    KINDS["MAE"].build().save_pretrained(tmp_path)
    assert load_mae_model(tmp_path) is None
