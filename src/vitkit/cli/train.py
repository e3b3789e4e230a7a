"""The command `vitkit train`."""

from pathlib import Path

import click

from vitkit.cli.running import print_result, training_session
from vitkit.core.environment import is_main_rank


@click.command("train")
@click.argument("data", metavar="DATA|RECIPE|FILE.toml")
@click.argument("settings", nargs=-1, metavar="[SETTING=VALUE]...")
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="Run directory; an interrupted run is resumed."
)
@click.option("--from", "init", metavar="WEIGHTS", help="Initial weights: a run, a weight file or a hub name.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(data: str, settings: tuple[str, ...], out: Path, init: str | None, as_json: bool) -> None:
    """Train a classifier on a folder of images, or run a recipe or a TOML file.

    Run the same command again to resume after an interruption. Start it with torchrun to use several devices.

    \b
    vitkit train photos/ --out runs/photos
    vitkit train digits --out runs/digits epochs=20
    vitkit train my.toml --out runs/mine data=photos/ optimizer.weight_decay=0.1
    torchrun --nproc-per-node 8 -m vitkit train imagenet-b16 --out runs/b16 data=imagenet/

    \b
    Common settings: model=B/16  epochs=20  lr=3e-4  image_size=224  (all: vitkit recipes folder)
    """
    with training_session() as (progress, stop):
        from vitkit.recipes.train import train

        result = train(data, out=out, init=init, settings=settings, callback=progress, stop=stop)
    if is_main_rank():
        print_result(result, as_json=as_json)
