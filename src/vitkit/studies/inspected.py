"""Studies of checkpoints: attention distance, filters and position embeddings of the runs of another study."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vitkit.core.errors import DataError
from vitkit.core.files import write_csv
from vitkit.core.lock import lock_directory
from vitkit.core.shapes import Float, Tensor
from vitkit.core.signals import StopFlag
from vitkit.data.dataset import ImageSource
from vitkit.data.layouts.registry import open_dataset
from vitkit.data.loader import make_evaluation_loader
from vitkit.inspection.attention import NotApplicableError, attention_distance
from vitkit.inspection.features import filter_components, position_similarity
from vitkit.model.vit import ViT
from vitkit.report.figures import Chart, filter_chart, position_chart, series_chart
from vitkit.studies.records import RunRecord, list_checkpoints
from vitkit.studies.runner import StudyResult, create_directory, write_outputs
from vitkit.studies.study import RUNS, SEED, UPSTREAM, Study
from vitkit.studies.worker import limit_images
from vitkit.training.callbacks import Callback
from vitkit.weights.bundle import ModelBundle
from vitkit.weights.load import load_bundle
from vitkit.weights.run_checkpoint import CHECKPOINTS, read_checkpoint

IMAGES = 128
"""Images of Figure 7."""
MAX_DRAWN, MIN_STEPS, MAX_STEPS = 8, 3, 6
"""Models whose filters, positions and training are drawn; checkpoints of one that are, at least and at most."""
HISTORY_FILE, HISTORY_COLUMNS = "distances.csv", ("run", SEED, "step", "layer", "distance")


def inspect_checkpoints(
    study: Study, *, out: Path, data: Mapping[str, str], callback: Callback, stop: StopFlag
) -> StudyResult:
    """Measure the attention of the checkpoints of another study, and write the report."""
    source = limit_images(next(iter(open_dataset(data[UPSTREAM]).splits.values())), IMAGES)
    table, inspected, drawings = list[dict[str, object]](), list[RunRecord](), dict[str, list[tuple[str, Chart]]]()
    history: list[dict[str, object]] = []
    records = list_checkpoints(study, data)
    for number, record in enumerate(records, start=1):
        stop.raise_if_requested()
        callback.on_message(f"run {number} of {len(records)}: {record.name}")
        bundle = load_bundle(str(record.path))
        model = bundle.build_model().eval()
        if not isinstance(model, ViT) or model.config.block.axial:
            continue
        inspected.append(record)
        labels = dict(record.settings)
        row = {"run": record.name, SEED: int(labels.pop(SEED)), "model": ", ".join(labels.values())}
        row["family"] = "hybrid" if model.config.backbone else "ViT"
        table += [
            row | {"layer": layer, "head": head, "distance": distance}
            for layer, heads in enumerate(measure_distances(bundle, source).tolist(), start=1)
            for head, distance in enumerate(heads, start=1)
        ]
        if row[SEED] == 0 and len(drawings) < MAX_DRAWN:
            distances = {
                step: measure_distances(read_checkpoint(record.path, file), source).mean(dim=1).tolist()
                for step, file in choose_checkpoints(record.path).items()
            }
            drawings[str(row["model"])] = draw_parts(model) + draw_training(distances)
            history += [
                {"run": record.name, SEED: row[SEED], "step": step, "layer": layer, "distance": distance}
                for step, layers in distances.items()
                for layer, distance in enumerate(layers, start=1)
            ]
    if not inspected:
        raise DataError(f"{data[RUNS]} has no Vision Transformers", hint="inspect a study of ViTs or hybrids")
    create_directory(out)
    with lock_directory(out):
        quick, steps = read_length(Path(data[RUNS]))
        result = StudyResult(study=study, quick=quick, runs=tuple(inspected), rate=1.0, steps=steps)
        write_csv(out / HISTORY_FILE, history, HISTORY_COLUMNS)
        return write_outputs(result, table, out, drawings=drawings)


def read_length(directory: Path) -> tuple[bool, tuple[int, int] | None]:
    """Return whether a study is quick, and the fewest and the most steps of its runs."""
    try:
        result: Any = json.loads((directory / "result.json").read_bytes())
        low, high = result["steps"]
        return bool(result["quick"]), (int(low), int(high))
    except (OSError, ValueError, KeyError, TypeError):  # its report is not written yet
        return False, None


def measure_distances(bundle: ModelBundle, source: ImageSource) -> Float[Tensor, "layers A"]:
    """Return the mean attention distance of a model by layer and head."""
    model, preprocessing = bundle.build_model().eval(), bundle.preprocessing
    with torch.no_grad(), make_evaluation_loader(source, preprocessing=preprocessing, batch_size=32) as batches:
        return attention_distance(model, (preprocessing.normalize(batch.pixels) for batch in batches))


def choose_checkpoints(run: Path) -> dict[int, Path]:
    """Return checkpoints of a run by step, evenly spaced; none if it kept too few to show its training."""
    files = sorted((run / CHECKPOINTS).glob("step-*"))
    if len(files) < MIN_STEPS:
        return {}
    count = min(len(files), MAX_STEPS)
    chosen = [files[index * (len(files) - 1) // (count - 1)] for index in range(count)]
    return {int(file.name.removeprefix("step-")): file for file in chosen}


def draw_parts(model: ViT) -> list[tuple[str, Chart]]:
    """Draw the filters, and the positions if the model has learned any."""
    charts = [("Filters", filter_chart(filter_components(model)))]
    with contextlib.suppress(NotApplicableError):
        charts.append(("Positions", position_chart(position_similarity(model))))
    return charts


def draw_training(distances: Mapping[int, Sequence[float]]) -> list[tuple[str, Chart]]:
    """Draw the distance of each layer over the steps of the training, if there are any."""
    if not distances:
        return []
    lines = {f"layer {layer}": list(values) for layer, values in enumerate(zip(*distances.values(), strict=True), 1)}
    title = "Mean attention distance over training"
    chart = series_chart(
        lines, y_title="Mean attention distance (pixels)", title=title, ticks=[*map(str, distances)], x_title="Step"
    )
    return [(title, chart)]
