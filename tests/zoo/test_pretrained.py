"""Table of pretrained weights: consistency, and agreement with the tables of timm and torchvision."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from oracles import import_timm, import_torchvision

import vitkit
from vitkit.core.errors import UnknownNameError
from vitkit.core.sizes import pair
from vitkit.data.preprocessing import ORIGINS
from vitkit.model.config import ViTConfig
from vitkit.weights.convert import ConvertedTensors
from vitkit.weights.formats.base import FileMetadata
from vitkit.weights.formats.registry import FORMATS, get_format
from vitkit.weights.formats.timm.config import make_timm_config
from vitkit.weights.hub import parse_hub_name
from vitkit.zoo.pretrained import IMAGENET_21K, PRETRAINED, PretrainedWeights, find_pretrained
from vitkit.zoo.registry import create, find_variant, get_model_name
from vitkit.zoo.variants import VARIANTS

FIELDS = ("image_size", "patch_size", "num_classes", "width", "heads", "mlp_dim", "pooling", "tokens", "head")
SOURCES = {row.source: row for row in PRETRAINED}
ALIASES = [alias for variant in VARIANTS for alias in variant.aliases]
# Aliases of models without public weights.
UNPUBLISHED = {
    *("vit_base_r26_s32_224", "R26+ViT-B_32", "R50+ViT-B_32", "R50+ViT-L_16"),
    *("Axial-ViT-B_16", "Axial-ViT-B_32", "BiT-S-R152x2"),
    *(f"{kind}{name}" for kind in ("", "BiT-M-", "BiT-S-") for name in ("R50x2", "R152x1", "R200x3")),
}


def rows_of(alias: str) -> list[PretrainedWeights]:
    """Return the rows an alias can mean: on the hub, timm's with any tag, Google's of either paper, torchvision's."""
    if "/" in alias:
        return [SOURCES[f"hub:{alias}"]] if f"hub:{alias}" in SOURCES else []
    second_paper = alias.replace("+ViT-", "_").removeprefix("ViT-")
    patterns = (f"{alias}.*", f"{alias}-*", f"{alias}_*swag-*", f"BiT-M-{alias}*", f"{second_paper}-i*")
    return [row for pattern in patterns for row in find_or_none(pattern)]


def find_or_none(pattern: str) -> tuple[PretrainedWeights, ...]:
    try:
        return find_pretrained(pattern)
    except UnknownNameError:
        return ()


def test_sources_are_unique() -> None:
    assert [source for source, times in Counter(row.source for row in PRETRAINED).items() if times > 1] == []


@pytest.mark.parametrize("row", PRETRAINED, ids=lambda row: row.source)
def test_row_refers_to_existing_entries(row: PretrainedWeights) -> None:
    assert row.model in vitkit.list_models()
    assert row.origin in ORIGINS
    assert row.format is None or row.format in FORMATS
    assert row.num_classes in (0, 1000, IMAGENET_21K)
    assert row.top1 is None or (0.5 < row.top1 < 0.9 and row.num_classes == 1000)
    assert row.config.image_size == row.image_size
    assert pair(row.preprocessing.image_size)[0] == (row.input_size or row.image_size)
    if row.source.startswith("hub:"):
        assert str(parse_hub_name(row.source)) == row.source
    else:
        assert row.source.startswith(("gs://", "https://"))
        assert row.source.endswith((".npz", ".pth"))


@pytest.mark.parametrize("row", PRETRAINED, ids=lambda row: row.source)
def test_row_without_settings_is_a_zoo_model(row: PretrainedWeights) -> None:
    if not any(key in setting for setting in row.settings for key in ("patch_size", "width", "depth")):
        assert get_model_name(row.config) == row.model


@pytest.mark.parametrize("alias", [alias for alias in ALIASES if alias not in UNPUBLISHED])
def test_every_alias_has_weights_of_its_model(alias: str) -> None:
    rows = rows_of(alias)
    assert rows
    assert {row.model for row in rows} == {find_variant(alias).name}


def test_unpublished_aliases_have_no_weights() -> None:
    assert set(ALIASES) > UNPUBLISHED
    assert {alias for alias in UNPUBLISHED if rows_of(alias)} == set()


@pytest.mark.parametrize("alias", [alias for alias in ALIASES if alias.endswith("384") and "/" in alias])
def test_row_has_the_image_size_of_its_alias(alias: str) -> None:
    assert SOURCES[f"hub:{alias}"].image_size == find_variant(alias).config.image_size == 384


@pytest.mark.parametrize("name", list(FORMATS))
def test_format_infers_the_config_of_its_rows(name: str) -> None:
    form = get_format(name)
    for config in {replace(row.config, depth=1) for row in PRETRAINED if row.format == name and is_vit(row)}:
        tensors = ConvertedTensors(form.rules(config, None), create(config, device="meta").state_dict())
        shapes = {key: tuple(tensors[key].shape) for key in tensors}
        stated = make_timm_config(config) if name == "timm" else {}
        inferred = form.infer_config(shapes, FileMetadata(file_type=form.file_type, config=stated, is_declared=True))
        assert isinstance(inferred, ViTConfig)
        for key in FIELDS:
            assert getattr(inferred, key) == getattr(config, key), (name, key, config)


