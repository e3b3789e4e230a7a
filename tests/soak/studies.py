"""Studies whose driver and runs are killed at random moments."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from soak.faults import Finding
from soak.victim import children

STUDY = """
seeds = 2
rates = [0.001, 0.01]
tune_by = "pooling"
[settings.model]
name = "Ti/16"
image_size = 8
patch_size = 4
settings = ["width=16", "heads=2", "depth=1", "mlp_dim=16"]
[settings.data]
channels = 1
workers = 0
[settings.schedule]
batch_size = 16
steps = 60
epochs = "none"
[settings.evaluation]
every = 20
[settings.checkpoint]
save_every = 10
[axes.pooling.class]
[axes.pooling.mean]
"model.settings" = ["pooling=mean"]
[[measures]]
shots = [2]
draws = 3
[[claims]]
text = "equal"
kind = "equal"
column = "downstream_2shot"
axis = "pooling"
labels = ["class", "mean"]
margin = 0.5
"""
MACHINE = ("images_per_second", "hours")
"""Columns that depend on the machine."""
TIMEOUT = 3600


def start(folder: Path, out: Path) -> "subprocess.Popen[bytes]":
    """Start the study or resume it."""
    (folder / "tiny.toml").write_text(STUDY, encoding="utf-8")
    command = [sys.executable, "-m", "vitkit", "study", str(folder / "tiny.toml"), "--out", str(out)]
    with (folder / "study.log").open("ab") as log:
        return subprocess.Popen(
            [*command, "data.upstream=digits", "data.downstream=digits"], stdout=log, stderr=log, cwd=folder
        )


def read_table(out: Path) -> list[dict[str, object]]:
    """Return the table without the columns that depend on the machine."""
    table = json.loads((out / "result.json").read_bytes())["table"]
    return [{key: value for key, value in row.items() if key not in MACHINE} for row in table]


def kills(folder: Path, *, count: int) -> Finding:
    """Kill the driver or a run `count` times; the final table must equal that of an undisturbed study.

    Moments are drawn from a third of the time that the undisturbed study takes, so that they fall into all of it.
    """
    result = Finding("studies that are killed", {"driver killed": 0, "run killed": 0})
    folder.mkdir(parents=True, exist_ok=True)
    reference, out, chance = folder / "reference", folder / "killed", random.Random(0)
    began = time.monotonic()
    result.expect(start(folder, reference).wait(TIMEOUT) == 0, "the undisturbed study failed")
    longest = (time.monotonic() - began) / 3
    while sum(int(str(each)) for each in result.figures.values()) < count:
        driver = start(folder, out)
        try:
            driver.wait(chance.uniform(0.0, longest))
        except subprocess.TimeoutExpired:
            runs = children(driver.pid)
            victim = chance.choice(["driver", "run"]) if runs else "driver"
            os.kill(driver.pid if victim == "driver" else runs[0], signal.SIGKILL)
            result.count(f"{victim} killed")
            if victim == "driver":
                driver.wait(60)
                continue
        code = driver.wait(TIMEOUT)
        result.expect(code in (0, 1), f"the study ended with code {code}")  # 1: a run was killed
        if len(read_table(out)) == len(read_table(reference)):  # finished before the last kill: once more
            result.expect(read_table(out) == read_table(reference), f"the table of {out.name} differs")
            out = folder / f"killed{len(list(folder.glob('killed*')))}"
    result.expect(start(folder, out).wait(TIMEOUT) == 0, "the resumed study failed")
    result.expect(read_table(out) == read_table(reference), "the table differs from that of the undisturbed study")
    return result
