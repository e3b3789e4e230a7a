"""End of a run: save and evaluate the model, measure the compute, and write the report and the summary."""

import math
import platform
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from PIL import Image

from vitkit.core import metrics_log
from vitkit.core.config import to_toml
from vitkit.core.files import atomic_write, write_json, write_text
from vitkit.core.formatting import format_clock
from vitkit.core.metrics_log import MetricsRecord
from vitkit.core.result import to_json
from vitkit.core.shapes import Tensor
from vitkit.data.dataset import ImageSource, count_labels
from vitkit.data.decode import decode
from vitkit.evaluation.evaluation import EvaluationResult
from vitkit.evaluation.metrics import Calibration, ClassMetrics, Confusion
from vitkit.evaluation.protocols import PreparedData, evaluate_protocol
from vitkit.inference.engine import TRAINING_DTYPES
from vitkit.objectives.config import get_builder
from vitkit.report.charts import Panel, Series
from vitkit.report.html import thumbnail
from vitkit.report.run import ComparisonRow, MistakeExample, ReportData, RunReport, render_run_report
from vitkit.training.budget import advise
from vitkit.training.config import RunConfig
from vitkit.training.data import RunData
from vitkit.training.distributed import Ranks
from vitkit.training.fit import tf32_products
from vitkit.training.run_dir import RunContext, RunDir
from vitkit.weights import artifact as artifact_io
from vitkit.weights.bundle import ModelBundle
from vitkit.weights.pretraining import PretrainingWrapper, write_pretraining
from vitkit.zoo.cost import EXA, TRAINING_FACTOR

IMAGE_ARRAYS = ("targets", "predictions", "confidences", "target_probabilities")
NUM_MISTAKES = 24
"""Number of misclassified images in the report."""
POOR_TOP1 = 0.7
"""Accuracy below which pretrained weights are suggested."""


@dataclass(frozen=True, kw_only=True)
class ComputeStats:
    """Compute of a run. FLOPs are 2 × multiply-adds; `utilization` is the fraction of the measured peak.

    The peak is that of matrix products in the precision of the run. Should the run have been faster, `utilization` is
    None.

    `seconds` is the time of the training steps, without evaluation, saving and pauses.
    """

    parameters: int
    images_seen: int
    flops_per_image: int
    exaflops: float
    seconds: float | None
    images_per_second: float | None
    data_wait: float | None
    flops_per_second: float | None
    peak_flops_per_second: float
    precision: str
    utilization: float | None
    device: str
    ranks: int
    threads: int


@dataclass(frozen=True)
class SplitEvaluation:
    """Evaluation of the final model on a split."""

    split: str
    source: ImageSource
    result: EvaluationResult


