"""`vitkit finetune`: a trained model learns other classes, at another size, in whole or in part, at the best rate."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from cli.tiny_runs import Shell, photos, tree
from safetensors.torch import load_file

from vitkit.cli.main import main
from vitkit.cli.watching import Shown
from vitkit.train.watch import Pulse


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on cats and dogs, and photos of birds beside it."""
    place = tmp_path_factory.mktemp("trained")
    photos(place / "pets")
    photos(place / "birds", ["eagle", "owl", "rook"])
    shape = ["model=Ti/16", "image_size=16", "model.patch_size=8"]
    settings = ['model.settings=["width=16","heads=2","depth=1","mlp_dim=16"]', "steps=3", "batch_size=8", "workers=0"]
    assert main(["train", str(place / "pets"), "--out", str(place / "run"), *shape, *settings]) == 0
    return place


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    for name in ("pets", "birds", "run"):
        (tmp_path / name).symlink_to(trained / name)
    return Shell(capsys)


def test_the_head_is_new_and_the_positions_are_moved_to_the_larger_grid(shell):
    said = shell.finetune("run", "birds", "new", image_size=32)
    assert said.code == 0
    assert "position embeddings: grid 2×2 → 4×4" in said.talk
    assert "head: new, for 3 classes instead of 2" in said.talk
    weights = load_file("new/model.safetensors")
    assert weights["pos_embed"].shape[-2] == 4 * 4 + 1
    assert weights["head.weight"].shape[0] == 3
    assert json.loads(Path("new/labels.json").read_bytes()) == ["eagle", "owl", "rook"]
    assert shell("eval", "new", "birds", "--workers", "0", "--json").json["count"] == 6  # a tenth was held out


def test_a_new_head_is_zero_even_for_the_same_classes(shell):
    assert shell.finetune("run", "pets", "new", lr=1e-30).code == 0
    assert load_file("new/model.safetensors")["head.weight"].abs().max() < 1e-20


def test_the_head_alone_may_learn(shell):
    assert shell.finetune("run", "birds", "new", optimizer__tune="head", optimizer__weight_decay=0).code == 0
    before, after = load_file("run/model.safetensors"), load_file("new/model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before if not name.startswith("head."))
    assert after["head.weight"].abs().max() > 0


def test_lora_is_merged_into_queries_and_values(shell):
    said = shell.finetune("run", "birds", "new", optimizer__tune="lora", optimizer__lora_rank=2, lr=0.1)
    assert said.code == 0
    before, after = load_file("run/model.safetensors"), load_file("new/model.safetensors")
    changed = {name for name in before if not name.startswith("head.") and not torch.equal(before[name], after[name])}
    assert changed == {"blocks.0.attn.qkv.weight"}
    query, key, value = (after["blocks.0.attn.qkv.weight"] - before["blocks.0.attn.qkv.weight"]).chunk(3)
    assert query.abs().max() > 0
    assert key.abs().max() == 0
    assert value.abs().max() > 0
    assert before.keys() == after.keys()


def test_a_sweep_chooses_by_held_out_images_and_learns_from_all(shell):
    said = shell.finetune("run", "birds", "new", "--sweep", "--rates", "1e-20,0.03", "--json")
    assert said.code == 0
    assert [trial["lr"] for trial in said.json["sweep"]] == [1e-20, 0.03]
    best = said.json["sweep"][1]
    assert best["val_loss"] < said.json["sweep"][0]["val_loss"]
    kept = json.loads(Path("new/sweep.json").read_bytes())
    assert kept == {"chosen": 0.03, "trials": said.json["sweep"]}
    assert said.json["images"] == {"train": 60}
    trial = json.loads(Path("new/sweep/lr-0.03/summary.json").read_bytes())
    assert trial["images"] == {"train": 54, "val": 6}
    before = tree(Path("new"))
    again = shell.finetune("run", "birds", "new", "--rates", "1e-20,0.03")
    assert again.code == 0
    assert "Already done, nothing was changed" in again.out
    assert "held-out top-1" in again.out
    assert tree(Path("new")) == before


def test_a_sweep_without_rates_tries_the_recipes(shell):
    assert shell.finetune("run", "birds", "new", "--sweep", steps=1).code == 0
    assert sorted(path.name for path in Path("new/sweep").iterdir()) == [
        "lr-0.0001",
        "lr-0.0003",
        "lr-0.001",
        "lr-0.003",
    ]


def test_a_sweep_goes_on_where_it_was_stopped(shell, monkeypatch):
    show, begun = Shown.pulse, []

    def pulse(self: Shown, pulse: Pulse) -> None:
        show(self, pulse)
        begun.append(pulse.step)
        if len(begun) == 4 + 2:  # the second step of the second trial
            os.kill(os.getpid(), signal.SIGTERM)

    rates = ("--rates", "0.001,0.03")
    with monkeypatch.context() as patched:
        patched.setattr(Shown, "pulse", pulse)
        stopped = shell.finetune("run", "birds", "new", *rates)
    assert stopped.code == 75
    assert stopped.out == ""
    assert "stopped by SIGTERM; run the same command again" in stopped.talk
    assert Path("new/sweep/lr-0.001/summary.json").exists()
    assert not Path("new/sweep/lr-0.03/summary.json").exists()
    resumed = shell.finetune("run", "birds", "new", *rates)
    assert resumed.code == 0
    assert "going on from step 2" in resumed.talk
    assert shell.finetune("run", "birds", "never-stopped", *rates).code == 0
    for name in ("sweep.json", "model.safetensors", "sweep/lr-0.03/metrics.jsonl"):
        assert Path("new", name).read_bytes() == Path("never-stopped", name).read_bytes()
