"""Evaluation and few-shot evaluation of models on datasets."""

import pathlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch

from vitkit.api.progress import show_progress
from vitkit.api.public import public
from vitkit.api.sources import find_run_dir, resolve_workers
from vitkit.core.errors import ConfigError, WeightsError, check_positive
from vitkit.core.formatting import format_plural, shorten_list
from vitkit.core.signals import ProgressFunction, start_task
from vitkit.data.dataset import ImageSource
from vitkit.data.layouts.base import check_several_classes
from vitkit.data.layouts.files import list_left_out
from vitkit.data.layouts.registry import open_dataset
from vitkit.data.verify import BadFile, skip_unreadable
from vitkit.evaluation.evaluation import EvaluatedEngine, EvaluationResult, choose_split
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
from vitkit.training.data import apply_run_splits
from vitkit.typing import DataSource, ModelSource, Path
from vitkit.weights.artifact import write_artifact
from vitkit.weights.bundle import ModelBundle
from vitkit.weights.load import load_bundle


@public
def evaluate(  # noqa: PLR0913  the options of `vitkit eval`
    model: ModelSource,
    data: DataSource,
    *,
    split: str | None = None,
    layout: str | None = None,
    label_map: str | Path | None = None,
    real: Path | None = None,
    batch_size: int = 64,
    keep_probabilities: bool = False,
    precision: Literal["fp32", "bf16", "int8"] = "fp32",
    merge: int = 0,
    device: str | torch.device = "auto",
    workers: int | None = None,
    progress: bool | None = None,
) -> EvaluationResult:
    """Evaluate a model on labeled images.

    Images that a run was trained on are excluded if `data` is the dataset of that run.

    Args:
        model: A run, an artifact, a weight file of any format, a published name, or a model.
        data: A dataset in any layout, pairs of image and label, or such pairs by split.
        split: Split to evaluate on; by default test, else val, else all images.
        layout: Layout of the dataset, if it is not detected correctly.
        label_map: Name of a published label map, or a JSON or CSV file.
        real: The published `real.json`, for ReaL accuracy.
        batch_size: Images per batch.
        keep_probabilities: Keep the probability of every class for every image.
        precision: Arithmetic of the engine; other than fp32, the unmodified model is evaluated too.
        merge: Tokens to merge in each layer (ToMe).
        device: cpu, cuda, mps or auto.
        workers: Processes that decode images; two by default, one on a single core.
        progress: Whether to show progress; by default in notebooks, on terminals, and as lines elsewhere.

    >>> import numpy as np, vitkit
    >>> images = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3), dtype=np.uint8)
    >>> pairs = list(zip(images, ["0", "1", "2"] * 2))
    >>> model = vitkit.create("Ti/16", image_size=16, num_classes=4)  # has a zero head, so it predicts "0"
    >>> result = vitkit.evaluate(model, pairs, workers=0, progress=False)
    >>> result.count, round(result.accuracy, 3), result.split
    (6, 0.333, 'all')
    """
    check_positive("batch_size", batch_size)
    workers, target_device = resolve_workers(workers), resolve_device(device)
    bundle, dataset = load_bundle(model), open_dataset(data, layout=layout)
    run_dir = find_run_dir(model)
    name, source = choose_split(dataset if run_dir is None else apply_run_splits(run_dir, dataset), split)
    label_map, real = (None if path is None else str(path) for path in (label_map, real))
    prepared = prepare(Protocol(label_map=label_map, real=real), source, bundle=bundle, path=dataset.path)
    warnings = ["these are training images; the model may have seen them"] if name == "train" else []
    warnings += list_left_out(dataset.left_out)
    warnings += _label_map_warnings(prepared)
    with show_progress(progress) as report:
        selected = None
        if precision != "fp32" or merge:
            selected = _select_engine(bundle, precision=precision, merge=merge, device=target_device, progress=report)
        channels = bundle.preprocessing.channels
        readable, bad = check_images(
            prepared.source, path=dataset.path, channels=channels, workers=workers, progress=report, warnings=warnings
        )
        engines = [None] if selected is None else [None, selected.engine]
        evaluate_engine = partial(
            evaluate_protocol,
            bundle,
            replace(prepared, source=readable),
            workers=workers,
            batch_size=batch_size,
            keep_probabilities=keep_probabilities,
            device=target_device,
            progress=start_task(report, "evaluating", len(readable) * len(engines)),
        )
        fp32, *others = [evaluate_engine(engine=engine) for engine in engines]
    result = replace(fp32, split=name, skipped=tuple(bad), warnings=tuple(warnings))
    if selected is None:
        return result
    engine = EvaluatedEngine(
        name=selected.engine.name, precision=precision, merge=merge, fallback_reason=selected.fallback_reason
    )
    return replace(others[0], split=name, skipped=result.skipped, warnings=result.warnings, engine=engine, fp32=result)


