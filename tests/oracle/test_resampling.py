"""Resampling of position embeddings against the code of each origin."""

import json
from collections import OrderedDict
from dataclasses import replace
from importlib import import_module
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from oracles import import_timm, import_torchvision, import_transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from witness.google_numpy import vit_logits

from vitkit.core.config import parse_assignments
from vitkit.core.sizes import Size, pair
from vitkit.data.preprocessing import Preprocessing
from vitkit.model.config import InterpolationOrigin
from vitkit.model.positions import resample_grid
from vitkit.weights.adapt_state import adapt_state
from vitkit.weights.bundle import ModelBundle
from vitkit.weights.convert import write_format
from vitkit.weights.formats.registry import get_format
from vitkit.weights.load import load_bundle
from vitkit.zoo.registry import configure, create

TOLERANCE = 1e-6  # results are rounded to float32, whose step is 2e-7 at the largest of these numbers
WIDTH = 8

Grid = tuple[int, int]
grids = st.tuples(st.integers(1, 24), st.integers(1, 24))
SQUARE = [((7, 7), (14, 14)), ((14, 14), (7, 7)), ((5, 5), (6, 6)), ((4, 4), (9, 9)), ((1, 1), (3, 3))]
ANY = [*SQUARE, ((4, 4), (2, 8)), ((5, 5), (7, 3)), ((14, 14), (9, 20))]
OBLONG = [((3, 5), (6, 4)), ((4, 9), (9, 4)), ((1, 8), (1, 5)), ((8, 1), (3, 2))]


def table(grid: Grid, prefix: int) -> Tensor:
    """Draw embeddings fifty times as large as initialized ones, so that rounding errors show."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, prefix + grid[0] * grid[1], WIDTH, generator=generator)


def as_ids(grids: list[tuple[Grid, Grid]]) -> list[Any]:
    return [pytest.param(old, new, id=f"{old[0]}x{old[1]} to {new[0]}x{new[1]}") for old, new in grids]


def assert_same(
    positions: Tensor, expected: Tensor, *, prefix: int, old: Grid, new: Grid, origin: InterpolationOrigin
) -> None:
    actual = resample_grid(positions[:, prefix:], old=old, new=new, origin=origin)
    torch.testing.assert_close(actual, expected[:, prefix:], rtol=0, atol=TOLERANCE)
    assert torch.equal(expected[:, :prefix], positions[:, :prefix])


# Google


def scipy_zoom(positions: Tensor, *, old: Grid, new: Grid, **mode: str) -> Tensor:
    """Resample as the released code does: keep the class token's row, zoom the grid by new / old."""
    grid = positions[0, 1:].reshape(*old, WIDTH).numpy()
    zoomed = scipy.ndimage.zoom(grid, (new[0] / old[0], new[1] / old[1], 1), order=1, **mode)
    assert zoomed.shape == (*new, WIDTH)
    return torch.cat([positions[:, :1], torch.from_numpy(zoomed).reshape(1, -1, WIDTH)], dim=1)


@given(old=grids, new=grids)
@example(old=(1, 9), new=(1, 4))
@example(old=(9, 1), new=(4, 3))
@example(old=(6, 6), new=(1, 1))
@example(old=(24, 24), new=(22, 22))
def test_google_resampling_equals_scipy_zoom(old: Grid, new: Grid) -> None:
    """Zoom with mode="nearest". By default, if (old - 1) / (new - 1) * (new - 1) rounds up, as from 24 to 22 and from
    32 to 16, scipy treats the last row as outside the grid and fills it with zeros."""
    positions = table(old, prefix=1)
    expected = scipy_zoom(positions, old=old, new=new, mode="nearest")
    assert_same(positions, expected, prefix=1, old=old, new=new, origin="google")


RELEASED = [(7, 12), (7, 16), (14, 16), (14, 24), (14, 32), (16, 37), (24, 14), (12, 7)]


@pytest.mark.parametrize(("old", "new"), as_ids([((old, old), (new, new)) for old, new in RELEASED]))
def test_google_resampling_equals_the_released_code(old: Grid, new: Grid) -> None:
    positions = table(old, prefix=1)
    expected = scipy_zoom(positions, old=old, new=new)
    assert_same(positions, expected, prefix=1, old=old, new=new, origin="google")


