"""Measured rows and the machine go in, the section of BENCHMARKS.md comes out."""

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
from peers import CONTENDERS, Contender
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
BUSY = 0.05
PACKAGES = ("torch", "timm", "transformers", "einops")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was measured on one row."""

    row: Row
    times: Times
    difference: float
    peaks: dict[Contender, Peak]

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file; seconds and megabytes."""
        best, median = self.times.best(), self.times.median()
        return self.row.as_dict() | {
            "rounds": self.times.rounds,
            "largest_logit_difference": self.difference,
            "ratio": {"best": ratio(best), "median": ratio(median)},
            "seconds": {name: {"best": best[name], "median": median[name]} for name in CONTENDERS},
            "peak_megabytes": {name: vars(peak) for name, peak in self.peaks.items()},
        }


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """Where, when and of what the measurements were taken."""

    processor: str
    instruction_sets: str
    cores: int
    threads: int
    memory_gigabytes: float
    date: str
    commit: str
    versions: dict[str, str]
    command: str
    others_share: float

    @property
    def is_busy(self) -> bool:
        """Whether others used so much of the machine that times mean little."""
        return self.others_share > BUSY

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return vars(self)


def look_around(*, command: str, others_share: float) -> Circumstances:
    """The machine and the code as they are now."""
    cpuinfo = Path("/proc/cpuinfo")
    facts = cpuinfo.read_text() if cpuinfo.exists() else ""
    name = re.search(r"model name\s*:\s*(.+)", facts)
    flags = set(facts.split())
    return Circumstances(
        processor=name[1] if name else platform.processor() or platform.machine(),
        instruction_sets=" ".join(found for found in INSTRUCTION_SETS if found in flags) or "unknown",
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory_gigabytes=round(psutil.virtual_memory().total / 1e9, 1),
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        commit=commit(),
        versions={"python": platform.python_version()} | {package: version(package) for package in PACKAGES},
        command=command,
        others_share=others_share,
    )


def commit() -> str:
    """The commit the code is at, with a + if the working tree differs from it (but for the report itself)."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", ":(top)", ":(top,exclude)BENCHMARKS.md")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if changed else "")


def section(results: Sequence[Result], around: Circumstances) -> str:
    """The section as Markdown."""
    return f"""## Forward and backward pass

{facts(around)}

{how(results)}
{table(results)}

{why()}
"""


def facts(around: Circumstances) -> str:
    """Where, when and of what, as a list; it warns where the machine was busy."""
    versions = ", ".join(f"{package} {number}" for package, number in around.versions.items())
    busy = ": the machine was busy, do not trust these numbers" if around.is_busy else ""
    return f"""- machine: {around.processor}, {around.cores} cores ({around.threads} threads used), \
{around.memory_gigabytes} GB, instruction sets {around.instruction_sets}
- taken on {around.date} at commit {around.commit}; {versions}
- command: `{around.command}`
- all other processes together used {around.others_share:.0%} of the cores during the run{busy}"""


def how(results: Sequence[Result]) -> str:
    """How the numbers come about."""
    differences = dict.fromkeys(("fp32", "bf16"), 0.0)
    for result in results:
        differences[result.row.precision] = max(differences[result.row.precision], result.difference)
    fewest, most = min(result.times.rounds for result in results), max(result.times.rounds for result in results)
    return f"""All contenders compute the same function: equal random weights, the same images of 224 pixels, the same
GELU. Before a row is timed their logits are compared; the largest difference was {differences["fp32"]:.1e} in fp32 and
{differences["bf16"]:.1e} in bf16. Everything is eager (no compile). Forward is `eval()` under `inference_mode`, in bf16
with weights and images in bf16; forward+backward is `train()` without dropout, with cross-entropy and all gradients, in
bf16 by autocast over fp32 weights.

In each round every contender runs once, in changing order; there were {fewest} to {most} rounds a row, more where the
result was within {CLOSE:.0%} of a draw. Times are **best (median)** in milliseconds. The ratio is the faster peer's
time over ours, of the best and of the median times: above 1, vitkit is faster. Peak memory is what running adds to
libraries and model, and in brackets the whole process, in MB, each measured in a fresh process. While times are taken
malloc keeps freed memory, for all contenders alike: by default page faults cost one or the other of them up to a fifth
of a forward pass at batch 8, by the luck of the heap.
"""


def table(results: Sequence[Result]) -> str:
    """One line a row."""
    times = " | ".join(f"{name} ms" for name in CONTENDERS)
    memory = " | ".join(f"{name} peak MB" for name in CONTENDERS)
    lines = [
        f"| model | pass | precision | batch | {times} | ratio to the faster peer | {memory} |",
        f"|---|---|---|{'--:|' * (2 + 2 * len(CONTENDERS))}",
    ]
    for result in results:
        row, best, median = result.row, result.times.best(), result.times.median()
        cells = [row.title, row.run, row.precision, str(row.batch)]
        cells += [f"{milliseconds(best[name])} ({milliseconds(median[name])})" for name in CONTENDERS]
        cells += [f"**{ratio(best):.2f}** ({ratio(median):.2f})"]
        cells += [f"{result.peaks[name].growth:.0f} ({result.peaks[name].total:.0f})" for name in CONTENDERS]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def milliseconds(seconds: float) -> str:
    """Three or more digits.

    >>> milliseconds(0.0123456), milliseconds(0.1234), milliseconds(2.0)
    ('12.3', '123', '2000')
    """
    return f"{1000 * seconds:.1f}" if seconds < 0.1 else f"{1000 * seconds:.0f}"


def why() -> str:
    """Where the difference comes from, and how far to trust it."""
    return """What makes the difference: the head reads the class token alone, so of the last block only that row is
computed, from keys and values of all tokens; that saves about 6 % of all operations, and is most of it. The rest is
small: the patch embedding is one matrix product over unfolded patches, a little faster than the convolution for one
image and a little slower for eight; queries, keys and values are one product (as in timm; transformers has three).

On noise: the cores may be shared with other machines and processes, so absolute times move by tens of percent from run
to run; the contenders of one row see the same weather, which is why only the ratio is meant to be compared, and why a
ratio between 0.98 and 1.02 should be read as a draw. bf16 on a processor without avx512_bf16 or AMX is emulated, and
slower than fp32 for everyone."""


def write_section(text: str, path: Path, *, markers: tuple[str, str] = (BEGIN, END)) -> None:
    """Put the section between its markers in a file, in place of the last one; the rest of the file stays."""
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
