"""Campaigns that check the guarantees of docs/reliability.md on small runs and servers.

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

if __name__ == "__main__":  # as a script: the directory of this file would hide the package
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from soak import architectures, attacks, damage, disks, faults, images, ranks, restarts, serving, studies
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
    "R1-ddp-3": lambda launcher, folder, full: faults.kills(
        launcher, folder, count=20 if full else 1, ranks=3, mode="ddp"
    ),
    "R1-ddp-4": lambda launcher, folder, full: faults.kills(
        launcher, folder, count=20 if full else 1, ranks=4, mode="ddp"
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
    "R5-full": lambda launcher, folder, full: disks.full_disk(launcher, folder, count=40 if full else 3),
    "R6": lambda launcher, folder, full: images.not_finite(launcher, folder),
    "R7": lambda launcher, folder, full: images.broken_images(launcher, folder, count=10_000 if full else 200),
    "R8-killed": lambda launcher, folder, full: ranks.killed_rank(folder, count=5 if full else 1),
    "R8-fsdp2": lambda launcher, folder, full: ranks.killed_rank(folder, count=5 if full else 1, mode="fsdp2"),
    "R8-ddp-3": lambda launcher, folder, full: ranks.killed_rank(folder, count=3 if full else 1, processes=3),
    "R8-ddp-4": lambda launcher, folder, full: ranks.killed_rank(folder, count=3 if full else 1, processes=4),
    "R8-nodes": lambda launcher, folder, full: ranks.killed_rank(folder, count=5 if full else 1, nodes=2),
    "R8-stopped": lambda launcher, folder, full: ranks.stopped_rank(folder, count=3 if full else 1),
    "R9": lambda launcher, folder, full: studies.kills(folder, count=10 if full else 2),
    "W1": lambda launcher, folder, full: architectures.compare_wide(folder),
}

SERVING: dict[str, ServingCampaign] = {
    "S1": serving.measure_http_cost,
    "S2": serving.run_at_70_percent,
    "S3": serving.overload,
    "S4": serving.slow_clients,
    **attacks.CAMPAIGNS,
    "S8": restarts.kill_worker,
    "S9-stops": restarts.stop_servers_under_load,
    "S9-rolling": restarts.restart_rolling,
    "S9-shared": restarts.restart_on_shared_socket,
}


def main() -> int:
    """Run the selected campaigns; return 1 if a guarantee is violated."""
    names = [*CAMPAIGNS, *SERVING]
    parser = argparse.ArgumentParser(description="Inject faults into small runs and servers and check the guarantees.")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--small", action="store_true", help="a few faults of each kind (the default)")
    size.add_argument("--medium", action="store_true", help="S*: a few minutes each; R*: as --small")
    size.add_argument("--full", action="store_true", help="the counts of docs/reliability.md")
    parser.add_argument("--only", default="", help="comma-separated names or prefixes of: " + ", ".join(names))
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--keep", type=Path, help="directory that keeps the runs")
    arguments = parser.parse_args()
    prefixes = [name for name in arguments.only.split(",") if name] or [""]
    selected = [name for name in names if any(name.startswith(each) for each in prefixes)]
    if not selected:
        parser.error(f"no campaign matches {arguments.only}")
    rows = []
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        launcher = None
        for name in selected:
            folder = (arguments.keep or Path(temporary)).resolve() / name
            start = time.monotonic()
            if name in SERVING:
                result = attempt(functools.partial(SERVING[name], folder, chosen_size(arguments)))
            else:
                launcher = launcher or stack.enter_context(Launcher())
                result = attempt(functools.partial(CAMPAIGNS[name], launcher, folder, arguments.full))
            rows.append(row(name, result, seconds=time.monotonic() - start))
            print_row(rows[-1])
    if arguments.out:
        environment = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": platform.platform()}
        arguments.out.write_text(json.dumps(environment | {"results": rows}, indent=2) + "\n", encoding="utf-8")
    return int(not all(each["passed"] for each in rows))


def chosen_size(arguments: argparse.Namespace) -> Size:
    return "full" if arguments.full else "medium" if arguments.medium else "small"


def attempt(campaign: Callable[[], Finding]) -> Finding:
    """Run a campaign; an exception counts as a violation."""
    try:
        return campaign()
    except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
        return Finding("the campaign failed", failures=[f"{type(error).__name__}: {error}"])


def row(name: str, result: Finding, *, seconds: float) -> dict[str, object]:
    return {
        "name": name,
        "guarantee": result.guarantee,
        "passed": result.passed,
        "figures": {key: value if is_json(value) else str(value) for key, value in result.figures.items()},
        "failures": result.failures,
        "seconds": round(seconds),
    }


def is_json(value: object) -> bool:
    """Return whether JSON can represent the value: infinity and NaN cannot be."""
    return not isinstance(value, float) or math.isfinite(value)


def print_row(row: dict) -> None:
    figures = ", ".join(f"{name} {value}" for name, value in row["figures"].items() if not isinstance(value, list))
    sys.stdout.write(
        f"{row['name']:<10} {'passed' if row['passed'] else 'FAILED':<6} {row['seconds']:>5} s  {figures}\n"
    )
    for failure in row["failures"]:
        sys.stdout.write(f"{'':<11}{failure}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
