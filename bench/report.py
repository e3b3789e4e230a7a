"""Section of BENCHMARKS.md on forward and backward passes, and helpers for all sections."""

import datetime
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from memory import Peak
from peers import CANDIDATES, Candidate
from rows import Row
from timing import CLOSE, Times, ratio

BEGIN, END = "<!-- forward_backward:begin -->", "<!-- forward_backward:end -->"
INSTRUCTION_SETS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
)
BUSY_FRACTION = 0.05
PACKAGES = ("torch", "timm", "transformers", "einops")


@dataclass(frozen=True, kw_only=True)
class Result:
    """Measurements of one row."""

    row: Row
    times: Times
    difference: float
    peaks: dict[Candidate, Peak]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for a JSON file."""
        best, median = self.times.best(), self.times.median()
        return self.row.as_dict() | {
            "rounds": self.times.rounds,
            "largest_logit_difference": self.difference,
            "ratio": {"best": ratio(best), "median": ratio(median)},
            "seconds": {name: {"best": best[name], "median": median[name]} for name in CANDIDATES},
            "peak_megabytes": {name: vars(peak) for name, peak in self.peaks.items()},
        }


@dataclass(frozen=True, kw_only=True)
class BenchmarkEnvironment:
    """Machine, time and versions of the measurements."""

    processor: str
    instruction_sets: str
    cores: int
    threads: int
    memory_gigabytes: float
    date: str
    commit: str
    versions: dict[str, str]
    command: str
    other_cpu_fraction: float

    @property
    def is_busy(self) -> bool:
        """Return whether other processes used too much of the machine."""
        return self.other_cpu_fraction > BUSY_FRACTION

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for a JSON file."""
        return vars(self)


def describe_environment(*, command: str, other_cpu_fraction: float) -> BenchmarkEnvironment:
    """Describe the machine and the code."""
    cpuinfo = Path("/proc/cpuinfo")
    facts = cpuinfo.read_text() if cpuinfo.exists() else ""
    name = re.search(r"model name\s*:\s*(.+)", facts)
    flags = set(facts.split())
    return BenchmarkEnvironment(
        processor=name[1] if name else platform.processor() or platform.machine(),
        instruction_sets=" ".join(matches for matches in INSTRUCTION_SETS if matches in flags) or "unknown",
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory_gigabytes=round(psutil.virtual_memory().total / 1e9, 1),
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        commit=commit(),
        versions={"python": platform.python_version()} | {package: version(package) for package in PACKAGES},
        command=command,
        other_cpu_fraction=other_cpu_fraction,
    )


def commit() -> str:
    """Return the commit, with a + if the working tree differs from it (except for the report)."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", ":(top)", ":(top,exclude)BENCHMARKS.md")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if changed else "")


def section(results: Sequence[Result], environment: BenchmarkEnvironment) -> str:
    """Return the section as Markdown."""
    return f"""## Forward and backward pass

{facts(environment)}

{describe_method(results)}
{table(results)}

{describe_differences()}
"""


def facts(environment: BenchmarkEnvironment) -> str:
    """List machine, time and versions, with a warning if the machine was busy."""
    versions = ", ".join(f"{package} {number}" for package, number in environment.versions.items())
    busy = "; the machine was busy, so the numbers are unreliable" if environment.is_busy else ""
    return f"""- machine: {environment.processor}, {environment.cores} cores ({environment.threads} threads used), \
{environment.memory_gigabytes} GB, instruction sets {environment.instruction_sets}
- measured on {environment.date} at commit {environment.commit}; {versions}
- command: `{environment.command}`
- CPU use of all other processes during the run: {environment.other_cpu_fraction:.0%}{busy}"""


def describe_method(results: Sequence[Result]) -> str:
    """Describe the method."""
    differences = dict.fromkeys(("fp32", "bf16"), 0.0)
    for result in results:
        differences[result.row.precision] = max(differences[result.row.precision], result.difference)
    rounds = [result.times.rounds for result in results]
    min_rounds, max_rounds = min(rounds), max(rounds)
    return f"""All candidates compute the same function: the same random weights, images of 224 pixels and GELU.
Their logits are compared before a row is timed; the largest difference was {differences["fp32"]:.1e} in fp32 and
{differences["bf16"]:.1e} in bf16. All models run in eager mode. The forward pass is `eval()` under `inference_mode`; in
bf16, weights and images are bf16. Forward+backward is `train()` without dropout, with cross-entropy and all gradients;
bf16 uses autocast over fp32 weights.

Each round runs every candidate once, in changing order. A row has {min_rounds} to {max_rounds} rounds, more if the
result is within {CLOSE:.0%} of a draw. Times are **best (median)** in milliseconds. The ratio is the time of the faster
peer divided by vitkit's, for the best and the median times: above 1, vitkit is faster. Peak memory in MB is measured in
a new process: the growth caused by running, and in parentheses the total of the process. During timing, malloc keeps
freed memory for all candidates; with the default, page faults add up to a fifth to a forward pass at batch 8, depending
on the state of the heap.
"""


def table(results: Sequence[Result]) -> str:
    """Return one line per row."""
    times = " | ".join(f"{name} ms" for name in CANDIDATES)
    memory = " | ".join(f"{name} peak MB" for name in CANDIDATES)
    lines = [
        f"| model | pass | precision | batch | {times} | ratio to the faster peer | {memory} |",
        f"|---|---|---|{'--:|' * (2 + 2 * len(CANDIDATES))}",
    ]
    for result in results:
        row, best, median = result.row, result.times.best(), result.times.median()
        cells = [row.title, row.run, row.precision, str(row.batch)]
        cells += [f"{milliseconds(best[name])} ({milliseconds(median[name])})" for name in CANDIDATES]
        cells += [f"**{ratio(best):.2f}** ({ratio(median):.2f})"]
        cells += [f"{result.peaks[name].growth:.0f} ({result.peaks[name].total:.0f})" for name in CANDIDATES]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def milliseconds(seconds: float) -> str:
    """Format with at least three digits.

    >>> milliseconds(0.0123456), milliseconds(0.1234), milliseconds(2.0)
    ('12.3', '123', '2000')
    """
    return f"{1000 * seconds:.1f}" if seconds < 0.1 else f"{1000 * seconds:.0f}"


def describe_differences() -> str:
    """Explain the differences and their reliability."""
    return """Most of the difference comes from the last block: the head reads only the class token, so vitkit
computes only that row, from the keys and values of all tokens. This saves about 6 % of all operations. Two smaller
differences: the patch embedding is a matrix product over unfolded patches, slightly faster than a convolution for one
image and slightly slower for eight; queries, keys and values are one product, as in timm (transformers has three).

Noise: the cores may be shared with other machines and processes, so absolute times vary by tens of percent between
runs. The candidates of a row run under the same conditions. Compare only ratios, and read a ratio between 0.98 and 1.02
as a draw. On processors without avx512_bf16 or AMX, bf16 is emulated and slower than fp32 in all libraries."""


def write_section(text: str, path: Path, *, markers: tuple[str, str] = (BEGIN, END)) -> None:
    """Replace the section between its markers in a file."""
    begin, end = markers
    marked = f"{begin}\n{text}{end}\n"
    before = path.read_text() if path.exists() else "# Benchmarks\n\n"
    if begin in before:
        head, rest = before.split(begin, 1)
        after = rest.split(end, 1)[1].lstrip("\n") if end in rest else ""
        marked = head + marked + ("\n" + after if after else "")
    else:
        marked = before.rstrip("\n") + "\n\n" + marked
    unfinished = path.with_suffix(".part")
    unfinished.write_text(marked)
    unfinished.replace(path)
