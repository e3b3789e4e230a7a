"""ReaL accuracy, label maps and ObjectNet, against timm and slow counts."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from model_cases import small
from PIL import Image

from vitkit.core.errors import DataError
from vitkit.data.dataset import Subset
from vitkit.data.layouts.arrays import open_digits
from vitkit.data.layouts.base import FileSource
from vitkit.data.layouts.registry import open_dataset
from vitkit.data.preprocessing import Preprocessing
from vitkit.evaluation.evaluation import evaluate_logits
from vitkit.evaluation.label_maps import (
    LabelMap,
    MappedMetrics,
    imagenet_indices,
    load_label_map,
    published_label_map,
)
from vitkit.evaluation.logits import LabeledLogits
from vitkit.evaluation.protocols import (
    BorderCroppedSource,
    Protocol,
    RealMetrics,
    find_mappings,
    objectnet_label_map,
    prepare,
    read_class_names,
    read_real_labels,
)
from vitkit.weights.bundle import ModelBundle
from vitkit.zoo.imagenet import imagenet_wnids

NUMBERS = tuple(map(str, range(1000)))


@pytest.fixture
def timm_data() -> Path:
    """Return timm's data directory, without importing timm, which needs torchvision."""
    result = importlib.util.find_spec("timm")
    if result is None or not result.submodule_search_locations:
        pytest.skip("timm is not installed")
    return Path(result.submodule_search_locations[0]) / "data"


def real_file(folder: Path, labels: dict[int, list[int]]) -> Path:
    """Write a file like the published one, with labels for some image numbers from 1."""
    (folder / "real.json").write_text(json.dumps([labels.get(number, []) for number in range(1, 50_001)]))
    return folder / "real.json"


def images(names: list[str]) -> FileSource:
    return FileSource(
        Path(), layout="images", classes=NUMBERS, labels=np.zeros(len(names), dtype=np.int64), names=names
    )


def sharp(answers: list[int], *, num_classes: int = 1000) -> torch.Tensor:
    """Return logits whose largest is at each answer."""
    return torch.nn.functional.one_hot(torch.tensor(answers), num_classes).float()


def evaluate_mapped(labeled, label_map, *, batch_size=64):
    metrics = MappedMetrics(label_map, num_classes=labeled.logits.shape[1], count=len(labeled.targets))
    for batch in zip(labeled.logits.split(batch_size), labeled.targets.split(batch_size), strict=True):
        metrics.add(*batch)
    return metrics.result()


def evaluate_real(logits, *, source, labels, indices):
    metrics = RealMetrics(indices)
    for batch in logits.split(64):
        metrics.add(batch)
    return metrics.result(source, labels=labels)


# ReaL


def test_real_accuracy_equals_a_count_in_any_order(tmp_path):
    rng = np.random.default_rng(0)
    numbers = rng.choice(np.arange(1, 50_001), 300, replace=False)
    labels = {int(n): rng.choice(1000, rng.integers(0, 4), replace=False).tolist() for n in numbers}
    answers = [labels[int(n)][0] if labels[int(n)] and rng.random() < 0.6 else int(rng.integers(1000)) for n in numbers]
    names = [f"val/n{n:08}/ILSVRC2012_val_{n:08}.JPEG" for n in numbers]
    result = evaluate_real(
        sharp(answers),
        source=images(names),
        labels=read_real_labels(real_file(tmp_path, labels)),
        indices=np.arange(1000),
    )
    right = skipped = 0
    for number, answer in zip(numbers, answers, strict=True):
        skipped += labels[int(number)] == []
        right += answer in labels[int(number)]
    assert (result.count, result.skipped) == (300 - skipped, skipped)
    assert result.top1 == pytest.approx(right / (300 - skipped))
    assert result.interval[0] < result.top1 < result.interval[1]


def test_real_accuracy_equals_timm(timm_data):
    folder = timm_data
    loaded = importlib.util.spec_from_file_location("real_labels", folder / "real_labels.py")
    module = importlib.util.module_from_spec(loaded)
    loaded.loader.exec_module(module)
    published = folder / "_info" / "imagenet_real_labels.json"
    names = [f"ILSVRC2012_val_{number:08}.JPEG" for number in range(1, 50_001)]
    peer = module.RealLabelsImagenet(names, real_json=published)
    labels = read_real_labels(published)
    rng = np.random.default_rng(1)
    answers = [of[-1] if of and rng.random() < 0.5 else int(rng.integers(1000)) for of in labels]
    peer.is_correct = {1: [answer in of for answer, of in zip(answers, labels, strict=True) if of]}
    ours = evaluate_real(sharp(answers), source=images(names), labels=labels, indices=np.arange(1000))
    assert ours.count + ours.skipped == 50_000
    assert ours.top1 * 100 == pytest.approx(peer.get_accuracy(1))


