"""Benchmark of the engines: speed, startup, memory and agreement with the unmodified model.

All engines are timed in turns, so that machine noise affects them equally.
"""

import ctypes
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import psutil
import torch

from vitkit.core.errors import ConfigError, DataError, UnknownNameError
from vitkit.core.result import Result, draw, select
from vitkit.core.shapes import Tensor
from vitkit.core.signals import ProgressFunction, ignore_progress, start_task
from vitkit.core.sizes import pair
from vitkit.inference.agreement import Agreement, compare_outputs, run_batches, sample_images
from vitkit.inference.engine import CPU, CompiledEngine, Engine, Precision, check_precision, compile_now, eager_engine
from vitkit.inference.image_inputs import describe_data, open_data_images
from vitkit.inference.select import (
    Report,
    available_engines,
    build_native_if_needed,
    create_engine,
    native_unsupported_reason,
    select_engine,
    try_build_native,
)
from vitkit.inference.token_merging import check_merging
from vitkit.typing import DataSource, ModelSource
from vitkit.weights.bundle import reference_image
from vitkit.weights.load import open_model
from vitkit.zoo.registry import Model, create, find_variant

if TYPE_CHECKING:
    import matplotlib.figure

MAX_RUNS = 500
MIN_SPEEDUP = 1.2
"""Speedup over fp32 from which on another precision is recommended."""
MIN_AGREEMENT = 0.97
"""Fraction of images that must keep their class for it."""
AGREEMENT_SECONDS = 10.0
"""Time that fp32 may take for the images on which agreement is measured."""
MIN_AGREEMENT_IMAGES, MAX_AGREEMENT_IMAGES = 16, 64
Progress = Callable[[float], None]


@dataclass(frozen=True, kw_only=True)
class BenchmarkRow:
    """Measurements of one engine at one batch size.

    `latency_p50` is that of a batch, and `start_seconds` the time from a loaded model to the first output.
    """

    kind: str
    engine: str
    precision: str
    merge: int = 0
    batch_size: int
    images_per_second: float
    latency_p50: float
    runs: int
    start_seconds: float
    memory_bytes: int
    agreement: Agreement | None


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class BenchmarkResult(Result):
    """Measurements of all engines for one model on one device, and a recommendation."""

    model: str
    image_size: tuple[int, int]
    device: str
    threads: int
    rows: tuple[BenchmarkRow, ...]
    recommendation: str
    agreement_images: int
    agreement_source: str | None
    note: str
    """Which images agreement was measured on."""

    def to_dict(self) -> dict[str, object]:
        """Return the result as JSON values."""
        agreement = {"images": self.agreement_images, "source": self.agreement_source, "note": self.note}
        facts = select(self, "model", "device", "threads")
        return facts | {"agreement": agreement} | select(self, "rows", "recommendation")

    def highlights(self) -> dict[str, object]:
        """Return the model, the highest speed, and the recommendation."""
        best = max(self.rows, key=lambda row: row.images_per_second)
        fastest = f"{best.images_per_second:.1f} images/s in {best.precision}, batches of {best.batch_size}"
        facts: dict[str, object] = {"model": self.model, "device": self.device, "fastest": fastest}
        return facts | {"recommendation": self.recommendation}

    def plot(self) -> "matplotlib.figure.Figure":
        """Draw images per second by engine and batch size."""
        return draw("plot_benchmark", self)


class BenchmarkSubject(NamedTuple):
    """A model, and the images on which agreement is measured."""

    model: Model
    batches: list[Tensor]
    note: str


class EngineSpec(NamedTuple):
    """An engine to be created and measured."""

    kind: str
    precision: Precision
    merge: int
    create: Callable[[], Engine]


def benchmark_model(
    model: ModelSource,
    *,
    images: DataSource | None,
    batch_sizes: Sequence[int],
    precisions: Sequence[str],
    merge: int = 0,
    seconds: float = 2.0,
    device: torch.device = CPU,
    workers: int = 0,
    report: Report = lambda message: None,
    progress: ProgressFunction = ignore_progress,
) -> BenchmarkResult:
    """Measure every engine and precision that can run a model on a device, `seconds` for each batch size."""
    subject = load_subject(model, images, workers=workers)
    check_merging(subject.model, merge)  # before anything is compiled
    build_native_if_needed(subject.model, precision="fp32", device=device, report=report)
    if device.type == "cpu":
        reason = native_unsupported_reason(subject.model, precision="fp32") or try_build_native()
        if reason is not None:
            report(f"without the native engine: {reason}")
    specs = list_engines(subject.model, device=device, precisions=precisions, merge=merge)
    rows = measure_engines(subject, specs, device=device, batch_sizes=batch_sizes, seconds=seconds, progress=progress)
    return BenchmarkResult(
        model=subject.model.name,
        image_size=pair(subject.model.config.image_size),
        device=str(device),
        threads=torch.get_num_threads(),
        rows=tuple(rows),
        recommendation=recommend(rows),
        agreement_images=sum(map(len, subject.batches)),
        agreement_source=None if images is None else describe_data(images),
        note=subject.note,
    )


