"""Time and memory of inspection, and a deletion test of attention maps.

python bench/inspection.py time                          attention distance beside the plain forward pass
python bench/inspection.py memory                        every section at 1024 pixels, each in its own process
python bench/inspection.py deletion ../shared/data       maps against random order on photos, with published weights
"""

import csv
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click
import torch

import vitkit
from vitkit.inspection import attention_distance, deletion_curve, relevance, rollout
from vitkit.report.inspection import make_section
from vitkit.report.inspection_context import InspectionContext
from vitkit.report.inspection_sections import SECTIONS

IMAGES, BATCH = 128, 8


@click.group()
def main() -> None:
    """Measure the time and memory of inspection, or test attention maps by deletion."""


@main.command("time")
@click.option("--rounds", default=3, show_default=True)
def time_(rounds: int) -> None:
    """Measure attention distance of B/16 over 128 images next to the forward pass."""
    model = vitkit.create("B/16").eval()
    batches = torch.randn(IMAGES, 3, 224, 224).split(BATCH)
    plain, distance = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        with torch.no_grad():
            for images in batches:
                model(images)
        plain.append(time.perf_counter() - start)
        start = time.perf_counter()
        attention_distance(model, batches)
        distance.append(time.perf_counter() - start)
    ratios = [slow / fast for slow, fast in zip(distance, plain, strict=True)]
    click.echo(f"B/16, {IMAGES} images of 224 pixels, {torch.get_num_threads()} threads, {rounds} rounds in turn")
    click.echo(f"forward   {min(plain):6.1f} s (best), {statistics.median(plain):6.1f} s (median)")
    click.echo(f"distance  {min(distance):6.1f} s (best), {statistics.median(distance):6.1f} s (median)")
    click.echo(f"ratio     {min(distance) / min(plain):6.2f} (best), {statistics.median(ratios):6.2f} (median)")


@main.command()
@click.option("--only", help="Measure one section in this process.")
def memory(only: str | None) -> None:
    """Measure the peak memory of each section for B/16 at 1024 pixels."""
    if only is None:
        for name in SECTIONS:
            subprocess.run([sys.executable, __file__, "memory", "--only", name], check=True)
        return
    folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path()
    path = folder / f"vitkit-b16-1024-{only}"
    vitkit.save(vitkit.create("B/16", image_size=1024).eval(), path)
    try:
        model = vitkit.load(path)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        photo = torch.randint(0, 256, (1024, 1024, 3), dtype=torch.uint8).numpy()
        section = make_section(only, InspectionContext(model=model, images=[photo], names=["noise"]))
        seconds, peak = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        note = f" ({section.missing})" if section.missing else ""
        click.echo(f"{only:12} {peak / 2**20:5.2f} GB at most, {before / 2**20:.2f} before; {seconds:5.1f} s{note}")
    finally:
        for file in path.iterdir():
            file.unlink()
        path.rmdir()


@main.command()
@click.argument("data", type=click.Path(path_type=Path, exists=True))
@click.option("--every", default=5, show_default=True, help="Use every n-th photo.")
@click.option("--steps", default=10, show_default=True)
def deletion(data: Path, every: int, steps: int) -> None:
    """Print the mean probability of the prediction as patches are removed, by rollout, relevance and at random."""
    with (data / "photos" / "labels.csv").open(encoding="utf-8") as file:
        files = [data / "photos" / row["file_name"] for row in csv.DictReader(file)][::every]
    for weights in sorted((data / "weights").iterdir()):
        model, generator = vitkit.load(weights), torch.Generator().manual_seed(0)
        curves: dict[str, list[torch.Tensor]] = {"rollout": [], "relevance": [], "random": []}
        for first in range(0, len(files), BATCH):
            images = torch.cat([model.preprocess(file) for file in files[first : first + BATCH]])
            maps = {
                "rollout": rollout(model, images),
                "relevance": relevance(model, images),
                "random": torch.rand(len(images), *model.config.grid, generator=generator),
            }
            for name, some in maps.items():
                curves[name].append(deletion_curve(model, images, some, steps=steps))
        click.echo(f"{weights.name}, {len(files)} photos, probability of the prediction")
        click.echo("removed      " + " ".join(f"{step / steps:5.0%}" for step in range(steps)) + "   mean  sooner")
        chance = torch.cat(curves["random"]).mean(dim=1)
        for name, parts in curves.items():
            curve = torch.cat(parts)
            sooner = float((curve.mean(dim=1) < chance).float().mean())
            row = " ".join(f"{value:5.1%}" for value in curve.mean(dim=0).tolist())
            click.echo(f"{name:12} {row}  {curve.mean():5.1%}  {sooner:5.1%}")


if __name__ == "__main__":
    main()
