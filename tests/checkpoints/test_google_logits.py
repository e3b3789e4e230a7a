"""What models from Google's files compute: against the NumPy witness, and the real weights on real photos."""

import csv
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints.google_files import (
    DIALECTS,
    FORMATS,
    NPZ,
    File,
    big_vision,
    drawn,
    later,
    on_one_axis,
    recognised,
    same_bits,
    shapes_of,
    tensors,
    with_prefix,
)
from model_cases import images_for, random_vit, small, without_numbers
from numpy.typing import NDArray
from oracles import import_timm
from torch import Tensor, nn
from witness import google_numpy as witness

from vitkit.checkpoints.formats.bit import BIT
from vitkit.checkpoints.formats.format import About, Format
from vitkit.checkpoints.formats.google import BIG_VISION, GOOGLE
from vitkit.checkpoints.mapping import Fit, fit, read, write
from vitkit.core.errors import WeightsError
from vitkit.data.decode import decode
from vitkit.data.transforms import ORIGINS
from vitkit.model.config import ViTConfig
from vitkit.model.positions import PositionConfig
from vitkit.model.resnet import BackboneConfig
from vitkit.zoo.lookup import create, find

DATA = Path(__file__).parents[3] / "shared" / "data"
WEIGHTS, PHOTOS = DATA / "weights" / "Ti_16-augreg-imagenet.npz", DATA / "photos"
TOLERANCE = {
    torch.float32: 1e-5,  # a few hundred roundings of 6e-8 on logits of order 1
    torch.float64: 1e-10,  # the witness runs in float64 too: only the order of summation differs
}


def logits_of(form: Format, file: File, images: NDArray[np.float64], *, about: About = NPZ, dtype: torch.dtype) -> Any:
    """A file through the format's description and rules, and what the model of it makes of images."""
    config = form.describe(shapes_of(file), about)
    model = create(config, device="meta")
    model.load_state_dict(dict(read(form.rules(config, shapes_of(file)), tensors(file))), strict=True, assign=True)
    with torch.no_grad():
        return model.eval().to(dtype)(torch.from_numpy(images.transpose(0, 3, 1, 2).copy()).to(dtype)).numpy()


def assert_logits(
    form: Format, file: File, expected: NDArray[np.float64], images: NDArray[np.float64], *, about: About = NPZ
) -> None:
    assert expected.std() > 0.1
    for dtype, tolerance in TOLERANCE.items():
        actual = logits_of(form, file, images, about=about, dtype=dtype)
        scale = np.abs(expected).max()
        np.testing.assert_allclose(actual / scale, expected / scale, rtol=0, atol=tolerance, err_msg=str(dtype))


@pytest.fixture
def images() -> NDArray[np.float64]:
    return np.random.default_rng(1).normal(size=(2, 32, 32, 3)).astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_dialect_gives_the_released_files_logits(dialect: str, images: NDArray[np.float64]) -> None:
    (form, translate), released = DIALECTS[dialect], drawn(depth=3)
    file = translate(released)
    assert recognised(file) == [form]
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
def test_a_vit_has_the_logits_of_the_released_code(changes: dict[str, Any], images: NDArray[np.float64]) -> None:
    file = drawn(**changes)
    assert recognised(file) == ["google"]
    assert_logits(GOOGLE, file, witness.vit_logits(file, images), images)


@pytest.mark.parametrize("flat_norms", [True, False], ids=["norms of C", "norms of 1x1x1xC"])
@pytest.mark.parametrize(
    ("units", "root_width", "patch"), [((2, 1), 32, 1), ((1,), 64, 2), ((), 32, 4)], ids=["two stages", "one", "root"]
)
def test_a_hybrid_has_the_logits_of_the_released_code(
    units: tuple[int, ...], root_width: int, patch: int, flat_norms: bool, images: NDArray[np.float64]
) -> None:
    file = witness.random_hybrid_weights(
        np.random.default_rng(0), blocks=units, root_width=root_width, patch=patch, flat_norms=flat_norms
    )
    assert recognised(file) == ["google"]
    config = GOOGLE.describe(shapes_of(file), NPZ)
    assert isinstance(config, ViTConfig)
    assert config.backbone == BackboneConfig(units=units, root_width=root_width)
    assert_logits(GOOGLE, file, witness.vit_logits(file, images), images)
    rules = GOOGLE.rules(config, shapes_of(file))
    assert fit(rules, file) == Fit((), ())
    assert same_bits(dict(write(rules, dict(read(rules, tensors(file))))), tensors(file))
    released = dict(write(GOOGLE.rules(config, None), dict(read(rules, tensors(file)))))
    assert released["gn_root/scale"].shape == (1, 1, 1, root_width)


