"""Position embeddings resampled by us as by each origin's own code."""

from collections import OrderedDict
from math import sqrt
from typing import Any

import pytest
import scipy.ndimage
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from oracles import import_timm, import_torchvision, import_transformers
from torch import Tensor
from torch.nn import functional

from vitkit.model.resample import Origin, resample_positions

TOLERANCE = 1e-6  # results are rounded to float32, whose step is 2e-7 at the largest of these numbers
WIDTH = 8

Grid = tuple[int, int]
grids = st.tuples(st.integers(1, 24), st.integers(1, 24))
SQUARE = [((7, 7), (14, 14)), ((14, 14), (7, 7)), ((5, 5), (6, 6)), ((4, 4), (9, 9)), ((1, 1), (3, 3))]
ANY = [*SQUARE, ((4, 4), (2, 8)), ((5, 5), (7, 3)), ((14, 14), (9, 20))]
OBLONG = [((3, 5), (6, 4)), ((4, 9), (9, 4)), ((1, 8), (1, 5)), ((8, 1), (3, 2))]


def table(grid: Grid, prefix: int) -> Tensor:
    """Random embeddings, fifty times as large as they are initialised, so that a rounding shows."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, prefix + grid[0] * grid[1], WIDTH, generator=generator)


def as_ids(grids: list[tuple[Grid, Grid]]) -> list[Any]:
    return [pytest.param(old, new, id=f"{old[0]}x{old[1]} to {new[0]}x{new[1]}") for old, new in grids]


def assert_same(positions: Tensor, expected: Tensor, *, prefix: int, old: Grid, new: Grid, origin: Origin) -> None:
    actual = resample_positions(positions, prefix=prefix, old=old, new=new, origin=origin)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)
    assert torch.equal(actual[:, :prefix], positions[:, :prefix])


# Google


def scipy_zoom(positions: Tensor, *, old: Grid, new: Grid, **mode: str) -> Tensor:
    """The released code: the class token's row kept, the grid zoomed by new / old."""
    grid = positions[0, 1:].reshape(*old, WIDTH).numpy()
    zoomed = scipy.ndimage.zoom(grid, (new[0] / old[0], new[1] / old[1], 1), order=1, **mode)
    assert zoomed.shape == (*new, WIDTH)
    return torch.cat([positions[:, :1], torch.from_numpy(zoomed).reshape(1, -1, WIDTH)], dim=1)


@given(old=grids, new=grids)
@example(old=(1, 9), new=(1, 4))
@example(old=(9, 1), new=(4, 3))
@example(old=(6, 6), new=(1, 1))
@example(old=(24, 24), new=(22, 22))
def test_google_resampling_is_scipys_zoom(old: Grid, new: Grid) -> None:
    """With mode="nearest": without it, where (old - 1) / (new - 1) * (new - 1) rounds up, as from 24 to 22 and from 32
    to 16, scipy takes the last row to lie outside the grid and fills it with zeros."""
    positions = table(old, prefix=1)
    expected = scipy_zoom(positions, old=old, new=new, mode="nearest")
    assert_same(positions, expected, prefix=1, old=old, new=new, origin="google")


RELEASED = [(7, 12), (7, 16), (14, 16), (14, 24), (14, 32), (16, 37), (24, 14), (12, 7)]


@pytest.mark.parametrize(("old", "new"), as_ids([((old, old), (new, new)) for old, new in RELEASED]))
def test_google_resampling_is_the_released_line_between_the_grids_in_use(old: Grid, new: Grid) -> None:
    positions = table(old, prefix=1)
    expected = scipy_zoom(positions, old=old, new=new)
    assert_same(positions, expected, prefix=1, old=old, new=new, origin="google")


# timm


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize(("old", "new"), as_ids(ANY + OBLONG))
def test_timm_resampling_is_timms(old: Grid, new: Grid, prefix: int) -> None:
    import_timm()
    from timm.layers import resample_abs_pos_embed  # noqa: PLC0415

    positions = table(old, prefix)
    expected = resample_abs_pos_embed(positions, new_size=list(new), old_size=list(old), num_prefix_tokens=prefix)
    assert_same(positions, expected, prefix=prefix, old=old, new=new, origin="timm")


# transformers


def transformers_resampling(name: str, positions: Tensor, *, old: Grid, new: Grid, prefix: int) -> Tensor:
    """What a model of transformers, made for a square grid, adds to images of another size."""
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
def test_resampling_is_that_of_transformers(old: Grid, new: Grid, name: str, prefix: int, origin: Origin) -> None:
    positions = table(old, prefix)
    expected = transformers_resampling(name, positions, old=old, new=new, prefix=prefix)
    assert_same(positions, expected, prefix=prefix, old=old, new=new, origin=origin)


# torchvision


@pytest.mark.parametrize(("old", "new"), as_ids(SQUARE))
def test_torchvision_resampling_is_torchvisions(old: Grid, new: Grid) -> None:
    interpolate = import_torchvision().models.vision_transformer.interpolate_embeddings
    positions = table(old, prefix=1)
    state = OrderedDict({"encoder.pos_embedding": positions.clone()})
    expected = interpolate(image_size=4 * new[0], patch_size=4, model_state=state)["encoder.pos_embedding"]
    assert_same(positions, expected, prefix=1, old=old, new=new, origin="torchvision")


# facebook's DINOv2


def facebook_resampling(positions: Tensor, new: Grid) -> Tensor:
    """DINOv2's own rule: bicubic by the scale of a grid 0.1 larger, not by the grid's size."""
    side = int(sqrt(positions.shape[1] - 1))
    grid = positions[:, 1:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
    scale = ((new[0] + 0.1) / side, (new[1] + 0.1) / side)
    grid = functional.interpolate(grid, scale_factor=scale, mode="bicubic")
    return torch.cat([positions[:, :1], grid.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)


@pytest.mark.parametrize(("old", "new"), as_ids([*ANY, ((37, 37), (16, 16)), ((37, 37), (16, 23))]))
def test_dinov2_resampling_is_facebooks(old: Grid, new: Grid) -> None:
    positions = table(old, prefix=1)
    expected = facebook_resampling(positions, new)
    assert_same(positions, expected, prefix=1, old=old, new=new, origin="dinov2")


def test_the_offset_of_dinov2_matters() -> None:
    positions = table((37, 37), prefix=1)
    with_offset, without = (
        resample_positions(positions, prefix=1, old=(37, 37), new=(16, 16), origin=origin)
        for origin in ("dinov2", "huggingface")
    )
    assert (with_offset - without).abs().max() > 1e-3
