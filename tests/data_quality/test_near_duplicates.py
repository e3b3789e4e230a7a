"""Near-duplicates and label issues: planted ones are found, and results equal slow references."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageEnhance
from sklearn.neighbors import NearestNeighbors

from vitkit.core.files import write_csv
from vitkit.data.dataset import Dataset, ImageSource, StoredImage
from vitkit.data_quality.check import LABEL_ISSUE_COLUMNS, NEAR_DUPLICATE_COLUMNS, DataQualityReport
from vitkit.data_quality.label_errors import LabelIssue, find_label_issues, target_probabilities
from vitkit.data_quality.near_duplicates import (
    ImageDescriptors,
    ImageRef,
    NearDuplicate,
    compare_thumbnails,
    compute_descriptors,
    find_near_duplicates,
    flip_descriptors,
    make_thumbnails,
)
from vitkit.evaluation import features
from vitkit.evaluation.features import nearest_neighbors
from vitkit.evaluation.fewshot import TEMPERATURE
from vitkit.report.data_quality import render

HOSTILE = '<img src=x onerror="alert(1)">.png'


class Pictures(ImageSource):
    """Encoded pictures in memory."""

    layout = "pictures"

    def __init__(self, pictures: Sequence[bytes], *, labels: Sequence[int] | None = None, name: str = "{}.png") -> None:
        self.pictures, self.pattern = list(pictures), name
        self.classes = ("cat", "dog", "owl")
        self.labels = np.array(labels if labels is not None else [0] * len(self.pictures), dtype=np.int64)

    def name(self, index: int) -> str:
        return self.pattern.format(index)

    def read(self, index: int) -> StoredImage:
        return self.pictures[index]


def drawn(number: int, *, side: int = 96) -> Image.Image:
    """A picture of a dozen shapes on a ground that shades off: no two alike."""
    rng = np.random.default_rng([7, number])
    shade = np.linspace(*rng.uniform(0, 255, 2), side)
    ground = np.stack([np.add.outer(shade, shade[::-1]) / 2] * 3, axis=2).astype(np.uint8)
    picture = Image.fromarray(ground)
    pen = ImageDraw.Draw(picture)
    for _ in range(12):
        x, y, size = *rng.uniform(0, side, 2).tolist(), rng.uniform(6, 40)
        pen.ellipse((x, y, x + size, y + size * rng.uniform(0.3, 1.5)), fill=tuple(rng.integers(0, 256, 3).tolist()))
    return picture


def encoded(picture: Image.Image, *, quality: int | None = None) -> bytes:
    content = io.BytesIO()
    if quality is None:
        picture.save(content, "PNG")
    else:
        picture.save(content, "JPEG", quality=quality)
    return content.getvalue()


CHANGES = {
    "smaller": lambda picture: encoded(picture.resize((60, 60))),
    "JPEG": lambda picture: encoded(picture, quality=40),
    "brighter": lambda picture: encoded(ImageEnhance.Brightness(picture).enhance(1.2)),
    "flatter": lambda picture: encoded(ImageEnhance.Contrast(picture).enhance(0.6), quality=80),
    "shifted": lambda picture: encoded(picture.crop((3, 0, 96, 94))),
    "gray": lambda picture: encoded(picture.convert("L")),
}


def describe(pictures: Sequence[bytes]) -> ImageDescriptors:
    return ImageDescriptors.from_thumbnails(make_thumbnails(Pictures(pictures)))


def train_and_test() -> tuple[dict[str, ImageDescriptors], set[tuple[int, int]]]:
    """300 pictures to learn from and 120 to test on, of which 24 are changed copies of the former."""
    train = [encoded(drawn(number)) for number in range(300)]
    test = [encoded(drawn(1000 + number)) for number in range(96)]
    planted = set()
    for copy in range(24):
        change = list(CHANGES.values())[copy % len(CHANGES)]
        planted.add((11 * copy, len(test)))
        test.append(change(drawn(11 * copy)))
    return {"train": describe(train), "test": describe(test)}, planted


def test_exactly_the_planted_copies_are_found() -> None:
    splits, planted = train_and_test()
    found = {(match.one.index, match.other.index) for match in find_near_duplicates(splits)}
    recall, precision = len(found & planted) / len(planted), len(found & planted) / len(found)
    assert recall >= 0.95
    assert precision >= 0.95


def test_image_saved_eight_times_is_found() -> None:
    """Copies do not stand out from each other: what is usual must not be taken from them."""
    copies = [encoded(drawn(7).resize((60 + 4 * number,) * 2), quality=40 + 5 * number) for number in range(8)]
    train = [*(encoded(drawn(number)) for number in range(100, 200)), *copies]
    test = [encoded(drawn(7)), *(encoded(drawn(number)) for number in range(300, 330))]
    found = {
        (match.one.index, match.other.index)
        for match in find_near_duplicates({"train": describe(train), "test": describe(test)})
    }
    assert found == {(100 + number, 0) for number in range(8)}


def test_flipped_copies_are_found_on_request() -> None:
    train = [encoded(drawn(number)) for number in range(60)]
    test = [encoded(drawn(number).transpose(Image.Transpose.FLIP_LEFT_RIGHT)) for number in (3, 30)]
    splits = {"train": describe(train), "test": describe([*test, encoded(drawn(500))])}
    assert find_near_duplicates(splits) == []
    found = find_near_duplicates(splits, match_flips=True)
    assert {(match.one.index, match.other.index, match.flipped) for match in found} == {(3, 0, True), (30, 1, True)}


def test_pairs_within_a_split_are_found_once() -> None:
    pictures = [encoded(drawn(number)) for number in range(40)]
    split = describe([*pictures, encoded(drawn(5), quality=60), encoded(drawn(5).resize((70, 70)))])
    assert find_near_duplicates({"all": split}) == []
    found = find_near_duplicates({"all": split}, within_splits=True)
    assert {(match.one.index, match.other.index) for match in found} == {(5, 40), (5, 41), (40, 41)}


def test_equal_frames_are_not_duplicates() -> None:
    framed = []
    for number in (1, 2):
        picture = Image.new("RGB", (96, 96), "white")
        picture.paste(drawn(number).resize((64, 64)), (16, 16))
        framed.append(encoded(picture))
    one, other = make_thumbnails(Pictures(framed))
    assert compare_thumbnails(one[None], other[None])[0] < 0.5


def trousers(number: int) -> Image.Image:
    """A silhouette that agrees with others of its kind in all but a little."""
    rng = np.random.default_rng(number)
    picture = Image.new("L", (448, 448))  # drawn large, so that no two of them have the same edges
    pen = ImageDraw.Draw(picture)
    left, right, fork = rng.uniform(110, 170), rng.uniform(280, 340), rng.uniform(100, 200)
    pen.rectangle((left, rng.uniform(20, 50), right, rng.uniform(400, 430)), fill=int(rng.integers(120, 255)))
    pen.rectangle((210, fork, 240, 440), fill=0)
    return picture.resize((56, 56))


def test_similar_objects_are_not_duplicates() -> None:
    """Silhouettes of one kind are all alike; only the copy stands out."""
    train = describe([encoded(trousers(number)) for number in range(400)])
    test = describe([*(encoded(trousers(1000 + number)) for number in range(30)), encoded(trousers(7), quality=70)])
    usual = [
        compare_thumbnails(np.repeat(each[None], 400, axis=0), train.thumbnails).max() for each in test.thumbnails[:5]
    ]
    assert np.mean(np.array(usual) > 0.85) > 0.9  # what pixels alone would call the same
    found = {(match.one.index, match.other.index) for match in find_near_duplicates({"train": train, "test": test})}
    assert (7, 30) in found
    assert len({image for _, image in found} - {30}) <= 6  # of 30 that are no copies, where pixels alone say all


def test_uniform_images_are_not_duplicates() -> None:
    flat = describe([encoded(Image.new("RGB", (40, 40), (shade, shade, shade))) for shade in (0, 90, 255)])
    assert not flat.descriptors.any()
    assert find_near_duplicates({"all": flat}, within_splits=True) == []


def test_features_relax_the_pixel_threshold() -> None:
    """Half-turned crops that pixels alone do not call the same, and features that do, or do not."""
    train = [encoded(drawn(number)) for number in range(80)]
    changed = drawn(9).rotate(4, resample=Image.Resampling.BICUBIC)
    pixels = {"train": describe(train), "test": describe([encoded(changed)])}
    alike = compare_thumbnails(pixels["test"].thumbnails, pixels["train"].thumbnails[9:10])[0]
    assert 0.65 < alike < 0.85, alike
    assert find_near_duplicates(pixels) == []
    rows = np.random.default_rng(0).normal(size=(80, 16)).astype(np.float32)
    for own, expected in ((rows[9] + 0.01, {(9, 0)}), (rows[10], set())):
        splits = {
            "train": ImageDescriptors.from_thumbnails(pixels["train"].thumbnails, rows),
            "test": ImageDescriptors.from_thumbnails(pixels["test"].thumbnails, own[None].astype(np.float32)),
        }
        assert {(match.one.index, match.other.index) for match in find_near_duplicates(splits)} == expected


# Descriptors and neighbors


def test_flipped_descriptors_equal_those_of_flipped_images() -> None:
    small = np.random.default_rng(0).integers(0, 256, (3, 32, 32), dtype=np.uint8)
    # Sums of 1,024 products of numbers to 255 in float32, as shares of their length.
    assert np.allclose(
        flip_descriptors(compute_descriptors(small)), compute_descriptors(small[:, :, ::-1].copy()), atol=1e-5
    )


@pytest.mark.parametrize("hidden", ["nothing", "self", "self and before"])
def test_nearest_neighbors_equal_full_product(hidden, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "ROWS", 7)
    monkeypatch.setattr(features, "COLUMNS", 5)
    rows = np.random.default_rng(0).normal(size=(23, 4)).astype(np.float32)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    product = unit @ unit.T
    row, column = np.indices(product.shape)
    product[{"nothing": row < 0, "self": row == column, "self and before": column <= row}[hidden]] = -2
    blocks = list(nearest_neighbors(rows, rows, count=6, exclude=hidden))
    found = torch.cat([block.indices for block in blocks]).numpy()
    cosines = torch.cat([block.cosines for block in blocks]).numpy()
    wanted = np.sort(product, axis=1)[:, ::-1][:, :6]
    assert np.allclose(cosines, wanted, atol=1e-6)
    assert ((found == -1) == (wanted == -2)).all()
    assert (np.take_along_axis(product, np.maximum(found, 0), 1)[found >= 0] > -2).all()


# Labels


def clusters(images: int, *, seed: int = 0, noise: float = 0.35) -> tuple[np.ndarray, np.ndarray]:
    """Features round three centers, and which center each is of."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, images)
    centers = np.eye(3, 12, dtype=np.float32)
    return (centers[labels] + noise * rng.normal(size=(images, 12)) / 2).astype(np.float32), labels.astype(np.int64)


