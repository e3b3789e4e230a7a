"""Times of engines and the machine's peak go in, the section of BENCHMARKS.md comes out."""

import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from children import TURN
from cold import MEMORY_BATCH, SLOW, Start
from contenders import CONTENDERS, REFERENCE, Contender, Precision
from peaks import SIDE
from report import Circumstances, facts, milliseconds

BATCHES = (1, 8, 32)
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8")
OURS: dict[str, str] = {each.precision: each.key for each in CONTENDERS if each.library == "vitkit"}
DRAW = 0.02
"""Nearer than this is a draw."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured of one model: seconds of every run by batch and contender, peaks in 10^9 operations a second.

    `gigaflops` are the operations of one image; `differences` are to timm's logits, as a share of the largest.
    """

    model: str
    gigaflops: float
    seconds: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    engines: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file: of all runs their number, the best and the median."""
        seconds = {
            str(batch): {
                key: {"runs": len(times), "best": min(times), "median": statistics.median(times)}
                for key, times in by_contender.items()
            }
            for batch, by_contender in self.seconds.items()
        }
        return asdict(self) | {"seconds": seconds}

    def best(self, key: str, batch: int) -> float | None:
        """The shortest time of a contender, where it ran."""
        times = self.seconds[batch].get(key)
        return min(times) if times else None

    def relative(self, key: str, batch: int) -> float | None:
        """Its speed, where timm's eager fp32 is 1."""
        time, reference = self.best(key, batch), self.best(REFERENCE.key, batch)
        return reference / time if time and reference else None

    def share(self, key: str, batch: int, precision: Precision) -> float | None:
        """Its speed as a share of the peak in its precision."""
        time = self.best(key, batch)
        return batch * self.gigaflops / time / self.peak(precision) if time else None

    def peak(self, precision: Precision) -> float:
        """The faster of the products in a precision and in fp32: where bf16 is emulated, fp32 is what it can reach."""
        return max(self.peaks[precision], self.peaks.get("fp32", 0.0))


@dataclass(frozen=True, kw_only=True)
class Engines:
    """All that was measured."""

    measured: Sequence[Measured]
    starts: Sequence[Start]
    longest: float
    """Seconds beyond which a run was left out."""

    @property
    def instructions(self) -> str:
        """What our own kernels were compiled for: speeds compare between machines that share it, and no others."""
        names = [name.split(", ") for measured in self.measured for name in measured.engines.values()]
        return next((rest[0] for kind, *rest in names if kind == "native" and rest), "no kernels of our own")

    @property
    def markers(self) -> tuple[str, str]:
        """Where the section stands; each kind of CPU has its own."""
        return f"<!-- engines, {self.instructions}:begin -->", f"<!-- engines, {self.instructions}:end -->"


def section(engines: Engines, around: Circumstances) -> str:
    """The section as Markdown."""
    parts = [f"## Engines, {engines.instructions}", facts(around), how(engines), standings(engines)]
    for measured in engines.measured:
        for precision in PRECISIONS:
            if OURS[precision] in measured.engines:
                parts += [f"### {measured.model}, {precision}", table(measured, precision)]
    parts += [starts_as_text(engines.starts), why()]
    return "\n\n".join(parts) + "\n"


def how(engines: Engines) -> str:
    """How the numbers come about."""
    differences: dict[str, float] = {}
    for measured in engines.measured:
        for contender in CONTENDERS:
            if contender.key in measured.differences:
                kept = differences.get(contender.precision, 0.0)
                differences[contender.precision] = max(kept, measured.differences[contender.key])
    said = ", ".join(f"{value:.0e} in {precision}" for precision, value in differences.items())
    names = dict.fromkeys(
        f"{precision}: {measured.engines[key]}"
        for measured in engines.measured
        for precision, key in OURS.items()
        if key in measured.engines
    )
    peaks = {
        precision: max(measured.peaks[precision] for measured in engines.measured)
        for precision in PRECISIONS
        if all(precision in measured.peaks for measured in engines.measured)
    }
    measured_peaks = ", ".join(f"{peak:.0f} in {precision}" for precision, peak in peaks.items())
    text = f"""Classifying images of 224 pixels that are in memory, by engines that compute the same function from the
same weights and images. The largest difference from timm's logits, as a share of the largest logit, was {said}.
ONNX Runtime runs timm's model as `torch.onnx.export` writes it, int8 by `quantize_dynamic`; OpenVINO what
`convert_model` makes of it, int8 by NNCF's static quantisation for transformers, and in two streams with half a batch
each as well. timm is compiled by `torch.compile` with frozen weights; its int8 is torch's dynamic one of linear layers.
Ours is what `engine_for` chooses: {"; ".join(names)}.

Each library has a process of its own and two threads. Processes take turns of {1000 * TURN:.0f} ms or of one run,
whichever is longer, in random order, while all others sleep; malloc keeps freed memory, for all alike. A run that
would take more than {engines.longest:.0f} s was left out (–). Speeds are those of the **best** run, relative to
timm's eager model in fp32 at the same batch, and in brackets images a second; the milliseconds of batch 1 are best
(median).

The peak is the best product of two {SIDE} × {SIDE} matrices by oneDNN or MKL, run between the turns: {measured_peaks},
in 10⁹ operations a second. Shares of it count all operations of the model, those of the last block's rows too that we
leave out because nobody reads them (6 %). A share above 100 % says that our products run faster than that library's."""
    return "\n\n".join(wrapped(paragraph) for paragraph in text.split("\n\n"))


