"""Variant table against the paper and against the models."""

import pytest
from model_cases import meta_model
from torch import nn

from vitkit.model.config import BackboneConfig, BiTConfig, ViTConfig
from vitkit.zoo.registry import configure, create, find_variant
from vitkit.zoo.variants import VARIANTS

BY_NAME = {variant.name: variant for variant in VARIANTS}

PAPER = {
    # Exact counts at 1000 classes, 224 pixels, with a class token and no pre-logits.
    "Ti/16": 5_717_416,
    "S/16": 22_050_664,
    "S/32": 22_878_952,
    "B/8": 86_576_872,
    "B/16": 86_567_656,
    "B/32": 88_224_232,
    "L/16": 304_326_632,
    "L/32": 306_535_400,
    "H/14": 632_045_800,
    "R+Ti/16": 6_337_704,
    "R26+S/32": 36_431_912,
    "R26+B/32": 101_383_976,
    "R50+B/16": 98_659_112,
    "R50+L/32": 328_994_856,
}

TABLE_1 = {
    # Layers, width, MLP, heads.
    "Ti": (12, 192, 768, 3),
    "S": (12, 384, 1536, 6),
    "B": (12, 768, 3072, 12),
    "L": (24, 1024, 4096, 16),
    "H": (32, 1280, 5120, 16),
}


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "parameters"), PAPER.items(), ids=list(PAPER))
def test_parameter_count_equals_the_paper(name: str, parameters: int) -> None:
    assert count(meta_model(configure(name))) == parameters


def test_mean_pooling_removes_class_token_and_position() -> None:
    parameters = count(create("B/16", settings={"pooling": "mean"}, device="meta"))
    assert parameters == 86_566_120
    assert PAPER["B/16"] - parameters == 2 * 768


@pytest.mark.parametrize(
    ("name", "millions"), [("B/16", 86), ("L/16", 307), ("H/14", 632)], ids=["Base", "Large", "Huge"]
)
def test_sizes_round_to_table_1(name: str, millions: int) -> None:
    # Table 1 counts a pre-training head's extra layer or not, to the nearest million: within one per cent.
    assert count(meta_model(configure(name))) == pytest.approx(millions * 1e6, rel=0.01)


@pytest.mark.parametrize("name", BY_NAME)
def test_stored_count_equals_the_model(name: str) -> None:
    assert BY_NAME[name].parameters == count(meta_model(BY_NAME[name].config))


def projection(inputs: int, width: int) -> int:
    """Count the weights and biases of a patch projection."""
    return inputs * width + width


def test_unpublished_counts_follow_from_published_parts() -> None:
    # A hybrid is a ViT whose projection reads a ResNet's feature map. An axial model is a mean-pooled ViT with every
    # block twice.
    resnet_32 = PAPER["R50+L/32"] - projection(2048, 1024) - (PAPER["L/32"] - projection(32 * 32 * 3, 1024))
    resnet_16 = PAPER["R50+B/16"] - projection(1024, 768) - (PAPER["B/16"] - projection(16 * 16 * 3, 768))
    blocks = 12 * (4 * (768 * 768 + 768) + 2 * 768 * 3072 + 3072 + 768 + 4 * 768)
    class_token_and_position = 2 * 768
    expected = {
        "R50+B/32": resnet_32 + projection(2048, 768) + PAPER["B/32"] - projection(32 * 32 * 3, 768),
        "R50+L/16": resnet_16 + projection(1024, 1024) + PAPER["L/16"] - projection(16 * 16 * 3, 1024),
        "Axial-B/16": PAPER["B/16"] - class_token_and_position + blocks,
        "Axial-B/32": PAPER["B/32"] - class_token_and_position + blocks,
    }
    assert {name: BY_NAME[name].parameters for name in expected} == expected


def test_every_entry_has_a_count() -> None:
    assert all(variant.parameters > 0 for variant in VARIANTS)
    assert PAPER.keys() <= BY_NAME.keys()


