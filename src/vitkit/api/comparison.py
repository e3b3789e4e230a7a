"""Comparison of models on the same images."""

import json
import os
import pathlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, Literal

import torch

from vitkit.api.evaluation import check_images
from vitkit.api.progress import show_progress
from vitkit.api.public import public
from vitkit.api.sources import find_run_dir, resolve_workers
from vitkit.core.errors import ConfigError, DataError, summarize
from vitkit.core.signals import start_task
from vitkit.data.dataset import Dataset, ImageSource, Subset
from vitkit.data.layouts.files import list_left_out
from vitkit.data.layouts.registry import open_dataset
from vitkit.evaluation.comparison import (
    ROUNDS,
    ComparedModel,
    ComparisonResult,
    compare_results,
    measure_speeds,
    model_family,
    scores_from_dict,
)
from vitkit.evaluation.evaluation import EvaluationResult, choose_split, class_indices
from vitkit.evaluation.protocols import PreparedData, evaluate_protocol
from vitkit.inference.engine import resolve_device
from vitkit.report.comparison import write_comparison
from vitkit.training.data import apply_run_splits
from vitkit.training.run_dir import RunDir
from vitkit.typing import DataSource, ModelSource, Path
from vitkit.weights.bundle import ModelBundle
from vitkit.weights.load import load_bundle, source_name, source_path
from vitkit.zoo.cost import count_parameters
from vitkit.zoo.flops import count_forward_flops


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A model to compare, with the run directory that it may come from."""

    label: str
    bundle: ModelBundle
    run: RunDir | None


@public
def compare(
    models: Sequence[ModelSource],
    *,
    data: DataSource | None = None,
    split: str | None = None,
    layout: str | None = None,
    against: Literal["first", "best"] = "first",
    measure: bool = False,
    out: Path | None = None,
    device: str | torch.device = "auto",
    workers: int | None = None,
    progress: bool | None = None,
) -> ComparisonResult:
    """Compare models: accuracy, calibration, size, cost and speed.

    With `data`, all models are evaluated on the same images, none of which a run was trained on, and differences have
    intervals and tests. Without, each run has the scores of its own evaluation.

    Args:
        models: Runs, artifacts, weight files, published names or models.
        data: A labeled dataset, pairs of image and label, or such pairs by split.
        split: Split of `data`.
        layout: Layout of `data`, if it is not detected correctly.
        against: Baseline of the differences.
        measure: Measure images per second of all models, side by side.
        out: Directory for report.html, charts, CSV and JSON.
        device: cpu, cuda, mps or auto.
        workers: Processes that decode images; two by default, one on a single core.
        progress: Whether to show progress; by default in notebooks, on terminals, and as lines elsewhere.

    >>> import numpy as np, vitkit
    >>> pairs = list(zip(np.zeros((4, 16, 16), dtype=np.uint8), "0101"))
    >>> models = [vitkit.create("Ti/16", image_size=16, num_classes=classes) for classes in (2, 3)]
    >>> result = vitkit.compare(models, data=pairs, workers=0, progress=False)
    >>> result.differences[0].p_value, result.differences[0].is_significant
    (1.0, False)
    """
    if data is None and (split is not None or layout is not None):
        raise ConfigError("split and layout are those of data", expected="data", hint="set data, or leave them out")
    workers, target_device = resolve_workers(workers), resolve_device(device)
    candidates = _load_candidates(models)
    warnings: list[str] = []
    results: list[EvaluationResult] | None = None
    description = None
    speeds: Sequence[float | None] = [None] * len(candidates)
    with show_progress(progress) as report:
        if data is not None:
            dataset = open_dataset(data, layout=layout)
            name, source, warnings = _common_images(candidates, dataset, split=split)
            for channels in sorted({each.bundle.preprocessing.channels for each in candidates}):
                source, _ = check_images(
                    source, path=dataset.path, channels=channels, workers=workers, progress=report, warnings=warnings
                )
            description = f"{len(source):,} images of {name}"
            advance = start_task(report, "evaluating", len(source) * len(candidates))
            images = PreparedData(source=source)
            results = [
                evaluate_protocol(each.bundle, images, workers=workers, device=target_device, progress=advance)
                for each in candidates
            ]
        if measure:
            advance = start_task(report, "measuring", (ROUNDS + 1) * len(candidates))
            modules = [each.bundle.build_model() for each in candidates]
            speeds = measure_speeds(modules, device=target_device, progress=advance)
    rows = _describe_models(candidates, results, evaluated_on=description)
    if results is None:
        warnings += comparison_warnings(candidates, rows)
    rows = [replace(row, speed=speed) for row, speed in zip(rows, speeds, strict=True)]
    labels = [each.label for each in candidates]
    comparison = ComparisonResult(
        models=tuple(rows),
        differences=compare_results(results, labels, against=against) if results else (),
        data=description,
        warnings=tuple(warnings),
        report_path=None if out is None else pathlib.Path(out) / "report.html",
    )
    if out is not None:
        write_comparison(comparison, pathlib.Path(out))
    return comparison


def _load_candidates(models: Sequence[ModelSource]) -> list[_Candidate]:
    """Load the models, labeled by directory or name; the same names are labeled by path or number."""
    if not models:
        raise ConfigError("there are no models to compare", expected="a list of models", got="none")
    keys = [os.fspath(model) if isinstance(model, PathLike) else model for model in models]
    names = [_name_model(model) for model in models]
    candidates = []
    for index, (model, name) in enumerate(zip(models, names, strict=True)):
        if any(key is keys[index] or key == keys[index] for key in keys[:index]):
            raise ConfigError(f"{source_name(model)} is listed twice", expected="different models")
        label = name
        if names.count(name) > 1:  # paths differ, names of models may not
            path = source_path(model)
            label = f"{name} ({names[: index + 1].count(name)})" if path is None else str(path)
        candidates.append(_Candidate(label=label, bundle=load_bundle(model), run=find_run_dir(model)))
    return candidates


def _name_model(model: ModelSource) -> str:
    path = source_path(model)
    return source_name(model) if path is None else path.resolve().name or str(path)


def _common_images(
    candidates: Sequence[_Candidate], dataset: Dataset, *, split: str | None
) -> tuple[str, ImageSource, list[str]]:
    """Return a description of the images that no run was trained on, the images, and warnings."""
    chosen = [
        choose_split(dataset if each.run is None else apply_run_splits(each.run, dataset), split) for each in candidates
    ]
    warnings = [
        f"{each.label} may have been trained on these images"
        for each, (name, _) in zip(candidates, chosen, strict=True)
        if name == "train"
    ]
    warnings += list_left_out(dataset.left_out)
    names = [{source.name(index) for index in range(len(source))} for _, source in chosen]
    shared = set.intersection(*names)
    if not shared:
        raise DataError(
            f"{dataset.path}: there is no image that all models can be evaluated on",
            expected="images that no run was trained on",
            hint="choose another dataset or split",
        )
    smallest = min(range(len(chosen)), key=lambda index: len(names[index]))
    split_name, source = chosen[smallest]
    if any(len(each) != len(shared) for each in names):
        warnings.append(f"the runs held out different images: only the {len(shared):,} in common are used")
        source = Subset(source, [index for index in range(len(source)) if source.name(index) in shared])
    for each in candidates:
        try:
            class_indices(each.bundle, source)
        except DataError as error:
            raise DataError(f"{each.label}: {summarize(error)}", hint=error.hint) from error
    return f"{split_name} of {pathlib.Path(dataset.path).name or dataset.path}", source, warnings


def _describe_models(
    candidates: Sequence[_Candidate], results: Sequence[EvaluationResult] | None, *, evaluated_on: str | None
) -> list[ComparedModel]:
    models = []
    for index, candidate in enumerate(candidates):
        summary: dict[str, Any] = _read_summary(candidate.run)
        stored, compute = summary.get("result"), summary.get("compute") or {}
        scores, images = None, None
        if results is not None:
            scores, images = scores_from_dict(results[index].to_dict()), evaluated_on
        elif stored:
            layout = _stored_data(candidate.run).get("layout", "images")
            scores = scores_from_dict(stored)
            images = f"{scores.count} images of {summary.get('evaluated_on')} ({layout})"
        config = candidate.bundle.config
        models.append(
            ComparedModel(
                label=candidate.label,
                model=candidate.bundle.name,
                family=model_family(config),
                parameters=count_parameters(config),
                gflops=sum(count_forward_flops(config).values()) / 1e9,
                scores=scores,
                evaluated_on=images,
                exaflops=compute.get("exaflops"),
                seconds=compute.get("seconds"),
                training_speed=compute.get("images_per_second"),
            )
        )
    return models


def comparison_warnings(candidates: Sequence[_Candidate], models: Sequence[ComparedModel]) -> list[str]:
    """Return reasons why the scores of the runs' own evaluations may not be comparable."""
    warnings = []
    unscored = [model.label for model in models if model.scores is None]
    if unscored:
        warnings.append(f"{', '.join(unscored)}: not evaluated by its run; set data to evaluate all models")
    images = {
        model.label: _own_fingerprint(candidate.run) or model.evaluated_on
        for candidate, model in zip(candidates, models, strict=True)
        if model.evaluated_on is not None
    }
    if len(set(images.values())) > 1:
        details = "; ".join(f"{model.label} on {model.evaluated_on}" for model in models if model.label in images)
        warnings.append(f"evaluated on different images, so the scores are not comparable: {details}")
    return warnings


def _read_summary(run: RunDir | None) -> dict[str, Any]:
    return (run.read_summary() if run else None) or {}


def _own_fingerprint(run: RunDir | None) -> str | None:
    """Return the fingerprint of the images that a run was evaluated on."""
    split = _read_summary(run).get("evaluated_on")
    return _stored_data(run).get("fingerprints", {}).get(split)


def _stored_data(run: RunDir | None) -> Any:
    if run is not None:
        with suppress(OSError, ValueError):
            return json.loads(run.data.read_bytes())
    return {}
