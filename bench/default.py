"""The plain training command on five real folders, against its alternatives and other tools' defaults.

Run with the folders and weights that `--folders` and `--weights` name; each finished cell is appended to the CSV, and a
cell that is there already is not repeated:

    python bench/default.py --folders FOLDERS --weights WEIGHTS --csv bench/default.csv

FOLDERS has pets, cats-dogs, clothes, ants-bees and photos (images with labels.csv of ImageNet-1k's class indices), the
first four with train/ and test/ in class directories. Accuracy is that on the test images, which no option has seen.
Published weights probably saw `photos` in training, so that column is marked.
"""

import argparse
import csv
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FOLDERS = ("pets", "cats-dogs", "clothes", "ants-bees", "animals")
ANIMALS = {
    "fish": (0, 6),
    "birds": (7, 24),
    "reptiles": (25, 68),
    "dogs": (151, 268),
    "cats": (281, 293),
    "insects": (300, 326),
}
"""Groups of ImageNet-1k's class indices; 60 % of each are for training, by seed."""
OWN = ("default", "scratch", "embedded", "probe")
PUBLISHED = {
    "Ti/16": "Ti_16-augreg-imagenet.npz",
    "DeiT-Ti": "deit_tiny_patch16_224.pth",
    "DINOv2-S": "dinov2_vits14.pth",
}
OTHER_TOOLS = {"timm": "timm", "transformers": "transformers", "fastai": "fastai", "autogluon": "autogluon"}
"""Tools and the modules that they need."""
COLUMNS = ("folder", "option", "seed", "minutes", "top1", "low", "high", "images", "seen_in_training", "note")


class Cell(NamedTuple):
    """One measurement of the table."""

    folder: str
    option: str
    seed: int


def plan_cells(seeds: int) -> Iterator[Cell]:
    """Yield the cells in the order of their importance: own options, published weights, other tools with one seed."""
    for group in (OWN, tuple(PUBLISHED)):
        for seed in range(seeds):
            for folder in FOLDERS:
                yield from (Cell(folder, option, seed) for option in group)
    yield from (Cell(folder, tool, 0) for folder in FOLDERS for tool in OTHER_TOOLS)


def read_finished(path: Path) -> set[Cell]:
    """Return the cells that the CSV has."""
    if not path.exists():
        return set()
    with path.open(newline="") as file:
        return {Cell(row["folder"], row["option"], int(row["seed"])) for row in csv.DictReader(file)}


def append_row(path: Path, row: dict[str, object]) -> None:
    """Append a row, with a header to a new file."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if is_new:
            writer.writeheader()
        writer.writerow(row)
        file.flush()
        os.fsync(file.fileno())


def find_folder(name: str, folders: Path, work: Path, seed: int) -> Path:
    """Return the folder with train/ and test/; the animals are divided by the seed."""
    if name != "animals":
        return folders / name
    out = work / f"animals-{seed}"
    if out.exists():
        return out
    with (folders / "photos" / "labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    unfinished = out.with_suffix(".partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    for group, (first, last) in ANIMALS.items():
        members = [row["file_name"] for row in rows if first <= int(row["class_index"]) <= last]
        members.sort(key=lambda file: hashlib.sha256(f"{seed} {file}".encode()).digest())
        for number, file in enumerate(members):
            directory = unfinished / ("train" if number < 0.6 * len(members) else "test") / group
            directory.mkdir(parents=True, exist_ok=True)
            shutil.copy(folders / "photos" / file, directory)
    unfinished.rename(out)
    return out


def train_own(cell: Cell, data: Path, out: Path, *, weights: Path, minutes: float) -> tuple[Path, float]:
    """Train with vitkit and return the model and the minutes; the probe is that of the default run."""
    default = out.parent / f"{cell.folder}-default-{cell.seed}"
    if cell.option == "probe":
        seconds = sum(
            each["seconds"]
            for each in json.loads((default / "trials.json").read_bytes())["records"]
            if not each["steps"]
        )
        return default / "probe", seconds / 60
    init = str(weights / PUBLISHED[cell.option]) if cell.option in PUBLISHED else cell.option
    command = [sys.executable, "-m", "vitkit", "train", str(data / "train"), "--out", str(out), f"seed={cell.seed}"]
    command += ["--minutes", f"{minutes:g}", "--from", "auto" if init == "default" else init]
    started = time.monotonic()
    subprocess.run(command, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    return out, (time.monotonic() - started) / 60


def evaluate_own(model: Path, data: Path) -> dict[str, object]:
    """Return the accuracy on the test images with its interval."""
    command = [sys.executable, "-m", "vitkit", "eval", str(model), str(data / "test"), "--json"]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    low, high = result["intervals"]["top1"]
    return {"top1": result["top1"], "low": low, "high": high, "images": result["count"]}


def measure(cell: Cell, arguments: argparse.Namespace) -> dict[str, object]:
    """Return the row of a cell; an option that cannot run has a note that says why."""
    row: dict[str, object] = {**cell._asdict(), "seen_in_training": ""}
    if cell.option in OTHER_TOOLS:
        if importlib.util.find_spec(OTHER_TOOLS[cell.option]) is None:
            return row | {"note": "not installed"}
        command = arguments.tool.get(cell.option)
        if command is None:
            return row | {"note": "no command: --tool NAME=COMMAND"}
    data = find_folder(cell.folder, arguments.folders, arguments.work, cell.seed)
    if not data.exists():
        return row | {"note": f"{cell.folder} is missing"}
    out = arguments.work / f"{cell.folder}-{cell.option.replace('/', '')}-{cell.seed}"
    if cell.option in OTHER_TOOLS:
        started = time.monotonic()
        texts = [each.format(data=data, out=out, minutes=arguments.minutes) for each in command.split()]
        output = subprocess.run(texts, check=True, capture_output=True, text=True).stdout.split()
        return row | {"minutes": (time.monotonic() - started) / 60, "top1": float(output[-1]), "note": command}
    if cell.option in PUBLISHED:
        if not (arguments.weights / PUBLISHED[cell.option]).exists():
            return row | {"note": "the weights are missing"}
        row["seen_in_training"] = "probably" if cell.folder == "animals" else ""
    model, minutes = train_own(cell, data, out, weights=arguments.weights, minutes=arguments.minutes)
    return row | {"minutes": round(minutes, 2), **evaluate_own(model, data), "note": ""}


def main() -> None:
    """Measure what is missing in the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folders", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--work", type=Path, default=Path("runs/bench-default"))
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--tool",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="command of another tool with {data}, {out} and {minutes}; its last printed word is the test accuracy",
    )
    arguments = parser.parse_args()
    arguments.tool = dict(text.split("=", 1) for text in arguments.tool)
    arguments.work.mkdir(parents=True, exist_ok=True)
    finished = read_finished(arguments.csv)
    for cell in plan_cells(arguments.seeds):
        if cell not in finished:
            row = measure(cell, arguments)
            print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            append_row(arguments.csv, row)


if __name__ == "__main__":
    main()
