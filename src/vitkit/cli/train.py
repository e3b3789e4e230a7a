"""The command `vitkit train`."""

from typing import Any

import click

from vitkit.cli.running import from_option, out_option, print_run
from vitkit.core.config import parse_assignments


@click.command("train")
@click.argument("data", metavar="[DATA|RECIPE|FILE.toml]", required=False)
@click.argument("settings", nargs=-1, metavar="[SETTING=VALUE]...")
@out_option
@from_option
@click.option("--minutes", type=float, metavar="N", help="Time budget.  [default: 10, unless epochs or steps are set]")
@click.option("--recipe", metavar="NAME", help="Recipe or TOML file to run on DATA.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(data: str | None, settings: tuple[str, ...], recipe: str | None, as_json: bool, **options: Any) -> None:
    """Train the best classifier that the time allows on a folder of images, or run a recipe or a TOML file.

    Run the same command again to resume after an interruption. Start it with torchrun to use several devices.

    \b
    vitkit train photos/ --minutes 3
    vitkit train digits --out runs/digits epochs=20
    vitkit train my.toml --out runs/mine data=photos/ optimizer.weight_decay=0.1
    torchrun --nproc-per-node 8 -m vitkit train imagenet-b16 --out runs/b16 data=imagenet/

    \b
    Common settings: model=B/16  epochs=20  lr=3e-4  image_size=224  (all: vitkit recipes folder)
    """
    import vitkit

    if data is not None and "=" in data and recipe is not None:  # --recipe alone, with settings
        settings, data = (data, *settings), None
    if data is None and recipe is None:
        raise click.UsageError("missing argument 'DATA|RECIPE|FILE.toml'")
    run = vitkit.train(data, recipe=recipe, settings=parse_assignments(settings), **options)
    print_run(run, as_json=as_json)