def test_real_accuracy_with_another_class_order(tmp_path):
    labels = imagenet_wnids()[::-1]  # the model's class 0 is ImageNet's 999
    source = images(["ILSVRC2012_val_00000001.JPEG"])
    real = read_real_labels(real_file(tmp_path, {1: [999]}))
    assert evaluate_real(sharp([0]), source=source, labels=real, indices=imagenet_indices(labels)).top1 == 1.0
    assert evaluate_real(sharp([999]), source=source, labels=real, indices=imagenet_indices(labels)).top1 == 0.0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[1], [2]]", "not the published real.json .*got a list of 2"),
        ("{}", "not the published real.json .*got dict"),
        ("[[", "not JSON"),
        (json.dumps([[1000]] + [[]] * 49_999), "labels of image 1 "),
        (json.dumps([[]] * 49_999 + [7]), "labels of image 50000"),
    ],
)
def test_invalid_real_json_is_rejected(tmp_path, content, message):
    (tmp_path / "real.json").write_text(content)
    with pytest.raises(DataError, match=message):
        read_real_labels(tmp_path / "real.json")


@pytest.mark.parametrize("name", ["cat/1.jpg", "ILSVRC2012_val_00050001.JPEG", "ILSVRC2012_val_00000000.JPEG"])
def test_real_needs_imagenet_file_names(name):
    with pytest.raises(DataError, match="not an ImageNet validation image"):
        evaluate_real(sharp([1]), source=images([name]), labels=[[1]] * 50_000, indices=np.arange(1000))


def test_real_needs_labeled_images():
    source = images(["ILSVRC2012_val_00000001.JPEG"])
    with pytest.raises(DataError, match="none of the images has a label"):
        evaluate_real(sharp([1]), source=source, labels=[[]] * 50_000, indices=np.arange(1000))


# ImageNet's order


def test_wordnet_ids_equal_timm(timm_data):
    assert list(imagenet_wnids()) == (timm_data / "_info/imagenet_synsets.txt").read_text().split()
    assert list(imagenet_wnids()) == sorted(imagenet_wnids())


def test_imagenet_order_is_recognized_by_landmarks():
    names = [f"thing {number}" for number in range(1000)]
    with pytest.raises(DataError, match="the model's classes are not ImageNet's"):
        imagenet_indices(names)
    for path, name in {0: "tench, Tinca tinca", 1: "goldfish", 207: "Golden Retriever", 779: "school bus"}.items():
        names[path] = name
    with pytest.raises(DataError, match="not ImageNet's"):
        imagenet_indices(names)
    names[999] = "toilet tissue, toilet paper"
    assert imagenet_indices(names).tolist() == list(range(1000))
    with pytest.raises(DataError, match="not ImageNet's"):
        imagenet_indices(NUMBERS[:10])


# Published sets


def test_numeric_folders_are_read_by_value():
    classes = sorted(NUMBERS)  # as folders are listed: 0, 1, 10, 100, 101, …
    result = published_label_map("imagenet-v2", classes=classes, labels=NUMBERS)
    perfect = LabeledLogits(sharp([int(name) for name in classes]), torch.arange(1000))
    assert evaluate_mapped(perfect, result).top1 == 1.0
    trapped = LabelMap(
        name="alphabetical", classes=tuple(classes), model_classes=tuple((n,) for n in range(1000)), logits="all"
    )
    assert evaluate_mapped(perfect, trapped).top1 < 0.02  # 0, 1 and the few that stand where they belong
    assert result.warnings == ()


def test_only_logits_of_mapped_classes_compete():
    classes = (*imagenet_wnids()[5:1000:5][:199], imagenet_wnids()[0])
    actual = published_label_map("imagenet-a", classes=classes, labels=NUMBERS)
    assert actual.warnings == ()
    rng = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(400, 1000, generator=rng), torch.randint(200, (400,), generator=rng)
    result = evaluate_mapped(LabeledLogits(logits, labels), actual)
    ours = [imagenet_wnids().index(wnid) for wnid in classes]
    right = right_of_all = 0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        some = [row[number] for number in ours]
        right += some.index(max(some)) == label
        right_of_all += row.index(max(row)) == ours[label]
    assert result.top1 == pytest.approx(right / 400)
    assert right != right_of_all
    assert [each.name for each in result.per_class] == list(classes)


