"""The list of published weights: that it is whole, that it holds together, and that others' own lists say the same."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from oracles import import_timm, import_torchvision

from vitkit.checkpoints.convert import Rewritten
from vitkit.checkpoints.foreign import FORMATS, format_called
from vitkit.checkpoints.formats.format import About
from vitkit.checkpoints.hub import parse
from vitkit.core.shapes import pair
from vitkit.data.transforms import ORIGINS
from vitkit.model.config import ViTConfig
from vitkit.zoo.lookup import create, find, models, name_of
from vitkit.zoo.published import IMAGENET_21K, PUBLISHED, Published, published
from vitkit.zoo.variants import VARIANTS

SOURCES = {row.source: row for row in PUBLISHED}
ALIASES = [alias for variant in VARIANTS for alias in variant.aliases]
# Names of models that were described, and whose weights nobody has put up.
UNPUBLISHED = {
    *("vit_base_r26_s32_224", "R26+ViT-B_32", "R50+ViT-B_32", "R50+ViT-L_16"),
    *("Axial-ViT-B_16", "Axial-ViT-B_32", "BiT-S-R152x2"),
    *(f"{kind}{name}" for kind in ("", "BiT-M-", "BiT-S-") for name in ("R50x2", "R152x1", "R200x3")),
}


def rows_of(alias: str) -> list[Published]:
    """The rows that an alias can mean: on the hub, timm's with any tag, Google's of either paper, torchvision's."""
    if "/" in alias:
        return [SOURCES[f"hub:{alias}"]] if f"hub:{alias}" in SOURCES else []
    second_paper = alias.replace("+ViT-", "_").removeprefix("ViT-")
    patterns = (f"{alias}.*", f"{alias}-*", f"{alias}_*swag-*", f"BiT-M-{alias}*", f"{second_paper}-i*")
    return [row for pattern in patterns for row in published(pattern)]


def test_no_source_is_listed_twice() -> None:
    assert [source for source, times in Counter(row.source for row in PUBLISHED).items() if times > 1] == []


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row.source)
def test_a_row_names_what_exists(row: Published) -> None:
    assert row.model in models()
    assert row.origin in ORIGINS
    assert row.format is None or row.format in {known.name for known in FORMATS}
    assert row.classes in (0, 1000, IMAGENET_21K)
    assert row.top1 is None or (0.5 < row.top1 < 0.9 and row.classes == 1000)
    assert row.config.image_size == row.image_size
    assert pair(row.preprocessing.image_size)[0] == (row.input_size or row.image_size)
    if row.source.startswith("hub:"):
        assert str(parse(row.source)) == row.source
    else:
        assert row.source.startswith(("gs://", "https://"))
        assert row.source.endswith((".npz", ".pth"))


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row.source)
def test_a_row_without_settings_of_its_own_is_the_zoos_model(row: Published) -> None:
    if not any(key in setting for setting in row.settings for key in ("patch_size", "width", "depth")):
        assert name_of(row.config) == row.model


@pytest.mark.parametrize("alias", [alias for alias in ALIASES if alias not in UNPUBLISHED])
def test_every_other_name_of_a_model_has_weights_of_that_model(alias: str) -> None:
    rows = rows_of(alias)
    assert rows
    assert {row.model for row in rows} == {find(alias).name}


def test_the_names_without_weights_are_names_without_weights() -> None:
    assert set(ALIASES) > UNPUBLISHED
    assert {alias for alias in UNPUBLISHED if rows_of(alias)} == set()


@pytest.mark.parametrize("alias", [alias for alias in ALIASES if alias.endswith("384") and "/" in alias])
def test_a_row_has_the_size_in_its_name(alias: str) -> None:
    assert SOURCES[f"hub:{alias}"].image_size == find(alias).config.image_size == 384


@pytest.mark.parametrize("name", [known.name for known in FORMATS])
def test_a_file_of_these_sizes_is_read_as_the_row_says(name: str) -> None:
    """Shapes only: what the format would write for the row's model, it describes as the row's model."""
    form = format_called(name)
    for config in {replace(row.config, depth=1) for row in PUBLISHED if row.format == name and is_vit(row)}:
        written = Rewritten(form.rules(config, None), create(config, device="meta").state_dict())
        found = form.describe({key: tuple(written[key].shape) for key in written}, About(kind=form.writes))
        assert isinstance(found, ViTConfig)
        for key in ("image_size", "patch_size", "classes", "width", "heads", "mlp_dim", "pooling", "tokens", "head"):
            assert getattr(found, key) == getattr(config, key), (name, key, config)


