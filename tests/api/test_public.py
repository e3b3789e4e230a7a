"""Public names: their signatures, what importing them costs, and errors of all public functions."""

import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest
from api.signatures import MODULES, list_signatures

import vitkit
from vitkit.api.hints import MODEL, RUN, SETTING_SYNONYMS, SYNONYMS
from vitkit.api.public import public
from vitkit.core.config import find_keys
from vitkit.errors import ArgumentError, ConfigError, VitkitError

HEAVY = ("torch", "numpy", "PIL", "matplotlib", "rich", "pydantic")


def test_signatures_are_those_of_the_list() -> None:
    listed = Path(__file__).with_name("public.txt").read_text(encoding="utf-8").splitlines()
    changed = "the public API has changed: python tests/api/signatures.py > tests/api/public.txt, and CHANGELOG.md"
    assert list(list_signatures()) == listed, changed


def test_import_is_light() -> None:
    names = ", ".join(module for module in MODULES if module != "vitkit.inspection")
    code = f"import sys, vitkit; dir(vitkit), {names}; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_function_has_the_name_of_a_package() -> None:
    packages = {path.stem for path in Path(vitkit.__file__).parent.iterdir() if not path.name.startswith("_")}
    assert not packages & set(vitkit.__all__)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("create_model", "vitkit.create(name)"),
        ("from_pretrained", "vitkit.load(source)"),
        ("models", "vitkit.list_models()"),
        ("VisionTransformer", "vitkit.ViT"),
        ("evaluate_model", "did you mean evaluate?"),
        ("AutoImageProcessor", "vitkit.load(source).preprocess"),
    ],
)
def test_unknown_attribute_names_the_right_one(name: str, hint: str) -> None:
    with pytest.raises(AttributeError) as raised:
        getattr(vitkit, name)
    assert str(raised.value) == f"module 'vitkit' has no attribute {name!r}\nhint: {hint}"


@pytest.mark.parametrize(
    ("call", "message", "hint"),
    [
        (lambda: vitkit.create("B/16", classes=10), "create() has no argument 'classes'", "use num_classes=10"),
        (lambda: vitkit.create("B/16", num_labels=2), "create() has no argument 'num_labels'", "use num_classes=2"),
        (lambda: vitkit.create("B/16", img_size=96), "create() has no argument 'img_size'", "use image_size=96"),
        (lambda: vitkit.create("B/16", in_chans=1), "create() has no argument 'in_chans'", "use channels=1"),
        (lambda: vitkit.predict("run", "a.jpg", top_k=1), "predict() has no argument 'top_k'", "use top=1"),
        (lambda: vitkit.export("run", "a", format="onnx"), "export() has no argument 'format'", "use to='onnx'"),
        (lambda: vitkit.train("a", time_limit=9), "train() has no argument 'time_limit'", "use minutes=9"),
        (lambda: vitkit.evaluate("a", "b", spilt="val"), "evaluate() has no argument 'spilt'", "did you mean split?"),
        (lambda: vitkit.train("a", pretrained=True), "train() has no argument 'pretrained'", 'use init="auto"'),
        (lambda: vitkit.train("a", freeze=True), "train() has no argument 'freeze'", 'use trainable="head"'),
        (
            lambda: vitkit.train("a", weight_decay=0.1),
            "train() has no argument 'weight_decay'",
            'use settings={"optimizer.weight_decay": 0.1}',
        ),
        (
            lambda: vitkit.train("a", drop_path_rate=0.1),
            "train() has no argument 'drop_path_rate'",
            'use settings={"model.settings": ["dropout.stochastic_depth=0.1"]}',
        ),
        (
            lambda: vitkit.train("a", fp16=True),
            "train() has no argument 'fp16'",
            'use settings={"parallel.precision": …}',
        ),
        (
            lambda: vitkit.create("B/16", embed_dim=64),
            "create() has no argument 'embed_dim'",
            'use settings={"width": 64}',
        ),
        (
            lambda: vitkit.create("B/16", features_only=True),
            "create() has no argument 'features_only'",
            "use model.forward_intermediates(images)",
        ),
        (
            lambda: vitkit.load("a", num_labels=3),
            "load() has no argument 'num_labels'",
            "use vitkit.create(name, pretrained=source, num_classes=…)",
        ),
        (
            lambda: vitkit.save("a"),
            "save(): missing a required argument: 'path'",
            "the signature is save(model, path, *, labels, preprocessing)",
        ),
    ],
)
def test_wrong_argument_names_the_right_one(call, message: str, hint: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        call()
    assert str(raised.value) == f"{message}\nhint: {hint}"
    assert isinstance(raised.value, TypeError)


@pytest.mark.parametrize(
    ("call", "message", "hint"),
    [
        (lambda: vitkit.fewshot("a", "b", shots=5), "shots is not a list (got 5)", "use shots=[5]"),
        (
            lambda: vitkit.inspect("a", "b", only="rollout"),
            "only is not a list (got 'rollout')",
            "use only=['rollout']",
        ),
        (lambda: vitkit.finetune("a", "b", sweep=0.1), "sweep is not a list (got 0.1)", "use sweep=[0.1]"),
        (lambda: vitkit.save("a", "b", labels="cat"), "labels is not a list (got 'cat')", "use labels=['cat']"),
        (
            lambda: vitkit.recipe("digits").override(["lr=1"]),
            "the settings are not a mapping (got list)",
            'settings={"section.key": value}',
        ),
        (
            lambda: vitkit.recipe("digits").override({"weight_decay": 0.1}),
            "weight_decay is not a known key",
            "did you mean optimizer.weight_decay?",
        ),
    ],
)
@pytest.mark.usefixtures("without_type_checks")
def test_wrong_kind_of_value_names_the_right_one(call, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        call()
    assert str(raised.value) == f"{message}\nhint: {hint}"


def test_every_synonym_is_for_an_argument() -> None:
    arguments = {argument for line in list_signatures() for argument in SYNONYMS if f"{argument}:" in line}
    assert arguments == SYNONYMS.keys()


def test_every_synonym_is_for_a_setting() -> None:
    configs = [resolve_name(config) for config in (MODEL, RUN)]
    assert not [name for name in SETTING_SYNONYMS if not any(find_keys(config, name) for config in configs)]


@pytest.mark.parametrize(
    ("error", "amount"),
    [
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 400000 bytes."),
            "400000 bytes",
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.50 GiB."), "2.50 GiB"),
        (MemoryError(), None),
    ],
)
def test_model_too_large_for_the_memory_has_a_hint(error: Exception, amount: str | None) -> None:
    @public
    def build() -> None:
        raise error

    with pytest.raises(VitkitError, match=r"^out of memory") as caught:
        build()
    assert caught.value.hint.startswith("use a smaller model")
    assert caught.value.got == (amount and f"a request for {amount}")


def test_other_errors_are_raised_unchanged() -> None:
    @public
    def build() -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match=r"^mat1"):
        build()
