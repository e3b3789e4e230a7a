"""A compiled model learns what a plain one does. In a process of its own: run-time checks do not go with compiling."""

import json
import subprocess
import sys

PROGRAM = """
import functools, itertools, json
from dataclasses import replace

import torch

from vitkit.data.loader import Batch
from vitkit.data.transforms import Preprocessing
from vitkit.train.config import ParallelConfig, RunConfig, ScheduleConfig
from vitkit.train.make import make_trainer
from vitkit.train.parallel import Ranks
from vitkit.zoo.lookup import create

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
    model = create("Ti/16", image_size=16, patch_size=4, classes=5, settings=("depth=2", "dropout.dense=0.1"),
                   generator=torch.Generator().manual_seed(0))
    trainer = make_trainer(config, model, preprocessing=Preprocessing(image_size=16), classes=5, steps=5,
                           ranks=Ranks(device=torch.device("cpu")))
    batches = itertools.repeat(Batch(pixels, torch.arange(8) % 5))
    losses[str(switch)] = [trainer.update(batches).loss for _ in range(5)]
    losses[f"{switch} compiled"] = len(compiled)
print(json.dumps(losses))
"""


def test_a_compiled_model_learns_the_same():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout)
    assert (seen["False compiled"], seen["True compiled"]) == (0, 1)
    assert seen["False"][0] > seen["False"][-1]
    assert max(abs(one - other) for one, other in zip(seen["False"], seen["True"], strict=True)) < 1e-4
