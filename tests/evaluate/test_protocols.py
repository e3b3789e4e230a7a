"""ReaL and label maps: the publishers' files and folders give the publishers' numbers, and nothing else passes."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitkit.core.errors import DataError
from vitkit.data.source import Subset
from vitkit.data.sources.base import FileSource
from vitkit.data.sources.detect import open_data
from vitkit.data.sources.embedded import digits
from vitkit.evaluate.accuracy import Answers
from vitkit.evaluate.judgement import judge
from vitkit.evaluate.label_maps import LabelMap, file_map, imagenet_order, imagenet_wnids, judge_mapped, published_map
from vitkit.evaluate.objectnet import WithoutBorder, imagenet_numbers, mappings_folder, objectnet_map
from vitkit.evaluate.protocols import Protocol, prepare
from vitkit.evaluate.real import read_real, real_accuracy

NUMBERS = tuple(map(str, range(1000)))


@pytest.fixture
def timm_data() -> Path:
    """Where timm keeps facts about data sets; timm itself is not imported, since that needs torchvision."""
    found = importlib.util.find_spec("timm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("timm, a comparison tool, is not here")
    return Path(found.submodule_search_locations[0]) / "data"


def real_file(folder: Path, labels: dict[int, list[int]]) -> Path:
    """A file of the published form: all images have no label but those given, by their numbers from 1."""
    (folder / "real.json").write_text(json.dumps([labels.get(number, []) for number in range(1, 50_001)]))
    return folder / "real.json"


def images(names: list[str]) -> FileSource:
    return FileSource(Path(), kind="images", classes=NUMBERS, labels=[0] * len(names), names=names)


def sharp(answers: list[int], *, classes: int = 1000) -> torch.Tensor:
    """Logits whose highest is each answer's."""
    return torch.nn.functional.one_hot(torch.tensor(answers), classes).float()


# ReaL


def test_real_accuracy_equals_a_slow_count_in_whatever_order_the_images_come(tmp_path):
    rng = np.random.default_rng(0)
    numbers = rng.choice(np.arange(1, 50_001), 300, replace=False)
    labels = {int(n): rng.choice(1000, rng.integers(0, 4), replace=False).tolist() for n in numbers}
    answers = [labels[int(n)][0] if labels[int(n)] and rng.random() < 0.6 else int(rng.integers(1000)) for n in numbers]
    names = [f"val/n{n:08}/ILSVRC2012_val_{n:08}.JPEG" for n in numbers]
    found = real_accuracy(
        sharp(answers), source=images(names), labels=read_real(real_file(tmp_path, labels)), order=np.arange(1000)
    )
    right = skipped = 0
    for number, answer in zip(numbers, answers, strict=True):
        skipped += labels[int(number)] == []
        right += answer in labels[int(number)]
    assert (found.count, found.skipped) == (300 - skipped, skipped)
    assert found.top1 == pytest.approx(right / (300 - skipped))
    assert found.interval[0] < found.top1 < found.interval[1]


def test_real_accuracy_is_timms(timm_data):
    folder = timm_data
    loaded = importlib.util.spec_from_file_location("real_labels", folder / "real_labels.py")
    module = importlib.util.module_from_spec(loaded)
    loaded.loader.exec_module(module)
    published = folder / "_info" / "imagenet_real_labels.json"
    names = [f"ILSVRC2012_val_{number:08}.JPEG" for number in range(1, 50_001)]
    peer = module.RealLabelsImagenet(names, real_json=published)
    labels = read_real(published)
    rng = np.random.default_rng(1)
    answers = [of[-1] if of and rng.random() < 0.5 else int(rng.integers(1000)) for of in labels]
    peer.is_correct = {1: [answer in of for answer, of in zip(answers, labels, strict=True) if of]}
    ours = real_accuracy(sharp(answers), source=images(names), labels=labels, order=np.arange(1000))
    assert ours.count + ours.skipped == 50_000
    assert ours.top1 * 100 == pytest.approx(peer.get_accuracy(1))


def test_real_reads_models_whose_classes_stand_in_another_order(tmp_path):
    labels = imagenet_wnids()[::-1]  # the model's class 0 is ImageNet's 999
    source = images(["ILSVRC2012_val_00000001.JPEG"])
    real = read_real(real_file(tmp_path, {1: [999]}))
    assert real_accuracy(sharp([0]), source=source, labels=real, order=imagenet_order(labels)).top1 == 1.0
    assert real_accuracy(sharp([999]), source=source, labels=real, order=imagenet_order(labels)).top1 == 0.0


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
def test_another_file_than_reals_is_refused(tmp_path, content, message):
    (tmp_path / "real.json").write_text(content)
    with pytest.raises(DataError, match=message):
        read_real(tmp_path / "real.json")


@pytest.mark.parametrize("name", ["cat/1.jpg", "ILSVRC2012_val_00050001.JPEG", "ILSVRC2012_val_00000000.JPEG"])
def test_other_images_than_imagenets_have_no_real_labels(name):
    with pytest.raises(DataError, match="no image of ImageNet's validation set"):
        real_accuracy(sharp([1]), source=images([name]), labels=[[1]] * 50_000, order=np.arange(1000))


