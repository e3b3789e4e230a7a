"""torch.compile traces whole models, in a process without run-time shape checks, which cannot be traced."""

import subprocess
import sys

PROGRAM = """
import torch
import vitkit

torch.manual_seed(0)
for name, image_size, settings in [
    ("Ti/16", 32, {"depth": 2}),
    ("Ti/16", 32, {"depth": 1, "positions.kind": "rotary", "tokens.registers": 2}),
    ("Ti/16", 32, {"depth": 1, "positions.kind": "relative"}),
    ("R26+S/32", 64, {"depth": 1, "backbone.units": [1]}),
    ("BiT-R50x1", 64, {"units": [1, 1]}),
]:
    model = vitkit.create(name, image_size=image_size, num_classes=5, settings=settings).eval()
    torch.nn.init.normal_(model.head.weight)
    images = torch.randn(2, 3, image_size, image_size)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        print((compiled(images) - model(images)).abs().max().item())
"""


def test_models_compile_as_one_graph_to_the_same_logits() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    differences = [float(line) for line in run.stdout.splitlines()]
    assert len(differences) == 5
    assert max(differences) < 1e-5  # the same operations, which the compiler may reorder
