"""Section of BENCHMARKS.md on engines."""

import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from candidates import CANDIDATES, REFERENCE, Candidate, Precision
from children import TURN
from cold import MEMORY_BATCH, SLOW, ColdStart
from peaks import SIDE
from report import BenchmarkEnvironment, facts, milliseconds

BATCHES = (1, 8, 32)
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8")
OURS: dict[str, str] = {each.precision: each.key for each in CANDIDATES if each.library == "vitkit"}
DRAW = 0.02
"""A difference below this is a draw."""


@dataclass(frozen=True, kw_only=True)
class ModelMeasurements:
    """Measurements of one model: seconds of every run by batch and candidate, peaks in 10^9 operations per second.

    `gigaflops` are the operations of one image; `differences` are to timm's logits, relative to the largest.
    """

    model: str
    gigaflops: float
    seconds: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    engines: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for a JSON file: of all runs their number, the best and the median."""
        seconds = {
            str(batch): {
                key: {"runs": len(times), "best": min(times), "median": statistics.median(times)}
                for key, times in by_candidate.items()
            }
            for batch, by_candidate in self.seconds.items()
        }
        return asdict(self) | {"seconds": seconds}

    def best(self, key: str, batch: int) -> float | None:
        """Return the shortest time of a candidate, if it ran."""
        times = self.seconds[batch].get(key)
        return min(times) if times else None

    def relative(self, key: str, batch: int) -> float | None:
        """Return the speed relative to timm's eager fp32."""
        time, reference = self.best(key, batch), self.best(REFERENCE.key, batch)
        return reference / time if time and reference else None

    def peak_fraction(self, key: str, batch: int, precision: Precision) -> float | None:
        """Return the speed as a fraction of the peak in its precision."""
        time = self.best(key, batch)
        return batch * self.gigaflops / time / self.peak(precision) if time else None

    def peak(self, precision: Precision) -> float:
        """Return the faster product of a precision and fp32: emulated bf16 can reach only fp32."""
        return max(self.peaks[precision], self.peaks.get("fp32", 0.0))


@dataclass(frozen=True, kw_only=True)
class Engines:
    """All measurements."""

    measurements: Sequence[ModelMeasurements]
    starts: Sequence[ColdStart]
    max_run_seconds: float
    """Seconds above which a run was skipped."""

    @property
    def instructions(self) -> str:
        """Return the instruction set of the native kernels; speeds are comparable only between equal ones."""
        names = [name.split(", ") for measurements in self.measurements for name in measurements.engines.values()]
        return next((rest[0] for kind, *rest in names if kind == "native" and rest), "no native kernels")

    @property
    def markers(self) -> tuple[str, str]:
        """Return the markers of the section, one pair per kind of CPU."""
        return f"<!-- engines, {self.instructions}:begin -->", f"<!-- engines, {self.instructions}:end -->"


def section(engines: Engines, environment: BenchmarkEnvironment) -> str:
    """Return the section as Markdown."""
    parts = [f"## Engines, {engines.instructions}", facts(environment), describe_method(engines), rankings(engines)]
    for measurements in engines.measurements:
        for precision in PRECISIONS:
            if OURS[precision] in measurements.engines:
                parts += [f"### {measurements.model}, {precision}", table(measurements, precision)]
    parts += [format_cold_starts(engines.starts), describe_differences()]
    return "\n\n".join(parts) + "\n"


def describe_method(engines: Engines) -> str:
    """Describe the method."""
    differences: dict[str, float] = {}
    for measurements in engines.measurements:
        for candidate in CANDIDATES:
            if candidate.key in measurements.differences:
                remaining = differences.get(candidate.precision, 0.0)
                differences[candidate.precision] = max(remaining, measurements.differences[candidate.key])
    sentences = ", ".join(f"{value:.0e} in {precision}" for precision, value in differences.items())
    names = dict.fromkeys(
        f"{precision}: {measurements.engines[key]}"
        for measurements in engines.measurements
        for precision, key in OURS.items()
        if key in measurements.engines
    )
    peaks = {
        precision: max(measurements.peaks[precision] for measurements in engines.measurements)
        for precision in PRECISIONS
        if all(precision in measurements.peaks for measurements in engines.measurements)
    }
    measured_peaks = ", ".join(f"{peak:.0f} in {precision}" for precision, peak in peaks.items())
    text = f"""Classification of images of 224 pixels that are in memory. All engines compute the same function from the
same weights and images; the largest difference from timm's logits, relative to the largest logit, was {sentences}.
ONNX Runtime runs timm's model as exported by `torch.onnx.export`, in int8 by `quantize_dynamic`. OpenVINO runs it as
converted by `convert_model`, in int8 by NNCF's static quantization for transformers, also with two streams of half a
batch each. timm is compiled by `torch.compile` with frozen weights; its int8 is torch's dynamic quantization of linear
layers. vitkit runs the engine that `select_engine` selects: {"; ".join(names)}.

Each library runs in its own process with two threads. Processes take turns of {1000 * TURN:.0f} ms or one run,
whichever is longer, in random order, while all others sleep; malloc keeps freed memory in all of them. A run that would
take more than {engines.max_run_seconds:.0f} s was skipped (–). Speeds are those of the **best** run relative to timm's
eager model in fp32 at the same batch size, with images per second in parentheses. The latency of batch 1 is best
(median).

The peak is the fastest product of two {SIDE} × {SIDE} matrices by oneDNN or MKL, run between the turns:
{measured_peaks}, in 10⁹ operations per second. Fractions of the peak count all operations of the model, including the
rows of the last block that vitkit does not compute because they are not read (6 %). A fraction above 100 % means that
vitkit's matrix products are faster than the library's."""
    return "\n\n".join(wrap_text(paragraph) for paragraph in text.split("\n\n"))


