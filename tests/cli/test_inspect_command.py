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
    path = tmp_path_factory.mktemp("inspected")
    photos(path / "photos", each=6)
    assert main(["train", str(path / "photos"), "--out", str(path / "run"), *assigned(SHAPE, {})]) == 0
    return path


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    for name in ("photos", "run"):
        (tmp_path / name).symlink_to(trained / name)
    return Shell(capsys)


def test_report_files(shell: Shell, tmp_path: Path) -> None:
    result = shell("inspect", "run", "photos", "--out", "look", "--only", "rollout,distance,filters", "--class", "dog")
    assert (result.code, result.out) == (0, "look/report.html\n")
    assert {path.name for path in (tmp_path / "look").iterdir()} == {
        "report.html",
        "numbers.json",
        *(f"{name}.{kind}" for name in ("rollout", "distance", "filters") for kind in ("svg", "png")),
    }
    numbers = json.loads((tmp_path / "look" / "numbers.json").read_text())
    assert numbers["sections"]["distance"]["images"] == 12
    assert "relevance_target" in numbers["sections"]["rollout"]
    assert {each["label"] for each in numbers["images"][0]["predictions"]} == {"cat", "dog"}


def test_json_equals_numbers_json(shell: Shell, tmp_path: Path) -> None:
    result = shell("inspect", "run", "photos/cat/00.png", "--out", "look", "--only", "logit-lens", "--json")
    assert result.json == json.loads((tmp_path / "look" / "numbers.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (("run", "missing.jpg", "--out", "look"), "missing.jpg: No such file", "give the path of an image file"),
        (("run", "photos", "--out", "look", "--only", "rolout"), "no section called 'rolout'", "rollout"),
        (("run", "photos", "--out", "look", "--class", "dgo"), "no class 'dgo'", "dog"),
        (("run", "photos", "--out", "look", "--layer", "7", "--only", "heads"), "no such layer", None),
        (("nowhere", "photos", "--out", "look"), "nowhere", None),
        (("run", "empty", "--out", "look"), "empty: no images in this directory", "pass image files"),
        (("run", "broken.jpg", "--out", "look"), "broken.jpg", None),
    ],
    ids=lambda each: each[0] if isinstance(each, str) else None,
)
def test_invalid_arguments_write_nothing(
    shell: Shell, tmp_path: Path, arguments: tuple[str, ...], message: str, hint: str | None
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.jpg").write_bytes(b"no image at all")
    result = shell("inspect", *arguments)
    assert result.code == 1
    assert len(result.errors) == 1
    assert message in result.errors[0]
    assert hint is None or hint in result.hints[0]
    assert not (tmp_path / "look").exists()


@pytest.mark.parametrize(("objective", "fraction"), [("masked", 0.5), ("mae", 0.75)])
def test_self_supervised_run_has_reconstructions(shell: Shell, tmp_path: Path, objective: str, fraction: float) -> None:
    decoder = {f"objective.mae.{key}": value for key, value in (("width", 16), ("depth", 1), ("heads", 2))}
    changes = {"objective.name": objective, "model.patch_size": 4, "augment.mixup": 0, **decoder}
    assert shell("train", "photos", "--out", "unlabeled", *assigned(SHAPE, changes)).code == 0
    result = shell("inspect", "unlabeled", "photos/cat/00.png", "--out", "look", "--only", "reconstruction,norms")
    assert (result.code, result.out) == (0, "look/report.html\n")
    numbers = json.loads((tmp_path / "look" / "numbers.json").read_text())
    assert numbers["sections"]["reconstruction"]["masked_fraction"] == fraction
    assert (tmp_path / "look" / "reconstruction.png").is_file()


def test_reconstruction_is_skipped_without_pretraining_head(shell: Shell) -> None:
    result = shell("inspect", "run", "photos/cat/00.png", "--out", "look", "--only", "reconstruction,norms")
    assert result.code == 0
    assert "skipped reconstruction: the model was not stored with a pre-training head" in result.stderr
