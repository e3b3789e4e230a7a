"""Campaigns for guarantees R6 and R7: non-finite values and broken images."""

import csv
import math
import random
from pathlib import Path

import numpy as np
from PIL import Image
from soak.faults import Finding, expect_same, run_undisturbed
from soak.victim import Launcher, Run


def not_finite(launcher: Launcher, folder: Path) -> Finding:
    """R6: train with an absurd learning rate; non-finite updates are skipped, counted and never saved."""
    from safetensors.numpy import load_file  # noqa: PLC0415

    finding = Finding("R6 nothing is finite any more")
    for rate in ("1e30", "1e38"):
        run = Run(folder / f"lr-{rate}", (f"schedule.lr={rate}", "schedule.warmup_steps=2", "optimizer.clip=none"))
        victim = launcher.start(run)
        code = victim.wait(600)
        errors = [line for line in victim.words().splitlines() if line.startswith("error:")]
        finding.expect(code == 1 and len(errors) == 1, f"lr {rate}: exit code {code}, {errors}")
        finding.expect("Traceback" not in victim.words(), f"lr {rate}: a traceback")
        finding.figures[f"skipped at lr {rate}"] = max((record.get("skipped", 0) for record in run.logged()), default=0)
        finding.expect(finding.figures[f"skipped at lr {rate}"], f"lr {rate}: no update was skipped")
        finding.expect(run.steps(), f"lr {rate}: no checkpoint is left")
        for step in run.steps():
            finding.expect(run.is_good(step), f"lr {rate}: the checkpoint of step {step} is damaged")
            tensors = load_file(run.checkpoints / f"step-{step:08d}" / "state.safetensors")
            finding.count("checkpoints checked")
            for name, tensor in tensors.items():
                finding.expect(np.isfinite(tensor).all(), f"lr {rate}: step {step}: {name} is not finite")
        for record in run.logged():
            lost = [key for key, value in record.items() if isinstance(value, float) and not math.isfinite(value)]
            finding.expect(not lost, f"lr {rate}: the log holds {lost} as numbers that JSON does not have")
    return finding


def broken_images(launcher: Launcher, folder: Path, *, count: int, seed: int = 0) -> Finding:
    """R7: break every tenth image; the run equals a run without them, and lists them."""
    finding = Finding("R7 broken images", {"images": count})
    broken = draw(folder, count=count, seed=seed)
    settings = ("data.max_bad_fraction=0.2",)
    sound = run_undisturbed(launcher, folder / "run-sound", *settings, f"data.path={folder / 'sound'}")
    mixed = run_undisturbed(launcher, folder / "run-mixed", *settings, f"data.path={folder / 'mixed'}")
    expect_same(finding, mixed, sound)
    with (mixed.path / "bad_files.csv").open(encoding="utf-8", newline="") as file:
        listed = {row[0]: row[1] for row in list(csv.reader(file))[1:]}
    finding.figures |= {"broken": len(broken), "listed": len(listed)}
    finding.figures["kinds of reasons"] = len(set(listed.values()))
    finding.expect(set(listed) == broken, f"not as listed: {sorted(set(listed) ^ broken)[:3]}")
    finding.expect(all(listed.values()), "a file is listed without a reason")
    return finding


def draw(folder: Path, *, count: int, seed: int) -> set[str]:
    """Write two folders of ten classes, one with every tenth image broken; return the names of those."""
    rng, numpy_rng = random.Random(seed), np.random.default_rng(seed)
    pixels = numpy_rng.integers(0, 256, (count, 8, 8), dtype=np.uint8)
    broken = set(rng.sample(range(count), count // 10))
    names = set()
    for index in range(count):
        name = f"class-{index % 10}/{index:05d}.png"
        for directory in ("mixed", "sound"):
            (folder / directory / name).parent.mkdir(parents=True, exist_ok=True)
        whole = folder / "mixed" / name
        Image.fromarray(pixels[index]).save(whole)
        if index in broken:
            names.add(name)
            whole.write_bytes(spoil(whole.read_bytes(), kind=rng.randrange(5), rng=rng))
        else:
            (folder / "sound" / name).hardlink_to(whole)
    return names


def spoil(content: bytes, *, kind: int, rng: random.Random) -> bytes:
    """Return a broken image: empty, truncated, a text, noise, or with an impossible size."""
    if kind == 4:  # PNG keeps its width in bytes 16 to 19
        return content[:16] + b"\x7f\xff\xff\xff" + content[20:]
    return (b"", content[: rng.randrange(8, 40)], b"not an image\n" * 9, rng.randbytes(90))[kind]
