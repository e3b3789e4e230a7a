"""Memory of converting a large model between formats, and time to load a base model.

python bench/weights.py --write BENCHMARKS.md       full run, half an hour and 15 GB of disk; writes its section
python bench/weights.py --large S/16 --rounds 3     rough estimate, prints
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
from forward_backward import OtherProcesses
from memory import MEGA
from peers import import_peer
from report import describe_environment, facts, write_section
from timing import interleave

import vitkit
from vitkit.cli.weights import command
from vitkit.core.config import parse_assignments

Loader = Literal["vitkit, artifact", "vitkit, timm directory", "timm, local-dir", "timm, checkpoint_path"]
LOADERS: tuple[Loader, ...] = get_args(Loader)
MARKERS = ("<!-- weights:begin -->", "<!-- weights:end -->")
REQUEST_OPTION = "--loads-by"
"""Hidden option with which the script loads on request and prints the seconds."""
FORMATS = {
    "vitkit": "own",
    "timm": "timm",
    "huggingface": "huggingface",
    "google": "google.npz",
    "torchvision": "tv.pth",
}
"""Name of the file or directory of each format: safetensors three times, NumPy's zip and torch's."""
SETTINGS = {"google": ["block.activation=gelu_tanh"], "torchvision": ["block.activation=gelu_erf"]}
"""Settings that a format requires; the weights are unchanged."""
MAX_RATIO = 1.2
"""Largest allowed ratio to timm's time."""
SAMPLE = 0.002
TINY = ("depth=1", "width=64", "heads=1", "mlp_dim=64")


# Memory


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Peak bytes: memory of the process, and all mapped pages including files."""

    own: int
    resident: int


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Cost of converting a large model."""

    source: str
    target: str
    before: Peak
    peak: Peak
    seconds: float

    @property
    def growth(self) -> int:
        """Return the bytes due to the weights, beyond what the process held before."""
        return self.peak.own - self.before.own


def run_in_fork(work: Callable[[], None]) -> tuple[Peak, Peak, float]:
    """Return memory before and at the peak, and the seconds, of work in a separate process."""
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
        samples = memory_of(pid)
        highest = Peak(own=max(highest.own, samples.own), resident=max(highest.resident, samples.resident))
        time.sleep(SAMPLE)
    if ended[1]:
        raise SystemExit("error: a conversion failed")
    return before, highest, time.perf_counter() - started


def memory_of(pid: int) -> Peak:
    """Return the kernel's memory counters of a process, or nothing after it ended."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    results = {name: 1024 * int(rest.split()[0]) for name, rest in (each.split(":") for each in lines if "kB" in each)}
    return Peak(own=results.get("RssAnon", 0), resident=results.get("VmHWM", 0))


def convert(path: Path, out: Path, to: str) -> None:
    """Run `vitkit weights convert` in this process."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        command.main(["convert", str(path), str(out), "--to", to, *SETTINGS.get(to, [])], standalone_mode=False)


