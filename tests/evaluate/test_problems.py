"""Finding problems: planted copies and planted mistakes are found, and little else; exact against slow references."""

import io
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageEnhance
from sklearn.neighbors import NearestNeighbors

from vitkit.data.source import Content, DataSet, Source
from vitkit.evaluate import neighbours
from vitkit.evaluate.fewshot import TEMPERATURE
from vitkit.evaluate.findings import DOUBT_COLUMNS, MATCH_COLUMNS, Findings
from vitkit.evaluate.neighbours import nearest
from vitkit.evaluate.problems import (
    Doubt,
    Looks,
    Match,
    Place,
    doubtful_labels,
    label_probabilities,
    near_duplicates,
)
from vitkit.evaluate.problems_page import render
from vitkit.evaluate.tables import as_csv
from vitkit.evaluate.thumbnails import descriptors, likeness, mirrored, thumbnails

HOSTILE = '<img src=x onerror="alert(1)">.png'


class Pictures(Source):
    """Encoded pictures in memory."""

    kind = "pictures"

    def __init__(self, pictures: Sequence[bytes], *, labels: Sequence[int] | None = None, name: str = "{}.png") -> None:
        self.pictures, self.pattern = list(pictures), name
        self.classes = ("cat", "dog", "owl")
        self.labels = np.array(labels if labels is not None else [0] * len(self.pictures), dtype=np.int64)

    def name(self, index: int) -> str:
        return self.pattern.format(index)

    def content(self, index: int) -> Content:
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
    "grey": lambda picture: encoded(picture.convert("L")),
}


def looks(pictures: Sequence[bytes]) -> Looks:
    return Looks.of(thumbnails(Pictures(pictures)))


def train_and_test() -> tuple[dict[str, Looks], set[tuple[int, int]]]:
    """300 pictures to learn from and 120 to test on, of which 24 are changed copies of the former."""
    train = [encoded(drawn(number)) for number in range(300)]
    test = [encoded(drawn(1000 + number)) for number in range(96)]
    planted = set()
    for copy in range(24):
        change = list(CHANGES.values())[copy % len(CHANGES)]
        planted.add((11 * copy, len(test)))
        test.append(change(drawn(11 * copy)))
    return {"train": looks(train), "test": looks(test)}, planted


def test_planted_copies_are_found_and_nothing_else() -> None:
    splits, planted = train_and_test()
    found = {(match.one.index, match.other.index) for match in near_duplicates(splits)}
    recall, precision = len(found & planted) / len(planted), len(found & planted) / len(found)
    assert recall >= 0.95
    assert precision >= 0.95


def test_an_image_that_was_saved_again_eight_times_is_found_all_the_same() -> None:
    """Copies do not stand out from each other: what is usual must not be taken from them."""
    copies = [encoded(drawn(7).resize((60 + 4 * number,) * 2), quality=40 + 5 * number) for number in range(8)]
    train = [*(encoded(drawn(number)) for number in range(100, 200)), *copies]
    test = [encoded(drawn(7)), *(encoded(drawn(number)) for number in range(300, 330))]
    found = {
        (match.one.index, match.other.index) for match in near_duplicates({"train": looks(train), "test": looks(test)})
    }
    assert found == {(100 + number, 0) for number in range(8)}


def test_mirrored_copies_are_found_on_request_only() -> None:
    train = [encoded(drawn(number)) for number in range(60)]
    test = [encoded(drawn(number).transpose(Image.Transpose.FLIP_LEFT_RIGHT)) for number in (3, 30)]
    splits = {"train": looks(train), "test": looks([*test, encoded(drawn(500))])}
    assert near_duplicates(splits) == []
    found = near_duplicates(splits, in_mirror=True)
    assert {(match.one.index, match.other.index, match.mirrored) for match in found} == {(3, 0, True), (30, 1, True)}


