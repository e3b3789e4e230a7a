"""Evaluation, few-shot evaluation and comparison of models on datasets."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from vitkit.core.errors import ConfigError, DataError, WeightsError, summarize
from vitkit.core.formatting import format_plural
from vitkit.core.signals import ProgressFunction, ignore_progress, start_task
from vitkit.data.dataset import ImageSource, Subset
from vitkit.data.layouts.registry import open_dataset
from vitkit.data.verify import BadFile, skip_unreadable
from vitkit.evaluation.comparison import (
    ROUNDS,
    ComparedModel,
    ComparisonResult,
    compare_results,
    measure_speeds,
    model_family,
    scores_from_dict,
)
from vitkit.evaluation.evaluation import (
    EngineComparison,
    EvaluationResult,
    choose_split,
    class_indices,
)
from vitkit.evaluation.features import LabeledFeatures, compute_features
from vitkit.evaluation.fewshot import (
    METHODS,
    FewShotResult,
    Method,
    fewshot_splits,
    fit_head,
    released_preprocessing,
    replace_head,
    score_shots,
)
from vitkit.evaluation.protocols import PreparedData, Protocol, evaluate_protocol, prepare
from vitkit.inference.engine import Precision, resolve_device
from vitkit.inference.select import SelectedEngine, needs_native_build, select_engine
from vitkit.report.comparison import write_comparison
from vitkit.training.data import apply_run_splits
from vitkit.training.run_dir import RunDir
from vitkit.weights.artifact import write_artifact
from vitkit.weights.bundle import ModelBundle
from vitkit.weights.load import load_bundle
from vitkit.zoo.flops import count_forward_flops


def evaluate(  # noqa: PLR0913  the options of `vitkit eval`
    model: str | Path,
    data: str,
    *,
    split: str | None = None,
    layout: str | None = None,
    label_map: str | None = None,
    real: str | None = None,
    batch_size: int = 64,
    precision: Precision = "fp32",
    merge: int = 0,
    device: str = "auto",
    workers: int = 2,
    progress: ProgressFunction = ignore_progress,
) -> EvaluationResult:
    """Evaluate a model on labeled images.

    Images that a run was trained on are excluded if `data` is the dataset of that run.

    Args:
        model: A run, an artifact or a weight file of any format.
        data: A dataset in any layout.
        split: Split to evaluate on; by default test, else val, else all images.
        layout: Layout of the dataset, if it is not detected correctly.
        label_map: Name of a published label map, or a JSON or CSV file.
        real: The published `real.json`, for ReaL accuracy.
        batch_size: Images per batch.
        precision: Arithmetic of the engine; other than fp32, the unmodified model is evaluated too.
        merge: Tokens to merge in each layer (ToMe).
        device: cpu, cuda, mps or auto.
        workers: Processes that decode images.
        progress: Called as the evaluation proceeds.
    """
    bundle, target_device = load_bundle(model), resolve_device(device)
    dataset = apply_run_splits(RunDir(Path(model)), open_dataset(data, layout=layout))
    name, source = choose_split(dataset, split)
    prepared = prepare(Protocol(label_map=label_map, real=real), source, bundle=bundle, path=data)
    warnings = ["these are training images; the model may have seen them"] if name == "train" else []
    warnings += _label_map_warnings(prepared)
    selected = None
    if precision != "fp32" or merge:
        selected = _select_engine(bundle, precision=precision, merge=merge, device=target_device, progress=progress)
    check_images = _ImageCheck(data, workers=workers, progress=progress, warnings=warnings)
    readable = check_images(prepared.source, bundle.preprocessing.channels)
    engines = [None] if selected is None else [None, selected.engine]
    evaluate_engine = partial(
        evaluate_protocol,
        bundle,
        replace(prepared, source=readable),
        workers=workers,
        batch_size=batch_size,
        device=target_device,
        progress=start_task(progress, "evaluating", len(readable) * len(engines)),
    )
    results = [evaluate_engine(engine=engine) for engine in engines]
    comparison = None
    if selected is not None:
        comparison = EngineComparison(
            precision=precision,
            merge=merge,
            engine=selected.engine.name,
            fallback_reason=selected.fallback_reason,
            fp32=results[0],
        )
    skipped = tuple(check_images.bad)
    return replace(results[-1], split=name, skipped=skipped, comparison=comparison, warnings=tuple(warnings))


def _select_engine(
    bundle: ModelBundle, *, precision: Precision, merge: int, device: torch.device, progress: ProgressFunction
) -> SelectedEngine:
    module = bundle.build_model()
    if device.type == "cpu" and needs_native_build(module, precision=precision, merge=merge):
        progress("building the native engine", 0, 1)
    return select_engine(module, precision=precision, device=device, merge=merge)


class _ImageCheck:
    """Removal of unreadable images from the sources of a dataset; `bad` lists them."""

    def __init__(self, data: str, *, workers: int, progress: ProgressFunction, warnings: list[str]) -> None:
        self.data, self.workers, self.progress, self.warnings = data, workers, progress, warnings
        self.bad: list[BadFile] = []

    def __call__(self, source: ImageSource, channels: int) -> ImageSource:
        readable, bad = skip_unreadable(
            source,
            path=self.data,
            channels=channels,
            workers=self.workers,
            progress=start_task(self.progress, "checking images", len(source)),
            warn=self.warnings.append,
        )
        self.bad += bad
        return readable


def _label_map_warnings(prepared: PreparedData) -> list[str]:
    label_map = prepared.label_map
    if label_map is None:
        return []
    warnings = list(label_map.warnings)
    if prepared.left_out:
        names = label_map.unmapped_classes
        examples = ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")
        images = format_plural(prepared.left_out, "image")
        warnings.append(f"left out {images} of classes that the model does not have: {examples}")
    return warnings


def fewshot(  # noqa: PLR0913  the options of `vitkit fewshot`
    model: str | Path,
    data: str,
    *,
    shots: Sequence[int] = (1, 5, 10, 25),
    seeds: int = 3,
    method: Method | Literal["all"] = "ridge",
    sweep_l2: bool = False,
    released_crop: bool = False,
    save: Path | None = None,
    device: str = "auto",
    workers: int = 2,
    progress: ProgressFunction = ignore_progress,
) -> FewShotResult:
    """Fit classifiers to the features of a few images of each class, and return their test accuracy.

    Args:
        model: A run, an artifact or a weight file of any format.
        data: A labeled dataset; without a test or val split, a fifth of each class is held out.
        shots: Training images of each class.
        seeds: Number of random draws.
        method: Classifier, or all of them.
        sweep_l2: Choose l2 of the ridge regression on held-out images instead of 2^10.
        released_crop: Preprocess as the paper's few-shot code.
        save: New directory for the model with a head fitted to the most shots.
        device: cpu, cuda, mps or auto.
        workers: Processes that decode images.
        progress: Called as features are computed.
    """
    if save is not None and save.exists() and (save.is_file() or any(save.iterdir())):
        raise WeightsError(f"{save} already exists", hint="choose another directory to save to")
    bundle, target_device = load_bundle(model), resolve_device(device)
    preprocessing = released_preprocessing(bundle.preprocessing) if released_crop else bundle.preprocessing
    warnings: list[str] = []
    check_images = _ImageCheck(data, workers=workers, progress=progress, warnings=warnings)

    def labeled_features(source: ImageSource) -> LabeledFeatures:
        readable = check_images(source, preprocessing.channels)
        advance = start_task(progress, "computing features", len(readable))
        features = compute_features(
            bundle, readable, preprocessing=preprocessing, workers=workers, device=target_device, progress=advance
        )
        return LabeledFeatures.from_arrays(features, readable.labels)

    splits = fewshot_splits(open_dataset(data))
    train, test = map(labeled_features, splits)
    labels = splits[0].classes
    methods: tuple[Method, ...] = METHODS if method == "all" else (method,)
    scores = {
        each: score_shots(
            train, test, num_classes=len(labels), shots=shots, seeds=range(seeds), method=each, sweep_l2=sweep_l2
        )
        for each in methods
    }
    if save is not None:
        head = fit_head(train, num_classes=len(labels), shots=max(shots))
        write_artifact(save, replace_head(bundle, head, labels=labels, preprocessing=preprocessing))
    return FewShotResult(
        model=bundle.name,
        labels=labels,
        methods=scores,
        train_images=len(train.targets),
        test_images=len(test.targets),
        skipped=tuple(check_images.bad),
        model_path=save,
        warnings=tuple(warnings),
    )


# Comparison


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A model to compare, with the run directory that it may come from."""

    label: str
    bundle: ModelBundle
    run: RunDir


