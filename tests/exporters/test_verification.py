"""Comparison of outputs (differences, ties, large and nonfinite logits), and the images for it."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from vitkit.core.errors import DataError, WeightsError
from vitkit.core.result import fields_to_json
from vitkit.data.preprocessing import Preprocessing
from vitkit.exporters.runtime import Runner
from vitkit.exporters.verification import (
    MAX_IMAGES,
    OutputComparison,
    VerificationImages,
    builtin_images,
    check_outputs,
    compare_outputs,
)
from vitkit.inference.image_inputs import ImageFiles

PIXELS = [torch.zeros(size, 3, 4, 4) for size in (1, 2, 7)]


def constant_runner(logits: list[float], features: float = 1.0) -> Runner:
    """Return a runner with the same output for every image."""

    def run(pixels: np.ndarray) -> Mapping[str, np.ndarray]:
        rows = np.tile(np.array(logits, dtype=np.float32), (len(pixels), 1))
        return {"logits": rows, "features": np.full((len(pixels), 2), features, dtype=np.float32)}

    return run


def compare(actual: list[float], expected: list[float], **features: float) -> OutputComparison:
    return compare_outputs(constant_runner(actual, **features), constant_runner(expected), PIXELS)


def test_equal_outputs_pass() -> None:
    found = compare([1.0, 3.0, 2.0], [1.0, 3.0, 2.0])
    check_outputs(found, title="ONNX")
    assert (found.images, found.batch_sizes, found.top1_agreement, found.ties) == (10, (1, 2, 7), 1.0, 0)
    assert found.largest_difference == 0


def test_different_logits_are_an_error_with_the_difference() -> None:
    with pytest.raises(WeightsError, match=r"the model's logits .*at most 0.0001, got 0.0003, 3.0 times"):
        check_outputs(compare([1.0, 3.0003], [1.0, 3.0]), title="ONNX")
    check_outputs(compare([1.0, 3.00009], [1.0, 3.0]), title="ONNX")


def test_tolerance_grows_with_logits_above_ten() -> None:
    assert compare([9.0], [9.0]).allowed_difference == 1e-4
    assert compare([-2000.0, 1.0], [-2000.0, 1.0]).allowed_difference == pytest.approx(0.02)


def test_other_top1_class_is_an_error_unless_tied() -> None:
    with pytest.raises(WeightsError, match=r"another top-1 class than the model .*got 0.00%"):
        check_outputs(compare([3.0, 1.0], [1.0, 3.0]), title="ONNX")
    tied = compare([1.00005, 1.0], [1.0, 1.00005])
    check_outputs(tied, title="ONNX")
    assert tied.ties == 10
    assert "10 ties excluded" in tied.summary()


@pytest.mark.parametrize("output", [[np.nan, 1.0], [np.inf, 1.0], [1.0, 2.0, 3.0]])
def test_nonfinite_or_misshaped_output_is_an_error(output: list[float]) -> None:
    found = compare(output, [1.0, 2.0])
    with pytest.raises(WeightsError):
        check_outputs(found, title="ONNX")
    assert fields_to_json(found)["largest_difference"] is None


def test_features_are_compared_too() -> None:
    with pytest.raises(WeightsError, match="does not reproduce the model's features"):
        check_outputs(compare([1.0, 3.0], [1.0, 3.0], features=1.01), title="ONNX")


# Images


def test_few_images_are_repeated_for_every_batch_size(tmp_path: Path) -> None:
    files = builtin_images(Preprocessing()).write_files(tmp_path, count=2)
    images = VerificationImages(
        ImageFiles(list(map(str, files))), preprocessing=Preprocessing(image_size=8), description="two"
    )
    assert [len(batch) for batch in images.batches()] == [1, 1, 2, 7]


def test_written_files_hold_the_same_images(tmp_path: Path) -> None:
    how = Preprocessing(image_size=8, channels=1, mean=(0.5,), std=(0.5,))
    images = builtin_images(how)
    files = images.write_files(tmp_path, count=8)
    again = VerificationImages(ImageFiles(list(map(str, files))), preprocessing=how, description="files")
    assert len({path.read_bytes() for path in files}) == 8
    first = torch.cat(list(images.batches()))
    for pixels in torch.cat(list(again.batches())):
        assert any(torch.equal(pixels, one) for one in first)


def test_unreadable_images_are_counted(tmp_path: Path) -> None:
    (good,) = builtin_images(Preprocessing()).write_files(tmp_path, count=1)
    (tmp_path / "bad.png").write_bytes(b"no image")
    how = Preprocessing(image_size=8)
    both = VerificationImages(ImageFiles([str(good), str(tmp_path / "bad.png")]), preprocessing=how, description="both")
    list(both.batches())
    assert (len(both), both.unreadable) == (1, 1)
    bad = VerificationImages(ImageFiles([str(tmp_path / "bad.png")]), preprocessing=how, description="bad")
    with pytest.raises(DataError, match="none of the images can be read"):
        list(bad.batches())


def test_many_images_are_sampled_evenly() -> None:
    many = VerificationImages(
        ImageFiles([str(number) for number in range(3 * MAX_IMAGES)]), preprocessing=Preprocessing(), description=""
    )
    assert len(many) == MAX_IMAGES
    assert [many.source.name(index) for index in (0, 1, MAX_IMAGES - 1)] == ["0", "3", str(3 * MAX_IMAGES - 3)]
