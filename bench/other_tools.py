"""Other tools' training scripts with their defaults, for bench/default.py.

TOOLS (`--tools`) has the scripts as their projects publish them: timm/train.py (huggingface/pytorch-image-models) and
transformers/run_image_classification.py (examples/pytorch/image-classification of huggingface/transformers), and may
have `python`, the interpreter of an environment in which the tools are installed. Their length is in epochs, so one and
two epochs are timed first, and then as many are trained as fit into the minutes.
"""

import csv
import importlib.util
import json
import math
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

Command = Callable[[Path, Path, Path, int], list[str]]
"""Returns the arguments for data, out, weights and a number of epochs."""


def timm_command(data: Path, out: Path, weights: Path, epochs: int) -> list[str]:
    """Return the arguments of timm's script for DeiT-Ti."""
    classes = sum(1 for _ in (data / "train").iterdir())
    model = ["--model", "deit_tiny_patch16_224", "--pretrained", "--pretrained-path", str(weights)]
    splits = ["--data-dir", str(data), "--train-split", "train", "--val-split", "test", "--num-classes", str(classes)]
    machine = ["--device", "cpu", "--workers", "1", "--no-prefetcher", "--output", str(out), "--experiment", "run"]
    return [*splits, *model, *machine, "--epochs", str(epochs)]


def transformers_command(data: Path, out: Path, weights: Path, epochs: int) -> list[str]:
    """Return the arguments of transformers' example for DeiT-Ti in its own format."""
    model = weights.parent / "deit-tiny-transformers"
    if not model.exists():
        command = [sys.executable, "-m", "vitkit", "weights", "convert", str(weights), str(model), "--to"]
        command += ["huggingface"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    splits = ["--train_dir", str(data / "train"), "--validation_dir", str(data / "test"), "--do_train", "--do_eval"]
    start = ["--model_name_or_path", str(model), "--ignore_mismatched_sizes", "--remove_unused_columns", "False"]
    machine = ["--use_cpu", "--output_dir", str(out), "--save_strategy", "no", "--report_to", "none"]
    return [*splits, *start, *machine, "--num_train_epochs", str(epochs)]


def read_timm(out: Path) -> float:
    """Return the accuracy of the last epoch: the best one would be chosen by test images."""
    with (out / "run" / "summary.csv").open(newline="") as file:
        return float(list(csv.DictReader(file))[-1]["eval_top1"]) / 100


def read_transformers(out: Path) -> float:
    """Return the accuracy after training."""
    return float(json.loads((out / "eval_results.json").read_bytes())["eval_accuracy"])


SCRIPTS: dict[str, tuple[str, Command, Callable[[Path], float]]] = {
    "timm": ("timm/train.py", timm_command, read_timm),
    "transformers": ("transformers/run_image_classification.py", transformers_command, read_transformers),
}
TOOLS = (*SCRIPTS, "fastai", "autogluon", "lightly_train", "libreyolo")
"""Tools; those without a script here are only looked for."""


def run_tool(
    name: str, data: Path, out: Path, *, weights: Path, minutes: float, tools: Path | None
) -> dict[str, object]:
    """Return accuracy with its interval, and minutes, or a note that says why there are none."""
    if name not in SCRIPTS:
        is_installed = importlib.util.find_spec(name) is not None
        return {"note": "installed, but there is no script for it" if is_installed else "not installed"}
    script, make_command, read_accuracy = SCRIPTS[name]
    if tools is None or not (tools / script).exists():
        return {"note": f"--tools has no {script}"}
    python = tools / "python" if (tools / "python").exists() else Path(sys.executable)

    def start(epochs: int, path: Path) -> float:
        command = [str(python), __file__, str(tools / script), *make_command(data, path, weights, epochs)]
        started = time.monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        return time.monotonic() - started

    try:
        one, two = (start(epochs, out.with_name(f"{out.name}-{epochs}")) for epochs in (1, 2))
        epochs = max(1, 1 + int((60 * minutes - one) / max(two - one, 1.0)))
        seconds = start(epochs, out)
    except subprocess.CalledProcessError as error:
        return {"note": f"failed: {(error.stderr or str(error)).strip().splitlines()[-1][:200]}"}
    images = sum(1 for _ in (data / "test").glob("*/*"))
    top1 = read_accuracy(out)
    low, high = wilson(top1, images)
    row = {"top1": round(top1, 4), "low": round(low, 4), "high": round(high, 4), "images": images}
    return row | {"minutes": round(seconds / 60, 2), "note": f"DeiT-Ti weights, {epochs} epochs"}


def wilson(fraction: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a fraction.

    >>> tuple(round(bound, 3) for bound in wilson(0.5, 100))
    (0.404, 0.596)
    """
    z = 1.96
    center = (fraction + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(fraction * (1 - fraction) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return center - half, center + half


if __name__ == "__main__":  # start a script although torchvision may be broken
    from peers import repair_torchvision

    repair_torchvision()
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(sys.argv[0])  # noqa: PTH120
    runpy.run_path(sys.argv[0], run_name="__main__")