# timm


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize(("old", "new"), as_ids(ANY + OBLONG))
def test_timm_resampling_equals_timm(old: Grid, new: Grid, prefix: int) -> None:
    import_timm()
    from timm.layers import resample_abs_pos_embed  # noqa: PLC0415

    positions = table(old, prefix)
    expected = resample_abs_pos_embed(positions, new_size=list(new), old_size=list(old), num_prefix_tokens=prefix)
    assert_same(positions, expected, prefix=prefix, old=old, new=new, origin="timm")


# transformers


def transformers_resampling(name: str, positions: Tensor, *, old: Grid, new: Grid, prefix: int) -> Tensor:
    """Return the positions that a transformers model for a square grid adds to images of another size."""
    model = getattr(import_transformers(), name)
    sizes = {"image_size": 4 * old[0], "patch_size": 4, "hidden_size": WIDTH, "num_attention_heads": 2}
    embeddings = model(model.config_class(**sizes, num_hidden_layers=1)).embeddings
    embeddings.position_embeddings.data = positions
    tokens = torch.zeros(1, prefix + new[0] * new[1], WIDTH)
    return embeddings.interpolate_pos_encoding(tokens, 4 * new[0], 4 * new[1]).detach()


@pytest.mark.parametrize(
    ("name", "prefix", "origin"),
    [
        pytest.param("ViTModel", 1, "huggingface", id="ViT"),
        pytest.param("DeiTModel", 2, "deit", id="DeiT"),
        pytest.param("ViTMAEModel", 1, "mae", id="MAE"),
        # Not facebook's rule: transformers drops the offset that DINOv2's weights were evaluated with.
        pytest.param("Dinov2Model", 1, "huggingface", id="DINOv2 in transformers"),
        pytest.param("Dinov2WithRegistersModel", 1, "dinov2-registers", id="DINOv2 with registers"),
    ],
)
@pytest.mark.parametrize(("old", "new"), as_ids(ANY))
def test_resampling_equals_transformers(
    old: Grid, new: Grid, name: str, prefix: int, origin: InterpolationOrigin
) -> None:
    positions = table(old, prefix)
    expected = transformers_resampling(name, positions, old=old, new=new, prefix=prefix)
    assert_same(positions, expected, prefix=prefix, old=old, new=new, origin=origin)


# torchvision


@pytest.mark.parametrize(("old", "new"), as_ids(SQUARE))
def test_torchvision_resampling_equals_torchvision(old: Grid, new: Grid) -> None:
    interpolate = import_torchvision().models.vision_transformer.interpolate_embeddings
    positions = table(old, prefix=1)
    state = OrderedDict({"encoder.pos_embedding": positions.clone()})
    expected = interpolate(image_size=4 * new[0], patch_size=4, model_state=state)["encoder.pos_embedding"]
    assert_same(positions, expected, prefix=1, old=old, new=new, origin="torchvision")


# facebook's DINOv2


