"""Other tools with their defaults, for bench/default.py, which says how TOOLS (`--tools`) is made.

A tool is a script as its project publishes it, or a quick start in bench/start_tool.py. Their length is in epochs or
steps, so two short runs are timed first, and then the longest is made that fits into the minutes; AutoGluon has a time
limit. The tools start from the weights of DeiT-Ti, except LibreYOLO.
"""

import csv
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

START = Path(__file__).with_name("start_tool.py")
DEIT = "deit_tiny_patch16_224.pth"
DINOV2 = "dinov2_vits14_pretrain.pth"
PATIENCE = 4
"""A run is stopped after this many times the minutes."""
SHORTEST = {"epochs": 1, "steps": 10}
"""Length of the first timed run; the second is twice as long."""


class Tool(NamedTuple):
    """A tool; its arguments are for data, out, weights and a length."""

    package: str
    initial_weights: str
    make_arguments: Callable[[Path, Path, Path, int], list[str]]
    read_accuracy: Callable[[Path], float]
    script: str = ""
    unit: Literal["epochs", "steps", "seconds"] = "epochs"


class Run(NamedTuple):
    """A finished run: its length in the unit of the tool, and how long it took."""

    length: int
    path: Path
    seconds: float


# Arguments


def timm_arguments(data: Path, out: Path, weights: Path, epochs: int) -> list[str]:
    """Return the arguments of timm's script for DeiT-Ti."""
    classes = sum(1 for _ in (data / "train").iterdir())
    model = ["--model", "deit_tiny_patch16_224", "--pretrained", "--pretrained-path", str(weights / DEIT)]
    splits = ["--data-dir", str(data), "--train-split", "train", "--val-split", "test", "--num-classes", str(classes)]
    machine = ["--device", "cpu", "--workers", "1", "--no-prefetcher", "--output", str(out), "--experiment", "run"]
    return [*splits, *model, *machine, "--epochs", str(epochs)]


def transformers_arguments(data: Path, out: Path, weights: Path, epochs: int) -> list[str]:
    """Return the arguments of transformers' example for DeiT-Ti in its own format."""
    model = convert(weights / DEIT, out.parent / "weights" / "deit-tiny-transformers", "deit", "huggingface")
    preprocessing = model / "preprocessor_config.json"
    settings = json.loads(preprocessing.read_bytes())
    settings["size"] = settings["crop_size"]  # the script crops to `size`, which is larger than the model's images
    preprocessing.write_text(json.dumps(settings))
    splits = ["--train_dir", str(data / "train"), "--validation_dir", str(data / "test"), "--do_train", "--do_eval"]
    start = ["--model_name_or_path", str(model), "--ignore_mismatched_sizes", "--remove_unused_columns", "False"]
    machine = ["--use_cpu", "--output_dir", str(out), "--save_strategy", "no", "--report_to", "none"]
    return [*splits, *start, *machine, "--num_train_epochs", str(epochs)]


def quick_start_arguments(data: Path, out: Path, weights: Path, length: int) -> list[str]:
    """Return the arguments of a quick start from DeiT-Ti."""
    return [str(data), str(out), str(weights / DEIT), str(length)]


def libreyolo_arguments(data: Path, out: Path, weights: Path, epochs: int) -> list[str]:
    """Return the arguments of LibreYOLO's quick start from DINOv2-S in transformers' format."""
    hub = out.parent / "weights"
    convert(weights / DINOV2, hub / "facebook" / "dinov2-small", "dinov2", "huggingface-dinov2")
    return [str(data), str(out), str(hub), str(epochs)]


def convert(file: Path, out: Path, source: str, target: str) -> Path:
    """Convert a file of weights to another format, once."""
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "vitkit", "weights", "convert", str(file), str(out), "--format", source]
        subprocess.run([*command, "--to", target], check=True, stdout=subprocess.DEVNULL)
    return out


# Results


def read_timm(out: Path) -> float:
    """Return the accuracy of the last epoch: the best one would be chosen by test images."""
    with (out / "run" / "summary.csv").open(newline="") as file:
        return float(list(csv.DictReader(file))[-1]["eval_top1"]) / 100


def read_results(out: Path) -> float:
    """Return the accuracy after training."""
    return float(json.loads((out / "eval_results.json").read_bytes())["eval_accuracy"])