def compare(
    models: Sequence[str],
    *,
    data: str | None = None,
    split: str | None = None,
    layout: str | None = None,
    against: Literal["first", "best"] = "first",
    measure: bool = False,
    out: Path | None = None,
    device: str = "auto",
    workers: int = 2,
    progress: ProgressFunction = ignore_progress,
) -> ComparisonResult:
    """Compare models: accuracy, calibration, size, cost and speed.

    With `data`, all models are evaluated on the same images, none of which a run was trained on, and differences have
    intervals and tests. Without, each run has the scores of its own evaluation.

    Args:
        models: Runs, artifacts or weight files.
        data: A labeled dataset.
        split: Split of `data`.
        layout: Layout of `data`, if it is not detected correctly.
        against: Baseline of the differences.
        measure: Measure images per second of all models, side by side.
        out: Directory for report.html, charts, CSV and JSON.
        device: cpu, cuda, mps or auto.
        workers: Processes that decode images.
        progress: Called as the comparison proceeds.
    """
    repeated = next((model for index, model in enumerate(models) if model in models[:index]), None)
    if repeated is not None:
        raise ConfigError(f"{repeated} is listed twice", expected="different models")
    candidates = _load_candidates(models)
    target_device = resolve_device(device)
    warnings: list[str] = []
    results: list[EvaluationResult] | None = None
    description = None
    if data is not None:
        name, source, warnings = _common_images(candidates, data, split=split, layout=layout)
        check_images = _ImageCheck(data, workers=workers, progress=progress, warnings=warnings)
        for channels in sorted({each.bundle.preprocessing.channels for each in candidates}):
            source = check_images(source, channels)
        description = f"{len(source):,} images of {name}"
        advance = start_task(progress, "evaluating", len(source) * len(candidates))
        images = PreparedData(source=source)
        results = [
            evaluate_protocol(each.bundle, images, workers=workers, device=target_device, progress=advance)
            for each in candidates
        ]
    rows = _describe_models(candidates, results, evaluated_on=description)
    if results is None:
        warnings += comparison_warnings(candidates, rows)
    if measure:
        advance = start_task(progress, "measuring", (ROUNDS + 1) * len(candidates))
        modules = [each.bundle.build_model() for each in candidates]
        speeds = measure_speeds(modules, device=target_device, progress=advance)
        rows = [replace(row, speed=speed) for row, speed in zip(rows, speeds, strict=True)]
    labels = [each.label for each in candidates]
    comparison = ComparisonResult(
        models=tuple(rows),
        differences=compare_results(results, labels, against=against) if results else (),
        data=description,
        warnings=tuple(warnings),
        report_path=None if out is None else out / "report.html",
    )
    if out is not None:
        write_comparison(comparison, out)
    return comparison