def is_vit(row: Published) -> bool:
    return isinstance(row.config, ViTConfig)


# The files of ImageNet-21k


@pytest.mark.parametrize(
    ("source", "classes", "pre_logits"),
    [
        ("gs://vit_models/imagenet21k/ViT-B_16.npz", IMAGENET_21K, 768),  # with a classifier of zeros
        ("hub:google/vit-base-patch16-224-in21k", 0, 768),  # a pooler and no classifier
        ("hub:google/vit-huge-patch14-224-in21k", 0, 1280),
        ("hub:timm/vit_base_patch16_224.orig_in21k", 0, None),  # neither
        ("hub:timm/vit_base_patch16_224.augreg_in21k", IMAGENET_21K, None),  # a trained classifier
        ("gs://vit_models/imagenet21k+imagenet2012/ViT-B_16.npz", 1000, None),
    ],
)
def test_what_the_files_of_imagenet_21k_end_in(source: str, classes: int, pre_logits: int | None) -> None:
    config = SOURCES[source].config
    assert isinstance(config, ViTConfig)
    assert (config.classes, config.head.pre_logits) == (classes, pre_logits)


# Asking


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
        ("nothing", 0),
    ],
)
def test_a_pattern_finds_sources_models_and_formats_in_any_case(pattern: str, count: int) -> None:
    assert len(published(pattern)) == count


def test_without_a_pattern_all_are_listed() -> None:
    assert published() == PUBLISHED


# Scores that are known from elsewhere


@pytest.mark.parametrize(
    ("source", "top1"),
    [
        ("hub:timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k", 0.7546),
        ("https://dl.fbaipublicfiles.com/deit/deit_tiny_patch16_224-a1311bcf.pth", 0.722),
        ("gs://vit_models/imagenet21k+imagenet2012/ViT-B_16-224.npz", 0.812),
    ],
)
def test_scores_are_those_that_were_published(source: str, top1: float) -> None:
    # Versions of Pillow and of the libraries move a score by a few of the 50,000 images.
    assert SOURCES[source].top1 == pytest.approx(top1, abs=2e-4)


# What the other libraries say of their own files


@pytest.mark.parametrize("row", published("hub:timm/*"), ids=lambda row: row.source)
def test_timm_says_the_same_of_its_weights(row: Published) -> None:
    told = import_timm().get_pretrained_cfg(row.source.removeprefix("hub:timm/"), allow_unregistered=False)
    fed = row.preprocessing
    assert told.hf_hub_id.startswith("timm/")
    assert (told.num_classes, told.input_size) == (row.classes, (3, row.image_size, row.image_size))
    assert (told.crop_pct, told.interpolation) == (fed.crop_share, fed.filter)
    assert (tuple(told.mean), tuple(told.std)) == (tuple(fed.mean), tuple(fed.deviation))
    if told.url and told.url.endswith(".npz"):
        google = SOURCES[told.url.replace("https://storage.googleapis.com/", "gs://")]
        assert (google.model, google.image_size, google.classes) == (row.model, row.image_size, row.classes)


def torchvision_weights() -> dict[str, Any]:
    weights = import_torchvision().models
    kinds = ("ViT_B_16", "ViT_B_32", "ViT_L_16", "ViT_L_32", "ViT_H_14")
    return {member.url: member for kind in kinds for member in getattr(weights, f"{kind}_Weights")}


def test_torchvision_says_the_same_of_its_weights() -> None:
    theirs = torchvision_weights()
    ours = {row.source: row for row in published("torchvision")}
    assert ours.keys() == theirs.keys()
    for source, row in ours.items():
        meta, transform, fed = theirs[source].meta, theirs[source].transforms(), row.preprocessing
        assert meta["min_size"] == (row.image_size, row.image_size)
        assert row.top1 == pytest.approx(meta["_metrics"]["ImageNet-1K"]["acc@1"] / 100, abs=1e-6)
        assert meta["num_params"] == sum(part.numel() for part in create(row.config, device="meta").parameters())
        assert (transform.crop_size, transform.resize_size) == ([row.image_size], [fed.resized[0]])
        assert transform.interpolation.value == fed.filter
        assert (tuple(transform.mean), tuple(transform.std)) == (tuple(fed.mean), tuple(fed.deviation))
