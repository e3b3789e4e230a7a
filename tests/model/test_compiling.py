"""torch.compile takes the models whole. In a process of its own: run-time shape checks do not go with compiling."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
import vitkit
from vitkit.core.shapes import pair

torch.manual_seed(0)
name, *settings = sys.argv[1:]
model = vitkit.create(name, classes=5, settings=settings).eval()
torch.nn.init.normal_(model.head.weight)
images = torch.randn(2, 3, *pair(model.config.image_size))
compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
with torch.no_grad():
    print((compiled(images) - model(images)).abs().max().item())
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("Ti/16", "depth=2"),
        ("Ti/16", "depth=2", "positions.kind=rotary", "tokens.registers=2"),
        ("Ti/16", "depth=2", "positions.kind=relative"),
        ("R26+S/32", "depth=1", "backbone.units=[1]", "image_size=64"),
        ("BiT-R50x1", "units=[1,1]", "image_size=64"),
    ],
    ids=" ".join,
)
def test_a_model_compiles_as_one_graph_to_the_same_logits(arguments):
    run = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 1e-5  # the same operations, in an order that the compiler may change
