"""Training steps of vitkit and of timm's model in a plain PyTorch loop, and training from JPEG files.

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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, cast, get_args

import click
import psutil
import torch
from forward_backward import OtherProcesses
from from_files import Rates
from memory import MEGA, Peak, peak_rss, reset_peak
from peers import draw_weights, import_peer
from report import BenchmarkEnvironment, describe_environment, facts, write_section
from timing import CLOSE, TOLERANCE, Effort, gc_disabled, interleave, warm_up
from torch import Tensor, nn
from torch.nn import functional

from vitkit.core.environment import retain_freed_memory
from vitkit.core.sizes import pair
from vitkit.data.loader import ImageBatch
from vitkit.model.vit import ViT
from vitkit.recipes.small import small_model
from vitkit.training.build import build_model, build_trainer, resolve_model_config, resolve_preprocessing
from vitkit.training.callbacks import Callback
from vitkit.training.config import ModelChoice, OptimizerConfig, ParallelConfig, RunConfig, ScheduleConfig
from vitkit.training.distributed import Ranks
from vitkit.training.trainer import Trainer

Candidate = Literal["vitkit", "timm", "timm, fused AdamW"]
CANDIDATES: tuple[Candidate, ...] = get_args(Candidate)
MARKERS = ("<!-- training:begin -->", "<!-- training:end -->")
REQUEST_OPTION = "--memory-of"
"""Hidden option with which the script measures memory and prints the result."""
PHOTOS = Path(__file__).resolve().parents[2] / "shared" / "data" / "photos"
EFFORT = Effort(seconds=30.0, min_rounds=6, max_rounds=60, retries=2, max_seconds=120.0)
EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}
QUICK = Effort(seconds=4.0, min_rounds=2, max_rounds=10, retries=0)
RATE, DECAY, CLIP = 1e-4, 0.1, 1.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model and batch that all candidates train."""

    title: str
    choice: ModelChoice
    num_classes: int
    batch: int
    precision: Literal["fp32", "bf16"] = "fp32"

    @property
    def config(self) -> RunConfig:
        """Return the run configuration of vitkit."""
        return RunConfig(
            model=self.choice,
            optimizer=OptimizerConfig(weight_decay=DECAY, clip=CLIP),
            parallel=ParallelConfig(precision=self.precision),
            schedule=ScheduleConfig(batch_size=self.batch, epochs=None, steps=10**6, lr=RATE, decay="constant"),
        )


CIFAR = small_model(image_size=32, patch_size=4, width=192, depth=6, mlp_dim=384)
NARROW = small_model(image_size=32, patch_size=4, width=96, depth=4, mlp_dim=192)
TINY = small_model(image_size=64, patch_size=8, width=128, depth=6, mlp_dim=512)
PHOTOS_96 = small_model(image_size=96, patch_size=12, width=192, depth=6, mlp_dim=384)
ERF = ("block.activation=gelu_erf",)
CASES = {
    "Ti/16": Case(title="Ti/16, 224 px", choice=ModelChoice(name="Ti/16", settings=ERF), num_classes=1000, batch=32),
    "S/16": Case(title="S/16, 224 px", choice=ModelChoice(name="S/16", settings=ERF), num_classes=1000, batch=16),
    "cifar": Case(title="width 192, depth 6, 32 px", choice=CIFAR, num_classes=10, batch=128),
    "narrow": Case(title="width 96, depth 4, 32 px", choice=NARROW, num_classes=10, batch=32),
    "tiny": Case(title="width 128, depth 6, 64 px", choice=TINY, num_classes=200, batch=32),
    "folder": Case(title="width 192, depth 6, 96 px", choice=PHOTOS_96, num_classes=10, batch=32),
}
CASES |= {
    f"{name}-bf16": replace(CASES[name], title=f"{CASES[name].title}, bf16", precision="bf16")
    for name in ("cifar", "narrow", "tiny", "folder")
}


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of every step, by candidate."""

    seconds: dict[Candidate, list[float]] = field(default_factory=lambda: {name: [] for name in CANDIDATES})

    def summary(self, of: Callable[[list[float]], float]) -> dict[Candidate, float]:
        """Return one number per candidate, such as its shortest time."""
        return {name: of(times) for name, times in self.seconds.items()}

    def is_close(self) -> bool:
        """Return whether noise could reverse the result."""
        return any(abs(ratio(self.summary(of)) - 1) <= CLOSE for of in (min, median))


@dataclass(frozen=True, kw_only=True)
class Result:
    """Measurements of one case."""

    case: str
    parameters: int
    difference: float
    times: Times
    peaks: dict[Candidate, Peak]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for a JSON file, in seconds and megabytes."""
        case, best, middle = CASES[self.case], self.times.summary(min), self.times.summary(median)
        return {
            "model": case.title,
            "batch": case.batch,
            "parameters": self.parameters,
            "largest_logit_difference": self.difference,
            "rounds": len(self.times.seconds["vitkit"]),
            "ratio": {"best": ratio(best), "median": ratio(middle)},
            "seconds": {name: {"best": best[name], "median": middle[name]} for name in CANDIDATES},
            "peak_megabytes": {name: asdict(peak) for name, peak in self.peaks.items()},
        }


