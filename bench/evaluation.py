"""CPU time, files and peak memory of an evaluation and of its results.

python bench/evaluation.py                                   # 100,000 images, 1,000 classes: at most 100 MB
python bench/evaluation.py --classes 10000 --results-only    # writing results: at most 5 MB, 2 s and 300 MB

The model is random projections of tiny images, so that what is measured is the evaluation itself. With --check, the
metrics are compared with those of all logits at once, which needs several times the memory of the logits.
"""

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil
import torch
from memory import MEGA, peak_rss, reset_peak
from torch import nn

from vitkit.data.dataset import ImageSource, StoredImage
from vitkit.data.preprocessing import Preprocessing
from vitkit.evaluation.evaluation import EvaluationResult, ImageMetrics, evaluate_logits
from vitkit.evaluation.logits import compute_logits, iterate_logits
from vitkit.report.run import ReportData, RunReport, render_run_report
from vitkit.training.finalize import summarize_result, write_arrays
from vitkit.training.run_dir import RunDir
from vitkit.weights.artifact import write_json

SIDE = 4
PREPROCESSING = Preprocessing(image_size=SIDE)
METRICS = ("top1", "top5", "ece", "nll")


class RandomImages(ImageSource):
    """Tiny random images, computed from their index."""

    layout = "random"
    always_readable = True

    def __init__(self, images: int, classes: int) -> None:
        self.classes = tuple(f"class {label}" for label in range(classes))
        self.labels = np.random.default_rng(0).integers(0, classes, images)

    def name(self, index: int) -> str:
        """Return the index."""
        return str(index)

    def read(self, index: int) -> StoredImage:
        """Return the pixels of an image."""
        return np.random.default_rng(index).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)


def main() -> None:
    """Print the measurements as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--classes", type=int, default=1_000)
    parser.add_argument("--results-only", action="store_true", help="predict at random instead of by a model")
    parser.add_argument("--check", action="store_true", help="compare with the metrics of all logits at once")
    options = parser.parse_args()
    source = RandomImages(options.images, options.classes)
    measured: dict[str, object] = {"images": options.images, "classes": options.classes}
    if options.results_only:
        result = random_result(source)
    else:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE**2, options.classes))
        result, measured["evaluation"] = evaluate(model, source)
        if options.check:
            whole = evaluate_logits(*compute_logits(model, source, preprocessing=PREPROCESSING), labels=source.classes)
            differences = [abs(getattr(result, name) - getattr(whole, name)) for name in METRICS]
            measured["largest_difference"] = max(differences)
    print(json.dumps(measured | {"results": write_results(result)}, indent=2))


def evaluate(model: nn.Module, source: ImageSource) -> tuple[EvaluationResult, dict[str, float]]:
    """Evaluate a model and return the result with CPU seconds and megabytes above those before."""
    for batch in iterate_logits(model, source, preprocessing=PREPROCESSING):
        ImageMetrics(source.classes, count=len(batch.targets)).add(*batch)  # what is allocated once is part of the base
        break
    before, start = _begin()
    images = ImageMetrics(source.classes, count=len(source))
    for batch in iterate_logits(model, source, preprocessing=PREPROCESSING):
        images.add(*batch)
    return images.result(), _measure(before, start)


def random_result(source: ImageSource) -> EvaluationResult:
    """Return the result of predictions at random, without logits of all classes."""
    images, rng = ImageMetrics(source.classes, count=len(source)), torch.Generator().manual_seed(0)
    targets = torch.from_numpy(source.labels)
    columns = {
        "targets": targets,
        "predictions": torch.randint(len(source.classes), targets.shape, generator=rng),
        "ranks": torch.randint(10, targets.shape, generator=rng),
        "confidences": torch.rand(targets.shape, generator=rng, dtype=torch.float64),
        "nll": torch.rand(targets.shape, generator=rng, dtype=torch.float64),
    }
    images._columns, images._added = columns, len(source)
    return images.result()


def write_results(result: EvaluationResult) -> dict[str, object]:
    """Write summary.json, confusion.npz, predictions.npz and report.html, and measure all of it."""
    with TemporaryDirectory() as folder:
        run_dir = RunDir(Path(folder))
        before, start = _begin()
        write_arrays(run_dir, result)
        write_json(run_dir.summary, {"result": summarize_result(result)})
        run_dir.report.write_text(render_run_report(_report(result)), encoding="utf-8")
        measured: dict[str, object] = dict(_measure(before, start))
        json_bytes = len(json.dumps(result.to_dict()))
        files = {file.name: file.stat().st_size / MEGA for file in sorted(Path(folder).iterdir())}
        return measured | {"megabytes_of_files": files | {"eval --json": json_bytes / MEGA}}


def _report(result: EvaluationResult) -> RunReport:
    data = ReportData(layout="random", source="random", classes=result.labels, counts={"test": result.count})
    return RunReport(title="run", model="linear", parameters=0, data=data, config="", evaluations={"test": result})


def _begin() -> tuple[int, float]:
    reset_peak()
    return psutil.Process().memory_info().rss, time.process_time()


def _measure(before: int, start: float) -> dict[str, float]:
    seconds = time.process_time() - start
    return {"cpu_seconds": round(seconds, 2), "peak_megabytes": round((peak_rss() - before) / MEGA, 1)}


if __name__ == "__main__":
    main()
