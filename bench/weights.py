"""Weights of a large model converted between formats, and of a base model loaded: memory and times come out.

python bench/weights.py --write BENCHMARKS.md       everything, half an hour and 15 GB of disk; also writes its section
python bench/weights.py --large S/16 --rounds 3     a rough idea, prints
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Literal, get_args

import click
import torch
from forward_backward import Others
from memory import MEGA
from peers import peer
from report import facts, look_around, write_section
from timing import interleave

import vitkit
from vitkit.cli.weights import command

Loader = Literal["vitkit, own folder", "vitkit, timm's folder", "timm, local-dir", "timm, checkpoint_path"]
LOADERS: tuple[Loader, ...] = get_args(Loader)
MARKERS = ("<!-- weights:begin -->", "<!-- weights:end -->")
QUESTION = "--loads-by"
"""The script's hidden option that makes it load whenever it is asked to, and print the seconds."""
FORMATS = {
    "vitkit": "own",
    "timm": "timm",
    "huggingface": "huggingface",
    "google": "google.npz",
    "torchvision": "tv.pth",
}
"""Safetensors thrice, NumPy's zip and torch's; under each name what its file or folder is called here."""
SETTINGS = {"google": ["block.activation=gelu_tanh"], "torchvision": ["block.activation=gelu_erf"]}
"""What a format can say; the numbers stay."""
ALLOWED = 1.2
"""How many times timm's time may be taken."""
SAMPLE = 0.002
TINY = ("depth=1", "width=64", "heads=1", "mlp_dim=64")


# Memory


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Bytes at the highest: memory of the process alone, and all that it had mapped, pages of files too."""

    own: int
    resident: int


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What converting a large model took."""

    source: str
    target: str
    before: Peak
    peak: Peak
    seconds: float

    @property
    def share(self) -> int:
        """The bytes that are the weights' doing: what the process did not hold before it began."""
        return self.peak.own - self.before.own


def watched(work: Callable[[], None]) -> tuple[Peak, Peak, float]:
    """Memory before and at the highest, and the seconds, of work in a process of its own that has all it needs."""
    ready, go = os.pipe()
    started = time.perf_counter()
    if (pid := os.fork()) == 0:
        status = 1
        try:
            os.read(ready, 1)
            work()
            status = 0
        finally:
            os._exit(status)
    before = highest = memory_of(pid)
    os.write(go, b".")
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        seen = memory_of(pid)
        highest = Peak(own=max(highest.own, seen.own), resident=max(highest.resident, seen.resident))
        time.sleep(SAMPLE)
    if ended[1]:
        raise SystemExit("error: a conversion failed")
    return before, highest, time.perf_counter() - started


def memory_of(pid: int) -> Peak:
    """What the kernel says of a process; nothing once it has ended."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = {name: 1024 * int(rest.split()[0]) for name, rest in (each.split(":") for each in lines if "kB" in each)}
    return Peak(own=found.get("RssAnon", 0), resident=found.get("VmHWM", 0))


def convert(place: Path, out: Path, to: str) -> None:
    """Do `vitkit weights convert`, in this process."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        command.main(["convert", str(place), str(out), "--to", to, *SETTINGS.get(to, [])], standalone_mode=False)


