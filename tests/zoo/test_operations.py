"""Operation counts against torch's FlopCounterMode and against convolutions of ones."""

import pytest
import torch
from model_cases import CASES, fresh, images_for, meta_model, reduce_size, reduced_zoo, small
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitkit.core.sizes import pair
from vitkit.model.config import BackboneConfig, BiTConfig, BlockConfig
from vitkit.model.resnet import StandardizedConv, pad_same
from vitkit.model.vit import ViT
from vitkit.zoo.flops import count_dense_flops, count_forward_flops
from vitkit.zoo.registry import Model, configure
from vitkit.zoo.variants import ModelConfig

MODELS: dict[str, ModelConfig] = CASES | reduced_zoo()


def run(model: Model, images: Tensor) -> Tensor:
    """Compute logits with every token in every layer, as the count assumes."""
    if isinstance(model, ViT):
        return model.head(model.pool(model.encode(model.embed(images))))
    return model(images)


@pytest.mark.parametrize("name", MODELS)
def test_count_equals_torchs_flop_counter(name: str) -> None:
    config = MODELS[name]
    model = fresh(config)
    # The counter does not know the CPU's fused attention kernel, so attention runs as matrix products.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run(model, images_for(config, batch=1))
    assert sum(count_forward_flops(config).values()) == counter.get_total_flops()


def count_pixel_products(conv: StandardizedConv, height: int, width: int) -> int:
    """Count the products of a convolution with image pixels by convolving ones with ones."""
    side, stride = conv.kernel_size[0], conv.stride[0]
    ones, kernel = torch.ones(1, 1, height, width), torch.ones(1, 1, side, side)
    padded = (
        pad_same(ones, kernel=side, stride=stride)
        if conv.conventions.pads_same
        else functional.pad(ones, (side // 2,) * 4)
    )
    return int(functional.conv2d(padded, kernel, stride=stride).sum()) * conv.in_channels * conv.out_channels


def hybrid(*image_size: int) -> ModelConfig:
    return small(patch_size=1, image_size=image_size, backbone=BackboneConfig(units=(1, 1), root_width=32))


def resnet(*image_size: int) -> ModelConfig:
    return BiTConfig(units=(1, 2), image_size=image_size, num_classes=5)


@pytest.mark.parametrize(
    "config",
    [hybrid(8, 8), hybrid(16, 64), hybrid(40, 24), resnet(1, 1), resnet(7, 32), resnet(33, 50), resnet(47, 63)],
    ids=lambda config: f"{config.image_size}",
)
def test_count_without_padding_has_only_pixel_products(config: ModelConfig) -> None:
    model = meta_model(config)
    products: list[int] = []

    def hook(conv: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        assert isinstance(conv, StandardizedConv)
        products.append(count_pixel_products(conv, arguments[0].shape[2], arguments[0].shape[3]))

    handles = [m.register_forward_pre_hook(hook) for m in model.modules() if isinstance(m, StandardizedConv)]
    model(torch.empty(1, 3, *pair(config.image_size), device="meta"))
    for handle in handles:
        handle.remove()
    parts = count_forward_flops(config, padding=False)
    counted = parts["root"] + parts["stages"] if isinstance(config, BiTConfig) else parts["backbone"]
    assert counted == 2 * sum(products)


@pytest.mark.parametrize("name", ["B/16", "L/32", "Axial-B/32"])
def test_padding_does_not_affect_transformers(name: str) -> None:
    assert count_forward_flops(configure(name), padding=False) == count_forward_flops(configure(name))


@pytest.mark.parametrize("name", ["BiT-R50x1", "R50+B/32"])
def test_padding_affects_convolutions(name: str) -> None:
    with_padding, without = (sum(count_forward_flops(configure(name), padding=p).values()) for p in (True, False))
    assert 0.9 * with_padding < without < with_padding


def test_dense_layer_count() -> None:
    assert count_dense_flops(3, 5, 7) == 2 * 3 * 5 * 7


def test_parts_of_base_model() -> None:
    tokens, width = 197, 768
    assert count_forward_flops(configure("B/16")) == {
        "patch embedding": 2 * 196 * 768 * width,
        "qkv": 12 * 2 * tokens * width * 3 * width,
        "attention": 12 * 2 * 2 * tokens * tokens * width,
        "attention out": 12 * 2 * tokens * width * width,
        "mlp": 12 * 2 * 2 * tokens * width * 3072,
        "head": 2 * width * 1000,
    }


def test_attention_cost_is_quadratic_in_tokens() -> None:
    small_image, large_image = (
        count_forward_flops(configure("B/16")),
        count_forward_flops(configure("B/16", image_size=448)),
    )
    assert large_image["patch embedding"] == 4 * small_image["patch embedding"]
    assert large_image["attention"] > 15 * small_image["attention"]
    assert large_image["head"] == small_image["head"]


def test_axial_attention_costs_less_over_a_large_grid() -> None:
    full = count_forward_flops(small(pooling="mean", image_size=256))["attention"]
    axial = count_forward_flops(small(pooling="mean", image_size=256, block=BlockConfig(axial=True)))["attention"]
    assert axial * 16 == full  # 32 rows and 32 columns instead of 32 × 32


def test_shrunk_model_has_the_same_parts() -> None:
    config = configure("R50+B/16")
    assert count_forward_flops(reduce_size(config)).keys() == count_forward_flops(config).keys()
