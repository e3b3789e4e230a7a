"""Compute a teacher's features of fixed crops of the training images, for objective.name=feature_distillation.

    python tools/teacher_targets.py DATA --teacher TEACHER.onnx --out DIRECTORY [--crops 1] [--precision bf16]

DATA is a dataset in any layout that `vitkit data check` reads; its training images are used. The teacher is an ONNX
model that takes B × 3 × 224 × 224 images with ImageNet's mean and standard deviation, and returns features. They are
stored as float16. An interrupted computation resumes. On a CPU with bfloat16, `--precision bf16` takes half the time;
the features then have a cosine of 0.998 with those in float32.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import openvino
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from PIL import Image

from vitkit.core.files import write_text
from vitkit.data.dataset import ImageSource
from vitkit.data.decode import decode
from vitkit.data.layouts.registry import open_dataset
from vitkit.data.stored_targets import NAMES, crop_box, crop_path

SIZE = 224
MEAN = np.array([0.485, 0.456, 0.406], dtype=np.float32)
STD = np.array([0.229, 0.224, 0.225], dtype=np.float32)
BATCH_SIZE = 16
SAVE_EVERY = 100


def main() -> None:
    """Compute the features of all crops that are missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("data", help="dataset in any layout")
    parser.add_argument("--teacher", type=Path, required=True, help="ONNX model that returns features")
    parser.add_argument("--out", type=Path, required=True, help="directory for the features")
    parser.add_argument("--crops", type=int, default=1, help="crops per image; the first is the whole image")
    parser.add_argument("--precision", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()

    splits = open_dataset(arguments.data).splits
    source = splits["train"] if "train" in splits else splits["all"]
    names = "".join(f"{source.name(index)}\n" for index in range(len(source)))
    arguments.out.mkdir(parents=True, exist_ok=True)
    stored = arguments.out / NAMES
    if stored.exists() and stored.read_text("utf-8", errors="surrogateescape") != names:
        parser.error(f"{stored} lists other images: choose another --out")
    write_text(stored, names)

    settings = {"INFERENCE_NUM_THREADS": arguments.threads, "INFERENCE_PRECISION_HINT": arguments.precision}
    teacher = openvino.Core().compile_model(arguments.teacher, "CPU", settings)
    for crop in range(arguments.crops):
        compute_crop(teacher, source, arguments.out, crop=crop)


def compute_crop(teacher: openvino.CompiledModel, source: ImageSource, out: Path, *, crop: int) -> None:
    """Compute the features of one crop of every image, from where an earlier call stopped."""
    path, progress = crop_path(out, crop), out / f"crop{crop}.progress"
    width = int(teacher.output(0).partial_shape[-1].get_length())
    if not path.exists():
        open_memmap(path, mode="w+", dtype=np.float16, shape=(len(source), width)).flush()
        write_text(progress, "0")
    if not progress.exists():  # complete
        return
    table, first = open_memmap(path, mode="r+"), int(progress.read_text())
    start = time.monotonic()
    for batch, low in enumerate(range(first, len(source), BATCH_SIZE), 1):
        high = min(low + BATCH_SIZE, len(source))
        images = np.stack([load(source, index, crop=crop) for index in range(low, high)])
        features = teacher(images)[0]
        table[low:high] = features.reshape(high - low, width)
        if batch % SAVE_EVERY == 0:
            table.flush()
            write_text(progress, str(high))
            rate = (high - first) / (time.monotonic() - start)
            minutes = (len(source) - high) / rate / 60
            print(
                f"crop {crop}: {high:,} of {len(source):,}, {rate:.1f} images/s, {minutes:.0f} minutes left", flush=True
            )
    table.flush()
    progress.unlink()


def load(source: ImageSource, index: int, *, crop: int) -> NDArray[np.float32]:
    """Return the normalized pixels of a crop, 3 × 224 × 224."""
    image = decode(source.read(index), channels=3)
    assert isinstance(image, Image.Image)
    box = crop_box(source.name(index), crop, height=image.height, width=image.width)
    image = image.resize((SIZE, SIZE), Image.Resampling.BICUBIC, box=box)
    pixels = (np.asarray(image, dtype=np.float32) / 255 - MEAN) / STD
    return pixels.transpose(2, 0, 1)


if __name__ == "__main__":
    main()