def test_unexpected_class_count_is_warned_about():
    result = published_label_map("imagenet-r", classes=imagenet_wnids()[:3], labels=NUMBERS)
    assert result.warnings == ("imagenet-r has 200 classes, these images have 3",)
    with pytest.raises(DataError, match="not the classes of imagenet-r: tench"):
        published_label_map("imagenet-r", classes=["tench"], labels=NUMBERS)
    with pytest.raises(DataError, match="not the classes of imagenet-v2: n01440764"):
        published_label_map("imagenet-v2", classes=["n01440764"], labels=NUMBERS)


# ObjectNet


def objectnet(place: Path) -> Path:
    """Write a small dataset in the published form."""
    mappings = place / "objectnet-1.0" / "mappings"
    mappings.mkdir(parents=True)
    places = {str(number): (number + 500) % 1000 for number in range(1000)}  # ImageNet's 0 is line 500
    names = [f"thing {(line - 500) % 1000}, stuff" for line in range(1000)]
    (mappings / "imagenet_to_label_2012_v2").write_text("\n".join(names) + "\n")
    (mappings / "pytorch_to_imagenet_2012_id.json").write_text(json.dumps(places))
    folders = {"alarm_clock": "Alarm clock", "bicycle": "Bicycle", "drill": "Drill"}
    (mappings / "folder_to_objectnet_label.json").write_text(json.dumps(folders))
    meanings = {"Alarm clock": "thing 7, stuff; thing 9, stuff", "Bicycle": "thing 30, stuff"}
    (mappings / "objectnet_to_imagenet_1k.json").write_text(json.dumps(meanings))
    for number, folder in enumerate(folders):
        (place / "objectnet-1.0/images" / folder).mkdir(parents=True)
        for index in range(2):
            pixels = np.full((12, 14, 3), 40 * number + index, dtype=np.uint8)
            pixels[:2] = pixels[-2:] = (255, 0, 0)
            pixels[:, :2] = pixels[:, -2:] = (255, 0, 0)
            Image.fromarray(pixels).save(place / f"objectnet-1.0/images/{folder}/{index}.png")
    return place / "objectnet-1.0"


def test_objectnet_label_map_from_published_files(tmp_path):
    path = objectnet(tmp_path)
    assert read_class_names(path / "mappings")["thing 7, stuff"] == 7
    data = open_dataset(path).first_split
    actual = objectnet_label_map(find_mappings(path), classes=data.classes, labels=NUMBERS)
    assert actual.model_classes == ((7, 9), (30,), ())
    remaining, left_out = actual.restrict(data)
    assert (len(remaining), left_out) == (4, 2)
    # An answer that is no class of ObjectNet's is wrong, and stands in the matrix as another.
    result = evaluate_mapped(LabeledLogits(sharp([9, 8, 30, 7]), torch.from_numpy(remaining.labels)), actual)
    assert result.top1 == 0.5
    assert result.confusion_matrix().tolist() == [[1, 0, 1], [1, 1, 0], [0, 0, 0]]
    assert result.labels == ("alarm_clock", "bicycle", "(other class)")


def test_objectnet_border_is_removed(tmp_path):
    source = BorderCroppedSource(open_dataset(objectnet(tmp_path)).first_split)
    for index in range(len(source)):
        pixels = source.read(index)
        assert pixels.shape == (8, 10, 3)
        assert (pixels == pixels[0, 0]).all()
        assert tuple(pixels[0, 0]) != (255, 0, 0)


def test_objectnet_mappings_are_found_or_reported(tmp_path):
    path = objectnet(tmp_path)
    assert find_mappings(path / "images") == path / "mappings"
    (path / "mappings/objectnet_to_imagenet_1k.json").unlink()
    with pytest.raises(DataError, match=r"has no mappings/objectnet_to_imagenet_1k\.json"):
        find_mappings(path)


def test_inconsistent_objectnet_mappings_are_rejected(tmp_path):
    path = objectnet(tmp_path)
    (path / "mappings/imagenet_to_label_2012_v2").write_text("thing 7, stuff\n")
    with pytest.raises(DataError, match="do not match"):
        read_class_names(path / "mappings")


# Maps in files


