"""The plain training command on five real folders, against its alternatives and other tools' defaults.

    python bench/default.py --sources SOURCES --weights WEIGHTS        measure what bench/default.csv lacks
    python bench/default.py --table                                    print the CSV as a table
    python bench/default.py --sources SOURCES --csv bench/embedded.csv --groups start --minutes 1

The last compares the embedded weights with training from scratch on 50, 500 and 2,000 photos of two of the folders.

SOURCES has checkouts of the repositories ants_and_bees, clothing-dataset-small and dataset-iiit-pet, and `photos`,
images with labels.csv of ImageNet-1k's class indices. WEIGHTS has the files of `PUBLISHED`. Each finished cell is
appended to the CSV; a cell that is there already is not repeated. Accuracy is that on test images, which no option has
seen, except that published weights probably saw `photos`: those rows are marked. `load` is the load average of the
machine at the end of a cell: more than its cores means that other work ran beside it, and `--max-load` repeats such
cells; the table has the row of the least busy machine.

TOOLS (`--tools`) is a directory with the scripts of two projects, timm/train.py (train.py of
huggingface/pytorch-image-models) and transformers/run_image_classification.py (examples/pytorch/image-classification of
huggingface/transformers), and with environments of Python 3.11 that the tools are installed in: environments/NAME for
one tool, environments/default for the others. AutoGluon needs an older timm than the others. LibreYOLO 1.6.0 has an
older transformers, because with 5.23 it silently loads only 126 of the 222 tensors of DINOv2-S. The constraint keeps
pip from replacing this torch by one with CUDA; torchvision need not fit to it.

    echo torch==2.13.0 > torch.txt
    for name in default autogluon libreyolo; do python -m venv TOOLS/environments/$name; done
    pip install -c torch.txt fastai lightly-train timm transformers accelerate datasets evaluate scikit-learn
    pip install -c torch.txt autogluon.multimodal==1.6.3
    pip install -c torch.txt "libreyolo[rfdetr]==1.6.0" transformers==5.4.0

Each line installs with the pip of its environment. `uv pip install` does the same with less search for versions.
"""

import argparse
import csv
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from other_tools import TOOLS, convert, run_tool

PUBLISHED = {
    "Ti/16": "Ti_16-augreg-imagenet.npz",
    "DeiT-Ti": "deit_tiny_patch16_224.pth",
    "DINOv2-S": "dinov2_vits14_pretrain.pth",
}
GROUPS = {
    "own": ("default", "scratch", "embedded", "probe"),
    "published": tuple(PUBLISHED),
    "tools": tuple(TOOLS),
    "start": ("embedded", "scratch"),
}
"""Options in the order of their importance."""
SIZES = (50, 500, 2000)
"""Numbers of training photos on which `--groups start` compares its options."""
ANIMALS = {
    "fish": (*range(7), *range(389, 398)),
    "birds": (*range(7, 25), *range(80, 101), *range(127, 147)),
    "reptiles": (*range(33, 69),),
    "dogs": (*range(151, 269),),
    "cats": (*range(281, 294),),
    "insects": (*range(300, 327),),
}
"""Groups of ImageNet-1k's class indices."""
TEST_PHOTOS = 30
"""Test photos of each breed; of cats and of dogs ten times as many."""
COLUMNS = (
    *("folder", "option", "seed", "minutes", "top1", "low", "high", "images", "held_out", "held_out_probe"),
    *("kept", "seen_in_training", "load", "note"),
)

Photos = Iterator[tuple[str, str, Path]]
"""Split, class and file of each photo of a folder."""
Folder = Callable[[Path, int], Photos]
"""Yields the photos of a folder of SOURCES with a seed."""


class Cell(NamedTuple):
    """One measurement of the table."""

    folder: str
    option: str
    seed: int


# Folders


def ants_bees(sources: Path, seed: int) -> Photos:
    """Yield the photos of PyTorch's tutorial on transfer learning; its validation photos are the test."""
    yield from list_folders(sources / "ants_and_bees", {"train": "train", "val": "test"})


def clothes(sources: Path, seed: int) -> Photos:
    """Yield photos of ten kinds of clothes."""
    yield from list_folders(sources / "clothing-dataset-small", {"train": "train", "test": "test"})


