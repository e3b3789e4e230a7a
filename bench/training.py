"""Training steps of vitkit beside timm's model in a plain PyTorch loop, and training from JPEG files beside both.

python bench/training.py --write BENCHMARKS.md       everything, about ten minutes; also writes its section there
python bench/training.py --quick                     few rounds, prints; a minute or two
python bench/training.py --models cifar --photos ""  one model, without the files
"""

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal, cast, get_args

import click
import psutil
import torch
from forward_backward import Others
from from_files import Rates
from memory import MEGA, Peak, forget_peak, resident_peak
from peers import draw_weights, peer
from report import Circumstances, facts, look_around, write_section
from timing import CLOSE, TOLERANCE, Effort, interleave, no_collection, warm_up
from torch import Tensor, nn
from torch.nn import functional

from vitkit.cli.machine import keep_freed_memory
from vitkit.core.shapes import pair
from vitkit.data.loader import Batch
from vitkit.model.vit import ViT
from vitkit.recipes.small import small_model
from vitkit.train.config import ModelChoice, OptimizerConfig, RunConfig, ScheduleConfig
from vitkit.train.make import choose_model, choose_preprocessing, make_model, make_trainer
from vitkit.train.parallel import Ranks
from vitkit.train.update import Trainer
from vitkit.train.watch import Watcher

Contender = Literal["vitkit", "timm", "timm, fused AdamW"]
CONTENDERS: tuple[Contender, ...] = get_args(Contender)
MARKERS = ("<!-- training:begin -->", "<!-- training:end -->")
QUESTION = "--memory-of"
"""The script's hidden option that makes it measure memory and print the answer."""
PHOTOS = Path(__file__).resolve().parents[2] / "shared" / "data" / "photos"
EFFORT = Effort(seconds=30.0, fewest=6, most=60, retries=2, patience=120.0)
EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}
QUICK = Effort(seconds=4.0, fewest=2, most=10, retries=0)
RATE, DECAY, CLIP = 1e-4, 0.1, 1.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model and batch that all contenders train."""

    title: str
    choice: ModelChoice
    classes: int
    batch: int

    @property
    def config(self) -> RunConfig:
        """The run of vitkit that is measured."""
        return RunConfig(
            model=self.choice,
            optimizer=OptimizerConfig(weight_decay=DECAY, clip=CLIP),
            schedule=ScheduleConfig(batch_size=self.batch, epochs=None, steps=10**6, lr=RATE, decay="constant"),
        )


CIFAR = small_model(image_size=32, patch_size=4, width=192, depth=6, mlp_dim=384)
ERF = ("block.activation=gelu_erf",)
CASES = {
    "Ti/16": Case(title="Ti/16, 224 px", choice=ModelChoice(name="Ti/16", settings=ERF), classes=1000, batch=32),
    "S/16": Case(title="S/16, 224 px", choice=ModelChoice(name="S/16", settings=ERF), classes=1000, batch=16),
    "cifar": Case(title="width 192, depth 6, 32 px", choice=CIFAR, classes=10, batch=128),
}


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of every step, by contender."""

    seconds: dict[Contender, list[float]] = field(default_factory=lambda: {name: [] for name in CONTENDERS})

    def summary(self, of: Callable[[list[float]], float]) -> dict[Contender, float]:
        """One number for each contender, such as its shortest time."""
        return {name: of(times) for name, times in self.seconds.items()}

    def is_close(self) -> bool:
        """Whether noise could turn the result round."""
        return any(abs(ratio(self.summary(of)) - 1) <= CLOSE for of in (min, median))


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was measured of one case."""

    case: str
    parameters: int
    difference: float
    times: Times
    peaks: dict[Contender, Peak]

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file; seconds and megabytes."""
        case, best, middle = CASES[self.case], self.times.summary(min), self.times.summary(median)
        return {
            "model": case.title,
            "batch": case.batch,
            "parameters": self.parameters,
            "largest_logit_difference": self.difference,
            "rounds": len(self.times.seconds["vitkit"]),
            "ratio": {"best": ratio(best), "median": ratio(middle)},
            "seconds": {name: {"best": best[name], "median": middle[name]} for name in CONTENDERS},
            "peak_megabytes": {name: asdict(peak) for name, peak in self.peaks.items()},
        }


