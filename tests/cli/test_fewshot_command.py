"""`vitkit fewshot`: a few examples of each class make a classifier that can be judged like any other."""

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
    place = tmp_path_factory.mktemp("few")
    photos(place / "photos", each=6)
    photos(place / "birds", ["finch", "owl", "wren"], each=20)
    assert main(["train", str(place / "photos"), "--out", str(place / "run"), *assigned(SHAPE, {})]) == 0
    return place


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("photos", "birds", "run"):
        (tmp_path / name).symlink_to(trained / name)
    return Shell(capsys)


def test_numbers_by_shots_and_method(shell: Shell) -> None:
    said = shell("fewshot", "run", "birds", "--shots", "5,1", "--seeds", "2", "--method", "all", "--json")
    assert said.code == 0
    found = said.json
    assert list(found["shots"]) == ["1", "5"]
    assert found["shots"]["5"]["mean"] == 1.0  # each class has a colour of its own
    assert len(found["shots"]["1"]["seeds"]) == 2
    assert set(found["knn"]) == set(found["logistic"]) == {"1", "5"}
    assert "3 classes, 48 to learn from, 12 to judge by" in said.talk


def test_the_head_can_be_saved_judged_and_exported(shell: Shell, tmp_path: Path) -> None:
    assert shell("fewshot", "run", "birds", "--shots", "5", "--save", "few").code == 0
    judged = shell("eval", "few", "birds", "--json").json
    assert judged["top1"] == 1.0
    assert [each["name"] for each in judged["per_class"]] == ["finch", "owl", "wren"]
    assert shell("export", "few", "for-timm", "--to", "timm").code == 0
    again = shell("fewshot", "run", "birds", "--shots", "5", "--save", "few")
    assert "few is there already" in again.errors[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "birds", "--shots", "100"), "too few images for 100 shots"),
        (("run", "birds", "--shots", "1,x"), "is no list of numbers"),
        (("run", "nowhere"), "nowhere"),
        (("nowhere", "birds"), "nowhere"),
    ],
)
def test_a_mistake_is_named(shell: Shell, arguments: tuple[str, ...], message: str) -> None:
    said = shell("fewshot", *arguments)
    assert said.code in (1, 2)
    assert message in said.errors[0]


def test_a_broken_image_is_left_out_by_name(shell: Shell, tmp_path: Path) -> None:
    photos(tmp_path / "own", ["finch", "owl"], each=10)
    (tmp_path / "own" / "owl" / "03.png").write_bytes(b"no image")
    said = shell("fewshot", "run", "own", "--shots", "1", "--json")
    assert [each["file"] for each in said.json["bad"]] == ["owl/03.png"]
