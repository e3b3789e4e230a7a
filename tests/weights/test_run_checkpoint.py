"""Tests of the models of unfinished runs."""

import json
from pathlib import Path

import pytest
import torch

import vitkit
from vitkit.core.errors import WeightsError
from vitkit.training.callbacks import StepMetrics
from vitkit.weights import artifact as artifact_io
from vitkit.weights.load import load_bundle

SHAPE = {"model.settings": ["width=16", "depth=1", "heads=2", "mlp_dim=16"], "data.workers": 0}
RUNS = {
    "plain": ("digits", {}),
    "average": ("digits", {"optimizer.ema_decay": 0.5}),
    "lora": ("digits", {"optimizer.trainable": "lora", "optimizer.lora_rank": 2}),
    "self-supervised": ("digits", {"objective.name": "masked"}),
}


def train(out: Path, recipe: str, settings: dict[str, object]) -> None:
    vitkit.train(recipe, out=out, steps=4, batch_size=8, image_size=8, settings=SHAPE | settings, progress=False)


def remove_final_model(run: Path) -> None:
    for name in (*artifact_io.ALL_FILES, "summary.json"):
        (run / name).unlink()


@pytest.mark.parametrize(("recipe", "settings"), RUNS.values(), ids=RUNS)
def test_last_checkpoint_equals_the_final_model(tmp_path: Path, recipe: str, settings: dict[str, object]) -> None:
    train(tmp_path / "run", recipe, settings)
    final = load_bundle(tmp_path / "run")
    remove_final_model(tmp_path / "run")
    saved = load_bundle(tmp_path / "run")
    assert (saved.name, saved.config, saved.labels, saved.preprocessing) == (
        final.name,
        final.config,
        final.labels,
        final.preprocessing,
    )
    assert saved.state.keys() == final.state.keys()
    assert all(torch.equal(saved.state[name], tensor) for name, tensor in final.state.items())
    assert vitkit.describe_weights(tmp_path / "run").notes == ("the run is not finished: its model at step-00000004",)
    assert not vitkit.verify(tmp_path / "run").agrees


class StopAt(vitkit.Callback):
    """Stop after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, metrics: StepMetrics) -> None:
        if metrics.step == self.step:
            raise KeyboardInterrupt


def test_best_evaluated_checkpoint_is_used(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = SHAPE | {"evaluation.every": 1, "checkpoint.save_every": 1, "checkpoint.last": 9}
    with pytest.raises(vitkit.Interrupted):
        vitkit.train(
            "digits",
            out=run,
            steps=9,
            batch_size=8,
            image_size=8,
            settings=settings,
            callbacks=[StopAt(4)],
            progress=False,
        )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scores = {line["step"]: line["val_top1"] for line in lines if "val_top1" in line}
    best = max(scores, key=lambda step: (scores[step], -step))
    expected = f"step-{best:08d}"
    assert vitkit.describe_weights(run).notes == (f"the run is not finished: its model at {expected}",)
    others = [path for path in (run / "checkpoints").glob("step-*") if path.name != expected]
    (run / "checkpoints" / expected).rename(run / "checkpoints" / "step-00000008")
    newest = max(path.name for path in others)
    assert vitkit.describe_weights(run).notes == (f"the run is not finished: its model at {newest}",)
    (run / "checkpoints" / "step-00000008").rename(run / "checkpoints" / expected)
    (run / "checkpoints" / expected / "state.safetensors").write_bytes(b"damaged")
    assert vitkit.describe_weights(run).notes == (f"the run is not finished: its model at {newest}",)
    (run / "model.json").write_text("{}")
    with pytest.raises(WeightsError, match=r"model.json: not the model of a run"):
        vitkit.load(run)
