"""NumPy witness against torch, scipy, timm and timm's readers of Google's files."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.special
import torch
from numpy.typing import NDArray
from oracles import import_timm
from torch import nn
from torch.nn import functional
from witness import google_numpy as witness

EXACT = {"rtol": 0.0, "atol": 1e-10}  # timm runs in float64 too, so only the order of summation differs
IMAGE_SIZE = (32, 48)  # rows and columns differ, so that confusing them shows

Float32 = NDArray[np.float32]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(2020)


def random_images(rng: np.random.Generator, image_size: tuple[int, int] = IMAGE_SIZE) -> NDArray[np.float64]:
    return rng.normal(size=(2, *image_size, 3))


def channels_first(x: NDArray[np.float64]) -> torch.Tensor:
    return torch.from_numpy(x.transpose(0, 3, 1, 2).copy())


def channels_last(x: torch.Tensor) -> NDArray[np.float64]:
    return x.numpy().transpose(0, 2, 3, 1)


def saved(weights: dict[str, Float32], folder: Path) -> str:
    path = folder / "weights.npz"
    np.savez(path, allow_pickle=False, **weights)
    return str(path)


def loaded(model: Any, path: str) -> Any:
    model.load_pretrained(path)
    return model.double().eval()


def logits_of(model: nn.Module, images: NDArray[np.float64]) -> NDArray[np.float64]:
    with torch.no_grad():
        return model(channels_first(images)).numpy()


# Parts


@pytest.mark.parametrize(
    ("length", "size", "stride", "expected"),
    [
        (224, 7, 2, (2, 3)),  # the hybrid's root, as the released code pads it
        (112, 3, 2, (0, 1)),  # its max-pool, and the 3×3 convolutions with stride 2
        (56, 3, 1, (1, 1)),
        (56, 1, 2, (0, 0)),
        (225, 7, 2, (3, 3)),
        (7, 3, 2, (1, 1)),
    ],
)
def test_same_padding(length: int, size: int, stride: int, expected: tuple[int, int]) -> None:
    assert witness.same_padding(length, size, stride) == expected


@pytest.mark.parametrize(
    ("size", "stride", "rows", "columns"),
    [(7, 2, (2, 3), (3, 3)), (3, 2, (0, 1), (1, 1)), (3, 1, (1, 1), (1, 1)), (1, 2, (0, 0), (0, 0))],
)
def test_same_padding_convolution_and_pool_equal_torch(
    rng: np.random.Generator, size: int, stride: int, rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    x, kernel = rng.normal(size=(2, 12, 15, 3)), rng.normal(size=(size, size, 3, 5))
    padded = functional.pad(channels_first(x), (*columns, *rows))
    expected = functional.conv2d(padded, torch.from_numpy(kernel.transpose(3, 2, 0, 1).copy()), stride=stride)
    actual = witness.convolution(witness.pad_same(x, size, stride), kernel, stride)
    np.testing.assert_allclose(actual, channels_last(expected), **EXACT)

    padded = functional.pad(channels_first(x), (*columns, *rows), value=-torch.inf)
    pooled = witness.max_pool(witness.pad_same(x, size, stride, -np.inf), size, stride)
    np.testing.assert_array_equal(pooled, channels_last(functional.max_pool2d(padded, size, stride)))


def test_activations_equal_torch_and_scipy(rng: np.random.Generator) -> None:
    x = 3 * rng.normal(size=(4, 9))
    np.testing.assert_allclose(
        witness.gelu(x), functional.gelu(torch.from_numpy(x), approximate="tanh").numpy(), **EXACT
    )
    np.testing.assert_allclose(witness.softmax(x), scipy.special.softmax(x, axis=-1), **EXACT)


def test_norms_equal_torch(rng: np.random.Generator) -> None:
    x = 0.01 * rng.normal(size=(2, 3, 4, 64))  # small, so that the epsilons show
    scale, bias = rng.normal(size=64), rng.normal(size=64)
    torch_scale, torch_bias = torch.from_numpy(scale), torch.from_numpy(bias)
    expected = functional.layer_norm(torch.from_numpy(x), (64,), torch_scale, torch_bias, eps=1e-6).numpy()
    np.testing.assert_allclose(witness.layer_norm(x, {"scale": scale, "bias": bias}), expected, **EXACT)
    for eps in (1e-5, 1e-6):
        expected = channels_last(functional.group_norm(channels_first(x), 32, torch_scale, torch_bias, eps=eps))
        np.testing.assert_allclose(witness.group_norm(x, scale, bias, eps), expected, **EXACT)


# Whole models


def timm_vit(
    weights: dict[str, Float32],
    *,
    patch: int,
    heads: int,
    embed_layer: Any = None,
    image_size: tuple[int, int],
) -> nn.Module:
    import_timm()
    from timm.layers import PatchEmbed  # noqa: PLC0415
    from timm.models.vision_transformer import VisionTransformer  # noqa: PLC0415

    depth = sum(name.endswith("LayerNorm_0/scale") for name in weights)
    width, mlp_dim = weights["Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel"].shape
    return VisionTransformer(
        img_size=image_size,
        patch_size=patch,
        embed_dim=width,
        depth=depth,
        num_heads=heads,
        mlp_ratio=mlp_dim / width,
        num_classes=weights["head/bias"].size,
        class_token="cls" in weights,
        global_pool="token" if "cls" in weights else "avg",
        fc_norm=False,
        norm_layer=partial(nn.LayerNorm, eps=1e-6),
        act_layer=partial(nn.GELU, approximate="tanh"),
        embed_layer=embed_layer or PatchEmbed,
    )


@pytest.mark.parametrize("class_token", [True, False], ids=["token", "gap"])
def test_vit_equals_timm(rng: np.random.Generator, tmp_path: Path, class_token: bool) -> None:
    weights = witness.random_vit_weights(rng, image_size=IMAGE_SIZE, patch=8, heads=3, class_token=class_token)
    images = random_images(rng)
    model = loaded(timm_vit(weights, patch=8, heads=3, image_size=IMAGE_SIZE), saved(weights, tmp_path))
    np.testing.assert_allclose(witness.vit_logits(weights, images), logits_of(model, images), **EXACT)


def test_pre_logits_equal_tanh_of_timm_features(rng: np.random.Generator, tmp_path: Path) -> None:
    weights = witness.random_vit_weights(rng, image_size=IMAGE_SIZE, patch=8, heads=3, pre_logits=20)
    images = random_images(rng)
    model = timm_vit(weights, patch=8, heads=3, image_size=IMAGE_SIZE)
    model.reset_classifier(0)  # timm has no pre_logits; it gives the features, torch the head
    features = torch.from_numpy(logits_of(loaded(model, saved(weights, tmp_path)), images))
    w = {name: torch.from_numpy(tensor).double() for name, tensor in weights.items()}
    hidden = torch.tanh(functional.linear(features, w["pre_logits/kernel"].T, w["pre_logits/bias"]))
    expected = functional.linear(hidden, w["head/kernel"].T, w["head/bias"]).numpy()
    np.testing.assert_allclose(witness.vit_logits(weights, images), expected, **EXACT)


def standardize(layer: nn.Conv2d) -> None:
    std, mean = torch.std_mean(layer.weight.data, dim=(1, 2, 3), keepdim=True, correction=0)
    layer.weight.data = (layer.weight.data - mean) / (std + 1e-5)


@pytest.mark.parametrize("flat_norms", [True, False], ids=["C", "111C"])
@pytest.mark.parametrize("class_token", [True, False], ids=["token", "gap"])
@pytest.mark.parametrize(
    ("blocks", "root_width", "patch", "image_size"),
    [
        ((2, 1), 32, 1, (32, 48)),
        ((1, 1, 2), 32, 2, (64, 32)),
        ((), 64, 4, (32, 48)),
        ((1, 1), 64, 1, (37, 50)),
    ],
)
def test_hybrid_equals_timm(
    rng: np.random.Generator,
    tmp_path: Path,
    blocks: tuple[int, ...],
    root_width: int,
    patch: int,
    image_size: tuple[int, int],
    class_token: bool,
    flat_norms: bool,
) -> None:
    """timm only has sqrt(var + eps), so torch standardizes and timm runs plain SAME convolutions."""
    import_timm()
    from timm.layers import Conv2dSame, GroupNormAct, HybridEmbed  # noqa: PLC0415
    from timm.models.resnetv2 import ResNetV2, create_resnetv2_stem  # noqa: PLC0415

    weights = witness.random_hybrid_weights(
        rng,
        image_size=image_size,
        blocks=blocks,
        root_width=root_width,
        patch=patch,
        heads=3,
        class_token=class_token,
        flat_norms=flat_norms,
    )
    layers = {
        "conv_layer": partial(Conv2dSame, bias=False),
        "norm_layer": partial(GroupNormAct, num_groups=32, eps=1e-6),
        "stem_type": "same",
        "preact": False,
    }
    if blocks:
        channels = tuple(4 * root_width * 2**stage for stage in range(len(blocks)))
        backbone = ResNetV2(blocks, channels=channels, num_classes=0, global_pool="", stem_chs=root_width, **layers)
    else:
        backbone = create_resnetv2_stem(3, root_width, **layers)
    model = timm_vit(
        weights,
        patch=patch,
        heads=3,
        image_size=image_size,
        embed_layer=lambda bias, **sizes: HybridEmbed(backbone, bias=bias, **sizes),
    )
    model = loaded(model, saved(weights, tmp_path))
    for layer in backbone.modules():
        if isinstance(layer, Conv2dSame):
            standardize(layer)
    images = random_images(rng, image_size)
    np.testing.assert_allclose(witness.vit_logits(weights, images), logits_of(model, images), **EXACT)


@pytest.mark.parametrize("image_size", [(64, 96), (65, 50)])
@pytest.mark.parametrize(("blocks", "width_factor"), [((1, 1, 1, 1), 0.5), ((2, 1, 2), 1)])
def test_bit_equals_timm(
    rng: np.random.Generator,
    tmp_path: Path,
    blocks: tuple[int, ...],
    width_factor: float,
    image_size: tuple[int, int],
) -> None:
    import_timm()
    from timm.layers import GroupNormAct, StdConv2d  # noqa: PLC0415
    from timm.models.resnetv2 import ResNetV2  # noqa: PLC0415

    weights = witness.random_bit_weights(rng, blocks=blocks, width_factor=width_factor)
    model = ResNetV2(
        blocks,
        num_classes=7,
        width_factor=width_factor,
        stem_type="fixed",
        conv_layer=partial(StdConv2d, eps=1e-10),
        norm_layer=partial(GroupNormAct, num_groups=32, eps=1e-5),
    )
    images = random_images(rng, image_size)
    actual = witness.bit_logits(weights, images)
    np.testing.assert_allclose(actual, logits_of(loaded(model, saved(weights, tmp_path)), images), **EXACT)


# Random weights


@pytest.mark.parametrize(
    ("draw", "forward"),
    [
        (partial(witness.random_vit_weights, patch=16, pre_logits=20), witness.vit_logits),
        (partial(witness.random_vit_weights, patch=16, class_token=False), witness.vit_logits),
        (partial(witness.random_hybrid_weights, patch=2), witness.vit_logits),
        (partial(witness.random_bit_weights, blocks=(2, 1)), witness.bit_logits),
    ],
    ids=["pre_logits", "gap", "hybrid", "bit"],
)
def test_every_tensor_matters(rng: np.random.Generator, draw: Any, forward: Any) -> None:
    weights, images = draw(rng), rng.normal(size=(1, 32, 32, 3))
    logits = forward(weights, images)
    assert 0.1 < logits.std() < 10
    for name, tensor in weights.items():
        assert tensor.dtype == np.float32
        assert np.all(tensor != 0)
        changed = weights | {name: tensor * rng.uniform(0.5, 1.5, tensor.shape)}
        difference = np.abs(forward(changed, images) - logits).max()
        if name.endswith("key/bias"):  # adds the same to all logits of a query; the softmax cancels it
            assert difference < 1e-12
        else:
            assert difference > 1e-4, name
