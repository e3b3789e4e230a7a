"""`vitkit models`: JSON keys and tables."""

import json

import pytest

from vitkit.cli.main import main
from vitkit.zoo.pretrained import PRETRAINED
from vitkit.zoo.variants import VARIANTS

KEYS = {"name", "kind", "layers", "width", "heads", "patch", "image_size", "tokens", "parameters", "gflops"}


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    assert main(["models", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_lists_every_variant_with_stable_keys(capsys):
    listed = rows(capsys)
    assert [row["name"] for row in listed] == [variant.name for variant in VARIANTS]
    assert all(set(row) >= KEYS for row in listed)


def test_json_row_of_large_model(capsys):
    (row,) = rows(capsys, "L/16")
    assert {key: row[key] for key in KEYS - {"gflops"}} == {
        "name": "L/16",
        "kind": "vit",
        "layers": 24,
        "width": 1024,
        "heads": 16,
        "patch": 16,
        "image_size": 224,
        "tokens": 197,
        "parameters": 304_326_632,
    }
    assert row["gflops"] == pytest.approx(123.1, abs=0.05)


def test_resnet_layers_match_its_name(capsys):
    listed = {row["name"]: row for row in rows(capsys, "BiT-*")}
    assert {name: row["layers"] for name, row in listed.items()} == {
        "BiT-R50x1": 50,
        "BiT-R50x2": 50,
        "BiT-R101x1": 101,
        "BiT-R152x1": 152,
        "BiT-R152x2": 152,
        "BiT-R200x3": 200,
    }
    assert all(row["heads"] is row["patch"] is row["tokens"] is None for row in listed.values())


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("h/14", ["H/14"]),
        ("R50+*", ["R50+B/16", "R50+B/32", "R50+L/16", "R50+L/32"]),
        ("vit_base_patch16_224", ["B/16"]),
        ("google/vit-huge*", ["H/14"]),
        ("axial*", ["Axial-B/16", "Axial-B/32"]),
    ],
)
def test_pattern_matches_names_and_aliases(capsys, pattern, names):
    assert [row["name"] for row in rows(capsys, pattern)] == names


@pytest.mark.parametrize("columns", ["40", "100"])
def test_table_has_one_line_per_model(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for variant in VARIANTS:
        assert sum(line.split()[:1] == [variant.name] for line in lines) == 1


def test_pattern_without_match_suggests_a_name(capsys):
    assert main(["models", "B/61"]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines() == ["error: no model matches B/61", "hint: did you mean B/16?"]


# Pretrained weights

WEIGHTS_KEYS = {"source", "model", "format", "image_size", "num_classes", "origin", "preprocessing", "top1"}


def test_json_lists_all_pretrained_weights(capsys):
    listed = rows(capsys, "--pretrained")
    assert [row["source"] for row in listed] == [row.source for row in PRETRAINED]
    assert all(set(row) >= WEIGHTS_KEYS for row in listed)


def test_json_row_has_preprocessing_and_score(capsys):
    (row,) = rows(capsys, "--pretrained", "vit_l_16-852*")
    assert (row["model"], row["format"], row["image_size"], row["num_classes"]) == ("L/16", "torchvision", 224, 1000)
    assert row["top1"] == pytest.approx(0.79662)
    assert row["preprocessing"]["interpolation"] == "bilinear"


def test_unnamed_model_is_listed_by_dimensions(capsys):
    (row,) = rows(capsys, "--pretrained", "facebook/dinov2-small")
    assert (row["model"], row["top1"]) == ("ViT 384 wide, 12 deep, patches of 14", None)


def test_weights_table_shows_sources_unwrapped(capsys):
    assert main(["models", "--pretrained"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for row in PRETRAINED:
        assert sum(line.split()[-1:] == [row.source] for line in lines) == 1


def test_pattern_without_weights_suggests_a_source(capsys):
    assert main(["models", "--pretrained", "google/vit-base-patch16-225"]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines() == [
        "error: no pretrained weights match google/vit-base-patch16-225",
        "hint: did you mean google/vit-base-patch16-224?",
    ]