def ratio(times: Mapping[Contender, float]) -> float:
    """The faster plain loop's time over ours: above 1, ours is faster.

    >>> ratio({"vitkit": 2.0, "timm": 4.0, "timm, fused AdamW": 3.0})
    1.5
    """
    return min(times[name] for name in CONTENDERS if name != "vitkit") / times["vitkit"]


@click.command()
@click.option("--models", default=",".join(CASES), show_default=True, help="Models to measure, with commas between.")
@click.option("--quick", is_flag=True, help="Few rounds.")
@click.option(
    "--photos", default=str(PHOTOS), help="A folder of JPEG files to train from; without it, that part is left out."
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write all numbers to this file.")
@click.option("--write", type=click.Path(path_type=Path), help="Write the report to this Markdown file.")
@click.option(QUESTION, "question", hidden=True)
def main(
    models: str, quick: bool, photos: str, json_file: Path | None, write: Path | None, question: str | None
) -> None:
    """Time training steps beside timm's model in a plain loop, measure memory, and train from files."""
    if question:
        print(json.dumps(asdict(peak_here(**json.loads(question)))))
        return
    chosen = [name for name in models.split(",") if name]
    if unknown := [name for name in chosen if name not in CASES]:
        raise click.BadParameter(f"no {', '.join(unknown)}; there are {', '.join(CASES)}", param_hint="--models")
    others = Others()
    keep_freed_memory()
    results = [measure(name, effort=QUICK if quick else EFFORT) for name in chosen]
    rates = rates_from_files(photos, quick=quick)
    around = look_around(command=" ".join(["python", "bench/training.py", *sys.argv[1:]]), others_share=others.share())
    text = section(results, rates, around)
    print(text)
    if around.is_busy:
        print("warning: other processes were at work; measure again on a quiet machine", file=sys.stderr)
    if json_file:
        rows = [result.as_dict() for result in results]
        numbers = {"circumstances": around.as_dict(), "rows": rows, "from_files": rates and asdict(rates)}
        json_file.write_text(json.dumps(numbers, indent=1) + "\n")
    if write:
        write_section(text, write, markers=MARKERS)


def measure(name: str, *, effort: Effort) -> Result:
    """Time all contenders on one case in interleaved rounds, then their memory in fresh processes."""
    case = CASES[name]
    models = {contender: build(case, contender) for contender in CONTENDERS}
    draw_weights(models["vitkit"])
    for model in models.values():
        model.load_state_dict(models["vitkit"].state_dict(), strict=True)
    batch = make_batch(case)
    difference = check_agreement(case, models, batch)
    runs = {contender: timed(step_of(case, contender, model, batch)) for contender, model in models.items()}
    times = Times()
    with no_collection():
        rounds = effort.rounds(sum(warm_up(run) for run in runs.values()))
        for _ in range(1 + effort.retries):
            interleave(runs, times.seconds, rounds=rounds)
            if not times.is_close() or sum(map(sum, times.seconds.values())) > effort.patience:
                break
    print(f"{case.title}: ratio {ratio(times.summary(min)):.3f}, {ratio(times.summary(median)):.3f}", file=sys.stderr)
    peaks = {contender: peak_in_new_process(name, contender) for contender in CONTENDERS}
    parameters = sum(parameter.numel() for parameter in models["vitkit"].parameters())
    return Result(case=name, parameters=parameters, difference=difference, times=times, peaks=peaks)


def build(case: Case, contender: Contender) -> nn.Module:
    """The model as vitkit's run makes it, or the same function by timm."""
    config = choose_model(case.config, classes=case.classes, pretrained=None)
    if contender == "vitkit":
        return make_model(case.config, config, pretrained=None, ranks=alone(), watcher=Watcher())
    return peer("timm").models.VisionTransformer(
        img_size=pair(config.image_size),
        patch_size=pair(config.patch_size),
        num_classes=case.classes,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=config.mlp_dim / config.width,
        class_token=config.class_tokens > 0,
        global_pool="token" if config.pooling == "class" else "avg",
        fc_norm=False,
        act_layer=None if config.block.activation == "gelu_erf" else "gelu_tanh",
    )


def alone() -> Ranks:
    """One process on the CPU."""
    return Ranks(device=torch.device("cpu"))


def make_batch(case: Case) -> Batch:
    """Random pixels and labels, as a loader gives them."""
    generator = torch.Generator().manual_seed(1)
    height, width = pair(choose_model(case.config, classes=case.classes, pretrained=None).image_size)
    pixels = torch.randint(256, (case.batch, 3, height, width), dtype=torch.uint8, generator=generator)
    return Batch(pixels, torch.randint(case.classes, (case.batch,), generator=generator))


def trainer_of(case: Case, model: nn.Module) -> Trainer:
    """What vitkit's run calls for each update."""
    assert isinstance(model, ViT)
    prepared = choose_preprocessing(case.config, model.config, None)
    return make_trainer(case.config, model, preprocessing=prepared, classes=case.classes, steps=10**6, ranks=alone())


def normalised(case: Case, pixels: Tensor) -> Tensor:
    """The images as the model takes them."""
    config = choose_model(case.config, classes=case.classes, pretrained=None)
    return choose_preprocessing(case.config, config, None).normalise(pixels)


def step_of(case: Case, contender: Contender, model: nn.Module, batch: Batch) -> Callable[[], object]:
    """One training step. The plain loop's images are normalised beforehand; ours are not."""
    if contender == "vitkit":
        trainer, batches = trainer_of(case, model), itertools.repeat(batch)
        return lambda: trainer.update(cast("Any", batches))
    images, labels = normalised(case, batch.pixels), batch.labels
    fused = True if contender == "timm, fused AdamW" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=fused)
    model.train()

    def step() -> float:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return loss.item()

    return step


