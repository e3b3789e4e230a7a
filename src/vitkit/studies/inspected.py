"""Studies of checkpoints: attention distance, filters and position embeddings of the runs of another study."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

import torch

from vitkit.core.errors import DataError
from vitkit.core.lock import lock_directory
from vitkit.core.signals import StopFlag
from vitkit.data.layouts.registry import open_dataset
from vitkit.data.loader import make_evaluation_loader
from vitkit.inspection.attention import NotApplicableError, attention_distance
from vitkit.inspection.features import filter_components, position_similarity
from vitkit.model.vit import ViT
from vitkit.report.figures import Chart, filter_chart, position_chart
from vitkit.studies.records import RunRecord, list_checkpoints
from vitkit.studies.runner import StudyResult, write_outputs
from vitkit.studies.study import RUNS, SEED, UPSTREAM, Study
from vitkit.studies.worker import limit_images
from vitkit.training.callbacks import Callback
from vitkit.weights.load import load_bundle

IMAGES = 128
"""Images of Figure 7."""
MAX_DRAWN = 8
"""Models whose filters and positions are drawn."""


def inspect_checkpoints(
    study: Study, *, out: Path, data: Mapping[str, str], callback: Callback, stop: StopFlag
) -> StudyResult:
    """Measure the attention of the checkpoints of another study, and write the report."""
    source = limit_images(next(iter(open_dataset(data[UPSTREAM]).splits.values())), IMAGES)
    table, inspected, drawings = list[dict[str, object]](), list[RunRecord](), dict[str, list[tuple[str, Chart]]]()
    records = list_checkpoints(study, data)
    for number, record in enumerate(records, start=1):
        stop.raise_if_requested()
        callback.on_message(f"checkpoint {number} of {len(records)}: {record.name}")
        bundle = load_bundle(str(record.path))
        model = bundle.build_model().eval()
        if not isinstance(model, ViT) or model.config.block.axial:
            continue
        inspected.append(record)
        with (
            torch.no_grad(),
            make_evaluation_loader(source, preprocessing=bundle.preprocessing, batch_size=32) as batches,
        ):
            normalize = bundle.preprocessing.normalize
            distances = attention_distance(model, (normalize(batch.pixels) for batch in batches))
        labels = dict(record.settings)
        row = {"run": record.name, SEED: int(labels.pop(SEED)), "model": ", ".join(labels.values())}
        row["family"] = "hybrid" if model.config.backbone else "ViT"
        table += [
            row | {"layer": layer, "head": head, "distance": distance}
            for layer, heads in enumerate(distances.tolist(), start=1)
            for head, distance in enumerate(heads, start=1)
        ]
        if row[SEED] == 0 and len(drawings) < MAX_DRAWN:
            drawings[str(row["model"])] = draw_parts(model)
    if not inspected:
        raise DataError(f"{data[RUNS]} has no Vision Transformers", hint="inspect a study of ViTs or hybrids")
    out.mkdir(parents=True, exist_ok=True)
    with lock_directory(out):
        result = StudyResult(study=study, quick=False, runs=tuple(inspected), rate=1.0)
        return write_outputs(result, table, out, drawings=drawings)


def draw_parts(model: ViT) -> list[tuple[str, Chart]]:
    """Draw the filters, and the positions if the model has learned any."""
    charts = [("Filters", filter_chart(filter_components(model)))]
    with contextlib.suppress(NotApplicableError):
        charts.append(("Positions", position_chart(position_similarity(model))))
    return charts
