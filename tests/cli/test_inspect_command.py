"""`vitkit inspect`: a run or weights and images become a folder one can look at; what cannot be is said."""

import json
from pathlib import Path

import pytest
from cli.tiny_runs import Shell, assigned, photos

from vitkit.cli.main import main

SHAPE = {
    "model.name": "Ti/16",
    "image_size": 16,
    "model.patch_size": 8,
    "model.settings": '["width=16","heads=2","depth=2","mlp_dim=16"]',
    "steps": 2,
    "batch_size": 8,
    "workers": 0,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("inspected")
    photos(place / "photos", each=6)
    assert main(["train", str(place / "photos"), "--out", str(place / "run"), *assigned(SHAPE, {})]) == 0
    return place


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    for name in ("photos", "run"):
        (tmp_path / name).symlink_to(trained / name)
    return Shell(capsys)


def test_a_run_and_a_folder_of_images_become_a_report(shell: Shell, tmp_path: Path) -> None:
    said = shell("inspect", "run", "photos", "--out", "look", "--only", "rollout,distance,filters", "--class", "dog")
    assert (said.code, said.out) == (0, "look/report.html\n")
    assert {path.name for path in (tmp_path / "look").iterdir()} == {
        "report.html",
        "numbers.json",
        *(f"{name}.{kind}" for name in ("rollout", "distance", "filters") for kind in ("svg", "png")),
    }
    numbers = json.loads((tmp_path / "look" / "numbers.json").read_text())
    assert numbers["parts"]["distance"]["images"] == 12
    assert "relevance_chosen" in numbers["parts"]["rollout"]
    assert {each["label"] for each in numbers["images"][0]["predictions"]} == {"cat", "dog"}


def test_json_prints_the_numbers_that_are_written(shell: Shell, tmp_path: Path) -> None:
    said = shell("inspect", "run", "photos/cat/00.png", "--out", "look", "--only", "lens", "--json")
    assert said.json == json.loads((tmp_path / "look" / "numbers.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (("run", "missing.jpg", "--out", "look"), "missing.jpg: No such file", "name an image file"),
        (("run", "photos", "--out", "look", "--only", "rolout"), "no part called 'rolout'", "rollout"),
        (("run", "photos", "--out", "look", "--class", "dgo"), "no class 'dgo'", "dog"),
        (("run", "photos", "--out", "look", "--layer", "7", "--only", "heads"), "no such layer", None),
        (("nowhere", "photos", "--out", "look"), "nowhere", None),
        (("run", "empty", "--out", "look"), "empty: no images in this folder", "name image files"),
        (("run", "broken.jpg", "--out", "look"), "broken.jpg", None),
    ],
    ids=lambda each: each[0] if isinstance(each, str) else None,
)
def test_a_mistake_is_named_and_nothing_is_written(
    shell: Shell, tmp_path: Path, arguments: tuple[str, ...], message: str, hint: str | None
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.jpg").write_bytes(b"no image at all")
    said = shell("inspect", *arguments)
    assert said.code == 1
    assert len(said.errors) == 1
    assert message in said.errors[0]
    assert hint is None or hint in said.hints[0]
    assert not (tmp_path / "look").exists()


@pytest.mark.parametrize(("objective", "share"), [("masked", 0.5), ("autoencoder", 0.75)])
def test_a_run_without_labels_shows_what_it_makes_of_hidden_patches(
    shell: Shell, tmp_path: Path, objective: str, share: float
) -> None:
    decoder = {f"objective.autoencoder.{key}": value for key, value in (("width", 16), ("depth", 1), ("heads", 2))}
    changes = {"objective.name": objective, "model.patch_size": 4, "augment.mixup": 0, **decoder}
    assert shell("train", "photos", "--out", "unlabelled", *assigned(SHAPE, changes)).code == 0
    said = shell("inspect", "unlabelled", "photos/cat/00.png", "--out", "look", "--only", "hidden,norms")
    assert (said.code, said.out) == (0, "look/report.html\n")
    numbers = json.loads((tmp_path / "look" / "numbers.json").read_text())
    assert numbers["parts"]["hidden"]["hidden_share"] == share
    assert (tmp_path / "look" / "hidden.png").is_file()


def test_a_model_alone_has_nothing_to_fill_in_patches_with(shell: Shell) -> None:
    said = shell("inspect", "run", "photos/cat/00.png", "--out", "look", "--only", "hidden,norms")
    assert said.code == 0
    assert "left out hidden: what it filled in patches with is not beside the model" in said.talk
