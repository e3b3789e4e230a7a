"""torch.compile in training. In a separate process: run-time shape checks cannot be compiled."""

import json
import subprocess
import sys

PROGRAM = """
import functools, itertools, json
from dataclasses import replace

import torch

from vitkit.data.loader import ImageBatch
from vitkit.data.preprocessing import Preprocessing
from vitkit.training.config import ParallelConfig, RunConfig, ScheduleConfig
from vitkit.training.build import build_trainer
from vitkit.training.distributed import Ranks
from vitkit.zoo.registry import create

compiled = []
def compile(function, **options):
    compiled.append(function)
    return plain_compile(function, backend="aot_eager", **options)  # the default one needs a C++ compiler, and minutes
plain_compile, torch.compile = torch.compile, compile

pixels = torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
losses = {}
for switch in (False, True):
    config = RunConfig(
        schedule=ScheduleConfig(batch_size=8, epochs=None, steps=5, lr=1e-2), parallel=ParallelConfig(compile=switch)
    )
    model = create("Ti/16", image_size=16, patch_size=4, num_classes=5, settings={"depth": 2, "dropout.dense": 0.1},
                   generator=torch.Generator().manual_seed(0))
    trainer = build_trainer(config, model, preprocessing=Preprocessing(image_size=16), num_classes=5, total_steps=5,
                           ranks=Ranks(device=torch.device("cpu")))
    batches = itertools.repeat(ImageBatch(pixels, torch.arange(8) % 5))
    losses[str(switch)] = [trainer.step(batches).loss for _ in range(5)]
    losses[f"{switch} compiled"] = len(compiled)
print(json.dumps(losses))
"""


def test_compiled_model_trains_the_same():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout)
    assert (seen["False compiled"], seen["True compiled"]) == (0, 1)
    assert seen["False"][0] > seen["False"][-1]
    assert max(abs(one - other) for one, other in zip(seen["False"], seen["True"], strict=True)) < 1e-4