def ratio(times: Mapping[Candidate, float]) -> float:
    """Return the faster plain loop's time over ours: above 1, ours is faster.

    >>> ratio({"vitkit": 2.0, "timm": 4.0, "timm, fused AdamW": 3.0})
    1.5
    """
    return min(times[name] for name in CANDIDATES if name != "vitkit") / times["vitkit"]


@click.command()
@click.option("--models", default=",".join(CASES), show_default=True, help="Models, comma-separated.")
@click.option("--quick", is_flag=True, help="Few rounds.")
@click.option(
    "--photos", default=str(PHOTOS), help="Directory of JPEG files to train from; without it, that part is skipped."
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write all numbers to this file.")
@click.option("--write", type=click.Path(path_type=Path), help="Write the report to this Markdown file.")
@click.option(REQUEST_OPTION, "request", hidden=True)
def main(
    models: str, quick: bool, photos: str, json_file: Path | None, write: Path | None, request: str | None
) -> None:
    """Compare the time and memory of training steps with timm in a plain loop, and train from files."""
    if request:
        print(json.dumps(asdict(measure_peak(**json.loads(request)))))
        return
    chosen = [name for name in models.split(",") if name]
    if unknown := [name for name in chosen if name not in CASES]:
        raise click.BadParameter(
            f"unknown: {', '.join(unknown)}; choose from {', '.join(CASES)}", param_hint="--models"
        )
    others = OtherProcesses()
    retain_freed_memory()
    results = [measure(name, effort=QUICK if quick else EFFORT) for name in chosen]
    rates = rates_from_files(photos, quick=quick)
    environment = describe_environment(
        command=" ".join(["python", "bench/training.py", *sys.argv[1:]]), other_cpu_fraction=others.fraction()
    )
    text = section(results, rates, environment)
    print(text)
    if environment.is_busy:
        print("warning: other processes were running; repeat the benchmark on an idle machine", file=sys.stderr)
    if json_file:
        rows = [result.as_dict() for result in results]
        numbers = {"environment": environment.as_dict(), "rows": rows, "from_files": rates and asdict(rates)}
        json_file.write_text(json.dumps(numbers, indent=1) + "\n")
    if write:
        write_section(text, write, markers=MARKERS)


def measure(name: str, *, effort: Effort) -> Result:
    """Time all candidates on one case in interleaved rounds, then their memory in fresh processes."""
    case = CASES[name]
    models = {candidate: build(case, candidate) for candidate in CANDIDATES}
    draw_weights(models["vitkit"])
    for model in models.values():
        model.load_state_dict(models["vitkit"].state_dict(), strict=True)
    batch = make_batch(case)
    difference = check_agreement(case, models, batch)
    runs = {candidate: with_timing(make_step(case, candidate, model, batch)) for candidate, model in models.items()}
    times = Times()
    with gc_disabled():
        rounds = effort.rounds(sum(warm_up(run) for run in runs.values()))
        for _ in range(1 + effort.retries):
            interleave(runs, times.seconds, rounds=rounds)
            if not times.is_close() or sum(map(sum, times.seconds.values())) > effort.max_seconds:
                break
    print(f"{case.title}: ratio {ratio(times.summary(min)):.3f}, {ratio(times.summary(median)):.3f}", file=sys.stderr)
    peaks = {candidate: peak_in_new_process(name, candidate) for candidate in CANDIDATES}
    parameters = sum(parameter.numel() for parameter in models["vitkit"].parameters())
    return Result(case=name, parameters=parameters, difference=difference, times=times, peaks=peaks)


def build(case: Case, candidate: Candidate) -> nn.Module:
    """Build the model as a vitkit run does, or the equivalent model of timm."""
    config = resolve_model_config(case.config, num_classes=case.num_classes, pretrained=None)
    if candidate == "vitkit":
        return build_model(case.config, config, pretrained=None, ranks=single_process(), callback=Callback())
    return import_peer("timm").models.VisionTransformer(
        img_size=pair(config.image_size),
        patch_size=pair(config.patch_size),
        num_classes=case.num_classes,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=config.mlp_dim / config.width,
        class_token=config.class_tokens > 0,
        global_pool="token" if config.pooling == "class" else "avg",
        fc_norm=False,
        act_layer=None if config.block.activation == "gelu_erf" else "gelu_tanh",
    )


def single_process() -> Ranks:
    """Return the ranks of a single process on the CPU."""
    return Ranks(device=torch.device("cpu"))


def make_batch(case: Case) -> ImageBatch:
    """Return random pixels and labels in the form that a loader returns."""
    generator = torch.Generator().manual_seed(1)
    height, width = pair(resolve_model_config(case.config, num_classes=case.num_classes, pretrained=None).image_size)
    pixels = torch.randint(256, (case.batch, 3, height, width), dtype=torch.uint8, generator=generator)
    return ImageBatch(pixels, torch.randint(case.num_classes, (case.batch,), generator=generator))


def build_case_trainer(case: Case, model: nn.Module) -> Trainer:
    """Build the trainer that a vitkit run calls for each update."""
    assert isinstance(model, ViT)
    prepared = resolve_preprocessing(case.config, model.config, None)
    return build_trainer(
        case.config,
        model,
        preprocessing=prepared,
        num_classes=case.num_classes,
        total_steps=10**6,
        ranks=single_process(),
    )


def normalize(case: Case, pixels: Tensor) -> Tensor:
    """Normalize images as the model expects them."""
    config = resolve_model_config(case.config, num_classes=case.num_classes, pretrained=None)
    return resolve_preprocessing(case.config, config, None).normalize(pixels)


def make_step(case: Case, candidate: Candidate, model: nn.Module, batch: ImageBatch) -> Callable[[], object]:
    """Return a function that runs one training step; only timm's images are normalized beforehand."""
    if candidate == "vitkit":
        trainer, batches = build_case_trainer(case, model), itertools.repeat(batch)
        return lambda: trainer.step(cast("Any", batches))
    images, labels = normalize(case, batch.pixels), batch.labels
    fused = True if candidate == "timm, fused AdamW" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=fused)
    model.train()

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16"):
            loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return loss.item()

    return step


