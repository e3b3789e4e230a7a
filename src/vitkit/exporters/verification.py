"""Comparison of an export with its model, on images and through its example.py.

Logits may differ by 1e-4, or by 1e-5 of the largest where that is above 10, because the spacing of float32 grows. The
top-1 class must be the same for every image, except for ties: images whose two largest logits are so close that an
allowed difference can exchange them. Ties are counted.
"""

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vitkit.core.errors import DataError, WeightsError
from vitkit.core.formatting import format_plural
from vitkit.core.shapes import Float, Tensor
from vitkit.data.config import FractalConfig
from vitkit.data.dataset import ConcatSource, ImageSource, StoredImage, Subset
from vitkit.data.decode import decode
from vitkit.data.fractals import FractalSource
from vitkit.data.layouts.arrays import open_digits
from vitkit.data.preprocessing import Preprocessing
from vitkit.data.verify import read_image
from vitkit.exporters.example import IMAGE_CHANNELS
from vitkit.exporters.runtime import FEATURES, LOGITS, ExportModule, FloatArray, Runner, as_runner
from vitkit.weights.bundle import ModelBundle, logits_difference, reference_image

BATCH_SIZES = (1, 2, 7)
MAX_IMAGES = 1000
"""More images than this are sampled evenly."""
BUILTIN_IMAGES = 12
"""Number of digits and of fractals that are used by default."""
ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE = 1e-4, 1e-5
"""Allowed difference of logits, and as a fraction of the largest."""
PROBABILITY_TOLERANCE, FEATURE_TOLERANCE = 1e-4, 1e-3
"""Allowed differences for example.py, which also resizes with its own code; features as a fraction of the largest."""
EXAMPLE = "example.py"
EXAMPLE_IMAGES = 8
EXAMPLE_TIMEOUT = 300
"""Seconds; a minute is much, but the machine may be busy."""
NOTHING_WRITTEN = "nothing was written; vitkit export --to torch is the closest to the model itself"
WITH_LIBRARY = """\
import runpy, sys
from vitkit.weights.verify import import_library
import_library(sys.argv[1])
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


# Images


class VerificationImages:
    """Images on which an export is verified.

    `unreadable` is the number of images that could not be read, after `batches` was consumed. `progress` is called with
    the number of images read so far.
    """

    def __init__(self, source: ImageSource, *, preprocessing: Preprocessing, description: str) -> None:
        count = min(len(source), MAX_IMAGES)
        self.source = Subset(source, [index * len(source) // count for index in range(count)])
        self.preprocessing, self.description = preprocessing, description
        self.progress: Callable[[int], None] = lambda count: None
        self.unreadable = 0

    def __len__(self) -> int:
        return len(self.source) - self.unreadable

    def read(self, index: int) -> StoredImage:
        """Read an image; built-in pixels are repeated, each shifted, for models with other numbers of channels."""
        content, channels = read_image(self.source, index), self.preprocessing.channels
        if isinstance(content, np.ndarray) and channels not in (1, 3, content.shape[2] if content.ndim == 3 else 1):
            gray = content if content.ndim == 2 else content[:, :, 0]
            return np.stack([np.roll(gray, band, axis=1) for band in range(channels)], axis=2)
        return content

    def batches(self) -> Iterator[Float[Tensor, "B C H W"]]:
        """Yield every image once in batches of 1, 2 and 7; a few images are repeated until each size has occurred."""
        self.unreadable = 0
        sizes, waiting, first = cycle(BATCH_SIZES), [], list[Float[Tensor, "C H W"]]()
        size = next(sizes)
        for pixels in self._pixels():
            first += [pixels] if len(first) < sum(BATCH_SIZES) else []
            waiting.append(pixels)
            if len(waiting) == size:
                yield self.preprocessing.normalize(torch.stack(waiting))
                waiting, size = [], next(sizes)
        if not first:
            raise DataError("none of the images can be read", got=self.description, hint="choose others with --images")
        if len(first) < sum(BATCH_SIZES):
            again = cycle(first)
            for size in BATCH_SIZES:
                yield self.preprocessing.normalize(torch.stack(list(islice(again, size))))
        elif waiting:
            yield self.preprocessing.normalize(torch.stack(waiting))

    def write_files(self, directory: Path, *, count: int) -> list[Path]:
        """Write some readable images, sampled evenly, as files."""
        files: list[Path] = []
        step = max(1, len(self.source) // count)
        for index in range(0, len(self.source), step):
            if len(files) == count:
                break
            try:
                content = self.read(index)
                decode(content, channels=self.preprocessing.channels)
            except DataError:
                continue
            path = directory / f"{index:04}"
            if isinstance(content, bytes):  # readers detect the format by its content
                path.write_bytes(content)
            elif content.ndim == 2 or content.shape[2] in IMAGE_CHANNELS:
                path = path.with_suffix(".png")
                Image.fromarray(content[:, :, 0] if content.shape[2:] == (1,) else content).save(path)
            else:
                path = path.with_suffix(".npy")
                np.save(path, content)
            files.append(path)
        return files

    def _pixels(self) -> Iterator[Float[Tensor, "C H W"]]:
        for index in range(len(self.source)):
            try:
                image = decode(self.read(index), channels=self.preprocessing.channels)
            except DataError:
                self.unreadable += 1
                continue
            yield torch.from_numpy(self.preprocessing.to_pixels(image))
            self.progress(index + 1)


def builtin_images(preprocessing: Preprocessing) -> VerificationImages:
    """Return built-in images: digits and fractals."""
    numerals = Subset(open_digits().splits["test"], range(BUILTIN_IMAGES))
    fractals = FractalSource(FractalConfig(num_classes=BUILTIN_IMAGES, per_class=1), first=0, count=1)
    description = f"{BUILTIN_IMAGES} digits, {BUILTIN_IMAGES} fractals and the reference image"
    return VerificationImages(ConcatSource([numerals, fractals]), preprocessing=preprocessing, description=description)


# Comparison


@dataclass(frozen=True, kw_only=True)
class OutputComparison:
    """Differences between a program and its model. `top1_agreement` excludes ties, and is None without classes."""

    images: int
    batch_sizes: tuple[int, ...]
    top1_agreement: float | None
    ties: int
    largest_difference: float
    allowed_difference: float
    largest_output: float
    features_difference: float | None
    """None if the program has no features output."""
    features_allowed: float

    def summary(self) -> str:
        """Describe the comparison in one line."""
        top1 = "" if self.top1_agreement is None else f"same top-1 class for {self.top1_agreement:.2%}, "
        ties = f" ({self.ties:,} ties excluded)" if self.ties else ""
        output = FEATURES if self.top1_agreement is None else LOGITS
        return f"{format_plural(self.images, 'image')}: {top1}{output} within {self.largest_difference:.1e}{ties}"


def compare_outputs(run: Runner, model: Runner, batches: Iterable[Tensor]) -> OutputComparison:
    """Run both on batches (B × C × H × W) of any size and compare their outputs."""
    parts: dict[str, list[tuple[FloatArray, FloatArray]]] = defaultdict(list)
    sizes = []
    for batch in batches:
        pixels = batch.numpy()
        actual, expected = run(pixels), model(pixels)
        if actual.keys() != expected.keys():
            raise WeightsError("the program has other outputs", expected=list(expected), got=list(actual))
        for name in expected:
            parts[name].append((actual[name], expected[name]))
        sizes.append(len(pixels))
    outputs = {name: [np.concatenate(each) for each in zip(*pairs, strict=True)] for name, pairs in parts.items()}
    largest = {name: float(np.abs(expected).max()) for name, (_, expected) in outputs.items()}
    allowed = {name: max(ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE * value) for name, value in largest.items()}
    difference = {name: logits_difference(*map(torch.from_numpy, pair)) for name, pair in outputs.items()}
    main = LOGITS if LOGITS in outputs else FEATURES
    agreement, ties = _compare_top1(*outputs[LOGITS], allowed=allowed[LOGITS]) if LOGITS in outputs else (None, 0)
    return OutputComparison(
        images=sum(sizes),
        batch_sizes=tuple(dict.fromkeys(sizes)),
        top1_agreement=agreement,
        ties=ties,
        largest_difference=difference[main],
        allowed_difference=allowed[main],
        largest_output=largest[main],
        features_difference=difference.get(FEATURES),
        features_allowed=allowed.get(FEATURES, ABSOLUTE_TOLERANCE),
    )


def _compare_top1(actual: FloatArray, expected: FloatArray, *, allowed: float) -> tuple[float, int]:
    """Return the fraction of images, ties excluded, with the same top-1 class, and the number of ties."""
    if actual.shape != expected.shape:
        return 0.0, 0
    same = actual.argmax(axis=1) == expected.argmax(axis=1)
    tied = np.zeros(len(expected), dtype=bool)
    if expected.shape[1] > 1:
        second, first = np.partition(expected, -2, axis=1)[:, -2:].T
        tied = first - second <= 2 * allowed  # either of the two logits may differ by what is allowed
    return (float(same[~tied].mean()) if not tied.all() else 1.0), int(tied.sum())


def check_outputs(comparison: OutputComparison, *, title: str) -> None:
    """Raise WeightsError if the outputs differ by more than is allowed."""
    if comparison.top1_agreement is not None and comparison.top1_agreement < 1:
        raise WeightsError(
            f"{title} gives another top-1 class than the model",
            expected=f"the same for all of {comparison.images:,} images",
            got=f"{comparison.top1_agreement:.2%}, with logits that differ by {comparison.largest_difference:.2g}",
            hint=NOTHING_WRITTEN,
        )
    differences = (
        (
            FEATURES if comparison.top1_agreement is None else LOGITS,
            comparison.largest_difference,
            comparison.allowed_difference,
        ),
        (FEATURES, comparison.features_difference, comparison.features_allowed),
    )
    for name, difference, allowed in differences:
        if difference is not None and not difference <= allowed:
            raise WeightsError(
                f"{title} does not reproduce the model's {name}",
                expected=f"a difference of at most {allowed:.2g}",
                got=f"{difference:.2g}, {difference / allowed:.1f} times as much",
                hint=NOTHING_WRITTEN,
            )


def verify_outputs(
    run: Runner, bundle: ModelBundle, *, title: str, images: VerificationImages | None, model: Runner | None = None
) -> tuple[OutputComparison, dict[str, object]]:
    """Compare with the model on images, by default built-in ones. Return the result and which images were used.

    Raise WeightsError if the outputs differ by more than is allowed.
    """
    selected = images or builtin_images(bundle.preprocessing)
    reference = [] if images else [reference_image(bundle.config)]
    comparison = compare_outputs(run, model or model_runner(bundle), chain(selected.batches(), reference))
    check_outputs(comparison, title=title)
    return comparison, {"images_from": selected.description, "unreadable": selected.unreadable}


def model_runner(bundle: ModelBundle) -> Runner:
    """Return the runner of a model in float32 and evaluation mode."""
    return as_runner(ExportModule(bundle.build_model().float()).eval())


def verify_example(
    directory: Path, bundle: ModelBundle, *, images: VerificationImages | None, library: str | None = None
) -> dict[str, object]:
    """Run example.py in another process on image files and compare its output with the model.

    If it fails because a `library` cannot be imported here without help, it is run with that help, and this is noted.
    """
    selected = images or builtin_images(bundle.preprocessing)
    with tempfile.TemporaryDirectory() as temporary:
        files = selected.write_files(Path(temporary), count=EXAMPLE_IMAGES)
        arguments, note = [str(directory.absolute() / EXAMPLE), "--json", *map(str, files)], {}
        try:
            lines = _run_example([sys.executable, "-P", *arguments], cwd=temporary)
        except WeightsError as error:
            if library is None:
                raise
            lines = _run_example([sys.executable, "-P", "-c", WITH_LIBRARY, library, *arguments], cwd=temporary)
            note = {"note": f"alone: {error.message}; it works after repairing torchvision"}
        if len(lines) != len(files):
            raise WeightsError(f"{EXAMPLE} did not print every image", expected=len(files), got=len(lines))
        module = ExportModule(bundle.build_model().float())
        difference = 0.0
        for file, line in zip(files, lines, strict=True):
            expected = _expected_output(module, bundle, file)
            difference = max(difference, _example_difference(line, expected, labels=bundle.labels))
    return {"images": len(files), "largest_difference": difference, **note}


def _run_example(command: list[str], *, cwd: str) -> list[str]:
    try:
        result = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, encoding="utf-8", timeout=EXAMPLE_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise WeightsError(f"{EXAMPLE} took longer than {EXAMPLE_TIMEOUT} s", hint="nothing was written") from error
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise WeightsError(f"{EXAMPLE} failed: {last[:300]}", hint="nothing was written; report this")
    return result.stdout.splitlines()


@torch.inference_mode()
def _expected_output(module: ExportModule, bundle: ModelBundle, file: Path) -> Tensor:
    """Return the model's probabilities for a file, or its features if it has no classes."""
    image = np.load(file, allow_pickle=False) if file.suffix == ".npy" else file
    outputs = module(bundle.preprocessing(image))
    return outputs[FEATURES][0] if LOGITS not in outputs else outputs[LOGITS][0].double().softmax(dim=0)


def _example_difference(line: str, expected: Tensor, *, labels: Sequence[str]) -> float:
    """Return the difference between a printed line and the model; raise WeightsError if it is too large.

    Equally probable classes may be printed in any order, so ranked probabilities and labels are compared separately.
    """
    output = json.loads(line)
    if not labels:
        features = torch.tensor(output["features"])
        difference = logits_difference(features, expected)
        allowed = FEATURE_TOLERANCE * max(1.0, float(expected.abs().max()))
    else:
        printed = [(str(each["label"]), float(each["probability"])) for each in output["predictions"]]
        ranked = expected.sort(descending=True).values[: len(printed)]
        by_rank = logits_difference(torch.tensor([probability for _, probability in printed]), ranked)
        by_label = [
            min(abs(probability - float(expected[index])) for index, name in enumerate(labels) if name == label)
            for label, probability in printed
        ]
        difference, allowed = max(by_rank, *by_label), PROBABILITY_TOLERANCE
    if not difference <= allowed:
        raise WeightsError(
            f"{EXAMPLE} does not reproduce the model's output",
            expected=f"a difference of at most {allowed:.2g}",
            got=f"{difference:.2g} for {Path(output['file']).name}",
            hint="nothing was written; report this",
        )
    return difference
