"""`vitkit eval --precision --merge`: the engine is compared with the unmodified model, and its cost is printed."""

from pathlib import Path

import pytest
from cli.tiny_runs import Shell, photos

from vitkit.cli.main import main
from vitkit.data.layouts.registry import open_dataset
from vitkit.evaluation.logits import compute_logits
from vitkit.inference.select import select_engine
from vitkit.weights.load import load_bundle

ADDED = {"precision", "merge", "engine", "fp32", "difference"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eval")
    photos(path / "photos", each=10)
    settings = [
        "model.settings=" + '["width=16","heads=2","depth=2","mlp_dim=16"]',
        "steps=4",
        "batch_size=8",
        "workers=0",
    ]
    shape = ["model.name=Ti/16", "image_size=16", "model.patch_size=8", *settings]
    assert main(["train", str(path / "photos"), "--out", str(path / "run"), *shape]) == 0
    return path


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], trained: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(trained)
    return Shell(capsys)


def test_json_has_both_results_and_their_difference(shell: Shell) -> None:
    plain = shell("eval", "run", "photos", "--workers", 0, "--json").json
    assert not ADDED & plain.keys()
    for options in (["--precision", "int8"], ["--merge", 1], ["--precision", "bf16", "--merge", 1]):
        result = shell("eval", "run", "photos", "--workers", 0, "--json", *options).json
        assert result.keys() == plain.keys() | ADDED
        assert result["count"] == plain["count"]
        assert result["fp32"]["top1"] == plain["top1"]
        assert result["fp32"]["nll"] == plain["nll"]
        assert result["difference"]["top1"] == pytest.approx(result["top1"] - plain["top1"])
        assert result["nll"] != plain["nll"]  # another engine was asked


def test_text_output_has_both_results(shell: Shell) -> None:
    result = shell("eval", "run", "photos", "--workers", 0, "--precision", "int8")
    assert result.code == 0
    assert "The unmodified model in fp32" in result.out
    assert "this engine: " in result.out
    assert "engine: " in result.stderr
    assert "unmodified" not in shell("eval", "run", "photos", "--workers", 0).out


def test_engine_logits_are_used(trained: Path) -> None:
    artifact, source = load_bundle(trained / "run"), open_dataset(trained / "photos").splits["all"]
    engine = select_engine(artifact.build_model(), precision="int8").engine
    preprocessing = artifact.preprocessing
    written = compute_logits(artifact.build_model(), source, preprocessing=preprocessing)
    result = compute_logits(lambda images: engine.forward(images)[1], source, preprocessing=preprocessing)
    assert (result.targets == written.targets).all()
    difference = (result.logits - written.logits).abs().max().item()
    assert 0 < difference < 0.1  # one layer of 8-bit products
