"""`vitkit eval` on ImageNet's relatives and by ReaL: the publishers' layouts, evaluated as the publishers do."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from cli.tiny_runs import Shell
from model_cases import random_vit, small
from PIL import Image

from vitkit.data.layouts.registry import open_dataset
from vitkit.data.preprocessing import Preprocessing
from vitkit.evaluation.features import compute_features
from vitkit.evaluation.fewshot import LinearHead, replace_head
from vitkit.weights import artifact as artifact_io
from vitkit.weights.bundle import ModelBundle
from vitkit.zoo.imagenet import LANDMARKS, imagenet_wnids

SHARED = Path(__file__).parents[3] / "shared" / "data"

NAMES = tuple(LANDMARKS.get(number, f"thing {number}") for number in range(1000))
NUMBERS = (0, 1, 2, 9, 10, 11, 100, 101, 207, 500, 779, 999)
WNIDS = [imagenet_wnids()[number] for number in NUMBERS]


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(capsys)


def picture(path: Path, *, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)


def model_that_says(
    answers: Mapping[str, int], place: str, *, labels: tuple[str, ...] = NAMES, louder: Mapping[int, float] = {}
) -> None:
    """Save, as `model`, one of 1,000 classes that says of each image of a place, by its name, what is to be said.

    `louder` raises the logits of some classes for every image.
    """
    source = open_dataset(place).first_split
    expected = torch.tensor([answers[source.name(index)] for index in range(len(source))])
    config = small(image_size=16, num_classes=1000, width=16)
    how = Preprocessing(image_size=16, mean=(0.5,) * 3, std=(0.5,) * 3)
    plain = ModelBundle(
        name="tiny", config=config, state=random_vit(config).state_dict(), preprocessing=how, labels=labels
    )
    features = torch.tensor(np.array(compute_features(plain, source, directory=Path("features")))).double()
    rows = torch.cat([features, torch.ones(len(features), 1, dtype=torch.float64)], dim=1)
    solution = torch.linalg.pinv(rows) @ (10 * torch.nn.functional.one_hot(expected, 1000).double())
    bias = solution[-1].clone()
    for number, more in louder.items():
        bias[number] += more
    head = LinearHead(weight=solution[:-1].T.contiguous().float(), bias=bias.float())
    artifact_io.write_artifact("model", replace_head(plain, head, labels=labels, preprocessing=how))


def evaluate(shell: Shell, *arguments: object) -> dict:
    result = shell("eval", "model", *arguments, "--workers", "0", "--json")
    assert result.code == 0, result.stderr
    return result.json


def test_imagenet_v2_folders_are_numbers(shell):
    for number in NUMBERS:
        picture(Path(f"imagenetv2/{number}/a.png"), seed=number)
    model_that_says({f"{number}/a.png": number for number in NUMBERS}, "imagenetv2")
    result = shell("eval", "model", "imagenetv2", "--label-map", "imagenet-v2", "--workers", "0", "--json")
    assert (result.json["top1"], result.json["count"]) == (1.0, 12)
    assert result.json["label_map"] == {"name": "imagenet-v2", "classes": 12, "logits": "all", "left_out": []}
    assert "imagenet-v2 has 1,000 classes, these images have 12" in result.stderr
    # One that goes by the order of the folders' names takes the third, "10", for the class 2.
    trap = {f"{name}/a.png": path for path, name in enumerate(sorted(map(str, NUMBERS)))}
    model_that_says(trap, "imagenetv2")
    assert evaluate(shell, "imagenetv2", "--label-map", "imagenet-v2")["top1"] == pytest.approx(2 / 12)  # 0 and 1
    unmapped = shell("eval", "model", "imagenetv2")
    assert "does not have the class 0" in unmapped.errors[0]
    assert unmapped.hints[0].endswith("use --label-map imagenet")
    assert evaluate(shell, "imagenetv2", "--label-map", "imagenet")["count"] == 12


def test_imagenet_a_uses_only_its_classes(shell):
    for number, wnid in zip(NUMBERS, WNIDS, strict=True):
        picture(Path(f"imagenet-a/{wnid}/0.1_a.png"), seed=number)
    says = {f"{wnid}/0.1_a.png": number for number, wnid in zip(NUMBERS, WNIDS, strict=True)}
    model_that_says(says, "imagenet-a", louder={3: 1000.0})  # a class that ImageNet-A does not have
    assert evaluate(shell, "imagenet-a", "--label-map", "imagenet-a")["top1"] == 1.0
    # Without a map WordNet ids are understood too, but all of the model's classes may be its answer.
    whole = evaluate(shell, "imagenet-a")
    assert (whole["top1"], whole["label_map"]["logits"]) == (0.0, "all")
    assert whole["per_class"][-1]["name"] == "(other class)"


def test_wordnet_id_labels_in_any_order(shell):
    for number, wnid in zip(NUMBERS, WNIDS, strict=True):
        picture(Path(f"sketch/{wnid}/a.png"), seed=number)
    backwards = {f"{wnid}/a.png": 999 - number for number, wnid in zip(NUMBERS, WNIDS, strict=True)}
    model_that_says(backwards, "sketch", labels=imagenet_wnids()[::-1])
    assert evaluate(shell, "sketch", "--label-map", "imagenet-sketch")["top1"] == 1.0
    assert evaluate(shell, "sketch")["top1"] == 1.0


def validation_images() -> dict[str, int]:
    """Twelve of ImageNet's validation images in the usual folders, with the numbers of their classes."""
    answers = {}
    for path, (number, wnid) in enumerate(zip(NUMBERS, WNIDS, strict=True)):
        name = f"val/{wnid}/ILSVRC2012_val_{4000 - path:08}.JPEG"
        picture(Path("imagenet", name), seed=number)
        answers[name] = number
    return answers


