"""Start another tool in its own environment, for bench/other_tools.py; only torch is imported before the tool.

    python bench/start_tool.py SCRIPT [ARGUMENT]...            a script of the tool
    python bench/start_tool.py TOOL DATA OUT WEIGHTS LENGTH    a function of `QUICK_STARTS`

A quick start is what the tool's documentation shows first for image classification, with its defaults and seed 0. It
trains on DATA/train from WEIGHTS for LENGTH (epochs, steps or seconds), evaluates on DATA/test after that, without
choosing by it, and writes the accuracy to OUT/eval_results.json.
"""

import json
import os
import runpy
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from repair import repair_torchvision

MODEL = "deit_tiny_patch16_224"
"""timm's name of the architecture that every tool can build, except LibreYOLO."""


def list_photos(path: Path) -> list[tuple[Path, str]]:
    """Return the photos of class folders with their classes."""
    return [(file, file.parent.name) for file in sorted(path.glob("*/*"))]


def fastai(data: Path, out: Path, weights: Path, epochs: int) -> float:
    """Fine-tune one epoch of the head and then the whole model, as in fastai's quick start."""
    vision = import_module("fastai.vision.all")
    vision.set_seed(0)
    loaders = vision.ImageDataLoaders.from_folder(data, train="train", valid="test", item_tfms=vision.Resize(224))
    initial = {"pretrained_cfg_overlay": {"file": str(weights)}}
    learner = vision.vision_learner(loaders, MODEL, metrics=vision.accuracy, path=out, **initial)
    learner.fine_tune(epochs)
    return float(learner.validate()[1])


def autogluon(data: Path, out: Path, weights: Path, seconds: int) -> float:
    """Fine-tune by AutoGluon Multimodal's own time limit, on its own split into training and validation photos."""
    from_rows = import_module("pandas").DataFrame
    predictor = import_module("autogluon.multimodal").MultiModalPredictor(label="label", path=str(out / "predictor"))
    train, test = (
        from_rows([{"image": str(file), "label": name} for file, name in list_photos(data / split)])
        for split in ("train", "test")
    )
    checkpoint = write_timm_directory(weights, out / MODEL)
    predictor.fit(train, time_limit=seconds, hyperparameters={"model.timm_image.checkpoint_name": str(checkpoint)})
    return float(predictor.evaluate(test, metrics=["accuracy"])["accuracy"])


def write_timm_directory(weights: Path, path: Path) -> Path:
    """Write a model without its classifier to a directory of timm's layout."""
    path.mkdir(parents=True)
    state = {name: tensor for name, tensor in read_state(weights).items() if not name.startswith("head.")}
    torch.save(state, path / "pytorch_model.bin")
    published = import_module("timm").create_model(MODEL, num_classes=0)
    config = {"architecture": MODEL, "num_features": published.num_features, "pretrained_cfg": published.default_cfg}
    (path / "config.json").write_text(json.dumps(config))
    return path


def lightly_train(data: Path, out: Path, weights: Path, steps: int) -> float:
    """Fine-tune for a number of steps."""
    lightly = import_module("lightly_train")
    backbone = out / "backbone.pt"
    torch.save(read_state(weights), backbone)
    classes = dict(enumerate(sorted({name for _, name in list_photos(data / "train")})))
    lightly.train_image_classification(
        out=out / "run",
        model=f"timm/{MODEL}",
        model_args={"backbone_weights": str(backbone)},
        data={"train": str(data / "train"), "val": str(data / "test"), "classes": classes},
        steps=steps,
    )
    model = lightly.load_model(out / "run" / "exported_models" / "exported_last.pt")
    return match((classes[int(model.predict(file)["labels"][0])], name) for file, name in list_photos(data / "test"))


def libreyolo(data: Path, out: Path, weights: Path, epochs: int) -> float:
    """Fine-tune DINOv2-S: LibreYOLO has DeiT, but does not train it.

    WEIGHTS is a directory with facebook/dinov2-small, which transformers reads there instead of from the hub.
    """
    os.chdir(weights)
    classes = len({name for _, name in list_photos(data / "train")})
    model = import_module("libreyolo").LibreDINOv2(size="s", task="classify", nb_classes=classes)
    model.train(data=str(data), epochs=epochs, output_dir=str(out / "run"), val=False, seed=0)
    return float(model.val(data=str(data), split="test", project=str(out))["metrics/accuracy_top1"])


QUICK_STARTS: dict[str, Callable[[Path, Path, Path, int], float]] = {
    "fastai": fastai,
    "autogluon": autogluon,
    "lightly_train": lightly_train,
    "libreyolo": libreyolo,
}


def read_state(weights: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of DeiT."""
    return torch.load(weights, map_location="cpu", weights_only=True)["model"]


def match(pairs: Iterable[tuple[str, str]]) -> float:
    """Return the fraction of equal pairs.

    >>> match([("cat", "cat"), ("cat", "dog")])
    0.5
    """
    equal = [first == second for first, second in pairs]
    return sum(equal) / len(equal)


def load_metric(name: str, **_: Any) -> SimpleNamespace:
    """Return what `evaluate.load` would fetch from the hub; transformers' script only wants the accuracy."""
    return SimpleNamespace(
        compute=lambda predictions, references: {name: match(zip(predictions, references, strict=True))}
    )


def main() -> None:
    """Start a script or a function."""
    repair_torchvision()
    name = sys.argv[1]
    if name in QUICK_STARTS:
        data, out, weights = (Path(argument).absolute() for argument in sys.argv[2:5])
        out.mkdir(parents=True)
        accuracy = QUICK_STARTS[name](data, out, weights, int(sys.argv[5]))
        (out / "eval_results.json").write_text(json.dumps({"eval_accuracy": accuracy}))
        return
    if find_spec("evaluate") is not None:
        import_module("evaluate").load = load_metric  # type: ignore[attr-defined]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(name).parent)
    runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    main()