def facebook_resampling(positions: Tensor, new: Grid) -> Tensor:
    """Resample as DINOv2 does: bicubic, with the scale of a grid larger by 0.1."""
    side = int(sqrt(positions.shape[1] - 1))
    grid = positions[:, 1:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
    scale = ((new[0] + 0.1) / side, (new[1] + 0.1) / side)
    grid = functional.interpolate(grid, scale_factor=scale, mode="bicubic")
    return torch.cat([positions[:, :1], grid.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)


@pytest.mark.parametrize(("old", "new"), as_ids([*ANY, ((37, 37), (16, 16)), ((37, 37), (16, 23))]))
def test_dinov2_resampling_equals_facebook(old: Grid, new: Grid) -> None:
    positions = table(old, prefix=1)
    expected = facebook_resampling(positions, new)
    assert_same(positions, expected, prefix=1, old=old, new=new, origin="dinov2")


def test_dinov2_offset_matters() -> None:
    positions = table((37, 37), prefix=0)
    with_offset, without = (
        resample_grid(positions, old=(37, 37), new=(16, 16), origin=origin) for origin in ("dinov2", "huggingface")
    )
    assert (with_offset - without).abs().max() > 1e-3


# The whole way, as from 224 to 384 pixels with patches of 16: a file in an origin's format is read and adapted by us,
# and read and resized by the origin's own code; both answer to the same images.

OLD, LARGE, OBLONG_IMAGE = 56, 96, (80, 48)  # with patches of 4, grids of 14×14, 24×24 and 20×12
SIZES = ("width=64", "depth=2", "heads=1", "mlp_dim=128")
ERF = "block.activation=gelu_erf"
sizes = pytest.mark.parametrize("size", [LARGE, OBLONG_IMAGE], ids=["24x24", "20x12"])


def file_of(name: str, place: Path, *settings: str, num_classes: int = 5) -> Path:
    """Write a randomized model in a format."""
    config = configure(
        "Ti/16", image_size=OLD, patch_size=4, num_classes=num_classes, settings=parse_assignments((*SIZES, *settings))
    )
    generator = torch.Generator().manual_seed(3)
    shapes = {key: tensor.shape for key, tensor in create(config, device="meta").state_dict().items()}
    made = ModelBundle(
        name="small",
        config=config,
        state={key: 0.2 * torch.randn(shape, generator=generator) for key, shape in shapes.items()},
        preprocessing=Preprocessing(image_size=OLD),
        labels=tuple(map(str, range(num_classes))),
    )
    to = get_format(name)
    out = place / {"safetensors": "folder", "torch": "model.pth", "npz": "model.npz"}[to.file_type]
    write_format(to, out, made)
    return out


def adapted(path: Path, size: Size, *, format_name: str) -> ModelBundle:
    """Load a model and adapt it to another size."""
    found = load_bundle(path, format=format_name)
    config = configure(found.config, image_size=size)
    return replace(found, config=config, state=adapt_state(found.state, old=found.config, new=config).state)


def images_of(size: Size) -> Tensor:
    return torch.randn(2, 3, *pair(size), generator=torch.Generator().manual_seed(4))


def assert_same_logits(ours: ModelBundle, theirs: Any) -> None:
    """Check that our logits equal those of `theirs` up to float32 summation order."""
    images = images_of(ours.config.image_size)
    with torch.no_grad():
        actual, expected = ours.build_model()(images), torch.as_tensor(theirs(images))
    assert actual.shape == expected.shape
    assert expected.std() > 0.1
    torch.testing.assert_close(actual, expected.float(), rtol=0, atol=1e-5 * max(1.0, float(expected.abs().max())))


@sizes
def test_adapted_google_model_equals_released_code(tmp_path: Path, size: Size) -> None:
    path = file_of("google", tmp_path)
    name, new = "Transformer/posembed_input/pos_embedding", (pair(size)[0] // 4, pair(size)[1] // 4)
    with np.load(path) as file:
        tensors = {key: file[key] for key in file.files}
    row, grid = tensors[name][0, :1], tensors[name][0, 1:].reshape(14, 14, -1)
    zoomed = scipy.ndimage.zoom(grid, (new[0] / 14, new[1] / 14, 1), order=1).reshape(new[0] * new[1], -1)
    tensors[name] = np.concatenate([row, zoomed])[None]
    ours = adapted(path, size, format_name="google")
    assert_same_logits(ours, lambda images: vit_logits(tensors, images.permute(0, 2, 3, 1).numpy()))


TIMM = {
    "plain": (),
    "registers": ("tokens.registers=4", "positions.covers=patches"),
    "distilled": ("tokens.distillation=true",),
    "positions of patches alone": ("positions.covers=patches",),
    "mean": ("pooling=mean", "head.norm=after_pooling"),
}


@sizes
@pytest.mark.parametrize("settings", TIMM.values(), ids=TIMM)
def test_adapted_timm_model_equals_timm(tmp_path: Path, size: Size, settings) -> None:
    timm = import_timm()
    path = file_of("timm", tmp_path, ERF, *settings)
    said = json.loads((path / "config.json").read_bytes())
    args = said["model_args"] | {"img_size": pair(size), "num_classes": 5}
    theirs = timm.create_model(said["architecture"], **args).eval()
    home = import_module(timm.models.model_entrypoint(said["architecture"]).__module__)
    theirs.load_state_dict(home.checkpoint_filter_fn(load_file(path / "model.safetensors"), theirs), strict=True)
    assert_same_logits(adapted(path, size, format_name="timm"), theirs)


HUGGING_FACE = {
    "huggingface": ((), 5, "ViTForImageClassification"),
    "huggingface-deit": (("tokens.distillation=true", ERF), 5, "DeiTForImageClassificationWithTeacher"),
    "huggingface-dinov2": (("block.layer_scale=0.5", ERF), 0, "Dinov2Model"),
    "huggingface-dinov2, registers": (
        ("block.layer_scale=0.5", ERF, "tokens.registers=4", "positions.origin=dinov2-registers"),
        0,
        "Dinov2WithRegistersModel",
    ),
}


@sizes
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_adapted_hugging_face_model_equals_transformers(tmp_path: Path, size: Size, name: str) -> None:
    settings, num_classes, model = HUGGING_FACE[name]
    format_name = name.partition(",")[0]
    path = file_of(format_name, tmp_path, *settings, num_classes=num_classes)
    theirs = getattr(import_transformers(), model).from_pretrained(path).eval()

    def answer(images: Tensor) -> Tensor:
        if num_classes:
            return theirs(images, interpolate_pos_encoding=True).logits
        return theirs(images).last_hidden_state[:, 0]

    assert_same_logits(adapted(path, size, format_name=format_name), answer)


def test_adapted_torchvision_model_equals_torchvision(tmp_path: Path) -> None:
    transformer = import_torchvision().models.vision_transformer
    path = file_of("torchvision", tmp_path, ERF)
    state = OrderedDict(torch.load(path, weights_only=True))
    theirs = transformer.VisionTransformer(
        image_size=LARGE, patch_size=4, num_layers=2, num_heads=1, hidden_dim=64, mlp_dim=128, num_classes=5
    ).eval()
    theirs.load_state_dict(transformer.interpolate_embeddings(image_size=LARGE, patch_size=4, model_state=state))
    assert_same_logits(adapted(path, LARGE, format_name="torchvision"), theirs)


def interpolate_pos_embed(positions: Tensor, *, prefix: int, side: int) -> Tensor:
    """Resample as DeiT's main.py and MAE's util/pos_embed.py do: keep extra tokens, resize a square grid."""
    old = int((positions.shape[1] - prefix) ** 0.5)
    extra, patches = positions[:, :prefix], positions[:, prefix:]
    patches = patches.reshape(-1, old, old, positions.shape[2]).permute(0, 3, 1, 2)
    patches = functional.interpolate(patches, size=(side, side), mode="bicubic", align_corners=False)
    return torch.cat((extra, patches.permute(0, 2, 3, 1).flatten(1, 2)), dim=1)


FACEBOOK = {
    "deit": (ERF,),
    "deit, distilled": (ERF, "tokens.distillation=true"),
    "mae": (ERF, "pooling=mean", "tokens.class_token=true", "head.norm=after_pooling"),
}


@pytest.mark.parametrize("name", FACEBOOK)
def test_adapted_facebook_model_equals_its_code(tmp_path: Path, name: str) -> None:
    """Run the resized tensors in timm, which has nothing left to resize; its own method would differ."""
    timm = import_timm()
    format_name = name.partition(",")[0]
    path = file_of(format_name, tmp_path, *FACEBOOK[name])
    tensors = torch.load(path, weights_only=True)["model"]
    distilled = "distilled" in name
    tensors["pos_embed"] = interpolate_pos_embed(tensors["pos_embed"], prefix=1 + distilled, side=24)
    made = timm.models.deit.VisionTransformerDistilled if distilled else timm.models.VisionTransformer
    pooled = {"global_pool": "avg", "fc_norm": True} if name == "mae" else {}
    sides = {"img_size": LARGE, "patch_size": 4, "embed_dim": 64, "depth": 2, "num_heads": 1, "mlp_ratio": 2}
    theirs = made(**sides, num_classes=5, **pooled).eval()
    theirs.load_state_dict(tensors, strict=True)
    assert_same_logits(adapted(path, LARGE, format_name=format_name), theirs)


@sizes
@pytest.mark.parametrize("registers", [0, 4])
def test_adapted_dinov2_positions_equal_facebook(tmp_path, size, registers) -> None:
    """Compare with interpolate_pos_encoding: an offset of 0.1 at first; antialias and no offset with registers."""
    settings = (f"tokens.registers={registers}", "positions.origin=dinov2-registers") if registers else ()
    path = file_of("dinov2", tmp_path, ERF, "block.layer_scale=0.5", *settings, num_classes=0)
    positions = torch.load(path, weights_only=True)["pos_embed"]
    new = pair(size)[0] // 4, pair(size)[1] // 4
    grid = positions[:, 1:].reshape(1, 14, 14, -1).permute(0, 3, 1, 2)
    if registers:
        grid = functional.interpolate(grid, size=new, mode="bicubic", antialias=True)
    else:
        grid = functional.interpolate(
            grid, scale_factor=(float(new[0] + 0.1) / 14, float(new[1] + 0.1) / 14), mode="bicubic", antialias=False
        )
    expected = torch.cat([positions[:, :1], grid.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)
    ours = adapted(path, size, format_name="dinov2")
    torch.testing.assert_close(ours.state["pos_embed"], expected, rtol=0, atol=TOLERANCE)
    if registers:
        assert torch.equal(ours.state["reg_token"], load_bundle(path, format="dinov2").state["reg_token"])
