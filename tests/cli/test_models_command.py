"""`vitkit models`: what scripts rely on, and what a person sees."""

import json

import pytest

from vitkit.cli.main import main
from vitkit.zoo.published import PUBLISHED
from vitkit.zoo.variants import VARIANTS

KEYS = {"name", "kind", "layers", "width", "heads", "patch", "image_size", "tokens", "parameters", "gflops"}


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    assert main(["models", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_variant_is_listed_with_the_keys_that_scripts_rely_on(capsys):
    listed = rows(capsys)
    assert [row["name"] for row in listed] == [variant.name for variant in VARIANTS]
    assert all(set(row) >= KEYS for row in listed)


def test_a_row_has_the_papers_sizes(capsys):
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


def test_a_resnet_counts_its_layers_as_its_name_does_and_has_no_tokens(capsys):
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
def test_a_pattern_finds_names_and_aliases_in_any_case(capsys, pattern, names):
    assert [row["name"] for row in rows(capsys, pattern)] == names


def test_the_table_shows_every_name_on_a_line_of_its_own(capsys):
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for variant in VARIANTS:
        assert sum(line.split()[:1] == [variant.name] for line in lines) == 1


def test_a_pattern_without_a_match_fails_and_suggests(capsys):
    assert main(["models", "B/61"]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines() == ["error: no model fits B/61", "hint: did you mean B/16?"]


# Published weights

PUBLISHED_KEYS = {"source", "model", "format", "image_size", "classes", "origin", "preprocessing", "top1"}


def test_all_published_weights_are_listed_with_the_keys_that_scripts_rely_on(capsys):
    listed = rows(capsys, "--published")
    assert [row["source"] for row in listed] == [row.source for row in PUBLISHED]
    assert all(set(row) >= PUBLISHED_KEYS for row in listed)


def test_a_row_of_published_weights_says_how_to_feed_them_and_what_they_score(capsys):
    (row,) = rows(capsys, "--published", "vit_l_16-852*")
    assert (row["model"], row["format"], row["image_size"], row["classes"]) == ("L/16", "torchvision", 224, 1000)
    assert row["top1"] == pytest.approx(0.79662)
    assert row["preprocessing"]["filter"] == "bilinear"


def test_weights_of_a_model_that_has_no_name_are_listed_by_its_sizes(capsys):
    (row,) = rows(capsys, "--published", "facebook/dinov2-small")
    assert (row["model"], row["top1"]) == ("ViT 384 wide, 12 deep, patches of 14", None)


def test_the_table_of_published_weights_shows_every_source_whole(capsys):
    assert main(["models", "--published"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for row in PUBLISHED:
        assert sum(line.split()[-1:] == [row.source] for line in lines) == 1


def test_a_pattern_without_published_weights_fails_and_suggests(capsys):
    assert main(["models", "--published", "google/vit-base-patch16-225"]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines() == [
        "error: no published weights fit google/vit-base-patch16-225",
        "hint: did you mean google/vit-base-patch16-224?",
    ]