def load_subject(source: ModelSource, images: DataSource | None, *, workers: int = 0) -> BenchmarkSubject:
    """Load a model and the images for agreement: the given ones, else one synthetic image."""
    if isinstance(source, str) and not Path(source).exists():
        try:
            find_variant(source)
        except UnknownNameError:
            pass  # it may be the name of pretrained weights
        else:
            note = "The weights are random, so agreement is not measured."
            return BenchmarkSubject(create(source).eval(), [], note)
    model = open_model(source)
    example = reference_image(model.config)
    if images is None:
        note = "Agreement was measured on one synthetic image; --images PATH measures it on yours."
        return BenchmarkSubject(model, [example], note)
    with torch.inference_mode():
        seconds_per_image = time_call(lambda: model(example))
    count = max(MIN_AGREEMENT_IMAGES, min(MAX_AGREEMENT_IMAGES, int(AGREEMENT_SECONDS / seconds_per_image)))
    batches = list(sample_images(open_data_images(images), model.preprocess, images=count, workers=workers))
    if not batches:
        raise DataError("none of the images can be read", got=describe_data(images))
    total = sum(map(len, batches))
    note = f"Agreement was measured on {total} image{'s' * (total != 1)} of {describe_data(images)}."
    return BenchmarkSubject(model, batches, note)


def list_engines(model: Model, *, device: torch.device, precisions: Sequence[str], merge: int) -> list[EngineSpec]:
    """List every engine that can run a model on a device, and with `merge` also those that merge tokens."""

    def create_merging(precision: Precision) -> Engine:
        return compile_now(select_engine(model, precision=precision, device=device, merge=merge).engine)

    specs = []
    for precision in map(check_precision, precisions):
        kinds = available_engines(model, precision=precision, device=device)
        for kind in kinds:
            make = partial(create_engine, kind, model, precision=precision, device=device)
            specs.append(EngineSpec(kind, precision, 0, make))
        if merge and kinds:
            specs.append(EngineSpec("merging", precision, merge, partial(create_merging, precision)))
    if not specs:
        got = f"{', '.join(precisions)} on {device}"
        raise ConfigError("no engine to measure", got=got, hint="int8 runs only on the CPU")
    return specs


def measure_engines(
    subject: BenchmarkSubject,
    specs: Sequence[EngineSpec],
    *,
    device: torch.device,
    batch_sizes: Sequence[int],
    seconds: float,
    progress: ProgressFunction = ignore_progress,
) -> list[BenchmarkRow]:
    """Create all engines, measure agreement and startup of each, then time them in turns."""
    config = subject.model.config
    images = partial(random_images, config.channels, pair(config.image_size))
    advance = start_task(progress, "creating engines", len(specs))
    reference = eager_engine(subject.model, device=device)
    reference.forward(images(batch=1))  # torch's own initialization is not part of any engine's startup
    expected = run_batches(reference, subject.batches) if subject.batches else None
    engines: list[Engine] = []
    make_rows: list[Callable[..., BenchmarkRow]] = []
    for spec in specs:
        engine, start_seconds, memory_bytes = measure_startup(spec.create, images(batch=1), device=device)
        outputs = run_batches(engine, subject.batches) if expected else None
        engines.append(engine)
        build_row = partial(
            BenchmarkRow,
            kind=spec.kind,
            engine=engine.name,
            precision=spec.precision,
            merge=spec.merge,
            start_seconds=start_seconds,
            memory_bytes=memory_bytes,
            agreement=compare_outputs(outputs, expected) if outputs and expected else None,
        )
        make_rows.append(build_row)
        advance(1)
    rows: list[list[BenchmarkRow]] = [[] for _ in specs]
    for batch in batch_sizes:
        task, done = f"timing batches of {batch}", 0.0

        def add_fraction(fraction: float, task: str = task) -> None:
            nonlocal done
            done += fraction
            progress(task, min(round(100 * done / len(specs)), 100), 100)

        measurements = time_engines(engines, images(batch=batch), seconds=seconds, progress=add_fraction)
        for engine_rows, make_row, times in zip(rows, make_rows, measurements, strict=True):
            latency = median(times)
            speed = {"batch_size": batch, "images_per_second": batch / latency, "latency_p50": latency}
            engine_rows.append(make_row(**speed, runs=len(times)))
    return [row for engine_rows in rows for row in engine_rows]


