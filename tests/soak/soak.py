"""The names of promises go in; their faults are done to small runs and servers, and a table of what was seen comes out.

python tests/soak/soak.py [--small | --medium | --full] [--only R1,S3,…] [--out FILE.json] [--keep FOLDER]
"""

import argparse
import contextlib
import functools
import json
import math
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

if __name__ == "__main__":  # run as a script, this file's folder comes first, and would hide the package of its name
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from soak import attacks, damage, disks, faults, images, ranks, replaced, serving
from soak.faults import Finding
from soak.sizes import Size
from soak.victim import Launcher

Campaign = Callable[[Launcher, Path, bool], Finding]
ServingCampaign = Callable[[Path, Size], Finding]

CAMPAIGNS: dict[str, Campaign] = {
    "R1": lambda launcher, folder, full: faults.kills(launcher, folder, count=200 if full else 6),
    "R1-ddp": lambda launcher, folder, full: faults.kills(
        launcher, folder, count=50 if full else 3, ranks=2, mode="ddp"
    ),
    "R1-fsdp2": lambda launcher, folder, full: faults.kills(
        launcher, folder, count=50 if full else 3, ranks=2, mode="fsdp2"
    ),
    "R2": lambda launcher, folder, full: faults.stops(launcher, folder, count=100 if full else 8),
    "R3-workers": lambda launcher, folder, full: faults.other_workers(launcher, folder),
    "R3-ranks": lambda launcher, folder, full: faults.other_ranks(
        launcher, folder, ways=((1, 2), (2, 4), (4, 1), (2, 1)) if full else ((1, 2),)
    ),
    "R4": lambda launcher, folder, full: damage.damaged_checkpoints(
        launcher, folder, count=300 if full else 15, runs=18 if full else 2
    ),
    "R5-error": lambda launcher, folder, full: disks.broken_sync(launcher, folder, count=40 if full else 4),
    "R5-full": lambda launcher, folder, full: disks.full_disk(folder, count=40 if full else 3),
    "R6": lambda launcher, folder, full: images.not_finite(launcher, folder),
    "R7": lambda launcher, folder, full: images.broken_images(launcher, folder, count=10_000 if full else 200),
    "R8-killed": lambda launcher, folder, full: ranks.killed_rank(folder, count=5 if full else 1),
    "R8-fsdp2": lambda launcher, folder, full: ranks.killed_rank(folder, count=5 if full else 1, mode="fsdp2"),
    "R8-nodes": lambda launcher, folder, full: ranks.killed_rank(folder, count=5 if full else 1, nodes=2),
    "R8-stopped": lambda launcher, folder, full: ranks.stopped_rank(folder, count=3 if full else 1),
}

SERVING: dict[str, ServingCampaign] = {
    "S1": serving.cost_of_http,
    "S2": serving.seventy_percent,
    "S3": serving.overload,
    "S4": serving.slow_clients,
    **attacks.CAMPAIGNS,
    "S8": replaced.hit_worker,
    "S9-stops": replaced.stopped_under_load,
    "S9-rolling": replaced.rolling_restarts,
    "S9-shared": replaced.shared_restarts,
}


def main() -> int:
    """Run the campaigns that were asked for; 1 where a promise was not kept."""
    names = [*CAMPAIGNS, *SERVING]
    parser = argparse.ArgumentParser(description="Do to small runs and servers what happens to large ones.")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--small", action="store_true", help="a few faults of each kind (the default)")
    size.add_argument("--medium", action="store_true", help="S*: a few minutes each; R*: as --small")
    size.add_argument("--full", action="store_true", help="as many as docs/reliability.md promises")
    parser.add_argument("--only", default="", help="names or beginnings of names, by commas: " + ", ".join(names))
    parser.add_argument("--out", type=Path, help="write what was seen to this file as JSON")
    parser.add_argument("--keep", type=Path, help="leave the runs in this folder")
    arguments = parser.parse_args()
    wanted = [name for name in arguments.only.split(",") if name] or [""]
    chosen = [name for name in names if any(name.startswith(each) for each in wanted)]
    if not chosen:
        parser.error(f"no campaign begins with {arguments.only}")
    seen = []
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        launcher = None
        for name in chosen:
            folder = (arguments.keep or Path(temporary)).resolve() / name
            start = time.monotonic()
            if name in SERVING:
                finding = attempt(functools.partial(SERVING[name], folder, chosen_size(arguments)))
            else:
                launcher = launcher or stack.enter_context(Launcher())
                finding = attempt(functools.partial(CAMPAIGNS[name], launcher, folder, arguments.full))
            seen.append(row(name, finding, seconds=time.monotonic() - start))
            print_row(seen[-1])
    if arguments.out:
        about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": platform.platform()}
        arguments.out.write_text(json.dumps(about | {"seen": seen}, indent=2) + "\n", encoding="utf-8")
    return int(not all(each["kept"] for each in seen))


def chosen_size(arguments: argparse.Namespace) -> Size:
    return "full" if arguments.full else "medium" if arguments.medium else "small"


def attempt(campaign: Callable[[], Finding]) -> Finding:
    """What a campaign finds; one that breaks off has found that the promise is not kept."""
    try:
        return campaign()
    except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
        return Finding("the campaign broke off", failures=[f"{type(error).__name__}: {error}"])


def row(name: str, finding: Finding, *, seconds: float) -> dict[str, object]:
    return {
        "name": name,
        "promise": finding.promise,
        "kept": finding.kept,
        "figures": {key: value if is_json(value) else str(value) for key, value in finding.figures.items()},
        "failures": finding.failures,
        "seconds": round(seconds),
    }


def is_json(value: object) -> bool:
    """Whether JSON has it: not what never happened, or has no mean."""
    return not isinstance(value, float) or math.isfinite(value)


def print_row(seen: dict) -> None:
    figures = ", ".join(f"{name} {value}" for name, value in seen["figures"].items() if not isinstance(value, list))
    sys.stdout.write(
        f"{seen['name']:<10} {'kept' if seen['kept'] else 'BROKEN':<6} {seen['seconds']:>5} s  {figures}\n"
    )
    for failure in seen["failures"]:
        sys.stdout.write(f"{'':<11}{failure}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