TOOLS: dict[str, Tool] = {
    "timm": Tool("timm", "DeiT-Ti", timm_arguments, read_timm, "timm/train.py"),
    "transformers": Tool(
        *("transformers", "DeiT-Ti", transformers_arguments, read_results),
        script="transformers/run_image_classification.py",
    ),
    "fastai": Tool("fastai", "DeiT-Ti", quick_start_arguments, read_results),
    "autogluon": Tool("autogluon.multimodal", "DeiT-Ti", quick_start_arguments, read_results, unit="seconds"),
    "lightly_train": Tool("lightly-train", "DeiT-Ti", quick_start_arguments, read_results, unit="steps"),
    "libreyolo": Tool("libreyolo", "DINOv2-S", libreyolo_arguments, read_results),
}


# Runs


def run_tool(
    name: str, data: Path, out: Path, *, weights: Path, minutes: float, tools: Path | None
) -> dict[str, object]:
    """Return accuracy with its interval, and minutes, or a note that says why there are none."""
    tool = TOOLS[name]
    if tools is None or not (tools / tool.script).exists():
        return {"note": f"--tools has no {tool.script}" if tool.script else "needs --tools"}
    environments = [tools / "environments" / directory / "bin" / "python" for directory in (name, "default")]
    python = next((str(path) for path in environments if path.exists()), sys.executable)
    version = read_version(python, tool.package)
    if not version:
        return {"note": f"{tool.package} is not installed"}

    def start(length: int) -> Run:
        path = out.with_name(f"{out.name}-{length}")
        shutil.rmtree(path, ignore_errors=True)
        arguments = tool.make_arguments(data, path, weights, length)
        started = time.monotonic()
        target = str(tools / tool.script) if tool.script else name
        run_offline([python, str(START), target, *arguments], path, timeout=60 * minutes * PATIENCE)
        return Run(length, path, time.monotonic() - started)

    try:
        run = start(int(60 * minutes)) if tool.unit == "seconds" else run_in_time(start, minutes, SHORTEST[tool.unit])
    except subprocess.TimeoutExpired as error:
        return {"note": f"{tool.package} {version}: stopped after {error.timeout / 60:g} minutes without a result"}
    except subprocess.CalledProcessError as error:
        return {"note": f"{tool.package} {version} failed: {error.output[:200]}"}
    images = sum(1 for _ in (data / "test").glob("*/*"))
    top1 = tool.read_accuracy(run.path)
    low, high = wilson(top1, images)
    row = {"top1": round(top1, 4), "low": round(low, 4), "high": round(high, 4), "images": images}
    note = f"{tool.package} {version}, {tool.initial_weights} weights, {run.length} {tool.unit}"
    return row | {"minutes": round(run.seconds / 60, 2), "note": note}


def read_version(python: str, package: str) -> str:
    """Return the version of a package in an environment, or nothing."""
    command = [python, "-c", f"from importlib.metadata import version; print(version({package!r}))"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def run_in_time(start: Callable[[int], Run], minutes: float, shortest: int) -> Run:
    """Return the longest run that fits into the minutes, or the shortest one if none does.

    >>> run_in_time(lambda length: Run(length, Path(), 20.0 + 10 * length), minutes=1, shortest=1).length
    4
    """
    one = start(shortest)
    if one.seconds >= 60 * minutes:
        return one
    two = start(2 * shortest)
    count = 1 + int((60 * minutes - one.seconds) / max(two.seconds - one.seconds, 1.0))
    return {1: one, 2: two}.get(count) or start(count * shortest)


def run_offline(command: list[str], out: Path, timeout: float) -> None:
    """Run a tool without a network and with an empty hub cache; the error has the last message that it printed."""
    caches = out.parent / "caches"
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(caches), "NO_ALBUMENTATIONS_UPDATE": "1"}
    environment |= {"LIGHTLY_TRAIN_EVENTS_DISABLED": "true", "LIGHTLY_TRAIN_CACHE_DIR": str(caches)}
    log = out.with_suffix(".log")
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            status = process.wait(timeout)
        finally:
            if process.poll() is None:  # data loaders too
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if status:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()] or [""]
        messages = [line for line in lines if "Error" in line.partition(":")[0]] or lines
        raise subprocess.CalledProcessError(status, command, messages[-1])


def wilson(fraction: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a fraction.

    >>> tuple(round(bound, 3) for bound in wilson(0.5, 100))
    (0.404, 0.596)
    """
    z = 1.96
    center = (fraction + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(fraction * (1 - fraction) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return center - half, center + half
