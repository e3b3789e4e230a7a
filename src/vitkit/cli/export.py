"""`vitkit export`: a trained model goes in, a file or folder that another library loads comes out."""

from pathlib import Path

import click

from vitkit.cli.output import print_json, safe_text, talk_console

LOADERS = {
    "huggingface": 'transformers.ViTForImageClassification.from_pretrained("{out}")',
    "huggingface-deit": 'transformers.AutoModel.from_pretrained("{out}")',
    "huggingface-mae": 'transformers.AutoModel.from_pretrained("{out}")',
    "huggingface-dinov2": 'transformers.AutoModel.from_pretrained("{out}")',
    "timm": 'timm.create_model("local-dir:{out}", pretrained=True)',
}


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--to", default="huggingface", show_default=True, help="The format: huggingface, timm, google, …")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(run: Path, out: Path, to: str, as_json: bool) -> None:
    """Write the model in RUN for another library into OUT, with its labels and preprocessing where the format has them.

    RUN is the folder of a run, or weights of any format. For Hugging Face and timm, OUT is a new folder; for the
    others a new file.

    \b
    vitkit export runs/photos photos-hf --to huggingface
    vitkit export runs/photos photos.npz --to google
    """
    from vitkit.checkpoints.convert import write_as
    from vitkit.checkpoints.foreign import format_called, load
    from vitkit.core.errors import ConfigError

    wanted = format_called(to)
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ConfigError(f"{out}: there is something already", hint="name a new place, or remove what is there")
    artefact = load(run)
    write_as(wanted, out, artefact)
    files = sorted(path.name for path in out.iterdir()) if out.is_dir() else [out.name]
    if as_json:
        names = {"format": wanted.name, "out": str(out), "model": artefact.name}
        print_json(names | {"classes": artefact.config.classes, "files": files})
        return
    talk = talk_console()
    talk.print(safe_text(f"{artefact.name} as {wanted.title}: {', '.join(files)}"), soft_wrap=True)
    click.echo(safe_text(LOADERS.get(wanted.name, "{out}").format(out=out)))
