"""Logits of Google's files against the NumPy witness, and real weights on photos."""

import csv
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_cases import images_for, meta_model, random_vit, small
from numpy.typing import NDArray
from oracles import import_timm
from torch import Tensor, nn
from weights.google_files import (
    DIALECTS,
    FORMATS,
    NPZ,
    File,
    big_vision,
    drawn,
    later,
    on_one_axis,
    recognized,
    same_bits,
    shapes_of,
    tensors,
    with_prefix,
)
from witness import google_numpy as witness

from vitkit.core.errors import WeightsError
from vitkit.data.decode import decode
from vitkit.data.preprocessing import ORIGINS
from vitkit.model.config import BackboneConfig, PositionConfig, ViTConfig
from vitkit.weights.formats.base import FileMetadata, Format
from vitkit.weights.formats.bit import BIT
from vitkit.weights.formats.google import BIG_VISION, GOOGLE
from vitkit.weights.rules import KeyMatch, apply_rules, invert_rules, match_keys
from vitkit.zoo.registry import create, find_variant

DATA = Path(__file__).parents[3] / "shared" / "data"
WEIGHTS, PHOTOS = DATA / "weights" / "Ti_16-augreg-imagenet.npz", DATA / "photos"
TOLERANCE = {
    torch.float32: 1e-5,  # a few hundred roundings of 6e-8 on logits of order 1
    torch.float64: 1e-10,  # the witness runs in float64 too: only the order of summation differs
}


def logits_of(
    form: Format, file: File, images: NDArray[np.float64], *, metadata: FileMetadata = NPZ, dtype: torch.dtype
) -> Any:
    """Load a file by its format's inference and rules, and compute the logits."""
    config = form.infer_config(shapes_of(file), metadata)
    model = create(config, device="meta")
    model.load_state_dict(
        dict(apply_rules(form.rules(config, shapes_of(file)), tensors(file))), strict=True, assign=True
    )
    with torch.no_grad():
        return model.eval().to(dtype)(torch.from_numpy(images.transpose(0, 3, 1, 2).copy()).to(dtype)).numpy()


def assert_logits(
    form: Format,
    file: File,
    expected: NDArray[np.float64],
    images: NDArray[np.float64],
    *,
    metadata: FileMetadata = NPZ,
) -> None:
    assert expected.std() > 0.1
    for dtype, tolerance in TOLERANCE.items():
        actual = logits_of(form, file, images, metadata=metadata, dtype=dtype)
        scale = np.abs(expected).max()
        np.testing.assert_allclose(actual / scale, expected / scale, rtol=0, atol=tolerance, err_msg=str(dtype))


@pytest.fixture
def images() -> NDArray[np.float64]:
    return np.random.default_rng(1).normal(size=(2, 32, 32, 3)).astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_naming_scheme_gives_the_same_logits(dialect: str, images: NDArray[np.float64]) -> None:
    (form, translate), released = DIALECTS[dialect], drawn(depth=3)
    file = translate(released)
    assert recognized(file) == [form]
    assert_logits(FORMATS[form], file, witness.vit_logits(released, images), images)


# Logits of the released code, its ResNets and its later heads


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="class token"),
        pytest.param({"pre_logits": 20}, id="pre-logits"),
        pytest.param({"class_token": False}, id="mean-pooled"),
        pytest.param({"class_token": False, "pre_logits": 20}, id="mean-pooled, pre-logits"),
        pytest.param({"patch": 16, "heads": 1}, id="large patches, one head"),
    ],
)
def test_vit_logits_equal_released_code(changes: dict[str, Any], images: NDArray[np.float64]) -> None:
    file = drawn(**changes)
    assert recognized(file) == ["google"]
    assert_logits(GOOGLE, file, witness.vit_logits(file, images), images)