def finalize_run(
    context: RunContext,
    bundle: ModelBundle,
    data: RunData,
    *,
    wrapper: Mapping[str, Tensor],
    heartbeat: Callable[[], None],
) -> dict[str, object]:
    """Save the model, evaluate it, and write the report and the summary; the summary last, as it marks the end.

    `wrapper` holds the weights of the pre-training wrapper of a self-supervised run, which is not evaluated.
    """
    config, run_dir, ranks, callback = context.config, context.run_dir, context.ranks, context.callback
    builder, metrics = get_builder(config.objective), metrics_log.read_metrics(run_dir.metrics)
    validation = final_evaluation(config, metrics)
    if context.is_trial:
        artifact_io.write_artifact(run_dir.path, bundle)
        trial: dict[str, object] = {"validation": to_json(validation)}
        write_json(run_dir.summary, trial)
        return trial
    bundle, winner = keep_best(context, bundle, validation)
    artifact_io.write_artifact(run_dir.path, bundle)
    if (settings := builder.pretraining_config()) is not None:
        write_pretraining(run_dir.path, PretrainingWrapper(settings=settings, state=dict(wrapper)))
    evaluation = None
    if config.objective.needs_labels and data.evaluation_split is not None:
        split, source = data.evaluation_split
        callback.on_task("evaluating the model", len(source))

        def on_progress(images: int) -> None:
            callback.on_progress(images)
            heartbeat()

        images = PreparedData(source=source)
        result = evaluate_protocol(bundle, images, workers=context.workers, device=ranks.device, progress=on_progress)
        evaluation = SplitEvaluation(split, source, result)
    compute = measure_compute(
        parameters=sum(tensor.numel() for tensor in bundle.state.values()),
        images_seen=max((int(str(record["step"])) for record in metrics), default=0) * config.schedule.batch_size,
        forward_flops=builder.forward_flops(bundle.config),
        speed=metrics_log.read_metrics(run_dir.speed),
        peak=measure_peak_flops(config, ranks),
        precision=config.parallel.precision,
        ranks=ranks,
    )
    for other in config.report.compare_with:
        if RunDir(Path(other)).read_summary() is None:
            callback.on_warning(f"report.compare_with: {other} is not a finished run")
    selection = describe_selection(context, data, evaluation, winner=winner, final=validation)
    suggestion = suggest_pretrained(config, evaluation.result.top1 if evaluation else None, tried=selection)
    report = render_report(
        context,
        bundle,
        data,
        metrics=metrics,
        evaluation=evaluation,
        compute=compute,
        selection=selection,
        suggestion=suggestion,
    )
    write_text(run_dir.report, report)
    summary: dict[str, object] = {
        "model": bundle.name,
        "objective": config.objective.name,
        "classes": len(bundle.labels),
        "images": {"train": len(data.train)} | ({evaluation.split: len(evaluation.source)} if evaluation else {}),
        "bad_files": data.bad,
        "evaluated_on": evaluation.split if evaluation else None,
        "result": summarize_result(evaluation.result) if evaluation else None,
        "validation": to_json(validation),
        "compute": asdict(compute),
    } | {key: value for key, value in (("selection", selection), ("suggestion", suggestion)) if value}
    if evaluation:
        write_arrays(run_dir, evaluation.result)
    write_json(run_dir.summary, summary)
    return summary


def keep_best(context: RunContext, bundle: ModelBundle, final: Mapping[str, object] | None) -> tuple[ModelBundle, str]:
    """Return the final model, or the best one before it if that has a better score on held-out images."""
    if context.selection is None or final is None:
        return bundle, "final run"
    best, score = context.selection.best, (float(str(final["val_top1"])), -float(str(final["val_loss"])))
    if score >= best.score:
        return bundle, "final run"
    message = f"kept {best.name}: {best.top1:.1%} of held-out images, the final run {score[0]:.1%}"
    context.callback.on_message(message)
    return artifact_io.read_artifact(context.selection.path), best.name


def describe_selection(
    context: RunContext,
    data: RunData,
    evaluation: SplitEvaluation | None,
    *,
    winner: str,
    final: Mapping[str, object] | None,
) -> dict[str, object]:
    """Return what was tried, what was kept, and what would help most; empty without a time budget."""
    selection = context.selection
    if selection is None:
        return {}
    counts = dict(zip(data.classes, count_labels(data.train), strict=True))
    result = evaluation.result if evaluation else None
    recalls = {each.name: each.recall for each in result.per_class if each.recall is not None} if result else {}
    top1 = result.top1 if result else selection.best.top1
    final_top1 = float(str(final["val_top1"])) if final else 0.0
    return {
        "minutes": selection.minutes,
        "kept": winner,
        "tried": [asdict(record) for record in selection.records],
        "advice": advise(selection, counts=counts, recalls=recalls, top1=top1, final_top1=final_top1),
    }


def summarize_result(result: EvaluationResult) -> dict[str, object]:
    """Return an evaluation as JSON values without the confusion matrix, which `write_arrays` writes."""
    return {name: value for name, value in result.to_dict().items() if name != "confusion"}


def write_arrays(run_dir: RunDir, result: EvaluationResult) -> None:
    """Write the pairs of classes and the arrays by image of an evaluation, which the summary does not have."""
    images = {name: getattr(result, name) for name in IMAGE_ARRAYS}
    for path, arrays in ((run_dir.confusion, vars(result.confusion)), (run_dir.predictions, images)):
        with atomic_write(path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)