def write_formats(model: str, path: Path, *settings: str) -> None:
    """Write a model in every format, with weights that are quick to draw."""
    created = vitkit.create(model, settings=parse_assignments(settings), device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for parameter in created.parameters():
            parameter.uniform_(-0.01, 0.01)
    vitkit.save(created, path / FORMATS["vitkit"])
    del created
    for to in list(FORMATS)[1:]:
        convert(path / FORMATS["vitkit"], path / FORMATS[to], to)


def measure_conversions(model: str, folder: Path) -> list[Conversion]:
    """Measure every format from every other."""
    pairs = [(source, target) for source, target in product(FORMATS, FORMATS) if source != target]
    torch.set_num_threads(1)  # threads would not survive the fork
    for path in (folder / "tiny", folder / "large"):
        path.mkdir()
    write_formats(model, folder / "tiny", *TINY)
    for source, target in pairs:  # import everything that a conversion needs
        convert(folder / "tiny" / FORMATS[source], folder / "out", target)
        discard(folder / "out")
    run_in_fork(lambda: write_formats(model, folder / "large"))
    results = []
    for source, target in pairs:
        path = folder / "large" / FORMATS[source]
        before, peak, seconds = run_in_fork(partial(convert, path, folder / "out", target))
        discard(folder / "out")
        results.append(Conversion(source=source, target=target, before=before, peak=peak, seconds=seconds))
        print(f"{source} → {target}: {results[-1].growth / MEGA:,.0f} MB, {seconds:.0f} s", file=sys.stderr, flush=True)
    return results


def discard(path: Path) -> None:
    """Remove a file or a directory."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()


# Times


class Child:
    """A process that has imported everything and loads on request."""

    def __init__(self, loader: Loader, folder: Path) -> None:
        request = json.dumps({"loader": loader, "folder": str(folder)})
        line = [sys.executable, __file__, REQUEST_OPTION, request]
        self.process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.load()

    def load(self) -> tuple[float, float]:
        """Return the seconds to the loaded model and to its first output."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print("load", file=self.process.stdin, flush=True)
        loaded, answered = json.loads(self.process.stdout.readline())
        return loaded, answered

    def end(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def serve_loads(request: str) -> None:
    """Execute requests until stdin is closed."""
    fields = json.loads(request)
    load = make_loader(fields["loader"], Path(fields["folder"]))
    image = torch.rand(1, 3, 224, 224)
    for _ in sys.stdin:
        started = time.perf_counter()
        model = load()
        loaded = time.perf_counter() - started
        with torch.inference_mode():
            model(image)
        print(json.dumps([loaded, time.perf_counter() - started]), flush=True)
        del model


def make_loader(loader: Loader, folder: Path) -> Callable[[], torch.nn.Module]:
    """Return a candidate's loader; vitkit's directories hold the same safetensors file as timm's."""
    own, timms = folder / "own", folder / "timm"
    if loader.startswith("vitkit"):
        return lambda: vitkit.load(own if loader == "vitkit, artifact" else timms)
    timm = import_peer("timm")
    if loader == "timm, local-dir":
        return lambda: timm.create_model(f"local-dir:{timms}", pretrained=True).eval()
    weights = timms / "model.safetensors"
    return lambda: timm.create_model("vit_base_patch16_224", checkpoint_path=str(weights)).eval()


@dataclass(frozen=True, kw_only=True)
class LoadTimes:
    """Seconds of every load, and of every load with the first image, by candidate."""

    loaded: Mapping[Loader, list[float]]
    answered: Mapping[Loader, list[float]]


def measure_loads(folder: Path, *, rounds: int) -> LoadTimes:
    """Load B/16 with all candidates in turn, `rounds` times each."""
    model = vitkit.create("B/16", settings={"block.activation": "gelu_erf"})
    folder = folder / "base"
    vitkit.save(model, folder / "own")
    convert(folder / "own", folder / "timm", "timm")
    children = {loader: Child(loader, folder) for loader in LOADERS}
    results = LoadTimes(loaded={name: [] for name in LOADERS}, answered={name: [] for name in LOADERS})

    def run(loader: Loader) -> Callable[[], float]:
        def once() -> float:
            loaded, answered = children[loader].load()
            results.answered[loader].append(answered)
            return loaded

        return once

    interleave({name: run(name) for name in LOADERS}, results.loaded, rounds=rounds)
    for child in children.values():
        child.end()
    return results


# The report


@click.command()
@click.option("--large", default="H/14", show_default=True, help="Model to convert, or none.")
@click.option("--rounds", default=24, show_default=True, help="Loads per candidate.")
@click.option("--folder", type=click.Path(path_type=Path), help="Parent of the temporary directory.")
@click.option("--write", type=click.Path(path_type=Path), help="Write the section into this file.")
@click.option(REQUEST_OPTION, "request", hidden=True)
def main(large: str, rounds: int, folder: Path | None, write: Path | None, request: str | None) -> None:
    """Measure the memory of conversions and the time of loading next to timm's."""
    if request is not None:
        serve_loads(request)
        return
    others = OtherProcesses()
    with tempfile.TemporaryDirectory(dir=folder) as created:
        memory = [] if large == "none" else measure_conversions(large, Path(created))
        times = measure_loads(Path(created), rounds=rounds)
    command_line = " ".join(["python bench/weights.py", *sys.argv[1:]])
    environment = facts(describe_environment(command=command_line, other_cpu_fraction=others.fraction()))
    text = f"## Weights\n\n{environment}\n\n{format_loads(times)}"
    if memory:
        text += f"\n{format_conversions(large, memory)}"
    print(text)
    if write is not None:
        write_section(text, write, markers=MARKERS)


def format_loads(times: LoadTimes) -> str:
    """Return the times of loading as Markdown."""
    lines = [
        "### Loading B/16",
        "",
        "All candidates load the same safetensors file of 346 MB from the page cache. Each has its own process, which",
        "has imported the library and loaded the model once; they take turns in changing order. vitkit maps the file",
        "into memory, so the second pair of columns includes the first image, which reads all weights. For its own",
        "artifact directory vitkit verifies the SHA-256 of every file before loading. Times are best (median) in",
        f"milliseconds over {len(times.loaded[LOADERS[0]])} rounds; ratios are of medians, relative to timm's faster",
        f"loader. The required ratio is at most {MAX_RATIO}.",
        "",
        "| | load | ratio | load and first image | ratio |",
        "|---|--:|--:|--:|--:|",
    ]
    peers = [loader for loader in LOADERS if loader.startswith("timm")]
    for loader in LOADERS:
        cells = []
        for seconds in (times.loaded, times.answered):
            middle = {name: statistics.median(seconds[name]) for name in LOADERS}
            ratio = middle[loader] / min(middle[name] for name in peers)
            cells += [f"{1000 * min(seconds[loader]):,.0f} ({1000 * middle[loader]:,.0f})", f"{ratio:.2f}"]
        lines.append(f"| {loader} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def format_conversions(model: str, results: list[Conversion]) -> str:
    """Return the memory of conversions as Markdown."""
    sizes = [parameter.nbytes for parameter in vitkit.create(model, device="meta").parameters()]
    weights, largest = sum(sizes), max(sizes)
    lines = [
        f"### Converting {model}",
        "",
        f"`vitkit weights convert` in a forked process. The weights take {weights / MEGA:,.0f} MB in float32, the",
        f"largest tensor {largest / MEGA:,.0f} MB, one copy plus one tensor {(weights + largest) / MEGA:,.0f} MB.",
        "Memory is the growth of `RssAnon`, the anonymous memory of the process, sampled every 2 ms. The whole",
        "process is the highest `VmHWM`, which includes pages of mapped files that the system can reclaim. Seconds",
        "include the sync to disk.",
        "",
        "| from | to | MB | copies of the weights | whole process, MB | seconds |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for each in results:
        over = "" if each.growth <= weights + largest else " **over**"
        copies, whole = f"{each.growth / weights:.2f}{over}", f"{each.peak.resident / MEGA:,.0f}"
        cells = [each.source, each.target, f"{each.growth / MEGA:,.0f}", copies, whole, f"{each.seconds:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