@pytest.mark.parametrize("flat_norms", [True, False], ids=["norms of C", "norms of 1x1x1xC"])
@pytest.mark.parametrize(
    ("units", "root_width", "patch"), [((2, 1), 32, 1), ((1,), 64, 2), ((), 32, 4)], ids=["two stages", "one", "root"]
)
def test_hybrid_logits_equal_released_code(
    units: tuple[int, ...], root_width: int, patch: int, flat_norms: bool, images: NDArray[np.float64]
) -> None:
    file = witness.random_hybrid_weights(
        np.random.default_rng(0), blocks=units, root_width=root_width, patch=patch, flat_norms=flat_norms
    )
    assert recognized(file) == ["google"]
    config = GOOGLE.infer_config(shapes_of(file), NPZ)
    assert isinstance(config, ViTConfig)
    assert config.backbone == BackboneConfig(units=units, root_width=root_width)
    assert_logits(GOOGLE, file, witness.vit_logits(file, images), images)
    rules = GOOGLE.rules(config, shapes_of(file))
    assert match_keys(rules, file) == KeyMatch((), ())
    assert same_bits(dict(invert_rules(rules, dict(apply_rules(rules, tensors(file))))), tensors(file))
    released = dict(invert_rules(GOOGLE.rules(config, None), dict(apply_rules(rules, tensors(file)))))
    assert released["gn_root/scale"].shape == (1, 1, 1, root_width)


@pytest.mark.parametrize("units", [(1, 1, 1), (2, 1)], ids=["three stages", "two stages"])
def test_bit_logits_equal_released_code(units: tuple[int, ...], images: NDArray[np.float64]) -> None:
    file = witness.random_bit_weights(np.random.default_rng(0), blocks=units, width_factor=1)
    assert recognized(file) == ["bit"]
    assert_logits(BIT, file, witness.bit_logits(file, images), images)