def read_result(run_dir: RunDir, *, labels: tuple[str, ...]) -> EvaluationResult | None:
    """Return the evaluation of a finished run; None if there was none."""
    stored: Any = (run_dir.read_summary() or {}).get("result")
    if stored is None:
        return None
    with np.load(run_dir.predictions, allow_pickle=False) as file:
        arrays = {name: file[name] for name in IMAGE_ARRAYS}
    with np.load(run_dir.confusion, allow_pickle=False) as file:
        confusion = Confusion(**file)
    bins = {
        key: np.array([np.nan if each[key] is None else each[key] for each in stored["calibration"]])
        for key in ("count", "confidence", "accuracy")
    }
    return EvaluationResult(
        labels=labels,
        **{key: stored[key] for key in ("count", "top1", "top5", "ece", "nll")},
        intervals={name: (low, high) for name, (low, high) in stored["intervals"].items()},
        per_class=[ClassMetrics(**each) for each in stored["per_class"]],
        confusion=confusion,
        calibration=Calibration(error=stored["ece"], **bins),
        **arrays,
    )


def render_report(
    context: RunContext,
    bundle: ModelBundle,
    data: RunData,
    *,
    metrics: list[MetricsRecord],
    evaluation: SplitEvaluation | None,
    compute: ComputeStats,
    selection: Mapping[str, Any],
    suggestion: str | None,
) -> str:
    """Render the HTML report."""
    config, run_dir, needs_labels = context.config, context.run_dir, context.config.objective.needs_labels
    speed = chart_series(metrics_log.read_metrics(run_dir.speed), {"all": "images_per_second"})
    return render_run_report(
        RunReport(
            title=run_dir.path.resolve().name,
            model=bundle.name,
            parameters=compute.parameters,
            data=ReportData(
                layout=data.layout,
                source=Path(data.path).name or data.path,
                classes=data.classes,
                counts={name: len(source) for name, source in data.splits.items()},
            ),
            config=to_toml(config),
            curves=chart_panels(metrics, needs_labels=needs_labels),
            evaluations={evaluation.split: evaluation.result} if evaluation else {},
            not_evaluated=explain_missing_result(config, data, final_evaluation(config, metrics)),
            reconstructions=run_dir.reconstructions.read_bytes() if run_dir.reconstructions.exists() else None,
            mistakes=mistake_images(evaluation, channels=config.data.channels) if evaluation else (),
            comparison=comparison_rows(config, run_dir, evaluation.result) if evaluation else (),
            trials=trial_rows(selection),
            notes=tuple(f"What would help: {line}" for line in selection.get("advice", ())),
            compute=compute_rows(compute),
            speed=(Panel(title="Images per second", series=speed),),
            environment=environment_rows(),
            bad_files=data.bad,
            next_steps=next_steps(run_dir, needs_labels=needs_labels, suggestion=suggestion),
        )
    )


def final_evaluation(config: RunConfig, metrics: Sequence[MetricsRecord]) -> dict[str, object] | None:
    """Return the metrics on held-out images of the weights that a run ends with, from its log.

    With early stopping these are the weights of the best evaluation, else those of the last.
    """
    records = [record for record in metrics if "val_loss" in record]
    if not records:
        return None
    stops_early = config.evaluation.patience is not None
    final = max(records, key=metrics_log.validation_score) if stops_early else records[-1]
    return {key: value for key, value in final.items() if key.startswith("val_")}


def explain_missing_result(config: RunConfig, data: RunData, validation: Mapping[str, object] | None) -> str:
    """Return the text that the report shows if the model was not evaluated."""
    if config.objective.needs_labels:
        return "There were no images to validate or test on: accuracy was not measured."
    text = "The model was trained without labels and returns features: fine-tune it to classify images."
    if validation is None or data.val is None:
        return text
    return f"{text} Its loss on {len(data.val):,} validation images is {float(str(validation['val_loss'])):.3f}."


def comparison_rows(config: RunConfig, run_dir: RunDir, result: EvaluationResult) -> tuple[ComparisonRow, ...]:
    """Return this run and those of report.compare_with as rows of a table."""
    if not config.report.compare_with:
        return ()
    rows = []
    for other in map(Path, config.report.compare_with):
        other_result = (RunDir(other).read_summary() or {}).get("result")
        if isinstance(other_result, Mapping):
            low, high = other_result["intervals"]["top1"]
            rows.append(ComparisonRow(label=other.resolve().name, top1=other_result["top1"], interval=(low, high)))
    name = run_dir.path.resolve().name
    return (*rows, ComparisonRow(label=f"{name} (this run)", top1=result.top1, interval=result.intervals["top1"]))