def test_real_accuracy_is_added(shell):
    answers = validation_images()
    model_that_says(answers, "imagenet")
    labels: list[list[int]] = [[] for _ in range(50_000)]
    for path, number in enumerate(NUMBERS):
        # A third has the label among others, a third has another one only, and a third has none.
        labels[4000 - path - 1] = ([3, number], [3], [])[path % 3]
    Path("real.json").write_text(json.dumps(labels), encoding="utf-8")
    actual = evaluate(shell, "imagenet", "--real", "real.json")
    assert (actual["top1"], actual["count"]) == (1.0, 12)
    real = actual["real"]
    assert (real["top1"], real["count"], real["skipped"]) == (0.5, 8, 4)
    assert real["interval"][0] < 0.5 < real["interval"][1]
    result = shell("eval", "model", "imagenet", "--real", "real.json", "--workers", "0")
    assert "ReaL labels, 8 images" in result.out
    assert "4 images without labels" in result.out


@pytest.mark.parametrize("what", ["short", "other images", "no file"])
def test_invalid_real_input_is_reported_early(shell, what):
    model_that_says(validation_images(), "imagenet")
    Path("real.json").write_text(json.dumps([[1]] * (3 if what == "short" else 50_000)), encoding="utf-8")
    path, file = "imagenet", "real.json" if what != "no file" else "nothing.json"
    if what == "other images":
        for number, wnid in zip(NUMBERS, WNIDS, strict=True):
            picture(Path(f"others/{wnid}/{number}.png"), seed=number)
        path = "others"
    result = shell("eval", "model", path, "--real", file, "--workers", "0")
    assert result.code == 1
    expected = {"short": "got a list of 3", "other images": "not an ImageNet validation image"}
    assert expected.get(what, "No such file") in result.errors[0]
    assert result.hints or what == "short"