def timed(step: Callable[[], object]) -> Callable[[], float]:
    """The step, giving the seconds that it took."""

    def run() -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    return run


@torch.inference_mode()
def check_agreement(case: Case, models: Mapping[Contender, nn.Module], batch: Batch) -> float:
    """The largest difference between our logits and timm's; too large a one means another function, and is fatal."""
    images = normalised(case, batch.pixels[:4])
    ours, theirs = (models[name].eval()(images) for name in CONTENDERS[:2])
    difference, allowed = float((ours - theirs).abs().max()), TOLERANCE["fp32"] * float(ours.abs().max())
    if not difference <= allowed:
        raise SystemExit(f"error: {case.title}: logits differ by {difference:.2g}, more than {allowed:.2g}")
    return difference


def peak_in_new_process(name: str, contender: Contender) -> Peak:
    """Measure in a fresh process, which knows neither the other contenders nor an earlier run.

    Every block of 128 kB or more is the kernel's own, or where the heap has holes would decide by 100 MB and more.
    """
    question = json.dumps({"name": name, "contender": contender})
    command, environment = [sys.executable, __file__, QUESTION, question], os.environ | EXACT_MEMORY
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return Peak(**json.loads(done.stdout))


def peak_here(name: str, contender: Contender) -> Peak:
    """Three steps; the first makes the optimizer's state, and the others find it there."""
    case = CASES[name]
    step = step_of(case, contender, build(case, contender), make_batch(case))
    before = psutil.Process().memory_info().rss
    forget_peak()
    for _ in range(3):
        step()
    peak = resident_peak()
    return Peak(growth=max(0, peak - before) / MEGA, total=peak / MEGA)


def rates_from_files(photos: str, *, quick: bool) -> Rates | None:
    """How fast vitkit learns from JPEG files, measured by a process that starts as the command line does."""
    if not photos or not Path(photos).is_dir():
        print("no folder of JPEG files: training from files is left out", file=sys.stderr)
        return None
    script = str(Path(__file__).with_name("from_files.py"))
    effort = ["--steps", "4", "--rounds", "1"] if quick else []
    environment = os.environ | {"GOMP_SPINCOUNT": "1000"}
    command = [sys.executable, script, photos, *effort]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return Rates(**json.loads(done.stdout))