def probing(width: int = 24, heads: int = 3, mlp_dim: int = 40) -> File:
    """Draw the tensors of an attention pooling head."""
    draws = witness.Draws(np.random.default_rng(2))
    draws.normal("probe", (1, 1, width), 1.0)
    for name in ("query", "key", "value"):
        draws.dense(f"MultiHeadDotProductAttention_0/{name}", (width,), (heads, width // heads))
    draws.dense("MultiHeadDotProductAttention_0/out", (heads, width // heads), (width,))
    draws.norm("LayerNorm_0", (width,))
    draws.dense("MlpBlock_0/Dense_0", (width,), (mlp_dim,))
    draws.dense("MlpBlock_0/Dense_1", (mlp_dim,), (width,))
    return draws.weights


def probed_logits(released: File, pooling: File, images: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute attention pooling: the probe attends to all tokens, followed by a residual MLP."""
    w, pool = witness.in_float64(released), witness.in_float64(pooling)
    z = witness.patch_embeddings(images, witness.scope(w, "embedding/"))
    z = z + w["Transformer/posembed_input/pos_embedding"]
    for layer in range(2):
        z = witness.encoder_block(z, witness.scope(w, f"Transformer/encoderblock_{layer}/"))
    z = witness.layer_norm(z, witness.scope(w, "Transformer/encoder_norm/"))
    part = witness.scope(pool, "MultiHeadDotProductAttention_0/")
    q = np.einsum("nld,dhk->nhlk", pool["probe"], part["query/kernel"]) + part["query/bias"][:, None]
    k, v = (np.einsum("nld,dhk->nhlk", z, part[f"{n}/kernel"]) + part[f"{n}/bias"][:, None] for n in ("key", "value"))
    observed = witness.softmax(q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])) @ v
    x = np.einsum("nhlk,hkd->nld", observed, part["out/kernel"]) + part["out/bias"]
    x = x + witness.mlp(witness.layer_norm(x, witness.scope(pool, "LayerNorm_0/")), witness.scope(pool, "MlpBlock_0/"))
    return witness.dense(x[:, 0], witness.scope(w, "head/"))


@pytest.mark.parametrize("stack", [False, True], ids=["one by one", "stacked"])
@pytest.mark.parametrize("place", ["MAPHead_0/", ""], ids=["head of its own", "inlined"])
def test_attention_pooling_equals_big_vision(place: str, stack: bool, images: NDArray[np.float64]) -> None:
    released, pooling = drawn(class_token=False), probing()
    blocks = big_vision(released)
    file = with_prefix((on_one_axis(blocks) if stack else blocks) | with_prefix(pooling, place), "params/img/")
    assert recognized(file) == ["big_vision"]
    assert_logits(BIG_VISION, file, probed_logits(released, pooling, images), images)
    rules = BIG_VISION.rules(BIG_VISION.infer_config(shapes_of(file), NPZ), shapes_of(file))
    assert match_keys(rules, file) == KeyMatch((), ())
    assert same_bits(dict(invert_rules(rules, dict(apply_rules(rules, tensors(file))))), tensors(file))


def waves(side: int, width: int) -> NDArray[np.float32]:
    """Compute big_vision's position table."""
    frequencies = 10_000.0 ** -(np.arange(width // 4) / (width // 4 - 1))
    rows = [
        np.concatenate(
            [np.sin(x * frequencies), np.cos(x * frequencies), np.sin(y * frequencies), np.cos(y * frequencies)]
        )
        for y in range(side)
        for x in range(side)
    ]
    return np.array(rows, dtype=np.float32)[None]


@pytest.mark.parametrize("class_token", [True, False], ids=["class token", "mean-pooled"])
def test_positions_default_to_sine_cosine(class_token: bool, images: NDArray[np.float64]) -> None:
    released = drawn(class_token=class_token)
    name = "Transformer/posembed_input/pos_embedding"
    none = np.zeros((1, int(class_token), 24), dtype=np.float32)
    expected = released | {name: np.concatenate([none, waves(4, 24)], axis=1)}
    file = with_prefix(later({other: array for other, array in released.items() if other != name}), "params/")
    assert recognized(file) == ["big_vision"]
    metadata = FileMetadata(file_type="npz", config={"image_size": 32})
    assert_logits(BIG_VISION, file, witness.vit_logits(expected, images), images, metadata=metadata)
    config = BIG_VISION.infer_config(shapes_of(file), metadata)
    rules = BIG_VISION.rules(config, shapes_of(file))
    assert match_keys(rules, file) == KeyMatch((), ())
    state = dict(apply_rules(rules, tensors(file)))
    assert same_bits(dict(invert_rules(rules, state)), tensors(file))
    # Written anew, the table is there and tells the image size.
    again = dict(invert_rules(BIG_VISION.rules(config, None), state))
    assert BIG_VISION.infer_config(shapes_of(again), NPZ).image_size == 32


def test_image_size_defaults_to_224() -> None:
    file = {name: array for name, array in big_vision(drawn(patch=14)).items() if name != "pos_embedding"}
    assert BIG_VISION.infer_config(shapes_of(file), NPZ).image_size == 224
    metadata = FileMetadata(file_type="npz", config={"image_size": [384, 224]})
    assert BIG_VISION.infer_config(shapes_of(file), metadata).image_size == (
        378,
        224,
    )  # as many patches as there is room for


def test_paper_file_without_table_has_no_positions() -> None:
    file = {name: array for name, array in drawn().items() if "pos_embedding" not in name}
    config = GOOGLE.infer_config(shapes_of(file), NPZ)
    assert isinstance(config, ViTConfig)
    assert config.positions.kind == "none"
    rules = GOOGLE.rules(config, shapes_of(file))
    assert sorted(dict(apply_rules(rules, tensors(file)))) == sorted(meta_model(config).state_dict())


@pytest.mark.parametrize("class_token", [True, False], ids=["class token", "mean-pooled"])
def test_non_square_image_size_from_config(class_token: bool) -> None:
    images = np.random.default_rng(1).normal(size=(2, 24, 40, 3))
    file = drawn(image_size=(24, 40), class_token=class_token)
    with pytest.raises(WeightsError, match="does not have a square grid") as raised:
        GOOGLE.infer_config(shapes_of(file), NPZ)
    assert "config.json" in str(raised.value.hint)
    metadata = FileMetadata(file_type="npz", config={"image_size": [24, 40]})
    assert_logits(GOOGLE, file, witness.vit_logits(file, images), images, metadata=metadata)
    with pytest.raises(WeightsError, match="have different image sizes"):
        GOOGLE.infer_config(shapes_of(file), FileMetadata(file_type="npz", config={"image_size": 224}))


# What we write, read by other code


@pytest.mark.parametrize(
    ("form", "pooling", "covers"),
    [
        (GOOGLE, "class", "all"),
        (GOOGLE, "mean", "all"),
        (BIG_VISION, "class", "all"),
        (BIG_VISION, "class", "patches"),
        (BIG_VISION, "mean", "patches"),
        (BIG_VISION, "map", "patches"),
    ],
    ids=lambda value: value.name if isinstance(value, Format) else value,
)
def test_timm_reads_our_file(form: Format, pooling: Any, covers: Any, tmp_path: Path) -> None:
    timm = import_timm()
    config = small(image_size=32, pooling=pooling, positions=PositionConfig(covers=covers))
    model, images = random_vit(config, dtype=torch.float64), images_for(config, dtype=torch.float64)
    file = {name: tensor.numpy() for name, tensor in invert_rules(form.rules(config, None), model.state_dict())}
    np.savez(tmp_path / "weights.npz", allow_pickle=False, **file)
    theirs = timm.models.vision_transformer.VisionTransformer(
        img_size=32,
        patch_size=8,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=config.mlp_dim / config.width,
        num_classes=config.num_classes,
        global_pool={"class": "token", "mean": "avg", "map": "map"}[pooling],
        class_token=pooling == "class",
        no_embed_class=covers == "patches",
        fc_norm=False,
        final_norm=True,
        act_layer=partial(nn.GELU, approximate="tanh"),
        norm_layer=partial(nn.LayerNorm, eps=1e-6),
    ).double()
    theirs.load_pretrained(str(tmp_path / "weights.npz"))
    with torch.no_grad():
        expected, actual = theirs.eval()(images), model(images)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[torch.float64])


# The real weights


@pytest.fixture(scope="module")
def augreg() -> dict[str, Tensor]:
    if not WEIGHTS.is_file():
        pytest.skip(f"{WEIGHTS} is not there")
    with np.load(WEIGHTS, allow_pickle=False) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


def test_augreg_file_is_ti_16(augreg: dict[str, Tensor]) -> None:
    assert recognized(augreg) == ["google"]
    assert GOOGLE.infer_config(shapes_of(augreg), NPZ) == find_variant("Ti/16").config


def test_augreg_file_survives_round_trip(augreg: dict[str, Tensor]) -> None:
    config = GOOGLE.infer_config(shapes_of(augreg), NPZ)
    rules = GOOGLE.rules(config, shapes_of(augreg))
    assert match_keys(rules, augreg) == KeyMatch((), ())
    state = dict(apply_rules(rules, augreg))
    assert same_bits(dict(invert_rules(rules, state)), augreg)
    assert same_bits(dict(invert_rules(GOOGLE.rules(config, None), state)), augreg)


# Seen of 50 photos. They are mostly training images, so more are right than of the validation set's 75 %.
RIGHT = {"paper": 40, "timm_augreg": 42}


@pytest.mark.parametrize("origin", RIGHT)
def test_augreg_weights_classify_photos(origin: str, augreg: dict[str, Tensor]) -> None:
    if not (PHOTOS / "labels.csv").is_file():
        pytest.skip(f"{PHOTOS} is not there")
    with (PHOTOS / "labels.csv").open(newline="") as lines:
        photos = list(csv.DictReader(lines))[::20]
    config = GOOGLE.infer_config(shapes_of(augreg), NPZ)
    model = create(config, device="meta")
    rules = GOOGLE.rules(config, shapes_of(augreg))
    model.load_state_dict(dict(apply_rules(rules, augreg)), strict=True, assign=True)
    prepare, right = ORIGINS[origin], 0
    with torch.inference_mode():
        for photo in photos:
            pixels = torch.from_numpy(prepare.to_pixels(decode((PHOTOS / photo["file_name"]).read_bytes())))
            right += int(model.eval()(prepare.normalize(pixels[None])).argmax()) == int(photo["class_index"])
    assert len(photos) == 50
    assert abs(right - RIGHT[origin]) <= 1  # another processor may round two close logits the other way