def make(model: str, place: Path, *settings: str) -> None:
    """A model with some numbers in it in every format: those of training would take longer to draw."""
    made = vitkit.create(model, settings=settings, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.uniform_(-0.01, 0.01)
    vitkit.save(made, place / FORMATS["vitkit"])
    del made
    for to in list(FORMATS)[1:]:
        convert(place / FORMATS["vitkit"], place / FORMATS[to], to)


def conversions(model: str, folder: Path) -> list[Conversion]:
    """Every format from every other."""
    pairs = [(source, target) for source, target in product(FORMATS, FORMATS) if source != target]
    torch.set_num_threads(1)  # so that there are no threads which forked processes would miss
    for place in (folder / "tiny", folder / "large"):
        place.mkdir()
    make(model, folder / "tiny", *TINY)
    for source, target in pairs:  # so that all that is imported on the way is there
        convert(folder / "tiny" / FORMATS[source], folder / "out", target)
        discard(folder / "out")
    watched(lambda: make(model, folder / "large"))
    found = []
    for source, target in pairs:
        place = folder / "large" / FORMATS[source]
        before, peak, seconds = watched(partial(convert, place, folder / "out", target))
        discard(folder / "out")
        found.append(Conversion(source=source, target=target, before=before, peak=peak, seconds=seconds))
        print(f"{source} → {target}: {found[-1].share / MEGA:,.0f} MB, {seconds:.0f} s", file=sys.stderr, flush=True)
    return found


def discard(place: Path) -> None:
    """Remove a file, or a folder of files."""
    shutil.rmtree(place) if place.is_dir() else place.unlink()


# Times


class Child:
    """A process that has imported all it needs, and loads when asked."""

    def __init__(self, loader: Loader, folder: Path) -> None:
        question = json.dumps({"loader": loader, "folder": str(folder)})
        line = [sys.executable, __file__, QUESTION, question]
        self.process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ask()

    def ask(self) -> tuple[float, float]:
        """Seconds to the loaded model, and to its answer to one image."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print("load", file=self.process.stdin, flush=True)
        loaded, answered = json.loads(self.process.stdout.readline())
        return loaded, answered

    def end(self) -> None:
        """Let it go."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def answer(question: str) -> None:
    """What the child does until nobody asks any more."""
    asked = json.loads(question)
    load = loader_of(asked["loader"], Path(asked["folder"]))
    image = torch.rand(1, 3, 224, 224)
    for _ in sys.stdin:
        started = time.perf_counter()
        model = load()
        loaded = time.perf_counter() - started
        with torch.inference_mode():
            model(image)
        print(json.dumps([loaded, time.perf_counter() - started]), flush=True)
        del model


def loader_of(loader: Loader, folder: Path) -> Callable[[], torch.nn.Module]:
    """How a contender loads: vitkit's two folders hold the same safetensors file as timm's."""
    own, timms = folder / "own", folder / "timm"
    if loader.startswith("vitkit"):
        return lambda: vitkit.load(own if loader == "vitkit, own folder" else timms)
    timm = peer("timm")
    if loader == "timm, local-dir":
        return lambda: timm.create_model(f"local-dir:{timms}", pretrained=True).eval()
    weights = timms / "model.safetensors"
    return lambda: timm.create_model("vit_base_patch16_224", checkpoint_path=str(weights)).eval()


@dataclass(frozen=True, kw_only=True)
class Loads:
    """Seconds of every load, and of every load with the first image, by contender."""

    loaded: Mapping[Loader, list[float]]
    answered: Mapping[Loader, list[float]]


def loads(folder: Path, *, rounds: int) -> Loads:
    """Load B/16 by all contenders in turn, `rounds` times each."""
    model = vitkit.create("B/16", settings=["block.activation=gelu_erf"])
    folder = folder / "base"
    vitkit.save(model, folder / "own")
    convert(folder / "own", folder / "timm", "timm")
    children = {loader: Child(loader, folder) for loader in LOADERS}
    found = Loads(loaded={name: [] for name in LOADERS}, answered={name: [] for name in LOADERS})

    def run(loader: Loader) -> Callable[[], float]:
        def once() -> float:
            loaded, answered = children[loader].ask()
            found.answered[loader].append(answered)
            return loaded

        return once

    interleave({name: run(name) for name in LOADERS}, found.loaded, rounds=rounds)
    for child in children.values():
        child.end()
    return found


# The report


@click.command()
@click.option("--large", default="H/14", show_default=True, help="The model that is converted, or none.")
@click.option("--rounds", default=24, show_default=True, help="How often each contender loads.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to make the temporary folder.")
@click.option("--write", type=click.Path(path_type=Path), help="Write the section into this file.")
@click.option(QUESTION, "question", hidden=True)
def main(large: str, rounds: int, folder: Path | None, write: Path | None, question: str | None) -> None:
    """Measure the memory of conversions, and the time of loading beside timm's."""
    if question is not None:
        answer(question)
        return
    others = Others()
    with tempfile.TemporaryDirectory(dir=folder) as made:
        memory = [] if large == "none" else conversions(large, Path(made))
        times = loads(Path(made), rounds=rounds)
    typed = " ".join(["python bench/weights.py", *sys.argv[1:]])
    around = facts(look_around(command=typed, others_share=others.share()))
    text = f"## Weights\n\n{around}\n\n{loads_as_text(times)}"
    if memory:
        text += f"\n{conversions_as_text(large, memory)}"
    print(text)
    if write is not None:
        write_section(text, write, markers=MARKERS)


def loads_as_text(times: Loads) -> str:
    """Times of loading, as Markdown."""
    lines = [
        "### Loading B/16",
        "",
        "The same safetensors file of 346 MB, in the page cache. Each contender has a process of its own that has",
        "imported its library and loaded once; they take turns, in changing order. vitkit maps the file into memory,",
        "so the second pair of columns has the answer to a first image in it, for which every number is read. In its",
        "own folder vitkit checks the SHA-256 of every file before it gives a model. Times are best (median) in",
        f"milliseconds, of {len(times.loaded[LOADERS[0]])} rounds; ratios are of medians, to the faster of timm's",
        f"ways. The demand is a ratio of {ALLOWED} at most.",
        "",
        "| | load | ratio | load and first image | ratio |",
        "|---|--:|--:|--:|--:|",
    ]
    peers = [loader for loader in LOADERS if loader.startswith("timm")]
    for loader in LOADERS:
        cells = []
        for seconds in (times.loaded, times.answered):
            middle = {name: statistics.median(seconds[name]) for name in LOADERS}
            share = middle[loader] / min(middle[name] for name in peers)
            cells += [f"{1000 * min(seconds[loader]):,.0f} ({1000 * middle[loader]:,.0f})", f"{share:.2f}"]
        lines.append(f"| {loader} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def conversions_as_text(model: str, found: list[Conversion]) -> str:
    """Memory of conversions, as Markdown."""
    sizes = [parameter.nbytes for parameter in vitkit.create(model, device="meta").parameters()]
    weights, largest = sum(sizes), max(sizes)
    lines = [
        f"### Converting {model}",
        "",
        f"`vitkit weights convert` in a forked process. The weights have {weights / MEGA:,.0f} MB in float32, the",
        f"largest tensor {largest / MEGA:,.0f} MB; one copy and one tensor are {(weights + largest) / MEGA:,.0f} MB.",
        "Memory is `RssAnon`, sampled every 2 ms: what the process holds for itself, less what it held at its start.",
        "The whole process is the highest `VmHWM`, in which pages of mapped files count too; the system takes those",
        "back when it needs memory. Seconds have the sync to the disk in them.",
        "",
        "| from | to | MB | copies of the weights | whole process, MB | seconds |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for each in found:
        over = "" if each.share <= weights + largest else " **over**"
        copies, whole = f"{each.share / weights:.2f}{over}", f"{each.peak.resident / MEGA:,.0f}"
        cells = [each.source, each.target, f"{each.share / MEGA:,.0f}", copies, whole, f"{each.seconds:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