def section(results: Sequence[Result], rates: Rates | None, around: Circumstances) -> str:
    """The section of BENCHMARKS.md."""
    return f"""## Training

{facts(around)}

{how(results)}
{table(results)}

{from_files(rates) if rates else "Training from files was not measured: there was no folder of them."}
"""


def how(results: Sequence[Result]) -> str:
    """How the numbers come about."""
    difference = max((result.difference for result in results), default=0.0)
    counts = [len(result.times.seconds["vitkit"]) for result in results] or [0]
    return f"""One training step in float32 on a batch that is in memory. vitkit's is `Trainer.update`, all that
`vitkit train` does between two batches: normalise 8-bit pixels, one-hot targets, forward, cross-entropy, backward, the
norm of all gradients, the guard against what is not finite, clipping, fused AdamW, accuracy. The plain loop trains
timm's model of the same configuration, parameters and first weights with `cross_entropy`, `backward`,
`clip_grad_norm_` and `torch.optim.AdamW` as it comes, and again with `fused=True`; its images are normalised
beforehand. Logits differ by at most {difference:.1e}. Everything is eager, and malloc keeps freed memory, for all
alike. All models have the erf GELU, which is timm's usual one.

In each round every contender makes one step, in changing order; there were {min(counts)} to {max(counts)} rounds. Rates
are **best (median)**. The ratio is ours to the faster plain loop's: above 1, vitkit is faster. Peak memory is what
training adds to libraries and model, and in brackets the whole process, in MB, each in a fresh process whose malloc
hands every freed block of 128 kB or more back at once.
"""


def table(results: Sequence[Result]) -> str:
    """One line a case."""
    rates = " | ".join(f"{name}, images/s" for name in CONTENDERS)
    memory = " | ".join(f"{name}, peak MB" for name in CONTENDERS)
    lines = [
        f"| model | parameters | batch | {rates} | ratio to the faster loop | {memory} |",
        f"|---|{'--:|' * (3 + 2 * len(CONTENDERS))}",
    ]
    for result in results:
        case, best, middle = CASES[result.case], result.times.summary(min), result.times.summary(median)
        cells = [case.title, f"{result.parameters:,}", str(case.batch)]
        cells += [f"{case.batch / best[name]:.1f} ({case.batch / middle[name]:.1f})" for name in CONTENDERS]
        cells += [f"**{ratio(best):.3f}** ({ratio(middle):.3f})"]
        cells += [f"{result.peaks[name].growth:.0f} ({result.peaks[name].total:.0f})" for name in CONTENDERS]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def from_files(rates: Rates) -> str:
    """What training from files reaches, as Markdown."""
    lines = [
        f"### From {rates.files:,} JPEG files",
        "",
        f"{rates.model} at batch {rates.batch}, inception crop and flip, in a process that starts as `vitkit train`",
        "does. The clock of a stream starts with its store of batches full and stops when it is full again. All cores",
        "compute, so an image decoded takes its time from them: 1 / (1 / compute + 1 / decode) is what they can reach.",
        "",
        "| | images/s | of compute alone | of what the cores can reach | waiting for images |",
        "|---|--:|--:|--:|--:|",
        f"| compute alone, batch in memory | {rates.compute:.1f} | 100 % | | |",
    ]
    lines += [f"| decode alone, workers: {workers} | {rate:.1f} | | | |" for workers, rate in rates.decode.items()]
    lines.append(f"| what the cores can reach | {rates.limit:.1f} | {percent(rates.limit / rates.compute)} | 100 % | |")
    for workers, rate in rates.both.items():
        shares = [rate / rates.compute, rate / rates.limit, rates.waiting[workers]]
        lines.append(f"| training, workers: {workers} | {rate:.1f} | {' | '.join(map(percent, shares))} |")
    return "\n".join(lines)


def percent(share: float) -> str:
    """A share as it stands in a table.

    >>> percent(0.954)
    '95.4 %'
    """
    return f"{100 * share:.1f} %"


if __name__ == "__main__":
    main()
