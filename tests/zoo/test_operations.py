"""Counted operations against a counter that watches the model run, and against products counted one by one."""

import pytest
import torch
from model_cases import CASES, fresh, images_for, shrunk, shrunk_zoo, small, without_numbers
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitkit.core.shapes import pair
from vitkit.model.encoder import BlockConfig
from vitkit.model.resnet import BackboneConfig, BiTConfig, StandardisedConv, pad_same
from vitkit.model.vit import ViT
from vitkit.zoo.flops import dense, forward_flops
from vitkit.zoo.lookup import Model, configure
from vitkit.zoo.variants import ModelConfig

MODELS: dict[str, ModelConfig] = CASES | shrunk_zoo()


def run(model: Model, images: Tensor) -> Tensor:
    """Logits with every token in every layer, as operations are counted."""
    if isinstance(model, ViT):
        return model.head(model.pool(model.encode(model.embed(images)).tokens))
    return model(images)


@pytest.mark.parametrize("name", MODELS)
def test_the_count_is_what_a_watching_counter_sees(name: str) -> None:
    config = MODELS[name]
    model = fresh(config)
    # The counter knows matrix products and convolutions, not the fused attention of a CPU: have it done in products.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run(model, images_for(config, batch=1))
    assert sum(forward_flops(config).values()) == counter.get_total_flops()


def product_by_product(conv: StandardisedConv, height: int, width: int) -> int:
    """Products of a convolution with pixels of the image, by convolving ones with ones."""
    side, stride = conv.kernel_size[0], conv.stride[0]
    ones, kernel = torch.ones(1, 1, height, width), torch.ones(1, 1, side, side)
    padded = (
        pad_same(ones, kernel=side, stride=stride) if conv.numbers.pads_same else functional.pad(ones, (side // 2,) * 4)
    )
    return int(functional.conv2d(padded, kernel, stride=stride).sum()) * conv.in_channels * conv.out_channels


def hybrid(*image_size: int) -> ModelConfig:
    return small(patch_size=1, image_size=image_size, backbone=BackboneConfig(units=(1, 1), root_width=32))


def resnet(*image_size: int) -> ModelConfig:
    return BiTConfig(units=(1, 2), image_size=image_size, classes=5)


@pytest.mark.parametrize(
    "config",
    [hybrid(8, 8), hybrid(16, 64), hybrid(40, 24), resnet(1, 1), resnet(7, 32), resnet(33, 50), resnet(47, 63)],
    ids=lambda config: f"{config.image_size}",
)
def test_without_padding_only_products_with_pixels_are_counted(config: ModelConfig) -> None:
    model = without_numbers(config)
    seen: list[int] = []

    def look(conv: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        assert isinstance(conv, StandardisedConv)
        seen.append(product_by_product(conv, arguments[0].shape[2], arguments[0].shape[3]))

    hooks = [m.register_forward_pre_hook(look) for m in model.modules() if isinstance(m, StandardisedConv)]
    model(torch.empty(1, 3, *pair(config.image_size), device="meta"))
    for hook in hooks:
        hook.remove()
    parts = forward_flops(config, padding=False)
    counted = parts["root"] + parts["stages"] if isinstance(config, BiTConfig) else parts["backbone"]
    assert counted == 2 * sum(seen)


@pytest.mark.parametrize("name", ["B/16", "L/32", "Axial-B/32"])
def test_a_model_without_convolutions_has_no_padding_to_leave_out(name: str) -> None:
    assert forward_flops(configure(name), padding=False) == forward_flops(configure(name))


@pytest.mark.parametrize("name", ["BiT-R50x1", "R50+B/32"])
def test_leaving_out_padding_leaves_out_something(name: str) -> None:
    with_padding, without = (sum(forward_flops(configure(name), padding=p).values()) for p in (True, False))
    assert 0.9 * with_padding < without < with_padding


def test_a_dense_layer_multiplies_and_adds_for_each_weight() -> None:
    assert dense(3, 5, 7) == 2 * 3 * 5 * 7


def test_the_parts_of_a_base_model_by_hand() -> None:
    tokens, width = 197, 768
    assert forward_flops(configure("B/16")) == {
        "patch embedding": 2 * 196 * 768 * width,
        "qkv": 12 * 2 * tokens * width * 3 * width,
        "attention": 12 * 2 * 2 * tokens * tokens * width,
        "attention out": 12 * 2 * tokens * width * width,
        "mlp": 12 * 2 * 2 * tokens * width * 3072,
        "head": 2 * width * 1000,
    }


def test_a_larger_image_costs_more_in_attention_than_in_proportion() -> None:
    small_image, large_image = forward_flops(configure("B/16")), forward_flops(configure("B/16", image_size=448))
    assert large_image["patch embedding"] == 4 * small_image["patch embedding"]
    assert large_image["attention"] > 15 * small_image["attention"]
    assert large_image["head"] == small_image["head"]


def test_axial_attention_costs_less_over_a_large_grid() -> None:
    full = forward_flops(small(pooling="mean", image_size=256))["attention"]
    axial = forward_flops(small(pooling="mean", image_size=256, block=BlockConfig(axial=True)))["attention"]
    assert axial * 16 == full  # 32 rows and 32 columns in place of 32 × 32


def test_shrinking_keeps_the_parts() -> None:
    config = configure("R50+B/16")
    assert forward_flops(shrunk(config)).keys() == forward_flops(config).keys()