def animals(sources: Path, seed: int) -> Photos:
    """Yield six groups of animals: 60 % of each for training, by seed."""
    with (sources / "photos" / "labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for group, indices in ANIMALS.items():
        names = [row["file_name"] for row in rows if int(row["class_index"]) in indices]
        files = shuffle((sources / "photos" / name for name in names), seed)
        for number, path in enumerate(files):
            yield "train" if number < 0.6 * len(files) else "test", group, path


def pets(sources: Path, seed: int) -> Photos:
    """Yield 37 breeds by the lists of the publisher, with some of the test photos of each."""
    for split, photos in list_pets(sources).items():
        for breed in sorted({path.stem.rpartition("_")[0] for path in photos}):
            files = [path for path in photos if path.stem.rpartition("_")[0] == breed]
            for path in files if split == "train" else shuffle(files, 0)[:TEST_PHOTOS]:
                yield split, breed, path


def cats_dogs(sources: Path, seed: int, *, count: int = 50) -> Photos:
    """Yield this many cats and dogs for training, by seed; names of cats' breeds are capitalized."""
    for split, photos in list_pets(sources).items():
        for species, is_cat in (("cat", True), ("dog", False)):
            files = [path for path in photos if path.stem[0].isupper() == is_cat]
            chosen = shuffle(files, seed)[:count] if split == "train" else shuffle(files, 0)[: 10 * TEST_PHOTOS]
            yield from ((split, species, path) for path in chosen)


def draw(folder: Folder, count: int, sources: Path, seed: int) -> Photos:
    """Yield a folder with about this many training photos by seed, the same fraction of each class."""
    photos = list(folder(sources, seed))
    train = defaultdict(list)
    for split, label, path in photos:
        if split == "train":
            train[label].append(path)
    fraction = count / sum(map(len, train.values()))
    for label, files in train.items():
        yield from (("train", label, path) for path in shuffle(files, seed)[: max(2, round(fraction * len(files)))])
    yield from (photo for photo in photos if photo[0] == "test")


FOLDERS: dict[str, Folder] = {
    "ants-bees": ants_bees,
    "cats-dogs": cats_dogs,
    "animals": animals,
    "clothes": clothes,
    "pets": pets,
}
LARGE: dict[str, Folder] = {"cats-dogs": partial(cats_dogs, count=max(SIZES)), "clothes": clothes}
SUBSETS: dict[str, Folder] = {
    f"{name}-{size}": partial(draw, folder, size) for size in SIZES for name, folder in LARGE.items()
}
"""Parts of two folders, for `--groups start`."""


def list_folders(path: Path, splits: dict[str, str]) -> Photos:
    """Yield the photos of class folders in folders of splits."""
    for directory, split in splits.items():
        for file in sorted(path.glob(f"{directory}/*/*.jpg")):
            yield split, file.parent.name, file


def list_pets(sources: Path) -> dict[str, list[Path]]:
    """Return the photos of the publisher's two lists."""
    path, photos = sources / "dataset-iiit-pet", {}
    for split, name in {"train": "trainval.txt", "test": "test.txt"}.items():
        lines = (path / "annotations" / name).read_text().splitlines()
        photos[split] = [path / "images" / f"{line.split()[0]}.jpg" for line in lines]
    return photos


def shuffle(files: Iterable[Path], seed: int) -> list[Path]:
    """Return the files in an order that depends on the seed and their names alone."""
    return sorted(files, key=lambda path: hashlib.sha256(f"{seed} {path.name}".encode()).digest())


def prepare_folder(name: str, sources: Path, work: Path, seed: int) -> Path:
    """Return a folder with train/ and test/ in class folders, of links to the photos."""
    out = work / "folders" / f"{name}-{seed}"
    if out.exists():
        return out
    unfinished = out.with_suffix(".partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    for split, label, file in (FOLDERS | SUBSETS)[name](sources, seed):
        directory = unfinished / split / label
        directory.mkdir(parents=True, exist_ok=True)
        (directory / file.name).symlink_to(file.resolve())
    unfinished.rename(out)
    return out


# Cells


def plan_cells(folders: Iterable[str], groups: Iterable[str], seeds: int) -> Iterator[Cell]:
    """Yield the cells in the order of their importance; other tools have one seed."""
    folders = tuple(folders)
    for group in groups:
        for seed in range(1 if group == "tools" else seeds):
            for folder in folders:
                yield from (Cell(folder, option, seed) for option in GROUPS[group])


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of the CSV."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


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


def measure(cell: Cell, arguments: argparse.Namespace) -> dict[str, object]:
    """Return the row of a cell; a tool that does not run has a note that says why."""
    data = prepare_folder(cell.folder, arguments.sources, arguments.work, cell.seed)
    out = arguments.work / f"{cell.folder}-{cell.option.replace('/', '')}-{cell.seed}"
    row: dict[str, object] = dict(cell._asdict())
    started = time.monotonic()
    if cell.option in TOOLS:
        settings = {"weights": arguments.weights, "minutes": arguments.minutes, "tools": arguments.tools}
        row |= run_tool(cell.option, data, out, **settings)
    elif cell.option == "probe":  # that of the default run
        default = arguments.work / f"{cell.folder}-default-{cell.seed}"
        seconds = sum(each["seconds"] for each in read_tried(default) if not each["steps"])
        row |= {"minutes": round(seconds / 60, 2), **evaluate(default / "probe", data)}
    else:
        train(cell, data, out, weights=arguments.weights, minutes=arguments.minutes)
        row |= {"minutes": round((time.monotonic() - started) / 60, 2), **evaluate(out, data), **read_choice(out)}
    if cell.folder == "animals" and cell.option in (*PUBLISHED, *TOOLS):
        row["seen_in_training"] = "probably"
    return row | {"load": round(os.getloadavg()[0], 1)}


def train(cell: Cell, data: Path, out: Path, *, weights: Path, minutes: float) -> None:
    """Train with vitkit from the start, without a network and with an empty hub cache."""
    shutil.rmtree(out, ignore_errors=True)
    init = str(weights / PUBLISHED[cell.option]) if cell.option in PUBLISHED else cell.option
    if cell.option == "DINOv2-S":  # its tensors do not say that it is DINOv2
        init = str(convert(Path(init), out.parent / "weights" / "dinov2-small", "dinov2", "vitkit"))
    command = [sys.executable, "-m", "vitkit", "train", str(data / "train"), "--out", str(out), f"seed={cell.seed}"]
    command += ["--minutes", f"{minutes:g}", "--from", "auto" if init == "default" else init]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(out.parent / "empty-hub-cache")}
    subprocess.run(command, check=True, env=os.environ | offline, stdout=subprocess.DEVNULL)


def evaluate(model: Path, data: Path) -> dict[str, object]:
    """Return the accuracy on the test images with its interval."""
    command = [sys.executable, "-m", "vitkit", "eval", str(model), str(data / "test"), "--json"]
    result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    low, high = result["intervals"]["top1"]
    return {"top1": round(result["top1"], 4), "low": round(low, 4), "high": round(high, 4), "images": result["count"]}


def read_tried(out: Path) -> list[dict[str, float]]:
    """Return the probes and trials of a run."""
    records: list[dict[str, float]] = json.loads((out / "trials.json").read_bytes())["records"]
    return records


def read_choice(out: Path) -> dict[str, object]:
    """Return the accuracy on held-out photos of a run and of its chosen probe, and what was kept."""
    summary = json.loads((out / "summary.json").read_bytes())
    chosen = json.loads((out / "trials.json").read_bytes())["probe"]
    probes = [each["top1"] for each in read_tried(out) if each["name"] == chosen]
    return {
        "held_out": round(summary["result"]["top1"], 4),
        "held_out_probe": round(probes[0], 4) if probes else "",
        "kept": summary.get("selection", {}).get("kept", "final run"),
    }


def keep_quietest(rows: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """Return one row of each cell: that of the least busy machine."""
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        cell = tuple(row.get(key, "") for key in Cell._fields)
        if cell not in cells or float(row["load"]) < float(cells[cell]["load"]):
            cells[cell] = row
    return list(cells.values())


def format_table(rows: Iterable[dict[str, str]]) -> str:
    """Return a Markdown table of folders and options: mean accuracy with its mean interval, minutes and seeds.

    >>> row = {"folder": "pets", "option": "probe", "top1": "0.5", "low": "0.4", "high": "0.6", "minutes": "0.2"}
    >>> print(format_table([row]).splitlines()[2])
    | pets | probe | 50.0 % (40.0–60.0) | 0.2 | 1 |
    """
    cells = defaultdict(list)
    for row in keep_quietest(row for row in rows if row["top1"]):
        cells[row["folder"], row["option"]].append(row)
    lines = ["| folder | option | top-1 on test images | minutes | seeds |", "|---|---|---:|---:|---:|"]
    for (folder, option), group in cells.items():
        top1, low, high = (100 * mean(float(row[key]) for row in group) for key in ("top1", "low", "high"))
        minutes = mean(float(row["minutes"]) for row in group)
        mark = "*" if any(row.get("seen_in_training") for row in group) else ""
        accuracy = f"{top1:.1f} % ({low:.1f}–{high:.1f}){mark}"
        lines.append(f"| {folder} | {option} | {accuracy} | {minutes:.1f} | {len(group)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure what is missing in the CSV, or print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--tools", type=Path, help="directory of other tools; bench/other_tools.py says what it has")
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--work", type=Path, default=Path("runs/bench-default"))
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--max-load", type=float, default=math.inf, help="repeat cells of a machine that was busier")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folders", help="some of the folders, separated by commas")
    parser.add_argument("--groups", default="own,published,tools")
    parser.add_argument("--table", action="store_true", help="print the CSV as a table")
    arguments = parser.parse_args()
    rows = read_rows(arguments.csv)
    if arguments.table:
        print(format_table(rows))
        return
    quiet = [row for row in rows if float(row["load"]) <= arguments.max_load]
    finished = {Cell(row["folder"], row["option"], int(row["seed"])) for row in quiet}
    groups = arguments.groups.split(",")
    folders = arguments.folders.split(",") if arguments.folders else SUBSETS if groups == ["start"] else FOLDERS
    for cell in plan_cells(folders, groups, arguments.seeds):
        if cell not in finished:
            row = measure(cell, arguments)
            print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            append_row(arguments.csv, row)


if __name__ == "__main__":
    main()
