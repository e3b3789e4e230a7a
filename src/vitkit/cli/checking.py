"""A source of images goes in, those that can be read come out; the others are named."""

from typing import TYPE_CHECKING

from vitkit.cli.output import safe_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from vitkit.data.source import Source
    from vitkit.data.verify import BadFile

SHOWN = 20
"""Of a long list of bad files a person sees so many."""


def sound_images(
    source: "Source", *, place: str, channels: int, workers: int, progress: "Progress"
) -> "tuple[Source, list[BadFile]]":
    """The images that can be read, and the files that cannot; not one that can is an error."""
    from vitkit.core.errors import DataError
    from vitkit.data.verify import verify, without

    if source.is_sound:
        return source, []
    task = progress.add_task("checking images", total=len(source))
    bad = verify(
        source, channels=channels, workers=workers, progress=lambda done: progress.update(task, completed=done)
    )
    if len(bad) == len(source):
        raise DataError(
            f"{place}: not one of {len(bad)} images can be read; {bad[0].name}: {bad[0].reason}",
            hint=f"vitkit data check {place} lists them all",
        )
    warn_of(bad, progress.console)
    return without(source, bad), bad


def warn_of(bad: "list[BadFile]", talk: "Console") -> None:
    """Name the images that are left out, or the first of very many."""
    for file in bad[:SHOWN]:
        talk.print(safe_text(f"warning: left out {file.name}: {file.reason}"), style="yellow", soft_wrap=True)
    if len(bad) > SHOWN:
        more = f"warning: left out {len(bad) - SHOWN:,} more; --json names all of them"
        talk.print(more, style="yellow", soft_wrap=True)