def with_timing(step: Callable[[], object]) -> Callable[[], float]:
    """Wrap a step so that it returns its duration in seconds."""

    def run() -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    return run


@torch.inference_mode()
def check_agreement(case: Case, models: Mapping[Candidate, nn.Module], batch: ImageBatch) -> float:
    """Return the largest difference between our logits and timm's; exit if the models differ."""
    images = normalize(case, batch.pixels[:4])
    ours, theirs = (models[name].eval()(images) for name in CANDIDATES[:2])
    difference, allowed = float((ours - theirs).abs().max()), TOLERANCE["fp32"] * float(ours.abs().max())
    if not difference <= allowed:
        raise SystemExit(f"error: {case.title}: logits differ by {difference:.2g}, more than {allowed:.2g}")
    return difference


def peak_in_new_process(name: str, candidate: Candidate) -> Peak:
    """Measure in a new process without other candidates or earlier runs.

    Blocks of 128 kB or more are mapped individually; otherwise heap fragmentation changes the peak by 100 MB and more.
    """
    request = json.dumps({"name": name, "candidate": candidate})
    command, environment = [sys.executable, __file__, REQUEST_OPTION, request], os.environ | EXACT_MEMORY
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return Peak(**json.loads(done.stdout))


def measure_peak(name: str, candidate: Candidate) -> Peak:
    """Run three steps, of which the first creates the optimizer state, and return the peak."""
    case = CASES[name]
    step = make_step(case, candidate, build(case, candidate), make_batch(case))
    before = psutil.Process().memory_info().rss
    reset_peak()
    for _ in range(3):
        step()
    peak = peak_rss()
    return Peak(growth=max(0, peak - before) / MEGA, total=peak / MEGA)