def wrap_text(paragraph: str) -> str:
    """Wrap long lines."""
    return textwrap.fill(paragraph, width=118, break_long_words=False, break_on_hyphens=False)


def rankings(engines: Engines) -> str:
    """Return one line per comparison: the fastest candidate of a precision and its lead."""
    lines = ["| model | precision | batch 1 | batch 8 | batch 32 |", "|---|---|---|---|---|"]
    for measurements in engines.measurements:
        for precision in PRECISIONS:
            if OURS[precision] in measurements.engines:
                cells = [describe_rank(measurements, precision, batch) for batch in BATCHES]
                lines.append(f"| {measurements.model} | {precision} | {' | '.join(cells)} |")
    return "\n".join(lines)


def describe_rank(measurements: ModelMeasurements, precision: Precision, batch: int) -> str:
    """Return whether vitkit is first in its precision, and the distance to the next or the first."""
    ours = measurements.best(OURS[precision], batch)
    peers = {
        each: results
        for each in CANDIDATES
        if each.precision == precision and each.library != "vitkit" and (results := measurements.best(each.key, batch))
    }
    if ours is None:
        return "not measured"
    if not peers:
        return "**first**: all others take too long to measure"
    nearest = min(peers, key=lambda each: peers[each])
    ratio = peers[nearest] / ours
    if abs(ratio - 1) <= DRAW:
        return f"a draw with {nearest} ({ratio:.2f})"
    if ratio > 1:
        return f"**first**, {ratio:.2f} × {nearest}"
    theirs, fraction = (measurements.peak_fraction(key, batch, precision) for key in (nearest.key, OURS[precision]))
    return f"{1 - ratio:.0%} behind {nearest} ({fraction:.0%} of the peak; {nearest} {theirs:.0%})"


def table(measurements: ModelMeasurements, precision: Precision) -> str:
    """Return one line per candidate."""
    heads = [f"batch {batch}" for batch in BATCHES]
    fractions = [f"of peak, {batch}" for batch in BATCHES]
    lines = [
        f"| engine | {' | '.join(heads)} | latency ms | {' | '.join(fractions)} |",
        f"|---|{'--:|' * (2 * len(BATCHES) + 1)}",
    ]
    running = [each for each in CANDIDATES if each.precision == precision and each.key in measurements.engines]
    lines += [f"| {' | '.join(format_row(measurements, candidate))} |" for candidate in running]
    for key, reason in measurements.unavailable.items():
        if key.endswith(precision):
            lines.append(f"| {key.removesuffix(precision).strip()}: {reason} |{' |' * (2 * len(BATCHES) + 1)}")
    return "\n".join(lines)


def format_row(measurements: ModelMeasurements, candidate: Candidate) -> list[str]:
    """Return one line of the table; vitkit is bold."""
    mark = "**" if candidate.library == "vitkit" else ""
    key = candidate.key
    runs = [(batch, measurements.relative(key, batch), measurements.best(key, batch)) for batch in BATCHES]
    fractions = [measurements.peak_fraction(key, batch, candidate.precision) for batch in BATCHES]
    times = measurements.seconds[1].get(key)
    latency = f"{milliseconds(min(times))} ({milliseconds(statistics.median(times))})" if times else "–"
    return [
        f"{mark}{candidate}{mark}",
        *(f"{mark}{speed:.2f}{mark} ({rate(batch / time)})" if speed and time else "–" for batch, speed, time in runs),
        latency,
        *(f"{fraction:.0%}" if fraction else "–" for fraction in fractions),
    ]


def rate(images_per_second: float) -> str:
    """Format with at least two digits.

    >>> rate(123.4), rate(7.25)
    ('123', '7.2')
    """
    return f"{images_per_second:.0f}" if images_per_second >= 10 else f"{images_per_second:.1f}"


def format_cold_starts(starts: Sequence[ColdStart]) -> str:
    """Return cold starts and memory, models side by side."""
    models = list(dict.fromkeys(start.model for start in starts))
    results = {(start.candidate, start.model): start for start in starts}
    heads = [f"{model}: {what}" for model in models for what in ("first output, s", "memory, MB")]
    lines = [
        "### Cold start",
        "",
        wrap_text(
            "Seconds from the start of a new process to the output for one image, and peak memory after a batch of "
            f"{MEMORY_BATCH}. All files are in the page cache. A start of less than {SLOW:.0f} s is measured twice and "
            "the shorter one reported. The disk cache of `torch.compile` is empty; vitkit's native kernels are already "
            "compiled, which happens once per machine."
        ),
        "",
        f"| engine | {' | '.join(heads)} |",
        f"|---|{'--:|' * len(heads)}",
    ]
    for candidate in CANDIDATES:
        rows = [results.get((candidate.key, model)) for model in models]
        if any(rows):
            cells = [cell for start in rows for cell in start_cells(start)]
            lines.append(f"| {candidate}, {candidate.precision} | {' | '.join(cells)} |")
    return "\n".join(lines)


def start_cells(start: ColdStart | None) -> tuple[str, str]:
    """Format seconds and megabytes."""
    return (f"{start.seconds:.1f}", f"{start.megabytes:,.0f}") if start else ("–", "–")


def describe_differences() -> str:
    """Explain the differences and their reliability."""
    return """Noise: absolute times vary by tens of percent on a shared machine. The candidates of a row run under
the same conditions; a ratio between 0.98 and 1.02 is a draw. Without avx512_bf16 or AMX, torch emulates bf16, and so
does OpenVINO on AVX-512; both are then slower than in fp32. On AVX2, OpenVINO's bf16 is as fast as its fp32; vitkit
expands bf16 weights for each product there, which halves the memory and is somewhat slower than fp32."""