def recommend(rows: Sequence[BenchmarkRow]) -> str:
    """Recommend the fastest engine at the largest batch size that still agrees with fp32."""
    batch_size = max(row.batch_size for row in rows)
    largest = [row for row in rows if row.batch_size == batch_size]
    by_speed = sorted(largest, key=lambda row: -row.images_per_second)
    exact = next((row for row in by_speed if row.precision == "fp32" and not row.merge), None)
    if exact is None:
        return f"The fastest was {by_speed[0].precision} with {by_speed[0].engine}; fp32 was not measured."
    faster = by_speed[: by_speed.index(exact)]
    if not faster:
        return f"Use fp32, the fastest on this machine: {exact.engine}."
    for row in faster:
        speedup, agreement = row.images_per_second / exact.images_per_second, row.agreement
        if speedup < MIN_SPEEDUP or (agreement is not None and agreement.same_top1 < MIN_AGREEMENT):
            continue
        options = f"--precision {row.precision}" + (f" --merge {row.merge}" if row.merge else "")
        fact = f"{speedup:.1f}× as fast as fp32 with batches of {row.batch_size}"
        if agreement is None:
            return f"{options} is {fact}; measure its agreement with your model and --images."
        if agreement.images < MIN_AGREEMENT_IMAGES:
            return f"{options} is {fact}; measure its agreement with --images before you use it."
        same = f"{round(agreement.same_top1 * agreement.images)} of {agreement.images} images"
        direction, labels = f"the features of {same} keep their direction.", f"{same} keep their class."
        outcome = f"{labels} vitkit eval measures its accuracy." if agreement.of_logits else direction
        return f"Use {options}: it is {fact}, and {outcome}"
    return "Use fp32: nothing else is both 20% faster and in agreement with it."


def time_interleaved(
    actions: Sequence[Callable[[], object]], *, seconds: float, progress: Progress = lambda fraction: None
) -> list[list[float]]:
    """Time actions in turns until each has run for `seconds`, at least twice after one warm-up run.

    An action whose warm-up takes longer than `seconds`, and than one second, is not run again.
    """
    warmups = [time_call(action) for action in actions]
    times = [[first] if first > max(seconds, 1.0) else [] for first in warmups]
    remaining = [index for index, each in enumerate(times) if not each]
    while remaining:
        for index in remaining:
            times[index].append(time_call(actions[index]))
            progress(min(times[index][-1] / max(seconds, 1e-9), 1.0))
        runs = {index: len(times[index]) for index in remaining}
        remaining = [i for i, count in runs.items() if count < 2 or (sum(times[i]) < seconds and count < MAX_RUNS)]
    return times


def time_call(action: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def time_engines(
    engines: Sequence[Engine], images: Tensor, *, seconds: float, progress: Progress = lambda fraction: None
) -> list[list[float]]:
    """Return the seconds of each run of each engine on one batch (B C H W)."""
    for engine in engines:
        if isinstance(engine, CompiledEngine):
            engine.forward(images)  # compile for this batch size outside of the measurement
    actions = [lambda engine=engine: engine.forward(images) for engine in engines]
    return time_interleaved(actions, seconds=seconds, progress=progress)


def measure_startup(
    create: Callable[[], Engine], image: Tensor, *, device: torch.device = CPU
) -> tuple[Engine, float, int]:
    """Create an engine and run it on one image. Return it with the seconds and the bytes that this took."""
    before, start = allocated_bytes(device), time.perf_counter()
    engine = create()
    engine.forward(image)
    return engine, time.perf_counter() - start, max(0, allocated_bytes(device) - before)


def allocated_bytes(device: torch.device) -> int:
    """Return the memory in use: tensors on a GPU, resident memory of the process on the CPU."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return torch.mps.current_allocated_memory()
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)  # return freed blocks to the system
    return int(psutil.Process().memory_info().rss)


def random_images(channels: int, image_size: tuple[int, int], *, batch: int) -> Tensor:
    """Return a batch of random images; their content does not affect speed."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, channels, *image_size, generator=generator)