def is_vit(row: PretrainedWeights) -> bool:
    return isinstance(row.config, ViTConfig)


# ImageNet-21k


@pytest.mark.parametrize(
    ("source", "num_classes", "pre_logits"),
    [
        ("gs://vit_models/imagenet21k/ViT-B_16.npz", IMAGENET_21K, 768),  # with a classifier of zeros
        ("hub:google/vit-base-patch16-224-in21k", 0, 768),  # a pooler and no classifier
        ("hub:google/vit-huge-patch14-224-in21k", 0, 1280),
        ("hub:timm/vit_base_patch16_224.orig_in21k", 0, None),  # neither
        ("hub:timm/vit_base_patch16_224.augreg_in21k", IMAGENET_21K, None),  # a trained classifier
        ("gs://vit_models/imagenet21k+imagenet2012/ViT-B_16.npz", 1000, None),
    ],
)
def test_head_of_imagenet_21k_weights(source: str, num_classes: int, pre_logits: int | None) -> None:
    config = SOURCES[source].config
    assert isinstance(config, ViTConfig)
    assert (config.num_classes, config.head.pre_logits) == (num_classes, pre_logits)


# Lookup


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("google/vit-base-patch16-224", 1),
        ("hub:google/vit-base-patch16-224", 1),
        ("VIT-BASE-PATCH16-224", 1),
        ("vit_base_patch16_224.augreg_in21k", 1),
        ("vit_base_patch16_224.*", 7),
        ("facebook/deit-*", 8),
        ("facebook/vit-mae-*", 3),
        ("facebook/dinov2-*", 8),
        ("torchvision", 10),
        ("B/8", 5),
    ],
)
def test_pattern_matches_source_model_or_format(pattern: str, count: int) -> None:
    assert len(find_pretrained(pattern)) == count


def test_default_pattern_matches_everything() -> None:
    assert find_pretrained() == PRETRAINED


# Scores


@pytest.mark.parametrize(
    ("source", "top1"),
    [
        ("hub:timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k", 0.7546),
        ("https://dl.fbaipublicfiles.com/deit/deit_tiny_patch16_224-a1311bcf.pth", 0.722),
        ("gs://vit_models/imagenet21k+imagenet2012/ViT-B_16-224.npz", 0.812),
    ],
)
def test_scores_match_the_publications(source: str, top1: float) -> None:
    # Library versions change a score by a few of 50,000 images.
    assert SOURCES[source].top1 == pytest.approx(top1, abs=2e-4)


# Tables of other libraries


@pytest.mark.parametrize("row", find_pretrained("hub:timm/*"), ids=lambda row: row.source)
def test_rows_agree_with_timm(row: PretrainedWeights) -> None:
    cfg = import_timm().get_pretrained_cfg(row.source.removeprefix("hub:timm/"), allow_unregistered=False)
    preprocessing = row.preprocessing
    assert cfg.hf_hub_id.startswith("timm/")
    assert (cfg.num_classes, cfg.input_size) == (row.num_classes, (3, row.image_size, row.image_size))
    assert (cfg.crop_pct, cfg.interpolation) == (preprocessing.crop_fraction, preprocessing.interpolation)
    assert (tuple(cfg.mean), tuple(cfg.std)) == (tuple(preprocessing.mean), tuple(preprocessing.std))
    if cfg.url and cfg.url.endswith(".npz"):
        google = SOURCES[cfg.url.replace("https://storage.googleapis.com/", "gs://")]
        assert (google.model, google.image_size, google.num_classes) == (row.model, row.image_size, row.num_classes)


def torchvision_weights() -> dict[str, Any]:
    weights = import_torchvision().models
    kinds = ("ViT_B_16", "ViT_B_32", "ViT_L_16", "ViT_L_32", "ViT_H_14")
    return {member.url: member for kind in kinds for member in getattr(weights, f"{kind}_Weights")}


def test_rows_agree_with_torchvision() -> None:
    theirs = torchvision_weights()
    ours = {row.source: row for row in find_pretrained("torchvision")}
    assert ours.keys() == theirs.keys()
    for source, row in ours.items():
        meta, transform, preprocessing = theirs[source].meta, theirs[source].transforms(), row.preprocessing
        assert meta["min_size"] == (row.image_size, row.image_size)
        assert row.top1 == pytest.approx(meta["_metrics"]["ImageNet-1K"]["acc@1"] / 100, abs=1e-6)
        assert meta["num_params"] == sum(part.numel() for part in create(row.config, device="meta").parameters())
        assert (transform.crop_size, transform.resize_size) == ([row.image_size], [preprocessing.resize_size[0]])
        assert transform.interpolation.value == preprocessing.interpolation
        assert (tuple(transform.mean), tuple(transform.std)) == (tuple(preprocessing.mean), tuple(preprocessing.std))