def test_within_a_split_each_pair_is_found_once() -> None:
    pictures = [encoded(drawn(number)) for number in range(40)]
    split = looks([*pictures, encoded(drawn(5), quality=60), encoded(drawn(5).resize((70, 70)))])
    assert near_duplicates({"all": split}) == []
    found = near_duplicates({"all": split}, within=True)
    assert {(match.one.index, match.other.index) for match in found} == {(5, 40), (5, 41), (40, 41)}


def test_pictures_in_like_frames_are_not_alike() -> None:
    framed = []
    for number in (1, 2):
        picture = Image.new("RGB", (96, 96), "white")
        picture.paste(drawn(number).resize((64, 64)), (16, 16))
        framed.append(encoded(picture))
    one, other = thumbnails(Pictures(framed))
    assert likeness(one[None], other[None])[0] < 0.5


def trousers(number: int) -> Image.Image:
    """A silhouette that agrees with others of its kind in all but a little."""
    rng = np.random.default_rng(number)
    picture = Image.new("L", (448, 448))  # drawn large, so that no two of them have the same edges
    pen = ImageDraw.Draw(picture)
    left, right, fork = rng.uniform(110, 170), rng.uniform(280, 340), rng.uniform(100, 200)
    pen.rectangle((left, rng.uniform(20, 50), right, rng.uniform(400, 430)), fill=int(rng.integers(120, 255)))
    pen.rectangle((210, fork, 240, 440), fill=0)
    return picture.resize((56, 56))


def test_things_that_are_all_alike_are_not_copies() -> None:
    """Silhouettes of one kind are all alike; only the copy stands out."""
    train = looks([encoded(trousers(number)) for number in range(400)])
    test = looks([*(encoded(trousers(1000 + number)) for number in range(30)), encoded(trousers(7), quality=70)])
    usual = [likeness(np.repeat(each[None], 400, axis=0), train.thumbnails).max() for each in test.thumbnails[:30]]
    assert np.mean(np.array(usual) > 0.85) > 0.9  # what pixels alone would call the same
    found = {(match.one.index, match.other.index) for match in near_duplicates({"train": train, "test": test})}
    assert (7, 30) in found
    assert len({image for _, image in found} - {30}) <= 6  # of 30 that are no copies, where pixels alone say all


def test_even_pictures_are_nobodys_copies() -> None:
    flat = looks([encoded(Image.new("RGB", (40, 40), (shade, shade, shade))) for shade in (0, 90, 255)])
    assert not flat.descriptors.any()
    assert near_duplicates({"all": flat}, within=True) == []


def test_a_model_lets_pixels_agree_less() -> None:
    """Half-turned crops that pixels alone do not call the same, and features that do, or do not."""
    train = [encoded(drawn(number)) for number in range(80)]
    changed = drawn(9).rotate(4, resample=Image.Resampling.BICUBIC)
    pixels = {"train": looks(train), "test": looks([encoded(changed)])}
    alike = likeness(pixels["test"].thumbnails, pixels["train"].thumbnails[9:10])[0]
    assert 0.65 < alike < 0.85, alike
    assert near_duplicates(pixels) == []
    rows = np.random.default_rng(0).normal(size=(80, 16)).astype(np.float32)
    for own, expected in ((rows[9] + 0.01, {(9, 0)}), (rows[10], set())):
        splits = {
            "train": Looks.of(pixels["train"].thumbnails, rows),
            "test": Looks.of(pixels["test"].thumbnails, own[None].astype(np.float32)),
        }
        assert {(match.one.index, match.other.index) for match in near_duplicates(splits)} == expected


# Descriptors and neighbours


def test_a_mirrors_descriptor_is_that_of_the_mirrored_picture() -> None:
    small = np.random.default_rng(0).integers(0, 256, (3, 32, 32), dtype=np.uint8)
    # Sums of 1,024 products of numbers to 255 in float32, as shares of their length.
    assert np.allclose(mirrored(descriptors(small)), descriptors(small[:, :, ::-1].copy()), atol=1e-5)