def wrapped(paragraph: str) -> str:
    """Lines that are not too long, whatever was put into them."""
    return textwrap.fill(paragraph, width=118, break_long_words=False, break_on_hyphens=False)


def standings(engines: Engines) -> str:
    """One line a row of the comparison: who is first in a precision, and by how much."""
    lines = ["| model | precision | batch 1 | batch 8 | batch 32 |", "|---|---|---|---|---|"]
    for measured in engines.measured:
        for precision in PRECISIONS:
            if OURS[precision] in measured.engines:
                cells = [verdict(measured, precision, batch) for batch in BATCHES]
                lines.append(f"| {measured.model} | {precision} | {' | '.join(cells)} |")
    return "\n".join(lines)


def verdict(measured: Measured, precision: Precision, batch: int) -> str:
    """Whether ours is first in its precision, and how far the next is, or how far the first."""
    ours = measured.best(OURS[precision], batch)
    peers = {
        each: found
        for each in CONTENDERS
        if each.precision == precision and each.library != "vitkit" and (found := measured.best(each.key, batch))
    }
    if ours is None:
        return "not measured"
    if not peers:
        return "**first**: what there is besides takes too long to be measured"
    nearest = min(peers, key=lambda each: peers[each])
    ratio = peers[nearest] / ours
    if abs(ratio - 1) <= DRAW:
        return f"a draw with {nearest} ({ratio:.2f})"
    if ratio > 1:
        return f"**first**, {ratio:.2f} × {nearest}"
    theirs, share = (measured.share(key, batch, precision) for key in (nearest.key, OURS[precision]))
    return f"behind {nearest} by {1 - ratio:.0%}: it reaches {theirs:.0%} of the peak, we {share:.0%}"


def table(measured: Measured, precision: Precision) -> str:
    """One line a contender."""
    heads = [f"batch {batch}" for batch in BATCHES]
    shares = [f"of peak, {batch}" for batch in BATCHES]
    lines = [
        f"| engine | {' | '.join(heads)} | latency ms | {' | '.join(shares)} |",
        f"|---|{'--:|' * (2 * len(BATCHES) + 1)}",
    ]
    running = [each for each in CONTENDERS if each.precision == precision and each.key in measured.engines]
    lines += [f"| {' | '.join(cells_of(measured, contender))} |" for contender in running]
    for key, reason in measured.left_out.items():
        if key.endswith(precision):
            lines.append(f"| {key.removesuffix(precision).strip()}: {reason} |{' |' * (2 * len(BATCHES) + 1)}")
    return "\n".join(lines)


def cells_of(measured: Measured, contender: Contender) -> list[str]:
    """One line of the table; ours is bold."""
    mark = "**" if contender.library == "vitkit" else ""
    key = contender.key
    runs = [(batch, measured.relative(key, batch), measured.best(key, batch)) for batch in BATCHES]
    shares = [measured.share(key, batch, contender.precision) for batch in BATCHES]
    times = measured.seconds[1].get(key)
    latency = f"{milliseconds(min(times))} ({milliseconds(statistics.median(times))})" if times else "–"
    return [
        f"{mark}{contender}{mark}",
        *(f"{mark}{speed:.2f}{mark} ({rate(batch / time)})" if speed and time else "–" for batch, speed, time in runs),
        latency,
        *(f"{share:.0%}" if share else "–" for share in shares),
    ]


def rate(images_a_second: float) -> str:
    """Two or more digits.

    >>> rate(123.4), rate(7.25)
    ('123', '7.2')
    """
    return f"{images_a_second:.0f}" if images_a_second >= 10 else f"{images_a_second:.1f}"


def starts_as_text(starts: Sequence[Start]) -> str:
    """Cold starts and memory, models side by side."""
    models = list(dict.fromkeys(start.model for start in starts))
    found = {(start.contender, start.model): start for start in starts}
    heads = [f"{model}: {what}" for model in models for what in ("first answer, s", "memory, MB")]
    lines = [
        "### From nothing to the first answer",
        "",
        wrapped(
            "A fresh process, all files in the page cache: from its start to the answer for one image, the better of "
            f"two where one takes less than {SLOW:.0f} s; and the most memory that it had after a batch of "
            f"{MEMORY_BATCH}. "
            "What `torch.compile` keeps on the disk was not there. Our own kernels had been compiled before, which "
            "happens once on a machine."
        ),
        "",
        f"| engine | {' | '.join(heads)} |",
        f"|---|{'--:|' * len(heads)}",
    ]
    for contender in CONTENDERS:
        rows = [found.get((contender.key, model)) for model in models]
        if any(rows):
            cells = [cell for start in rows for cell in start_cells(start)]
            lines.append(f"| {contender}, {contender.precision} | {' | '.join(cells)} |")
    return "\n".join(lines)


def start_cells(start: Start | None) -> tuple[str, str]:
    """Seconds and megabytes."""
    return (f"{start.seconds:.1f}", f"{start.megabytes:,.0f}") if start else ("–", "–")


def why() -> str:
    """What makes the difference, and how far to trust it."""
    return """On noise: absolute times move by tens of percent on a shared machine; contenders of one row see the same
weather, and a ratio between 0.98 and 1.02 is a draw. bf16 without avx512_bf16 or AMX is emulated by torch, and by
OpenVINO on AVX-512, and slower there than fp32. On AVX2 OpenVINO takes as long as in fp32; ours unfolds weights of 16
bits for each product there, which takes half the memory and somewhat longer than fp32."""
