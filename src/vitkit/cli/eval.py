"""`vitkit eval`: evaluation of a model on labeled images."""

from typing import TYPE_CHECKING, Any

import click

from vitkit.cli.console import print_result, print_sections, stderr_console
from vitkit.cli.options import device_option, json_option, merge_option, precision_option, workers_option
from vitkit.core.formatting import safe_text

if TYPE_CHECKING:
    from vitkit.evaluation.evaluation import EvaluationResult


@click.command("eval")
@click.argument("model")
@click.argument("data")
@click.option("--split", help="Split to evaluate on.  [default: test, else val, else all images]")
@click.option("--layout", help="Layout of the dataset, if it is not detected correctly.")
@click.option(
    "--label-map",
    metavar="NAME|FILE",
    help="Map the classes of the data to those of the model: imagenet, imagenet-v2, imagenet-a, imagenet-r, "
    "imagenet-sketch, objectnet, or a JSON or CSV file.",
)
@click.option("--real", metavar="FILE", help="Also compute ReaL accuracy, with the published real.json.")
@workers_option
@click.option("--batch-size", type=click.IntRange(min=1), default=64, show_default=True, help="Images per batch.")
@device_option
@precision_option
@merge_option
@json_option
def command(as_json: bool, **options: Any) -> None:
    """Evaluate MODEL on DATA: top-1, top-5, metrics per class, calibration, confusion.

    MODEL is a run, or weights of any origin. On the dataset that a run was trained on, only held-out images are used.
    Models of the ImageNet classes are evaluated on ImageNet-V2, -A, -R, -Sketch and ObjectNet with a label map. With
    --precision or --merge, the unmodified model is evaluated too and the difference is printed.

    \b
    vitkit eval runs/photos photos/
    vitkit eval runs/photos holidays/ --json
    vitkit eval runs/photos photos/ --precision int8
    vitkit eval ViT-B_16.npz imagenet --real real.json
    vitkit eval ViT-B_16.npz imagenet-a --label-map imagenet-a
    """
    from vitkit.api.evaluation import evaluate

    result = evaluate(**options)
    print_details(result)
    print_result(result, print_metrics, as_json=as_json)


def print_details(result: "EvaluationResult") -> None:
    """Print the label map and the engine to stderr."""
    console = stderr_console()
    if result.label_map is not None:
        logits = "only their logits" if result.label_map["logits"] == "mapped" else "all logits"
        mapped, unmapped = int(str(result.label_map["classes"])), len(list(result.label_map["left_out"]))  # type: ignore[call-overload]
        classes = f"{mapped:,} of {mapped + unmapped:,} classes"
        line = f"label map {result.label_map['name']}: {classes}, {logits} are used"
        console.print(safe_text(line), soft_wrap=True)
    if result.engine is not None:
        reason = f"; {result.engine.fallback_reason}" if result.engine.fallback_reason else ""
        console.print(safe_text(f"engine: {result.engine.name}{reason}"), soft_wrap=True)


def print_metrics(result: "EvaluationResult") -> None:
    """Print the metrics and the classes with the lowest recall."""
    low, high = result.intervals["top1"]
    worst = sorted((each for each in result.per_class if each.recall is not None), key=lambda each: each.recall or 0.0)
    sections = {
        f"{result.count:,} images ({result.split})": [
            ("top-1", f"{result.top1:.2%} (95 % interval {low:.1%}–{high:.1%})"),
            ("top-5", f"{result.top5:.2%}"),
            ("calibration", f"{result.ece:.3f} expected calibration error"),
            ("log-likelihood", f"{-result.nll:.3f} nats per image"),
        ],
        "Classes with the lowest recall": [
            (each.name, f"recall {each.recall or 0.0:.1%} of {each.count}, precision {each.precision or 0.0:.1%}")
            for each in worst[:5]
        ],
    }
    if result.real is not None:
        low, high = result.real.interval
        sections[f"ReaL labels, {result.real.count:,} images"] = [
            ("top-1", f"{result.real.top1:.2%} (95 % interval {low:.1%}–{high:.1%})"),
            ("skipped", f"{result.real.skipped:,} images without labels"),
        ]
    if result.fp32 is not None:
        fp32 = result.fp32
        sections["The unmodified model in fp32"] = [
            ("top-1", f"{fp32.top1:.2%} (this engine: {100 * (result.top1 - fp32.top1):+.2f} points)"),
            ("top-5", f"{fp32.top5:.2%} (this engine: {100 * (result.top5 - fp32.top5):+.2f} points)"),
        ]
    print_sections(sections)