@pytest.mark.parametrize("hidden", ["nothing", "self", "self and before"])
def test_the_nearest_are_those_of_one_large_product(hidden, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "ROWS", 7)
    monkeypatch.setattr(neighbours, "COLUMNS", 5)
    rows = np.random.default_rng(0).normal(size=(23, 4)).astype(np.float32)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    product = unit @ unit.T
    row, column = np.indices(product.shape)
    product[{"nothing": row < 0, "self": row == column, "self and before": column <= row}[hidden]] = -2
    blocks = list(nearest(rows, rows, count=6, hidden=hidden))
    found = torch.cat([block.indices for block in blocks]).numpy()
    cosines = torch.cat([block.cosines for block in blocks]).numpy()
    wanted = np.sort(product, axis=1)[:, ::-1][:, :6]
    assert np.allclose(cosines, wanted, atol=1e-6)
    assert ((found == -1) == (wanted == -2)).all()
    assert (np.take_along_axis(product, np.maximum(found, 0), 1)[found >= 0] > -2).all()


# Labels


def clusters(images: int, *, seed: int = 0, noise: float = 0.35) -> tuple[np.ndarray, np.ndarray]:
    """Features round three centres, and which centre each is of."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, images)
    centres = np.eye(3, 12, dtype=np.float32)
    return (centres[labels] + noise * rng.normal(size=(images, 12)) / 2).astype(np.float32), labels.astype(np.int64)


def noise_looks(features: np.ndarray, *, seed: int = 0) -> Looks:
    small = np.random.default_rng(seed).integers(0, 256, (len(features), 32, 32), dtype=np.uint8)
    return Looks.of(small, features)


def test_planted_mistakes_are_found_and_little_else() -> None:
    splits, labels, planted = {}, {}, set()
    for seed, (name, images) in enumerate({"train": 600, "test": 200}.items()):
        features, true = clusters(images, seed=seed)
        flipped = np.random.default_rng(seed).choice(images, images // 20, replace=False)
        given = true.copy()
        given[flipped] = (given[flipped] + 1) % 3
        splits[name], labels[name] = noise_looks(features, seed=seed), given
        planted |= {(name, int(index)) for index in flipped}
    found = doubtful_labels(splits, labels, classes=3, voting="train")
    places = {(doubt.place.split, doubt.place.index) for doubt in found}
    assert len(places & planted) / len(planted) >= 0.9
    assert len(places & planted) / len(places) >= 0.9
    assert [doubt.score for doubt in found] == sorted((doubt.score for doubt in found), reverse=True)
    chances = label_probabilities(splits, labels, classes=3, voting="train")
    for name in splits:
        wrong = [index for split, index in planted if split == name]
        right = np.setdiff1d(np.arange(len(chances[name])), wrong)
        assert np.median(chances[name][wrong]) < 0.3 < np.median(chances[name][right])


def test_votes_are_those_of_a_slow_reference() -> None:
    features, labels = clusters(150, noise=1.2)
    found = doubtful_labels({"all": noise_looks(features)}, {"all": labels}, classes=3, voting="all", least=-1.0)
    by_index = {doubt.place.index: doubt for doubt in found}
    search = NearestNeighbors(n_neighbors=21, metric="cosine").fit(features)
    distances, indices = search.kneighbors(features)
    for index in range(150):
        others = indices[index] != index
        near, cosines = indices[index][others][:20], 1 - distances[index][others][:20]
        weights = np.exp(cosines / TEMPERATURE)
        shares = np.bincount(labels[near], weights=weights / weights.sum(), minlength=3)
        given = shares[labels[index]]
        shares[labels[index]] = -1
        doubt = by_index[index]
        # Exponentials of cosines over 0.07 in float32.
        assert doubt.score == pytest.approx(shares.max() - given, abs=1e-4)
        assert doubt.neighbours == tuple(near[:3])


def test_a_copy_with_the_same_mistake_does_not_hide_it() -> None:
    features, labels = clusters(90)
    features[1] = features[0]
    labels[:2] = (labels[0] + 1) % 3
    split = noise_looks(features)
    twins = split.thumbnails.copy()
    twins[1] = twins[0]
    found = doubtful_labels({"all": Looks.of(twins, features)}, {"all": labels}, classes=3, voting="all")
    assert {0, 1} <= {doubt.place.index for doubt in found}
    assert all(1 not in doubt.neighbours for doubt in found if doubt.place.index == 0)


def test_things_that_are_all_alike_vote_on_each_other() -> None:
    """Were they taken for copies, no mistake among them would be found."""
    features, labels = clusters(300, noise=0.1)
    given = labels.copy()
    wrong = np.flatnonzero(labels == 0)[:12]
    given[wrong] = 1
    kind = np.asarray(trousers(0).resize((32, 32)), dtype=np.float64)
    small = (kind * 0.5 + 60 + np.random.default_rng(0).normal(0, 18, (300, 32, 32))).clip(0, 255).astype(np.uint8)
    alike = likeness(np.repeat(small[:1], 299, axis=0), small[1:])
    assert 0.87 < alike.min() < alike.max() < 0.99  # what pixels alone would call the same
    found = doubtful_labels({"all": Looks.of(small, features)}, {"all": given}, classes=3, voting="all")
    places = {doubt.place.index for doubt in found}
    assert len(places & set(wrong.tolist())) >= 10  # of 12: they stand beside each other, too
    assert len(places) <= 14


def test_images_without_a_label_neither_vote_nor_are_doubted() -> None:
    features, labels = clusters(60)
    labels[::3] = -1
    found = doubtful_labels({"all": noise_looks(features)}, {"all": labels}, classes=3, voting="all", least=-1.0)
    assert {doubt.place.index for doubt in found} == set(np.flatnonzero(labels >= 0).tolist())
    assert all(labels[index] >= 0 for doubt in found for index in doubt.neighbours)


# The page and the tables


def findings() -> Findings:
    train = Pictures([encoded(drawn(number)) for number in range(3)], labels=[0, 1, 2])
    test = Pictures([encoded(drawn(0))], labels=[1], name=HOSTILE)
    match = Match(
        one=Place(split="train", index=0),
        other=Place(split="test", index=0),
        pixels=0.99,
        similarity=None,
        mirrored=False,
    )
    doubt = Doubt(
        place=Place(split="test", index=0),
        given=1,
        suggested=0,
        given_share=0.1,
        suggested_share=0.8,
        neighbours=(0, 2),
    )
    data = DataSet("place", {"train": train, "test": test})
    return Findings(data=data, matches=[match], doubts=[doubt], voting="train", model="Ti/16")


def test_the_page_shows_pictures_and_lets_nothing_run() -> None:
    page = render(findings())
    assert "<img src=x" not in page
    assert "&lt;img src=x" in page
    assert page.count("data:image/") == 2 + 3  # a pair, and an image with its two neighbours
    assert "With two labels: 1" in page


def test_tables_have_all_that_one_needs_to_act() -> None:
    found = findings()
    assert found.leaked() == {"train": 1, "test": 1}
    pairs = as_csv(found.match_rows(), MATCH_COLUMNS).decode().splitlines()
    assert pairs[1].startswith("0.png,train,cat,")
    assert pairs[1].endswith(",test,dog,0.99,,False")
    doubts = as_csv(found.doubt_rows(), DOUBT_COLUMNS).decode().splitlines()
    assert doubts[1].endswith(",test,dog,cat,0.7,0.1,0.8,,0.png,2.png,")


def test_without_a_model_the_page_says_what_is_missing() -> None:
    found = findings()
    page = render(Findings(data=found.data, matches=[], doubts=None, voting="train"))
    assert "needs a model" in page
    assert "mislabelled.csv" not in page
