"""Files between transformers and us, both ways, by its own `save_pretrained` and `from_pretrained`."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle.both_ways import ERF, LABELS, SMALL, TANH, answer, assert_same_logits, drawn, images_for, of_ours, written
from oracles import import_timm, import_transformers
from torch import Tensor

import vitkit
from vitkit.checkpoints import native
from vitkit.checkpoints.files.readers import open_tensors
from vitkit.checkpoints.foreign import identify, load_as_stored
from vitkit.checkpoints.pretraining import load_foreign_pretraining
from vitkit.core.shapes import pair
from vitkit.model.attention import AttentionConfig
from vitkit.model.config import TokenConfig, ViTConfig
from vitkit.model.heads import HeadConfig
from vitkit.model.patches import select_patches
from vitkit.model.resnet import BackboneConfig

SIZES: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
"""SMALL in the words of transformers."""
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
    """A model in our words and in those of transformers, and what of its output ours must give.

    `unread` are its tensors that no image needs, and that a file of ours has no numbers for.
    """

    format: str
    ours: ViTConfig
    name: str
    theirs: dict[str, Any]
    reads: Callable[[Any], Tensor] = logits
    arguments: dict[str, Any] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()

    def made(self) -> Any:
        model = getattr(import_transformers(), self.name)
        return drawn(model(model.config_class(**self.theirs), **self.arguments))


EPS = replace(ERF, norm_eps=1e-12)
PLAIN, BARE = replace(SMALL, block=EPS), replace(SMALL, block=EPS, classes=0)
SCALED = replace(SMALL, classes=0, mlp_dim=384, block=replace(ERF, layer_scale=1.0))
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
}
kinds = pytest.mark.parametrize("kind", KINDS)


@torch.no_grad()
def their_answer(model: Any, config: ViTConfig, reads: Callable[[Any], Tensor]) -> Tensor:
    # An MAE shuffles patches by this noise even if it hides none: in order, so that both sum in the same order.
    order = {"noise": torch.arange(config.patches).expand(2, -1)} if "MAE" in type(model).__name__ else {}
    return reads(model(images_for(config), **order))


@kinds
def test_what_transformers_saves_answers_here_as_there(kind: str, tmp_path: Path) -> None:
    made = KINDS[kind]
    theirs = made.made()
    theirs.save_pretrained(tmp_path)
    with open_tensors(tmp_path) as tensors:
        assert identify(tensors).format.name == made.format
    ours = vitkit.load(tmp_path)
    kernel = ours.config.positions.origin
    assert ours.config == replace(made.ours, positions=replace(made.ours.positions, origin=kernel))
    assert_same_logits(answer(ours, ours.config), their_answer(theirs, made.ours, made.reads))
    if "id2label" in made.theirs:
        assert ours.labels == LABELS


@kinds
def test_transformers_loads_the_folder_that_we_write(kind: str, tmp_path: Path) -> None:
    made = KINDS[kind]
    ours = of_ours(made.ours)
    written(ours, made.format, tmp_path / "out")
    visible = {"mask_ratio": 0.0} if made.format == "huggingface-mae" else {}
    model = getattr(import_transformers(), made.name)
    theirs, report = model.from_pretrained(tmp_path / "out", output_loading_info=True, **visible)
    assert set(report["missing_keys"]) == made.unread
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert_same_logits(answer(ours.model(), ours.config), their_answer(theirs.eval(), made.ours, made.reads))
    if ours.config.classes:
        assert tuple(theirs.config.id2label[number] for number in range(5)) == LABELS


def test_the_encoder_of_an_mae_in_training_is_read_and_its_decoder_left_aside(tmp_path: Path) -> None:
    theirs = replace(KINDS["MAE"], name="ViTMAEForPreTraining").made()
    theirs.save_pretrained(tmp_path)
    assert_same_logits(answer(vitkit.load(tmp_path), BARE), their_answer(theirs.vit, BARE, class_token))


def test_an_mae_in_training_takes_our_encoder_and_misses_its_decoder_alone(tmp_path: Path) -> None:
    ours = of_ours(BARE)
    written(ours, "huggingface-mae", tmp_path / "out")
    model = import_transformers().ViTMAEForPreTraining
    theirs, report = model.from_pretrained(tmp_path / "out", output_loading_info=True, mask_ratio=0.0)
    assert all(name.startswith("decoder.") for name in report["missing_keys"])
    assert not report["unexpected_keys"]
    assert_same_logits(answer(ours.model(), BARE), their_answer(theirs.vit.eval(), BARE, class_token))


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
def test_transformers_wraps_timms_model_around_the_folder_that_we_write(to: str, kind: str, tmp_path: Path) -> None:
    timm, transformers = import_timm(), import_transformers()
    ours = of_ours(THROUGH_TIMM[kind])
    if to == "vitkit":
        native.save(tmp_path / "out", ours)
    else:
        written(ours, to, tmp_path / "out")
    theirs, report = transformers.TimmWrapperForImageClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    wrapped = their_answer(theirs.eval(), ours.config, logits)
    assert_same_logits(answer(ours.model(), ours.config), wrapped)
    assert tuple(theirs.config.id2label[number] for number in range(5)) == LABELS
    bare = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    assert torch.equal(answer(bare, ours.config), wrapped)


@pytest.mark.parametrize("kind", [name for name in KINDS if name.startswith("DINOv2")])
def test_a_dinov2_is_loaded_for_the_images_that_it_is_fed(kind: str, tmp_path: Path) -> None:
    made = KINDS[kind]
    theirs = made.made()
    theirs.save_pretrained(tmp_path)
    stored = load_as_stored(tmp_path)
    fed = stored.config.image_size // 2
    how = replace(stored.preprocessing, image_size=fed).to_hub()
    del how["vitkit"]  # as Hugging Face's own file says it
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(how))
    ours = vitkit.load(tmp_path)
    assert ours.config.image_size == pair(fed)
    assert load_as_stored(tmp_path).config.image_size == stored.config.image_size
    # Their model takes images of any size, and resamples its positions to them.
    assert_same_logits(answer(ours, ours.config), their_answer(theirs, ours.config, made.reads))


@pytest.mark.parametrize("own_names", [False, True])
def test_an_mae_with_its_decoder_fills_in_patches_as_theirs_does(own_names: bool, tmp_path: Path) -> None:
    sizes = {"decoder_intermediate_size": 128, "mask_ratio": 0.75}  # a decoder's MLP is four times its width
    made = replace(KINDS["MAE"], name="ViTMAEForPreTraining", theirs=KINDS["MAE"].theirs | sizes)
    theirs = made.made()
    theirs.save_pretrained(tmp_path / "theirs")
    place = tmp_path / "theirs"
    if own_names:  # as MAE's own code writes it
        ours = load_foreign_pretraining(place)
        state = {name.removeprefix("encoder."): tensor for name, tensor in ours.state_dict().items()}
        place = tmp_path / "mae_visualize_vit_small.pth"
        torch.save({"model": state}, place)
        with open_tensors(place) as tensors:
            assert identify(tensors).format.name == "mae"
    model = load_foreign_pretraining(place)
    assert not model.settings.normalise
    if own_names:  # what such a file cannot say: Hugging Face's eps, and how many heads the decoder has
        assert model.settings.heads == 16
        return
    images, patches = images_for(made.ours), made.ours.patches
    noise = torch.rand(2, patches, generator=torch.Generator().manual_seed(0))
    order = noise.argsort(dim=1)
    visible, places = order[:, : patches // 4].sort(dim=1).values, order[:, patches // 4 :].sort(dim=1).values
    with torch.no_grad():
        expected = select_patches(theirs(images, noise=noise).logits, places)
        assert_same_logits(model(images, visible, places), expected)
    assert load_foreign_pretraining(tmp_path / "theirs").settings.hidden == 0.75


def test_an_mae_without_its_decoder_has_nothing_to_fill_in_with(tmp_path: Path) -> None:
    KINDS["MAE"].made().save_pretrained(tmp_path)
    assert load_foreign_pretraining(tmp_path) is None