def chart_series(records: list[MetricsRecord], keys: Mapping[str, str]) -> tuple[Series, ...]:
    """Return one line per key of a log that has values, by the name it has in the chart."""
    lines = []
    for name, key in keys.items():
        points = [(record["step"], record[key]) for record in records if key in record]
        if points:
            steps, values = zip(*points, strict=True)
            lines.append(Series(name=name, steps=steps, values=values))
    return tuple(lines)


def chart_panels(metrics: list[MetricsRecord], *, needs_labels: bool = True) -> tuple[Panel, ...]:
    """Return the charts of a run; without labels there is an accuracy only if patches have classes."""
    title, key = ("Accuracy", "top1") if needs_labels else ("Patch accuracy", "patch_accuracy")
    accuracy = chart_series(metrics, {"train": key, "val": f"val_{key}"})
    norm = chart_series(metrics, {"norm": "gradient_norm"})
    return (
        Panel(title="Loss", series=chart_series(metrics, {"train": "loss", "val": "val_loss"}), smooth=True),
        *([Panel(title=title, series=accuracy, percent=True, smooth=True)] if needs_labels or accuracy else []),
        Panel(title="Learning rate", series=chart_series(metrics, {"rate": "lr"})),
        Panel(title="Gradient norm", series=norm, scale="log", smooth=True),
    )


def mistake_images(evaluation: SplitEvaluation, *, channels: int) -> tuple[MistakeExample, ...]:
    """Return the wrong predictions with the highest confidence, with thumbnails."""
    result, mistakes = evaluation.result, []
    for mistake in result.mistakes(NUM_MISTAKES):
        picture = decode(evaluation.source.read(mistake.index), channels=channels)
        mistakes.append(
            MistakeExample(
                picture=thumbnail(picture) if isinstance(picture, Image.Image) else None,
                file=evaluation.source.name(mistake.index),
                target=result.labels[mistake.target],
                predicted=result.labels[mistake.predicted],
                probability=mistake.probability,
                target_probability=mistake.target_probability,
            )
        )
    return tuple(mistakes)


def trial_rows(selection: Mapping[str, Any]) -> tuple[ComparisonRow, ...]:
    """Return the probes and trials of a time budget as rows of a table."""
    rows = []
    for each in selection.get("tried", ()):
        name = f"{each['name']} (kept)" if each["name"] == selection["kept"] else each["name"]
        columns = {"loss": f"{each['loss']:.3f}", "steps": f"{each['steps']:,}", "seconds": f"{each['seconds']:.0f}"}
        rows.append(ComparisonRow(label=name, top1=each["top1"], columns=columns))
    return tuple(rows)


def compute_rows(compute: ComputeStats) -> tuple[tuple[str, str], ...]:
    """Return the compute statistics as rows of a table."""
    rows = [
        ("Training FLOPs per image", f"{compute.flops_per_image / 1e9:.3g} GFLOPs"),
        ("Images seen", f"{compute.images_seen:,}"),
        ("Total FLOPs", f"{compute.exaflops:.3g} exaFLOPs"),
    ]
    if compute.seconds and compute.images_per_second and compute.flops_per_second:
        rows += [
            ("Training time", format_clock(compute.seconds)),
            ("Images per second", f"{compute.images_per_second:,.0f}"),
            ("FLOPs per second", f"{compute.flops_per_second / 1e9:,.0f} GFLOP/s"),
        ]
    if compute.utilization is not None:
        rows += [
            ("Utilization", f"{compute.utilization:.0%} of the peak"),
            (
                f"Peak, {compute.precision} matrix products",
                f"{compute.peak_flops_per_second / 1e9:,.0f} GFLOP/s measured",
            ),
        ]
    if compute.data_wait is not None:
        rows.append(("Time spent waiting for images", f"{compute.data_wait:.1%}"))
    rows.append(("Machine", f"{compute.ranks} × {compute.device}, {compute.threads} threads each"))
    return tuple(rows)


