"""What is proved: answers that differ, ties, huge logits and numbers that are none; images in batches of each size."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from vitkit.core.errors import DataError, WeightsError
from vitkit.data.transforms import Preprocessing
from vitkit.export.images import MOST, ProofImages, embedded_images
from vitkit.export.proof import Comparison, check, compare
from vitkit.export.runtime import Run
from vitkit.predict.places import Files

PIXELS = [torch.zeros(size, 3, 4, 4) for size in (1, 2, 7)]


def says(logits: list[float], features: float = 1.0) -> Run:
    """Something that answers the same to every image."""

    def run(pixels: np.ndarray) -> Mapping[str, np.ndarray]:
        rows = np.tile(np.array(logits, dtype=np.float32), (len(pixels), 1))
        return {"logits": rows, "features": np.full((len(pixels), 2), features, dtype=np.float32)}

    return run


def compared(found: list[float], expected: list[float], **features: float) -> Comparison:
    return compare(says(found, **features), says(expected), PIXELS)


def test_equal_answers_pass() -> None:
    found = compared([1.0, 3.0, 2.0], [1.0, 3.0, 2.0])
    check(found, title="it")
    assert (found.images, found.batch_sizes, found.top1_agreement, found.ties) == (10, (1, 2, 7), 1.0, 0)
    assert found.largest_difference == 0


def test_logits_that_are_too_far_apart_are_an_error_that_says_by_how_much() -> None:
    with pytest.raises(WeightsError, match=r"does not give the model's logits .*at most 0.0001, got 0.0003, 3.0 times"):
        check(compared([1.0, 3.0003], [1.0, 3.0]), title="it")
    check(compared([1.0, 3.00009], [1.0, 3.0]), title="it")


def test_what_is_allowed_grows_with_logits_above_ten() -> None:
    assert compared([9.0], [9.0]).allowed_difference == 1e-4
    assert compared([-2000.0, 1.0], [-2000.0, 1.0]).allowed_difference == pytest.approx(0.02)


def test_another_first_class_is_an_error_and_a_tie_is_not() -> None:
    with pytest.raises(WeightsError, match=r"another first class than the model .*got 0.00%"):
        check(compared([3.0, 1.0], [1.0, 3.0]), title="it")
    tied = compared([1.00005, 1.0], [1.0, 1.00005])
    check(tied, title="it")
    assert tied.ties == 10
    assert "10 ties aside" in tied.in_words()


@pytest.mark.parametrize("answer", [[np.nan, 1.0], [np.inf, 1.0], [1.0, 2.0, 3.0]])
def test_what_is_no_number_or_of_another_length_is_an_error(answer: list[float]) -> None:
    found = compared(answer, [1.0, 2.0])
    with pytest.raises(WeightsError):
        check(found, title="it")
    assert found.to_json()["largest_difference"] is None


def test_features_are_proved_too() -> None:
    with pytest.raises(WeightsError, match="does not give the model's features"):
        check(compared([1.0, 3.0], [1.0, 3.0], features=1.01), title="it")


# Images


def test_few_images_are_repeated_until_every_size_of_batch_was_had(tmp_path: Path) -> None:
    files = embedded_images(Preprocessing()).files(tmp_path, most=2)
    images = ProofImages(Files(list(map(str, files))), preprocessing=Preprocessing(image_size=8), described="two")
    assert [len(batch) for batch in images.batches()] == [1, 1, 2, 7]


def test_files_are_the_images_themselves(tmp_path: Path) -> None:
    how = Preprocessing(image_size=8, channels=1, mean=(0.5,), deviation=(0.5,))
    images = embedded_images(how)
    files = images.files(tmp_path, most=8)
    again = ProofImages(Files(list(map(str, files))), preprocessing=how, described="files")
    assert len({path.read_bytes() for path in files}) == 8
    first = torch.cat(list(images.batches()))
    for pixels in torch.cat(list(again.batches())):
        assert any(torch.equal(pixels, one) for one in first)


def test_images_that_cannot_be_read_are_counted_and_none_at_all_are_an_error(tmp_path: Path) -> None:
    (good,) = embedded_images(Preprocessing()).files(tmp_path, most=1)
    (tmp_path / "bad.png").write_bytes(b"no image")
    how = Preprocessing(image_size=8)
    both = ProofImages(Files([str(good), str(tmp_path / "bad.png")]), preprocessing=how, described="both")
    list(both.batches())
    assert (len(both), both.unreadable) == (1, 1)
    bad = ProofImages(Files([str(tmp_path / "bad.png")]), preprocessing=how, described="bad")
    with pytest.raises(DataError, match="none of the images can be read"):
        list(bad.batches())


def test_of_very_many_images_some_are_taken_from_all_over() -> None:
    many = ProofImages(Files([str(number) for number in range(3 * MOST)]), preprocessing=Preprocessing(), described="")
    assert len(many) == MOST
    assert [many.source.name(index) for index in (0, 1, MOST - 1)] == ["0", "3", str(3 * MOST - 3)]