def test_images_that_nobody_gave_a_label_are_no_ground_to_judge_on():
    source = images(["ILSVRC2012_val_00000001.JPEG"])
    with pytest.raises(DataError, match="none of the images has a label"):
        real_accuracy(sharp([1]), source=source, labels=[[]] * 50_000, order=np.arange(1000))


# ImageNet's order


def test_the_wordnet_ids_are_timms_and_in_order(timm_data):
    assert list(imagenet_wnids()) == (timm_data / "_info/imagenet_synsets.txt").read_text().split()
    assert list(imagenet_wnids()) == sorted(imagenet_wnids())


def test_names_are_in_imagenets_order_only_where_that_can_be_seen():
    names = [f"thing {number}" for number in range(1000)]
    with pytest.raises(DataError, match="the model's classes are not ImageNet's"):
        imagenet_order(names)
    for place, name in {0: "tench, Tinca tinca", 1: "goldfish", 207: "Golden Retriever", 779: "school bus"}.items():
        names[place] = name
    with pytest.raises(DataError, match="not ImageNet's"):
        imagenet_order(names)
    names[999] = "toilet tissue, toilet paper"
    assert imagenet_order(names).tolist() == list(range(1000))
    with pytest.raises(DataError, match="not ImageNet's"):
        imagenet_order(NUMBERS[:10])


# Published sets


def test_numeric_folders_are_read_by_their_value_not_in_the_order_of_their_names():
    classes = sorted(NUMBERS)  # as folders are listed: 0, 1, 10, 100, 101, …
    found = published_map("imagenet-v2", classes=classes, labels=NUMBERS)
    perfect = Answers(sharp([int(name) for name in classes]), torch.arange(1000))
    assert judge_mapped(perfect, found).top1 == 1.0
    trapped = LabelMap(name="alphabetical", classes=tuple(classes), means=tuple((n,) for n in range(1000)), read="all")
    assert judge_mapped(perfect, trapped).top1 < 0.02  # 0, 1 and the few that stand where they belong
    assert found.warnings == ()


def test_only_the_logits_of_the_sets_classes_are_read():
    classes = (*imagenet_wnids()[5:1000:5][:199], imagenet_wnids()[0])
    found = published_map("imagenet-a", classes=classes, labels=NUMBERS)
    assert found.warnings == ()
    rng = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(400, 1000, generator=rng), torch.randint(200, (400,), generator=rng)
    judged = judge_mapped(Answers(logits, labels), found)
    ours = [imagenet_wnids().index(wnid) for wnid in classes]
    right = right_of_all = 0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        some = [row[number] for number in ours]
        right += some.index(max(some)) == label
        right_of_all += row.index(max(row)) == ours[label]
    assert judged.top1 == pytest.approx(right / 400)
    assert right != right_of_all
    assert [each.name for each in judged.per_class] == list(classes)


def test_another_number_of_classes_than_published_is_told():
    found = published_map("imagenet-r", classes=imagenet_wnids()[:3], labels=NUMBERS)
    assert found.warnings == ("imagenet-r has 200 classes, these images have 3",)
    with pytest.raises(DataError, match="not the folders of imagenet-r: tench"):
        published_map("imagenet-r", classes=["tench"], labels=NUMBERS)
    with pytest.raises(DataError, match="not the folders of imagenet-v2: n01440764"):
        published_map("imagenet-v2", classes=["n01440764"], labels=NUMBERS)


# ObjectNet


def objectnet(place: Path) -> Path:
    """The publisher's folder in small: names in the order of the challenge's numbers, and what these are."""
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


def test_objectnets_files_say_which_answers_are_right(tmp_path):
    place = objectnet(tmp_path)
    assert imagenet_numbers(place / "mappings")["thing 7, stuff"] == 7
    data = open_data(place).first
    found = objectnet_map(mappings_folder(place), classes=data.classes, labels=NUMBERS)
    assert found.means == ((7, 9), (30,), ())
    kept, left_out = found.covered(data)
    assert (len(kept), left_out) == (4, 2)
    # An answer that is no class of ObjectNet's is wrong, and stands in the matrix as another.
    judged = judge_mapped(Answers(sharp([9, 8, 30, 7]), torch.from_numpy(kept.labels)), found)
    assert judged.top1 == 0.5
    assert judged.confusion.tolist() == [[1, 0, 1], [1, 1, 0], [0, 0, 0]]
    assert judged.classes == ("alarm_clock", "bicycle", "(another class)")


def test_objectnets_red_border_never_reaches_the_model(tmp_path):
    source = WithoutBorder(open_data(objectnet(tmp_path)).first)
    for index in range(len(source)):
        pixels = source.content(index)
        assert pixels.shape == (8, 10, 3)
        assert (pixels == pixels[0, 0]).all()
        assert tuple(pixels[0, 0]) != (255, 0, 0)


