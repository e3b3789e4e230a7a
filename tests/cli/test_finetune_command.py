"""`vitkit finetune`: new heads and sizes, trainable parameters, sweeps."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from cli.tiny_runs import Shell, photos, tree
from safetensors.torch import load_file

from vitkit.api.progress import RunDisplay
from vitkit.cli.main import main
from vitkit.training.callbacks import StepMetrics


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run on cats and dogs, and write photos of birds."""
    path = tmp_path_factory.mktemp("trained")
    photos(path / "pets")
    photos(path / "birds", ["eagle", "owl", "rook"])
    shape = ["model=Ti/16", "image_size=16", "model.patch_size=8"]
    settings = ['model.settings=["width=16","heads=2","depth=1","mlp_dim=16"]', "steps=3", "batch_size=8", "workers=0"]
    assert main(["train", str(path / "pets"), "--out", str(path / "run"), *shape, *settings]) == 0
    return path


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    for name in ("pets", "birds", "run"):
        (tmp_path / name).symlink_to(trained / name)
    return Shell(capsys)


def test_head_is_new_and_positions_are_interpolated(shell):
    result = shell.finetune("run", "birds", "new", image_size=32)
    assert result.code == 0
    assert "position embeddings: grid 2×2 → 4×4" in result.stderr
    assert "head: new, for 3 classes instead of 2" in result.stderr
    weights = load_file("new/model.safetensors")
    assert weights["pos_embed"].shape[-2] == 4 * 4 + 1
    assert weights["head.weight"].shape[0] == 3
    assert json.loads(Path("new/labels.json").read_bytes()) == ["eagle", "owl", "rook"]
    assert shell("eval", "new", "birds", "--workers", "0", "--json").json["count"] == 6  # a tenth was held out


def test_new_head_is_zero_even_for_the_same_classes(shell):
    assert shell.finetune("run", "pets", "new", lr=1e-30).code == 0
    assert load_file("new/model.safetensors")["head.weight"].abs().max() < 1e-20


def test_trainable_head(shell):
    assert shell.finetune("run", "birds", "new", optimizer__trainable="head", optimizer__weight_decay=0).code == 0
    before, after = load_file("run/model.safetensors"), load_file("new/model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before if not name.startswith("head."))
    assert after["head.weight"].abs().max() > 0


def test_lora_is_merged_into_queries_and_values(shell):
    result = shell.finetune("run", "birds", "new", optimizer__trainable="lora", optimizer__lora_rank=2, lr=0.1)
    assert result.code == 0
    before, after = load_file("run/model.safetensors"), load_file("new/model.safetensors")
    changed = {name for name in before if not name.startswith("head.") and not torch.equal(before[name], after[name])}
    assert changed == {"blocks.0.attn.qkv.weight"}
    query, key, value = (after["blocks.0.attn.qkv.weight"] - before["blocks.0.attn.qkv.weight"]).chunk(3)
    assert query.abs().max() > 0
    assert key.abs().max() == 0
    assert value.abs().max() > 0
    assert before.keys() == after.keys()


def test_sweep_chooses_on_held_out_images(shell):
    result = shell.finetune("run", "birds", "new", "--sweep", "--rates", "1e-20,0.03", "--json")
    assert result.code == 0
    assert [trial["lr"] for trial in result.json["sweep"]] == [1e-20, 0.03]
    best = result.json["sweep"][1]
    assert best["val_loss"] < result.json["sweep"][0]["val_loss"]
    remaining = json.loads(Path("new/sweep.json").read_bytes())
    assert remaining == {"chosen": 0.03, "trials": result.json["sweep"]}
    assert result.json["images"] == {"train": 60}
    trial = json.loads(Path("new/sweep/lr-0.03/summary.json").read_bytes())
    assert trial["images"] == {"train": 54, "val": 6}
    before = tree(Path("new"))
    again = shell.finetune("run", "birds", "new", "--rates", "1e-20,0.03")
    assert again.code == 0
    assert "Already finished, nothing was changed" in again.out
    assert "held-out top-1" in again.out
    assert tree(Path("new")) == before


def test_sweep_uses_the_rates_of_the_recipe(shell):
    assert shell.finetune("run", "birds", "new", "--sweep", steps=1).code == 0
    assert sorted(path.name for path in Path("new/sweep").iterdir()) == [
        "lr-0.0001",
        "lr-0.0003",
        "lr-0.001",
        "lr-0.003",
    ]


def test_stopped_sweep_resumes(shell, monkeypatch):
    show, steps = RunDisplay.on_step, []

    def on_step(self: RunDisplay, metrics: StepMetrics) -> None:
        show(self, metrics)
        steps.append(metrics.step)
        if len(steps) == 4 + 2:  # the second step of the second trial
            os.kill(os.getpid(), signal.SIGTERM)

    rates = ("--rates", "0.001,0.03")
    with monkeypatch.context() as patched:
        patched.setattr(RunDisplay, "on_step", on_step)
        stopped = shell.finetune("run", "birds", "new", *rates)
    assert stopped.code == 75
    assert stopped.out == ""
    assert "stopped by SIGTERM; run the same command again" in stopped.stderr
    assert Path("new/sweep/lr-0.001/summary.json").exists()
    assert not Path("new/sweep/lr-0.03/summary.json").exists()
    resumed = shell.finetune("run", "birds", "new", *rates)
    assert resumed.code == 0
    assert "resuming from step 2" in resumed.stderr
    assert shell.finetune("run", "birds", "never-stopped", *rates).code == 0
    for name in ("sweep.json", "model.safetensors", "sweep/lr-0.03/metrics.jsonl"):
        assert Path("new", name).read_bytes() == Path("never-stopped", name).read_bytes()
