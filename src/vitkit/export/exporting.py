"""A model and a kind of program go in, a folder comes out: program, labels, preprocessing, example, card and proof."""

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

from vitkit.checkpoints.native import LABELS, Artefact, write_json
from vitkit.checkpoints.ready import Preprocess
from vitkit.checkpoints.reference import largest_difference
from vitkit.core.config import to_mapping
from vitkit.core.errors import WeightsError
from vitkit.core.files import sha256, write_text
from vitkit.core.shapes import Tensor
from vitkit.export.example import example
from vitkit.export.images import ProofImages, embedded_images, with_reference
from vitkit.export.placing import PROOF, damaged, put_folder, read_sums, stored_proof, write_sums
from vitkit.export.program import FEATURES, LOGITS, Program
from vitkit.export.proof import Comparison, check, compare, judged
from vitkit.export.runtime import Run, Runtime, check_installed
from vitkit.export.words import preprocessing_json, readme

EXAMPLE, PREPROCESSING, README = "example.py", "preprocessing.json", "README.md"
ASKED = 8
"""Image files that example.py is asked about."""
SECONDS = 300
"""How long that may take; a minute is much, and a machine may be busy."""
NEAR, NEAR_FEATURES = 1e-4, 1e-3
"""How far probabilities may be apart, and features as a share of the largest: pixels are resized by other code, too."""
WITH_LIBRARY = """\
import runpy, sys
from vitkit.checkpoints.verify import imported
imported(sys.argv[1])
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What was asked for: asked for again, nothing is to be done. `images` is the place that was named, if any."""

    to: str
    fingerprint: str
    images: str | None = None

    def is_met(self, out: Path) -> Mapping[str, object] | None:
        """The proof of an export that is there, whole, and of this wish; or None."""
        found = stored_proof(out)
        if found is None or found.get("asked") != self.to_json():
            return None
        is_whole = PROOF in read_sums(out) and damaged(out) is None if out.is_dir() else found["sha256"] == sha256(out)
        return found if is_whole else None

    def to_json(self) -> dict[str, object]:
        """As proof.json keeps it."""
        return {"to": self.to, "model": self.fingerprint, "images": self.images}


def fingerprint(artefact: Artefact) -> str:
    """What tells a model with its labels and preprocessing from any other: SHA-256 over all of it."""
    about = [artefact.name, to_mapping(artefact.config), list(artefact.labels), to_mapping(artefact.preprocessing)]
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(artefact.state):
        tensor = artefact.state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def export(
    artefact: Artefact, out: Path, *, runtime: Runtime, wish: Wish, images: ProofImages | None, say: Say
) -> dict[str, object]:
    """Write a model as a program into a folder, prove it there, and give the folder its name; the proof comes back.

    What does not give the model's answers is an error, and then nothing is left.
    """
    check_installed(runtime.title, needs=runtime.needs, extra=runtime.extra)
    proof: dict[str, object] = {}

    def fill(folder: Path) -> None:
        say(f"writing {runtime.title}")
        runtime.write(artefact, folder)
        write_json(folder / LABELS, list(artefact.labels))
        write_json(folder / PREPROCESSING, preprocessing_json(artefact.preprocessing))
        classes = artefact.config.classes
        write_text(
            folder / EXAMPLE, example(artefact.preprocessing, runtime=runtime.name, file=runtime.file, classes=classes)
        )
        proof.update(proved(artefact, runtime, folder, images=images, say=say) | {"asked": wish.to_json()})
        write_json(folder / PROOF, proof)
        write_text(folder / README, readme(artefact, runtime, proof=str(proof["words"])))
        write_sums(folder)

    put_folder(out, fill)
    return proof


def proved(
    artefact: Artefact, runtime: Runtime, folder: Path, *, images: ProofImages | None, say: Say
) -> dict[str, object]:
    """The figures of a program that gives the model's answers; one that does not is an error."""
    model = judged(Program(artefact.model().float()))
    say(f"running it with {runtime.version}")
    found, about = compared(runtime.start(folder), artefact, model=model, images=images)
    check(found, title=runtime.title)
    say(f"running {EXAMPLE}")
    tried = tried_example(folder, artefact, images=images)
    words = f"{runtime.version}, {found.in_words()}; {EXAMPLE} agrees on {tried['images']} files"
    return {
        "format": runtime.name,
        "runtime": runtime.version,
        "against": f"vitkit {metadata.version('vitkit')} on torch {torch.__version__}, float32",
        "words": words,
        **about,
        **found.to_json(),
        "example": tried,
    }


