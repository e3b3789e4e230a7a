"""Smoke tests on a GPU: `make test-gpu`. All other tests hide GPUs."""

from pathlib import Path

import pytest
import torch

import vitkit

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and VITKIT_TEST_GPU=1")


def test_forward_pass_agrees_with_the_cpu() -> None:
    model = vitkit.create("Ti/16", image_size=32, num_classes=10, settings={"depth": 2}).eval()
    torch.nn.init.normal_(model.head.weight)
    images = torch.rand(4, 3, 32, 32)
    with torch.no_grad():
        expected, logits = model(images), model.cuda()(images.cuda()).cpu()
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-2)  # TF32 has ten bits


def test_run_trains_resumes_and_predicts(tmp_path: Path) -> None:
    settings = {
        "model.settings": ["width=32", "depth=2", "heads=2", "mlp_dim=64"],
        "checkpoint.save_every": 5,
        "data.workers": 0,
    }

    class Stop(vitkit.Callback):
        def on_step(self, metrics: object) -> None:
            if getattr(metrics, "step", 0) == 7:
                raise KeyboardInterrupt

    def train(**options: object) -> vitkit.Run:
        return vitkit.train(
            recipe="digits", out=tmp_path / "run", steps=10, settings=settings, device="cuda", **options
        )

    with pytest.raises(vitkit.Interrupted):
        train(callbacks=[Stop()])
    run = train()
    assert run.status == "finished"
    assert vitkit.evaluate(run, "digits", device="cuda").top1 > 0.1