def rates_from_files(photos: str, *, quick: bool) -> Rates | None:
    """Measure training from JPEG files in a process started like the command line."""
    if not photos or not Path(photos).is_dir():
        print("no directory of JPEG files: training from files is skipped", file=sys.stderr)
        return None
    script = str(Path(__file__).with_name("from_files.py"))
    effort = ["--steps", "4", "--rounds", "1"] if quick else []
    environment = os.environ | {"GOMP_SPINCOUNT": "1000"}
    command = [sys.executable, script, photos, *effort]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return Rates(**json.loads(done.stdout))


def section(results: Sequence[Result], rates: Rates | None, environment: BenchmarkEnvironment) -> str:
    """Return the section of BENCHMARKS.md."""
    return f"""## Training

{facts(environment)}

{describe_method(results)}
{table(results)}

{format_rates(rates) if rates else "Training from files was not measured: no directory of photos."}
"""


def describe_method(results: Sequence[Result]) -> str:
    """Describe the method."""
    difference = max((result.difference for result in results), default=0.0)
    counts = [len(result.times.seconds["vitkit"]) for result in results] or [0]
    return f"""One training step on a batch that is in memory, in float32 or with autocast to bfloat16. vitkit runs
`Trainer.step`, which is everything that `vitkit train` does between two batches: normalization of 8-bit pixels, one-hot
targets, forward, cross-entropy, backward, gradient norm, check for non-finite values, clipping, fused AdamW, accuracy.
The plain loop trains timm's model with the same configuration and initial weights, using `cross_entropy`, `backward`,
`clip_grad_norm_` and `torch.optim.AdamW` with its defaults, and again with `fused=True`; its images are normalized
beforehand. Logits differ by at most {difference:.1e}. All models run in eager mode with the erf GELU, timm's default,
and malloc keeps freed memory.

Each round runs one step of every candidate, in changing order; there were {min(counts)} to {max(counts)} rounds. Rates
are **best (median)**. The ratio is vitkit's rate divided by that of the faster plain loop: above 1, vitkit is faster.
Peak memory in MB is measured in a new process whose malloc returns freed blocks of 128 kB or more at once: the growth
caused by training, and in parentheses the total of the process.
"""


def table(results: Sequence[Result]) -> str:
    """Return one line per case."""
    rates = " | ".join(f"{name}, images/s" for name in CANDIDATES)
    memory = " | ".join(f"{name}, peak MB" for name in CANDIDATES)
    lines = [
        f"| model | parameters | batch | {rates} | ratio to the faster loop | {memory} |",
        f"|---|{'--:|' * (3 + 2 * len(CANDIDATES))}",
    ]
    for result in results:
        case, best, middle = CASES[result.case], result.times.summary(min), result.times.summary(median)
        cells = [case.title, f"{result.parameters:,}", str(case.batch)]
        cells += [f"{case.batch / best[name]:.1f} ({case.batch / middle[name]:.1f})" for name in CANDIDATES]
        cells += [f"**{ratio(best):.3f}** ({ratio(middle):.3f})"]
        cells += [f"{result.peaks[name].growth:.0f} ({result.peaks[name].total:.0f})" for name in CANDIDATES]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def format_rates(rates: Rates) -> str:
    """Return the throughput of training from files as Markdown."""
    lines = [
        f"### From {rates.files:,} JPEG files",
        "",
        f"{rates.model} at batch {rates.batch}, inception crop and flip, in a process that starts like `vitkit train`.",
        "Timing starts and ends with a full prefetch queue. All cores compute, so decoding takes time from training:",
        "the upper bound is 1 / (1 / compute + 1 / decode).",
        "",
        "| | images/s | of compute alone | of the upper bound | waiting for images |",
        "|---|--:|--:|--:|--:|",
        f"| compute alone, batch in memory | {rates.compute:.1f} | 100 % | | |",
    ]
    lines += [f"| decode alone, workers: {workers} | {rate:.1f} | | | |" for workers, rate in rates.decode.items()]
    lines.append(f"| upper bound | {rates.limit:.1f} | {percent(rates.limit / rates.compute)} | 100 % | |")
    for workers, rate in rates.both.items():
        fractions = [rate / rates.compute, rate / rates.limit, rates.waiting[workers]]
        lines.append(f"| training, workers: {workers} | {rate:.1f} | {' | '.join(map(percent, fractions))} |")
    return "\n".join(lines)


def percent(fraction: float) -> str:
    """Format a fraction for a table.

    >>> percent(0.954)
    '95.4 %'
    """
    return f"{100 * fraction:.1f} %"


if __name__ == "__main__":
    main()