@pytest.mark.parametrize("units", [(1, 1, 1), (2, 1)], ids=["three stages", "two stages"])
def test_a_bit_has_the_logits_of_the_released_code(units: tuple[int, ...], images: NDArray[np.float64]) -> None:
    file = witness.random_bit_weights(np.random.default_rng(0), blocks=units, width_factor=1)
    assert recognised(file) == ["bit"]
    assert_logits(BIT, file, witness.bit_logits(file, images), images)


def probing(width: int = 24, heads: int = 3, mlp_dim: int = 40) -> File:
    """The tensors of an attention pooling head."""
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
    """Attention pooling by the facts: the probe asks all tokens, the MLP adds to what it saw."""
    w, pool = witness.in_float64(released), witness.in_float64(pooling)
    z = witness.patch_embeddings(images, witness.scope(w, "embedding/"))
    z = z + w["Transformer/posembed_input/pos_embedding"]
    for layer in range(2):
        z = witness.encoder_block(z, witness.scope(w, f"Transformer/encoderblock_{layer}/"))
    z = witness.layer_norm(z, witness.scope(w, "Transformer/encoder_norm/"))
    part = witness.scope(pool, "MultiHeadDotProductAttention_0/")
    q = np.einsum("nld,dhk->nhlk", pool["probe"], part["query/kernel"]) + part["query/bias"][:, None]
    k, v = (np.einsum("nld,dhk->nhlk", z, part[f"{n}/kernel"]) + part[f"{n}/bias"][:, None] for n in ("key", "value"))
    seen = witness.softmax(q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])) @ v
    x = np.einsum("nhlk,hkd->nld", seen, part["out/kernel"]) + part["out/bias"]
    x = x + witness.mlp(witness.layer_norm(x, witness.scope(pool, "LayerNorm_0/")), witness.scope(pool, "MlpBlock_0/"))
    return witness.dense(x[:, 0], witness.scope(w, "head/"))


@pytest.mark.parametrize("stack", [False, True], ids=["one by one", "stacked"])
@pytest.mark.parametrize("place", ["MAPHead_0/", ""], ids=["head of its own", "inlined"])
def test_attention_pooling_is_big_visions(place: str, stack: bool, images: NDArray[np.float64]) -> None:
    released, pooling = drawn(class_token=False), probing()
    blocks = big_vision(released)
    file = with_prefix((on_one_axis(blocks) if stack else blocks) | with_prefix(pooling, place), "params/img/")
    assert recognised(file) == ["big_vision"]
    assert_logits(BIG_VISION, file, probed_logits(released, pooling, images), images)
    rules = BIG_VISION.rules(BIG_VISION.describe(shapes_of(file), NPZ), shapes_of(file))
    assert fit(rules, file) == Fit((), ())
    assert same_bits(dict(write(rules, dict(read(rules, tensors(file))))), tensors(file))


def waves(side: int, width: int) -> NDArray[np.float32]:
    """big_vision's table from the formula."""
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
def test_without_a_table_the_positions_are_sines_and_cosines(class_token: bool, images: NDArray[np.float64]) -> None:
    released = drawn(class_token=class_token)
    name = "Transformer/posembed_input/pos_embedding"
    none = np.zeros((1, int(class_token), 24), dtype=np.float32)
    expected = released | {name: np.concatenate([none, waves(4, 24)], axis=1)}
    file = with_prefix(later({other: array for other, array in released.items() if other != name}), "params/")
    assert recognised(file) == ["big_vision"]
    about = About(kind="npz", config={"image_size": 32})
    assert_logits(BIG_VISION, file, witness.vit_logits(expected, images), images, about=about)
    config = BIG_VISION.describe(shapes_of(file), about)
    rules = BIG_VISION.rules(config, shapes_of(file))
    assert fit(rules, file) == Fit((), ())
    state = dict(read(rules, tensors(file)))
    assert same_bits(dict(write(rules, state)), tensors(file))
    # Written anew, the table is there and tells the image size.
    again = dict(write(BIG_VISION.rules(config, None), state))
    assert BIG_VISION.describe(shapes_of(again), NPZ).image_size == 32