def test_the_mappings_may_lie_beside_the_images_and_must_be_there(tmp_path):
    place = objectnet(tmp_path)
    assert mappings_folder(place / "images") == place / "mappings"
    (place / "mappings/objectnet_to_imagenet_1k.json").unlink()
    with pytest.raises(DataError, match=r"has no mappings/objectnet_to_imagenet_1k\.json"):
        mappings_folder(place)


def test_mappings_that_do_not_fit_together_are_refused(tmp_path):
    place = objectnet(tmp_path)
    (place / "mappings/imagenet_to_label_2012_v2").write_text("thing 7, stuff\n")
    with pytest.raises(DataError, match="do not fit together"):
        imagenet_numbers(place / "mappings")


# Maps in files


def test_a_map_may_be_a_file_of_numbers_labels_and_wordnet_ids(tmp_path):
    labels = ("cat", "dog", "n01440764")
    (tmp_path / "map.json").write_text('{"katze": "cat", "tier": [0, "dog", 1], "stein": null, "fisch": "n01440764"}')
    found = file_map(tmp_path / "map.json", classes=["fisch", "katze", "stein", "tier"], labels=labels)
    assert (found.means, found.read) == (((2,), (0,), (), (0, 1)), "mapped")
    assert found.to_json()["left_out"] == ["stein"]
    (tmp_path / "map.csv").write_text("class,model_class\ntier,cat\ntier,1\nkatze,0\n")
    assert file_map(tmp_path / "map.csv", classes=["katze", "tier"], labels=labels).means == ((0,), (0, 1))
    (tmp_path / "all.json").write_text('{"logits": "all", "classes": {"tier": 1}}')
    assert file_map(tmp_path / "all.json", classes=["tier"], labels=labels).read == "all"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("map.json", '{"katze": 3}', "class that the model lacks .*got 3"),
        ("map.json", '{"katze": "owl"}', "class that the model lacks .*got owl"),
        ("map.json", '{"katze": true}', "katze"),
        ("map.json", '{"mensch": 0}', "names no class of the data"),
        ("map.json", "[1]", "no label map"),
        ("map.json", "{", "not JSON"),
        ("map.json", '{"logits": "some", "classes": {"katze": 0}}', "logits .*expected mapped or all"),
        ("map.csv", "name,class\na,b\n", "no label map"),
    ],
)
def test_a_map_with_a_mistake_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        file_map(tmp_path / name, classes=["katze"], labels=("cat", "dog"))


def test_an_answer_that_means_two_classes_is_right_for_both():
    both = LabelMap(name="both", classes=("bike", "tandem"), means=((0,), (0, 1)), read="all")
    judged = judge_mapped(Answers(sharp([0, 0], classes=3), torch.tensor([0, 1])), both)
    assert judged.top1 == 1.0
    assert np.trace(judged.confusion) == 2


def test_top_5_are_five_of_the_models_classes():
    """Six classes of the model mean dog, and stand before the one that means cat: it is seventh, not second."""
    pets = LabelMap(name="pets", classes=("cat", "dog"), means=((6,), (0, 1, 2, 3, 4, 5)), read="mapped")
    logits = torch.arange(7, 0, -1).float()[None]
    assert judge_mapped(Answers(logits, torch.tensor([0])), pets).top5 == 0.0


def test_a_model_that_says_nothing_is_right_by_chance_alone_and_all_numbers_agree():
    names = tuple("abcd")
    same = LabelMap(name="same", classes=names, means=((0,), (1,), (2,), (3,)), read="all")
    nothing, labels = torch.zeros(40, 4), torch.arange(40) % 4
    mapped, plain = judge_mapped(Answers(nothing, labels), same), judge(nothing, labels, classes=names)
    assert mapped.top1 == plain.top1 == 0.25
    assert mapped.confusion.tolist() == plain.confusion.tolist()
    # One class of the data is two of the model's, and stands after the one that is answered.
    turned = LabelMap(name="turned", classes=("a", "b"), means=((1, 2), (0,)), read="all")
    judged = judge_mapped(Answers(torch.zeros(3, 4), torch.tensor([0, 0, 1])), turned)
    assert judged.top1 == pytest.approx(1 / 3)
    assert judged.confusion.tolist() == [[0, 2, 0], [0, 1, 0], [0, 0, 0]]
    assert [each.recall for each in judged.per_class[:2]] == [0.0, 1.0]


def test_a_map_of_no_class_that_the_images_are_of_is_refused(tmp_path):
    source = digits().splits["test"]
    threes = Subset(source, np.flatnonzero(source.labels == 3).tolist())
    path = tmp_path / "map.json"
    path.write_text('{"4": "four"}', encoding="utf-8")
    with pytest.raises(DataError, match=r"map.json names no class that these images are of \(expected 4, got 3\)"):
        prepare(Protocol(label_map=str(path)), threes, labels=("four", "five"), place="digits")
