"""`vitkit eval --precision --merge`: the chosen engine is judged beside the model as written, and the cost is told."""

from pathlib import Path

import pytest
from cli.tiny_runs import Shell, photos

from vitkit.checkpoints.foreign import load
from vitkit.cli.main import main
from vitkit.data.loader import CPU
from vitkit.data.sources.detect import open_data
from vitkit.engine.choose import engine_for
from vitkit.evaluate.judging import answers_of

ADDED = {"precision", "merge", "engine", "fp32", "difference"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("judged")
    photos(place / "photos", each=10)
    settings = [
        "model.settings=" + '["width=16","heads=2","depth=2","mlp_dim=16"]',
        "steps=4",
        "batch_size=8",
        "workers=0",
    ]
    shape = ["model.name=Ti/16", "image_size=16", "model.patch_size=8", *settings]
    assert main(["train", str(place / "photos"), "--out", str(place / "run"), *shape]) == 0
    return place


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], trained: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(trained)
    return Shell(capsys)


def test_both_accuracies_and_their_difference_are_there(shell: Shell) -> None:
    plain = shell("eval", "run", "photos", "--workers", 0, "--json").json
    assert not ADDED & plain.keys()
    for options in (["--precision", "int8"], ["--merge", 1], ["--precision", "bf16", "--merge", 1]):
        found = shell("eval", "run", "photos", "--workers", 0, "--json", *options).json
        assert found.keys() == plain.keys() | ADDED
        assert found["count"] == plain["count"]
        assert found["fp32"]["top1"] == plain["top1"]
        assert found["fp32"]["nll"] == plain["nll"]
        assert found["difference"]["top1"] == pytest.approx(found["top1"] - plain["top1"])
        assert found["nll"] != plain["nll"]  # another engine was asked


def test_people_read_both(shell: Shell) -> None:
    said = shell("eval", "run", "photos", "--workers", 0, "--precision", "int8")
    assert said.code == 0
    assert "The same images in fp32, as written" in said.out
    assert "points by this engine" in said.out
    assert "engine: " in said.talk
    assert "as written" not in shell("eval", "run", "photos", "--workers", 0).out


def test_answers_by_an_engine_are_the_engines_own(trained: Path) -> None:
    artefact, source = load(trained / "run"), open_data(trained / "photos").splits["all"]
    engine = engine_for(artefact.model(), precision="int8")
    written = answers_of(artefact, source, device=CPU)
    found = answers_of(artefact, source, device=CPU, engine=engine)
    assert (found.labels == written.labels).all()
    difference = (found.logits - written.logits).abs().max().item()
    assert 0 < difference < 0.1  # one layer of 8-bit products
