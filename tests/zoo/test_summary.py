"""Summaries of variants against the models they describe."""

import pytest
from model_cases import meta_model

from vitkit.model.vit import ViT
from vitkit.zoo.cost import summarize
from vitkit.zoo.registry import find_variant
from vitkit.zoo.variants import VARIANTS, Variant


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_summary_agrees_with_the_model(variant: Variant) -> None:
    row, model = summarize(variant), meta_model(variant.config)
    assert (row.name, row.kind, row.image_size) == (variant.name, variant.kind, 224)
    assert row.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert row.gflops > 0
    if isinstance(model, ViT):
        assert (row.layers, row.width, row.heads) == (model.config.depth, model.config.width, model.config.heads)
        assert row.tokens == model.config.prefix + (224 // row.patch) ** 2
    else:
        assert (row.heads, row.patch, row.tokens) == (None, None, None)


@pytest.mark.parametrize(
    ("name", "layers", "patch", "tokens", "gflops"),
    [
        # Twice the multiply-adds of the publications, in billions.
        ("B/16", 12, 16, 197, 2 * 17.58),
        ("google/vit-base-patch16-384", 12, 16, 577, 2 * 55.5),
        ("R+Ti/16", 12, 32, 50, None),
        ("R50+B/32", 12, 32, 50, None),
        ("Axial-B/16", 12, 16, 196, None),
        ("BiT-R50x1", 50, None, None, 2 * 4.11),
        ("BiT-R152x2", 152, None, None, None),
    ],
)
def test_published_sizes_and_costs(
    name: str, layers: int, patch: int | None, tokens: int | None, gflops: float | None
) -> None:
    row = summarize(find_variant(name))
    assert (row.layers, row.patch, row.tokens) == (layers, patch, tokens)
    # Publications differ by what else they count, and by where ResNet-50 puts its strides: five per cent.
    assert gflops is None or row.gflops == pytest.approx(gflops, rel=0.05)