def test_table_has_every_model_of_the_paper() -> None:
    baselines = {f"BiT-{name}" for name in ("R50x1", "R50x2", "R101x1", "R152x1", "R152x2", "R200x3")}
    hybrids = {"R50+B/32", "R50+B/16", "R50+L/32", "R50+L/16"}
    axial = {"Axial-B/16", "Axial-B/32"}
    assert PAPER.keys() | baselines | hybrids | axial == BY_NAME.keys()


@pytest.mark.parametrize("name", [name for name in BY_NAME if not name.startswith("BiT")])
def test_transformers_have_the_sizes_of_table_1(name: str) -> None:
    config = BY_NAME[name].config
    assert isinstance(config, ViTConfig)
    size = name.partition("/")[0].rpartition("+")[2].removeprefix("Axial-")
    assert (config.depth, config.width, config.mlp_dim, config.heads) == TABLE_1[size]
    assert (config.num_classes, config.image_size, config.channels) == (1000, 224, 3)
    assert config.head.pre_logits is None


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("B/8", (28, 28)),
        ("B/16", (14, 14)),
        ("B/32", (7, 7)),
        ("H/14", (16, 16)),
        ("R+Ti/16", (7, 7)),  # root stride 4, then patches of 8: 32 pixels despite the name
        ("R26+S/32", (7, 7)),
        ("R50+B/16", (14, 14)),
        ("R50+B/32", (7, 7)),
        ("R50+L/16", (14, 14)),
        ("R50+L/32", (7, 7)),
    ],
)
def test_patch_grid_matches_the_paper(name: str, grid: tuple[int, int]) -> None:
    config = BY_NAME[name].config
    assert isinstance(config, ViTConfig)
    assert config.grid == grid
    assert config.patches == grid[0] * grid[1]


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("R+Ti/16", ()),
        ("R26+S/32", (2, 2, 2, 2)),
        ("R26+B/32", (2, 2, 2, 2)),
        ("R50+B/16", (3, 4, 9)),
        ("R50+L/16", (3, 4, 9)),
        ("R50+B/32", (3, 4, 6, 3)),
        ("R50+L/32", (3, 4, 6, 3)),
    ],
)
def test_hybrids_have_the_released_resnets(name: str, units: tuple[int, ...]) -> None:
    config = BY_NAME[name].config
    assert isinstance(config, ViTConfig)
    assert config.backbone == BackboneConfig(units=units, root_width=64)


@pytest.mark.parametrize(
    ("name", "units", "factor"),
    [
        ("BiT-R50x1", (3, 4, 6, 3), 1),
        ("BiT-R50x2", (3, 4, 6, 3), 2),
        ("BiT-R101x1", (3, 4, 23, 3), 1),
        ("BiT-R152x1", (3, 8, 36, 3), 1),
        ("BiT-R152x2", (3, 8, 36, 3), 2),
        ("BiT-R200x3", (3, 24, 36, 3), 3),
    ],
)
def test_baselines_match_their_names(name: str, units: tuple[int, ...], factor: int) -> None:
    assert BY_NAME[name].config == BiTConfig(units=units, width_factor=factor)
    assert 3 * sum(units) + 2 == int(name.removeprefix("BiT-R").partition("x")[0])  # three layers per unit, root, head


@pytest.mark.parametrize(
    ("name", "kind"), [("B/16", "vit"), ("R50+B/16", "hybrid"), ("Axial-B/32", "axial"), ("BiT-R200x3", "resnet")]
)
def test_kind_of_variant(name: str, kind: str) -> None:
    assert find_variant(name).kind == kind


@pytest.mark.parametrize("name", ["Axial-B/16", "Axial-B/32"])
def test_axial_model_has_two_blocks_per_layer(name: str) -> None:
    assert len(meta_model(BY_NAME[name].config).blocks) == 24