def test_label_map_file(shell):
    for number, name in enumerate(("fisch", "goldfisch", "stein")):
        picture(Path(f"tiere/{name}/a.png"), seed=number)
    model_that_says({"fisch/a.png": 2, "goldfisch/a.png": 1, "stein/a.png": 5}, "tiere")
    Path("map.csv").write_text("class,model_class\nfisch,tench\nfisch,thing 2\ngoldfisch,1\n", encoding="utf-8")
    result = shell("eval", "model", "tiere", "--label-map", "map.csv", "--workers", "0", "--json")
    assert (result.json["top1"], result.json["count"]) == (1.0, 2)
    assert result.json["label_map"]["left_out"] == ["stein"]
    assert result.json["images_left_out"] == 1
    assert "left out 1 image of classes that the model does not have: stein" in result.stderr
    wrong = shell("eval", "model", "tiere", "--label-map", "imagenet-b")
    assert "there is no label map or file called imagenet-b" in wrong.errors[0]
    assert "did you mean imagenet-" in wrong.hints[0]


def test_objectnet_as_published(shell):
    path, folders = Path("objectnet-1.0"), {"alarm_clock": "Alarm clock", "bicycle": "Bicycle", "drill": "Drill"}
    for number, name in enumerate(folders):
        picture(Path("inside", name, "a.png"), seed=number)
        bordered = Image.new("RGB", (20, 20), (255, 0, 0))
        bordered.paste(Image.open(Path("inside", name, "a.png")), (2, 2))
        (path / "images" / name).mkdir(parents=True)
        bordered.save(path / "images" / name / "a.png")
    mappings = path / "mappings"
    mappings.mkdir()
    (mappings / "folder_to_objectnet_label.json").write_text(json.dumps(folders))
    meanings = {"Alarm clock": "name 7; name 9", "Bicycle": "name 30"}
    (mappings / "objectnet_to_imagenet_1k.json").write_text(json.dumps(meanings))
    (mappings / "pytorch_to_imagenet_2012_id.json").write_text(json.dumps({n: 999 - n for n in range(1000)}))
    (mappings / "imagenet_to_label_2012_v2").write_text("".join(f"name {999 - line}\n" for line in range(1000)))
    model_that_says({"alarm_clock/a.png": 9, "bicycle/a.png": 7, "drill/a.png": 0}, "inside")
    result = shell("eval", "model", path, "--label-map", "objectnet", "--workers", "0", "--json")
    assert result.code == 0, result.stderr
    pairs = list(zip(*result.json["confusion"].values(), strict=True))
    assert (result.json["count"], pairs) == (2, [(0, 0, 1), (1, 0, 1)])
    assert result.json["label_map"]["left_out"] == ["drill"]
    assert "label map objectnet: 2 of 3 classes, all logits are used" in result.stderr
    # Without their border the pictures are those inside: what the model says of them is the same to the last bit.
    same = {"logits": "all", "classes": {"alarm_clock": [7, 9], "bicycle": 30}}
    Path("map.json").write_text(json.dumps(same), encoding="utf-8")
    assert evaluate(shell, "inside", "--label-map", "map.json")["nll"] == result.json["nll"]


@pytest.mark.skipif(not (SHARED / "photos").is_dir(), reason="the shared photos and weights are not here")
def test_published_weights_on_photos_by_both_layouts(shell):
    """A tenth of the 24 would be much by chance; names in a wrong order are right for 1 in 1,000."""
    with (SHARED / "photos/labels.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))[::42]
    for row in rows:
        for folder in (f"v2/{row['class_index']}", f"r/{row['wordnet_id']}"):
            Path(folder).mkdir(parents=True)
            Path(folder, "a.jpg").symlink_to(SHARED / "photos" / row["file_name"])
    Path("model").symlink_to(SHARED / "weights/Ti_16-augreg-imagenet.npz")
    numbers = evaluate(shell, "v2", "--label-map", "imagenet-v2")
    wnids = evaluate(shell, "r", "--label-map", "imagenet-r")
    assert numbers["count"] == wnids["count"] == len(rows) == 24
    assert numbers["top1"] > 0.6
    assert wnids["top1"] >= numbers["top1"]  # of the same answers, fewer are possible