def _load_candidates(models: Sequence[str]) -> list[_Candidate]:
    """Load the models, labeled by directory name, or by path if two directories have the same name."""
    names = [Path(model).resolve().name or model for model in models]
    candidates = []
    for model, name in zip(models, names, strict=True):
        run = RunDir(Path(model))
        if run.config.exists() and run.read_summary() is None:
            raise WeightsError(f"{model} is an unfinished run", hint="run its command again to resume it")
        label = model if names.count(name) > 1 else name
        candidates.append(_Candidate(label=label, bundle=load_bundle(model), run=run))
    return candidates


def _common_images(
    candidates: Sequence[_Candidate], data: str, *, split: str | None, layout: str | None
) -> tuple[str, ImageSource, list[str]]:
    """Return a description of the images that no run was trained on, the images, and warnings."""
    dataset = open_dataset(data, layout=layout)
    chosen = [choose_split(apply_run_splits(each.run, dataset), split) for each in candidates]
    warnings = [
        f"{each.label} may have been trained on these images"
        for each, (name, _) in zip(candidates, chosen, strict=True)
        if name == "train"
    ]
    names = [{source.name(index) for index in range(len(source))} for _, source in chosen]
    shared = set.intersection(*names)
    if not shared:
        raise DataError(
            f"{data}: there is no image that all models can be evaluated on",
            expected="images that no run was trained on",
            hint="choose another dataset, or a split with --split",
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
    return f"{split_name} of {Path(data).name or data}", source, warnings


def _describe_models(
    candidates: Sequence[_Candidate], results: Sequence[EvaluationResult] | None, *, evaluated_on: str | None
) -> list[ComparedModel]:
    models = []
    for index, candidate in enumerate(candidates):
        summary: dict[str, Any] = candidate.run.read_summary() or {}
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
                parameters=sum(parameter.numel() for parameter in candidate.bundle.build_model().parameters()),
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
        warnings.append(f"{', '.join(unscored)}: not evaluated by its run; --data DIR evaluates all models")
    images = {
        model.label: _own_fingerprint(candidate.run) or model.evaluated_on
        for candidate, model in zip(candidates, models, strict=True)
        if model.evaluated_on is not None
    }
    if len(set(images.values())) > 1:
        details = "; ".join(f"{model.label} on {model.evaluated_on}" for model in models if model.label in images)
        warnings.append(f"evaluated on different images, so the scores are not comparable: {details}")
    return warnings


def _own_fingerprint(run: RunDir) -> str | None:
    """Return the fingerprint of the images that a run was evaluated on."""
    split = (run.read_summary() or {}).get("evaluated_on")
    fingerprint: str | None = _stored_data(run).get("fingerprints", {}).get(split)
    return fingerprint


def _stored_data(run: RunDir) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(run.data.read_bytes())
    except (OSError, ValueError):
        return {}
    return data