def describe_noise(features: np.ndarray, *, seed: int = 0) -> ImageDescriptors:
    small = np.random.default_rng(seed).integers(0, 256, (len(features), 32, 32), dtype=np.uint8)
    return ImageDescriptors.from_thumbnails(small, features)


def test_planted_label_errors_are_found() -> None:
    splits, labels, planted = {}, {}, set()
    for seed, (name, images) in enumerate({"train": 600, "test": 200}.items()):
        features, true = clusters(images, seed=seed)
        flipped = np.random.default_rng(seed).choice(images, images // 20, replace=False)
        given = true.copy()
        given[flipped] = (given[flipped] + 1) % 3
        splits[name], labels[name] = describe_noise(features, seed=seed), given
        planted |= {(name, int(index)) for index in flipped}
    found = find_label_issues(splits, labels, num_classes=3, voting_split="train")
    places = {(issue.image.split, issue.image.index) for issue in found}
    assert len(places & planted) / len(planted) >= 0.9
    assert len(places & planted) / len(places) >= 0.9
    assert [issue.score for issue in found] == sorted((issue.score for issue in found), reverse=True)
    chances = target_probabilities(splits, labels, num_classes=3, voting_split="train")
    for name in splits:
        wrong = [index for split, index in planted if split == name]
        right = np.setdiff1d(np.arange(len(chances[name])), wrong)
        assert np.median(chances[name][wrong]) < 0.3 < np.median(chances[name][right])


def test_votes_equal_a_slow_reference() -> None:
    features, labels = clusters(150, noise=1.2)
    found = find_label_issues(
        {"all": describe_noise(features)}, {"all": labels}, num_classes=3, voting_split="all", min_score=-1.0
    )
    by_index = {issue.image.index: issue for issue in found}
    search = NearestNeighbors(n_neighbors=21, metric="cosine").fit(features)
    distances, indices = search.kneighbors(features)
    for index in range(150):
        others = indices[index] != index
        near, cosines = indices[index][others][:20], 1 - distances[index][others][:20]
        weights = np.exp(cosines / TEMPERATURE)
        shares = np.bincount(labels[near], weights=weights / weights.sum(), minlength=3)
        given = shares[labels[index]]
        shares[labels[index]] = -1
        issue = by_index[index]
        # Exponentials of cosines over 0.07 in float32.
        assert issue.score == pytest.approx(shares.max() - given, abs=1e-4)
        assert issue.neighbors == tuple(near[:3])


def test_copy_with_the_same_error_does_not_hide_it() -> None:
    features, labels = clusters(90)
    features[1] = features[0]
    labels[:2] = (labels[0] + 1) % 3
    split = describe_noise(features)
    twins = split.thumbnails.copy()
    twins[1] = twins[0]
    found = find_label_issues(
        {"all": ImageDescriptors.from_thumbnails(twins, features)}, {"all": labels}, num_classes=3, voting_split="all"
    )
    assert {0, 1} <= {issue.image.index for issue in found}
    assert all(1 not in issue.neighbors for issue in found if issue.image.index == 0)


def test_similar_images_vote_on_each_other() -> None:
    """Were they taken for copies, no mistake among them would be found."""
    features, labels = clusters(120, noise=0.1)
    given = labels.copy()
    wrong = np.flatnonzero(labels == 0)[:5]
    given[wrong] = 1
    kind = np.asarray(trousers(0).resize((32, 32)), dtype=np.float64)
    small = (kind * 0.5 + 60 + np.random.default_rng(0).normal(0, 18, (120, 32, 32))).clip(0, 255).astype(np.uint8)
    alike = compare_thumbnails(np.repeat(small[:1], 119, axis=0), small[1:])
    assert 0.87 < alike.min() < alike.max() < 0.99  # what pixels alone would call the same
    found = find_label_issues(
        {"all": ImageDescriptors.from_thumbnails(small, features)}, {"all": given}, num_classes=3, voting_split="all"
    )
    places = {issue.image.index for issue in found}
    assert len(places & set(wrong.tolist())) >= 4  # of 5: they stand beside each other, too
    assert len(places) <= 6


def test_unlabeled_images_do_not_vote() -> None:
    features, labels = clusters(60)
    labels[::3] = -1
    found = find_label_issues(
        {"all": describe_noise(features)}, {"all": labels}, num_classes=3, voting_split="all", min_score=-1.0
    )
    assert {issue.image.index for issue in found} == set(np.flatnonzero(labels >= 0).tolist())
    assert all(labels[index] >= 0 for issue in found for index in issue.neighbors)


# The page and the tables


def make_report() -> DataQualityReport:
    train = Pictures([encoded(drawn(number)) for number in range(3)], labels=[0, 1, 2])
    test = Pictures([encoded(drawn(0))], labels=[1], name=HOSTILE)
    match = NearDuplicate(
        one=ImageRef(split="train", index=0),
        other=ImageRef(split="test", index=0),
        pixels=0.99,
        features=None,
        flipped=False,
    )
    issue = LabelIssue(
        image=ImageRef(split="test", index=0),
        given_label=1,
        suggested_label=0,
        given_fraction=0.1,
        suggested_fraction=0.8,
        neighbors=(0, 2),
    )
    data = Dataset("place", {"train": train, "test": test})
    return DataQualityReport(
        data=data, near_duplicates=[match], label_issues=[issue], voting_split="train", model="Ti/16"
    )


def test_report_shows_images_and_escapes_names() -> None:
    page = render(make_report())
    assert "<img src=x" not in page
    assert "&lt;img src=x" in page
    assert page.count("data:image/") == 2 + 3  # a pair, and an image with its two neighbors
    assert "With different labels: 1" in page


def test_tables_have_files_classes_and_scores(tmp_path: Path) -> None:
    found = make_report()
    assert found.count_leaked() == {"train": 1, "test": 1}
    write_csv(tmp_path / "pairs.csv", found.near_duplicate_rows(), NEAR_DUPLICATE_COLUMNS)
    pairs = (tmp_path / "pairs.csv").read_text().splitlines()
    assert pairs[1].startswith("0.png,train,cat,")
    assert pairs[1].endswith(",test,dog,0.99,,False")
    write_csv(tmp_path / "issues.csv", found.label_issue_rows(), LABEL_ISSUE_COLUMNS)
    issues = (tmp_path / "issues.csv").read_text().splitlines()
    assert issues[1].endswith(",test,dog,cat,0.7,0.1,0.8,,0.png,2.png,")


def test_report_without_a_model_says_so() -> None:
    found = make_report()
    page = render(DataQualityReport(data=found.data, near_duplicates=[], label_issues=None, voting_split="train"))
    assert "Labels were not checked" in page
    assert "label_issues.csv" not in page
