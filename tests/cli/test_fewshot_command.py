"""`vitkit fewshot`: a few examples per class make a classifier that is evaluated like any other."""

from pathlib import Path

import pytest
from cli.tiny_runs import Shell, assigned, photos

from vitkit.cli.main import main

SHAPE = {
    "model.name": "Ti/16",
    "image_size": 16,
    "model.patch_size": 8,
    "model.settings": '["width=16","heads=2","depth=1","mlp_dim=16"]',
    "steps": 2,
    "batch_size": 8,
    "workers": 0,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("few")
    photos(path / "photos", each=6)
    photos(path / "birds", ["finch", "owl", "wren"], each=20)
    assert main(["train", str(path / "photos"), "--out", str(path / "run"), *assigned(SHAPE, {})]) == 0
    return path


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    for name in ("photos", "birds", "run"):
        (tmp_path / name).symlink_to(trained / name)
    return Shell(capsys)


def test_json_by_shots_and_method(shell: Shell) -> None:
    result = shell("fewshot", "run", "birds", "--shots", "5,1", "--seeds", "2", "--method", "all", "--json")
    assert result.code == 0
    actual = result.json
    assert list(actual["shots"]) == ["1", "5"]
    assert actual["shots"]["5"]["mean"] == 1.0  # each class has a color of its own
    assert len(actual["shots"]["1"]["seeds"]) == 2
    assert set(actual["knn"]) == set(actual["logistic"]) == {"1", "5"}
    assert "3 classes, 48 training and 12 test images" in result.stderr


@pytest.mark.usefixtures("forked_examples")
def test_saved_head_is_evaluated_and_exported(shell: Shell, tmp_path: Path) -> None:
    assert shell("fewshot", "run", "birds", "--shots", "5", "--save", "few").code == 0
    result = shell("eval", "few", "birds", "--json").json
    assert result["top1"] == 1.0
    assert [each["name"] for each in result["per_class"]] == ["finch", "owl", "wren"]
    assert shell("export", "few", "for-timm", "--to", "timm").code == 0
    again = shell("fewshot", "run", "birds", "--shots", "5", "--save", "few")
    assert "few already exists" in again.errors[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "birds", "--shots", "100"), "too few images for 100 shots"),
        (("run", "birds", "--shots", "1,x"), "'x' is not a valid integer range"),
        (("run", "nowhere"), "nowhere"),
        (("nowhere", "birds"), "nowhere"),
    ],
)
def test_invalid_arguments_are_reported(shell: Shell, arguments: tuple[str, ...], message: str) -> None:
    result = shell("fewshot", *arguments)
    assert result.code in (1, 2)
    assert message in result.errors[0]


def test_unreadable_image_is_skipped(shell: Shell, tmp_path: Path) -> None:
    photos(tmp_path / "own", ["finch", "owl"], each=10)
    (tmp_path / "own" / "owl" / "03.png").write_bytes(b"no image")
    result = shell("fewshot", "run", "own", "--shots", "1", "--json")
    assert [each["file"] for each in result.json["skipped"]] == ["owl/03.png"]