def test_label_map_file_of_indices_labels_and_wnids(tmp_path):
    labels = ("cat", "dog", "n01440764")
    (tmp_path / "map.json").write_text('{"katze": "cat", "tier": [0, "dog", 1], "stein": null, "fisch": "n01440764"}')
    result = load_label_map(tmp_path / "map.json", classes=["fisch", "katze", "stein", "tier"], labels=labels)
    assert (result.model_classes, result.logits) == (((2,), (0,), (), (0, 1)), "mapped")
    assert result.to_dict()["left_out"] == ["stein"]
    (tmp_path / "map.csv").write_text("class,model_class\ntier,cat\ntier,1\nkatze,0\n")
    assert load_label_map(tmp_path / "map.csv", classes=["katze", "tier"], labels=labels).model_classes == (
        (0,),
        (0, 1),
    )
    (tmp_path / "all.json").write_text('{"logits": "all", "classes": {"tier": 1}}')
    assert load_label_map(tmp_path / "all.json", classes=["tier"], labels=labels).logits == "all"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("map.json", '{"katze": 3}', "class that the model lacks .*got 3"),
        ("map.json", '{"katze": "owl"}', "class that the model lacks .*got owl"),
        ("map.json", '{"katze": true}', "katze"),
        ("map.json", '{"mensch": 0}', "has no class of the dataset"),
        ("map.json", "[1]", "not a label map"),
        ("map.json", "{", "not JSON"),
        ("map.json", '{"logits": "some", "classes": {"katze": 0}}', "logits .*expected mapped or all"),
        ("map.csv", "name,class\na,b\n", "not a label map"),
    ],
)
def test_invalid_label_map_is_rejected(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        load_label_map(tmp_path / name, classes=["katze"], labels=("cat", "dog"))


def test_model_class_in_two_groups_is_correct_for_both():
    both = LabelMap(name="both", classes=("bike", "tandem"), model_classes=((0,), (0, 1)), logits="all")
    result = evaluate_mapped(LabeledLogits(sharp([0, 0], num_classes=3), torch.tensor([0, 1])), both)
    assert result.top1 == 1.0
    assert np.trace(result.confusion_matrix()) == 2


def test_top5_counts_classes_of_the_model():
    """Six classes of the model are dogs and precede the one that is a cat: it is seventh, not second."""
    pets = LabelMap(name="pets", classes=("cat", "dog"), model_classes=((6,), (0, 1, 2, 3, 4, 5)), logits="mapped")
    logits = torch.arange(7, 0, -1).float()[None]
    assert evaluate_mapped(LabeledLogits(logits, torch.tensor([0])), pets).top5 == 0.0


def test_equal_logits_are_correct_by_chance_only():
    names = tuple("abcd")
    same = LabelMap(name="same", classes=names, model_classes=((0,), (1,), (2,), (3,)), logits="all")
    nothing, labels = torch.zeros(40, 4), torch.arange(40) % 4
    mapped, plain = (
        evaluate_mapped(LabeledLogits(nothing, labels), same),
        evaluate_logits(nothing, labels, labels=names),
    )
    assert mapped.top1 == plain.top1 == 0.25
    assert mapped.to_dict()["confusion"] == plain.to_dict()["confusion"]
    # One class of the data is two of the model's, and stands after the one that is answered.
    turned = LabelMap(name="turned", classes=("a", "b"), model_classes=((1, 2), (0,)), logits="all")
    result = evaluate_mapped(LabeledLogits(torch.zeros(3, 4), torch.tensor([0, 0, 1])), turned)
    assert result.top1 == pytest.approx(1 / 3)
    assert result.confusion_matrix().tolist() == [[0, 2, 0], [0, 1, 0], [0, 0, 0]]
    assert [each.recall for each in result.per_class[:2]] == [0.0, 1.0]


def test_label_map_without_common_class_is_rejected(tmp_path):
    source = open_digits().splits["test"]
    threes = Subset(source, np.flatnonzero(source.labels == 3).tolist())
    path = tmp_path / "map.json"
    path.write_text('{"4": "four"}', encoding="utf-8")
    config = small(num_classes=2)
    bundle = ModelBundle(name="two", config=config, state={}, preprocessing=Preprocessing(), labels=("four", "five"))
    with pytest.raises(DataError, match=r"map.json has none of the classes of these images \(expected 4, got 3\)"):
        prepare(Protocol(label_map=str(path)), threes, bundle=bundle, path="digits")
