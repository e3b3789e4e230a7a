"""Weights that were written for another library go in, with the model that they are of; the proof of them comes out.

They are read back by vitkit and asked about images, and by the library that they are for, where it is installed, about
the drawn reference image.
"""

from importlib import metadata
from pathlib import Path

import torch

from vitkit.checkpoints import foreign
from vitkit.checkpoints.native import Artefact
from vitkit.checkpoints.verify import UNKNOWN, verify
from vitkit.core.errors import WeightsError
from vitkit.export.exporting import compared
from vitkit.export.images import ProofImages
from vitkit.export.program import Program
from vitkit.export.proof import check, judged


def proved_weights(
    to: str, place: Path, artefact: Artefact, *, title: str, images: ProofImages | None
) -> dict[str, object]:
    """The figures of weights that give the model's answers; such as do not are an error."""
    again = foreign.load_as_stored(place, format=None if to == "vitkit" else to)
    model, theirs = (judged(Program(each.model().float())) for each in (artefact, again))
    found, about = compared(theirs, artefact, model=model, images=images)
    check(found, title=title)
    library = in_its_library(to, place)
    against = library.get("against")
    words = f"read by vitkit, {found.in_words()}"
    words += f"; {against} answers within {library['largest_difference']:.1e}" if against else ""
    return {
        "format": to,
        "runtime": f"vitkit {metadata.version('vitkit')}",
        "against": f"the model before it was written, on torch {torch.__version__}, float32",
        "words": words,
        **about,
        **found.to_json(),
        "library": library,
    }


def in_its_library(to: str, place: Path) -> dict[str, object]:
    """How near the library that the weights are for comes to our answer; or why it was not asked."""
    found = verify(place, format=to)
    if found.max_difference is None:
        return {"skipped": found.against.removeprefix(f"{UNKNOWN}: ")}
    if not found.agrees:
        raise WeightsError(
            f"{found.against} reads other weights than were written",
            expected=f"a difference of at most {found.tolerance:.2g}",
            got=f"{found.max_difference:.2g}",
            hint="nothing was written; report this",
        )
    return {
        "against": found.against,
        "largest_difference": found.max_difference,
        "allowed_difference": found.tolerance,
    }