def test_a_file_that_does_not_tell_its_image_size_is_taken_for_224_pixels() -> None:
    file = {name: array for name, array in big_vision(drawn(patch=14)).items() if name != "pos_embedding"}
    assert BIG_VISION.describe(shapes_of(file), NPZ).image_size == 224
    about = About(kind="npz", config={"image_size": [384, 224]})
    assert BIG_VISION.describe(shapes_of(file), about).image_size == (378, 224)  # as many patches as there is room for


def test_the_paper_without_a_table_has_no_positions() -> None:
    file = {name: array for name, array in drawn().items() if "pos_embedding" not in name}
    config = GOOGLE.describe(shapes_of(file), NPZ)
    assert isinstance(config, ViTConfig)
    assert config.positions.kind == "none"
    rules = GOOGLE.rules(config, shapes_of(file))
    assert sorted(dict(read(rules, tensors(file)))) == sorted(without_numbers(config).state_dict())


@pytest.mark.parametrize("class_token", [True, False], ids=["class token", "mean-pooled"])
def test_an_image_that_is_not_square_is_as_config_json_says(class_token: bool) -> None:
    images = np.random.default_rng(1).normal(size=(2, 24, 40, 3))
    file = drawn(image_size=(24, 40), class_token=class_token)
    with pytest.raises(WeightsError, match="not of a square grid") as raised:
        GOOGLE.describe(shapes_of(file), NPZ)
    assert "config.json" in str(raised.value.hint)
    about = About(kind="npz", config={"image_size": [24, 40]})
    assert_logits(GOOGLE, file, witness.vit_logits(file, images), images, about=about)
    with pytest.raises(WeightsError, match="another image size than the position table"):
        GOOGLE.describe(shapes_of(file), About(kind="npz", config={"image_size": 224}))


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
def test_timm_reads_what_we_write(form: Format, pooling: Any, covers: Any, tmp_path: Path) -> None:
    timm = import_timm()
    config = small(image_size=32, pooling=pooling, positions=PositionConfig(covers=covers))
    model, images = random_vit(config, dtype=torch.float64), images_for(config, dtype=torch.float64)
    file = {name: tensor.numpy() for name, tensor in write(form.rules(config, None), model.state_dict())}
    np.savez(tmp_path / "weights.npz", allow_pickle=False, **file)
    theirs = timm.models.vision_transformer.VisionTransformer(
        img_size=32,
        patch_size=8,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=config.mlp_dim / config.width,
        num_classes=config.classes,
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


def test_the_augreg_file_is_ti_16(augreg: dict[str, Tensor]) -> None:
    assert recognised(augreg) == ["google"]
    assert GOOGLE.describe(shapes_of(augreg), NPZ) == find("Ti/16").config


def test_the_augreg_file_is_written_back_to_the_bit(augreg: dict[str, Tensor]) -> None:
    config = GOOGLE.describe(shapes_of(augreg), NPZ)
    rules = GOOGLE.rules(config, shapes_of(augreg))
    assert fit(rules, augreg) == Fit((), ())
    state = dict(read(rules, augreg))
    assert same_bits(dict(write(rules, state)), augreg)
    assert same_bits(dict(write(GOOGLE.rules(config, None), state)), augreg)


# Seen of 50 photos. They are mostly training images, so more are right than of the validation set's 75 %.
RIGHT = {"paper": 40, "timm_augreg": 42}


@pytest.mark.parametrize("origin", RIGHT)
def test_the_augreg_weights_know_the_photos(origin: str, augreg: dict[str, Tensor]) -> None:
    if not (PHOTOS / "labels.csv").is_file():
        pytest.skip(f"{PHOTOS} is not there")
    with (PHOTOS / "labels.csv").open(newline="") as lines:
        photos = list(csv.DictReader(lines))[::20]
    config = GOOGLE.describe(shapes_of(augreg), NPZ)
    model = create(config, device="meta")
    rules = GOOGLE.rules(config, shapes_of(augreg))
    model.load_state_dict(dict(read(rules, augreg)), strict=True, assign=True)
    prepare, right = ORIGINS[origin], 0
    with torch.inference_mode():
        for photo in photos:
            pixels = torch.from_numpy(prepare.pixels(decode((PHOTOS / photo["file_name"]).read_bytes())))
            right += int(model.eval()(prepare.normalise(pixels[None])).argmax()) == int(photo["class_index"])
    assert len(photos) == 50
    assert abs(right - RIGHT[origin]) <= 1  # another processor may round two close logits the other way