def environment_rows() -> tuple[tuple[str, str], ...]:
    """Return versions and platform as rows of a table."""
    return (
        ("vitkit", version("vitkit")),
        ("torch", torch.__version__),
        ("Python", platform.python_version()),
        ("System", f"{platform.system()} {platform.machine()}"),
    )


def suggest_pretrained(config: RunConfig, top1: float | None, *, tried: Mapping[str, Any]) -> str | None:
    """Return a command that starts from pretrained weights if a model from scratch is poor and none were tried."""
    has_probe = any(not each["steps"] for each in tried.get("tried", ()))
    if top1 is None or top1 >= POOR_TOP1 or config.model.init is not None or has_probe:
        return None
    return f"vitkit train {shlex.quote(config.data.path)} --from auto --out NEW"


def next_steps(run_dir: RunDir, *, needs_labels: bool, suggestion: str | None = None) -> tuple[tuple[str, str], ...]:
    """Return commands that use the model, or make a better one."""
    run = shlex.quote(str(run_dir.path))
    if not needs_labels:
        return (
            ("Fine-tune it on labeled images", f"vitkit finetune {run} LABELED-FOLDER --out NEW"),
            ("Evaluate its features", f"vitkit fewshot {run} LABELED-FOLDER"),
        )
    better = [("Start from pretrained weights, which need fewer images", suggestion)] if suggestion else []
    return (
        *better,
        ("Evaluate it on other images", f"vitkit eval {run} OTHER-FOLDER"),
        ("Fine-tune it on other classes", f"vitkit finetune {run} OTHER-FOLDER --out NEW"),
    )


def measure_compute(
    *,
    parameters: int,
    images_seen: int,
    forward_flops: int,
    speed: Sequence[MetricsRecord],
    peak: float,
    precision: str,
    ranks: Ranks,
) -> ComputeStats:
    """Summarize the compute of a run from its speed log, the FLOPs of one image and the peak of a rank."""
    flops = TRAINING_FACTOR * forward_flops
    rates = [value for record in speed if isinstance(value := record.get("images_per_second"), float)]
    waits = [value for record in speed if isinstance(value := record.get("data_wait"), float)]
    rate = median(rates) if rates else None
    peak *= ranks.world_size
    utilization = rate * flops / peak if rate else None
    return ComputeStats(
        parameters=parameters,
        images_seen=images_seen,
        flops_per_image=flops,
        exaflops=flops * images_seen / EXA,
        seconds=images_seen * mean(1 / rate for rate in rates) if rates else None,
        images_per_second=rate,
        data_wait=mean(waits) if waits else None,
        flops_per_second=rate * flops if rate else None,
        peak_flops_per_second=peak,
        precision=precision,
        utilization=utilization if utilization is not None and utilization <= 1 else None,
        device=str(ranks.device),
        ranks=ranks.world_size,
        threads=torch.get_num_threads(),
    )


def measure_peak_flops(config: RunConfig, ranks: Ranks) -> float:
    """Measure the peak rate of matrix products on the device of this rank, in the precision of the run or in fp32."""
    is_cpu = ranks.device.type == "cpu"
    half = TRAINING_DTYPES[config.parallel.precision]
    dtypes = (torch.float32, *([half] if half and not (is_cpu and half == torch.float16) else []))
    with tf32_products(config, ranks):
        return max(time_products(ranks.device, dtype=dtype, side=1024 if is_cpu else 8192) for dtype in dtypes)


@torch.no_grad()
def time_products(
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    side: int = 1024,
    repeats: int = 5,
    wall_clock: Callable[[], float] = time.perf_counter,
    cpu_clock: Callable[[], float] = time.process_time,
) -> float:
    """Return the best rate of products of square matrices, in FLOPs per second.

    On a CPU, only the time counts in which the threads computed. The rate is therefore a bound on a busy machine, too.
    """
    left, right = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    best = math.inf
    for _ in range(repeats):
        wall, cpu = wall_clock(), cpu_clock()
        (left @ right)[0, 0].item()
        seconds, busy = wall_clock() - wall, (cpu_clock() - cpu) / torch.get_num_threads()
        best = min(best, busy if device.type == "cpu" and 0 < busy < seconds else seconds)
    return 2 * side**3 / best
