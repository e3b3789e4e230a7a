"""`vitkit fewshot`: few-shot evaluation of the features of a model."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitkit.cli.console import print_result, print_table, stderr_console
from vitkit.cli.options import COUNTS, device_option, json_option, workers_option
from vitkit.core.formatting import safe_text

if TYPE_CHECKING:
    from vitkit.evaluation.fewshot import FewShotResult


@click.command("fewshot")
@click.argument("model")
@click.argument("data")
@click.option("--shots", type=COUNTS, default="1,5,10,25", show_default=True, help="Images of each class.")
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Number of random draws.")
@click.option(
    "--method",
    type=click.Choice(["ridge", "knn", "logistic", "all"]),
    default="ridge",
    show_default=True,
    help="Classifier.",
)
@click.option("--sweep-l2", is_flag=True, help="Choose l2 on held-out images instead of 2^10.")
@click.option("--released-crop", is_flag=True, help="Resize to 8/7 of the size and crop, as the paper's few-shot code.")
@click.option("--save", type=click.Path(path_type=Path), help="Write the model with a head from the most shots.")
@workers_option
@device_option
@json_option
def command(shots: list[int], as_json: bool, **options: Any) -> None:
    """Evaluate how well the features of MODEL classify DATA with a few labeled images of each class.

    The paper's linear probe: ridge regression on frozen features, in closed form, averaged over random draws. Features
    are cached. Shots are drawn from the training split and tested on the test split; without such splits, a fifth of
    each class is held out.

    \b
    vitkit fewshot runs/photos new-photos --shots 1,5
    vitkit fewshot runs/photos new-photos --shots 5 --save few
    """
    from vitkit.api.evaluation import fewshot

    result = fewshot(shots=sorted(shots), **options)
    console = stderr_console()
    images = f"{result.train_images:,} training and {result.test_images:,} test images"
    console.print(safe_text(f"{result.model}: {len(result.labels)} classes, {images}"), soft_wrap=True)
    if result.model_path is not None:
        console.print(safe_text(f"wrote {result.model_path}: a model of {len(result.labels)} classes"), soft_wrap=True)
    print_result(result, print_scores, as_json=as_json)


def print_scores(result: "FewShotResult") -> None:
    """Print the mean and the standard deviation over draws of each method, by number of shots."""
    scores = list(result.methods.values())
    rows = [(str(n), *(f"{each[n].mean:.1%} ± {each[n].std:.1%}" for each in scores)) for n in result.shots]
    print_table(("shots", *result.methods), rows, left=())