def _select_engine(
    bundle: ModelBundle, *, precision: Precision, merge: int, device: torch.device, progress: ProgressFunction
) -> SelectedEngine:
    module = bundle.build_model()
    if device.type == "cpu" and needs_native_build(module, precision=precision, merge=merge):
        progress("building the native engine", 0, 1)
    return select_engine(module, precision=precision, device=device, merge=merge)


def check_images(
    source: ImageSource, *, path: str, channels: int, workers: int, progress: ProgressFunction, warnings: list[str]
) -> tuple[ImageSource, list[BadFile]]:
    """Return the images that can be decoded and the files that cannot; a warning is added for each of these."""
    advance = start_task(progress, "checking images", len(source))
    return skip_unreadable(
        source, path=path, channels=channels, workers=workers, progress=advance, warn=warnings.append
    )


def _label_map_warnings(prepared: PreparedData) -> list[str]:
    label_map = prepared.label_map
    if label_map is None:
        return []
    warnings = list(label_map.warnings)
    if prepared.left_out:
        names = label_map.unmapped_classes
        images = format_plural(prepared.left_out, "image")
        warnings.append(f"left out {images} of classes that the model does not have: {shorten_list(names)}")
    return warnings


@public
def fewshot(  # noqa: PLR0913  the options of `vitkit fewshot`
    model: ModelSource,
    data: DataSource,
    *,
    shots: Sequence[int] = (1, 5, 10, 25),
    seeds: int = 3,
    method: Literal["ridge", "knn", "logistic", "all"] = "ridge",
    sweep_l2: bool = False,
    released_crop: bool = False,
    save: Path | None = None,
    device: str | torch.device = "auto",
    workers: int | None = None,
    progress: bool | None = None,
) -> FewShotResult:
    """Fit classifiers to the features of a few images of each class, and return their test accuracy.

    Args:
        model: A run, an artifact, a weight file of any format, a published name, or a model.
        data: A labeled dataset; without a test or val split, a fifth of each class is held out.
        shots: Training images of each class.
        seeds: Number of random draws.
        method: Classifier, or all of them.
        sweep_l2: Choose l2 of the ridge regression on held-out images instead of 2^10.
        released_crop: Preprocess as the paper's few-shot code.
        save: New directory for the model with a head fitted to the most shots.
        device: cpu, cuda, mps or auto.
        workers: Processes that decode images; two by default, one on a single core.
        progress: Whether to show progress; by default in notebooks, on terminals, and as lines elsewhere.

    >>> import numpy as np, vitkit
    >>> images = [np.full((16, 16), value, dtype=np.uint8) for value in (9, 40, 230, 255)]
    >>> train = list(zip(images, ["dark", "dark", "light", "light"]))
    >>> model = vitkit.create("Ti/16", image_size=16, num_classes=0)
    >>> result = vitkit.fewshot(model, {"train": train, "test": train}, shots=[1, 2], workers=0, progress=False)
    >>> result.shots[2].mean, result.method
    (1.0, 'ridge')
    """
    workers, target_device = resolve_workers(workers), resolve_device(device)
    check_positive("seeds", seeds)
    if not shots or min(shots) < 1:
        raise ConfigError("shots are numbers of images", expected="1 or more", got=list(shots))
    out = None if save is None else pathlib.Path(save)
    if out is not None and out.exists() and (out.is_file() or any(out.iterdir())):
        raise WeightsError(f"{out} already exists", hint="choose another directory to save to")
    bundle, dataset = load_bundle(model), check_several_classes(open_dataset(data))
    preprocessing = released_preprocessing(bundle.preprocessing) if released_crop else bundle.preprocessing
    warnings = list_left_out(dataset.left_out)
    splits = fewshot_splits(dataset)
    skipped: list[BadFile] = []
    with show_progress(progress) as report:

        def labeled_features(source: ImageSource) -> LabeledFeatures:
            channels, path = preprocessing.channels, dataset.path
            readable, bad = check_images(
                source, path=path, channels=channels, workers=workers, progress=report, warnings=warnings
            )
            skipped.extend(bad)
            advance = start_task(report, "computing features", len(readable))
            features = compute_features(
                bundle, readable, preprocessing=preprocessing, workers=workers, device=target_device, progress=advance
            )
            return LabeledFeatures.from_arrays(features, readable.labels)

        train, test = map(labeled_features, splits)
    labels = splits[0].classes
    methods: tuple[Method, ...] = METHODS if method == "all" else (method,)
    scores = {
        each: score_shots(
            train, test, num_classes=len(labels), shots=shots, seeds=range(seeds), method=each, sweep_l2=sweep_l2
        )
        for each in methods
    }
    if out is not None:
        head = fit_head(train, num_classes=len(labels), shots=max(shots))
        write_artifact(out, replace_head(bundle, head, labels=labels, preprocessing=preprocessing))
    return FewShotResult(
        model=bundle.name,
        labels=labels,
        methods=scores,
        train_images=len(train.targets),
        test_images=len(test.targets),
        skipped=tuple(skipped),
        model_path=out,
        warnings=tuple(warnings),
    )