def compared(
    run: Run, artefact: Artefact, *, model: Run, images: ProofImages | None
) -> tuple[Comparison, dict[str, object]]:
    """What runs beside the model on the images, or on those that come with vitkit; and which images these were."""
    chosen = images or embedded_images(artefact.preprocessing)
    batches = chosen.batches()
    found = compare(run, model, batches if images else with_reference(batches, artefact.config))
    return found, {"images_from": chosen.described, "unreadable": chosen.unreadable}


# example.py


def tried_example(
    folder: Path, artefact: Artefact, *, images: ProofImages | None, library: str | None = None
) -> dict[str, object]:
    """Run example.py in a process of its own on files, and compare what it prints with the model's own answers.

    Where it fails, and a `library` that it needs can only be imported with help, it gets that, and this is said.
    """
    chosen = images or embedded_images(artefact.preprocessing)
    with tempfile.TemporaryDirectory() as place:
        files = chosen.files(Path(place), most=ASKED)
        example_file = str(folder.absolute() / EXAMPLE)
        arguments, remark = [example_file, "--json", *map(str, files)], {}
        try:
            lines = _printed([sys.executable, "-P", *arguments], cwd=place)
        except WeightsError as error:
            if library is None:
                raise
            lines = _printed([sys.executable, "-P", "-c", WITH_LIBRARY, library, *arguments], cwd=place)
            remark = {"remark": f"as it is: {error.message}; with a torchvision that was mended first, it runs"}
        if len(lines) != len(files):
            raise WeightsError(f"{EXAMPLE} did not answer for every image", expected=len(files), got=len(lines))
        program = Program(artefact.model().float())
        difference = 0.0
        for file, line in zip(files, lines, strict=True):
            expected = _answered(program, artefact, file)
            difference = max(difference, _apart(line, expected, labels=artefact.labels))
    return {"images": len(files), "largest_difference": difference, **remark}


def _printed(command: list[str], *, cwd: str) -> list[str]:
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, encoding="utf-8", timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise WeightsError(f"{EXAMPLE} took longer than {SECONDS} s", hint="nothing was written") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise WeightsError(f"{EXAMPLE} failed: {last[:300]}", hint="nothing was written; report this")
    return done.stdout.splitlines()


@torch.inference_mode()
def _answered(program: Program, artefact: Artefact, file: Path) -> Tensor:
    """What the model says of a file: probabilities, or features where it has no classes."""
    given = np.load(file, allow_pickle=False) if file.suffix == ".npy" else file
    answers = program(Preprocess(artefact.preprocessing)(given))
    return answers[FEATURES][0] if LOGITS not in answers else answers[LOGITS][0].double().softmax(dim=0)


def _apart(line: str, expected: Tensor, *, labels: Sequence[str]) -> float:
    """How far a printed answer is from the model's; too far is an error.

    Of classes that are equally likely any may come first, so places and names are looked at one by one.
    """
    said = json.loads(line)
    if not labels:
        found = torch.tensor(said["features"])
        difference, allowed = largest_difference(found, expected), NEAR_FEATURES * max(1.0, float(expected.abs().max()))
    else:
        shown = [(str(each["label"]), float(each["probability"])) for each in said["predictions"]]
        in_order = expected.sort(descending=True).values[: len(shown)]
        by_place = largest_difference(torch.tensor([share for _, share in shown]), in_order)
        by_name = [
            min(abs(share - float(expected[number])) for number, known in enumerate(labels) if known == label)
            for label, share in shown
        ]
        difference, allowed = max(by_place, *by_name), NEAR
    if not difference <= allowed:
        raise WeightsError(
            f"{EXAMPLE} does not give the model's answers",
            expected=f"a difference of at most {allowed:.2g}",
            got=f"{difference:.2g} for {Path(said['file']).name}",
            hint="nothing was written; report this",
        )
    return difference
