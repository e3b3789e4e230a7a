"""A model and the shape that is wanted of it go in, the model in that shape comes out, with what was changed."""

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vitkit.cli.describing import are_numbers

if TYPE_CHECKING:
    from vitkit.checkpoints.native import Artefact
    from vitkit.core.shapes import Size
    from vitkit.zoo.variants import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is wanted of a model; None leaves it as it is. Labels say how many classes there are."""

    image_size: "Size | None" = None
    patch_size: "Size | None" = None
    channels: int | None = None
    classes: int | None = None
    labels: tuple[str, ...] | None = None
    pooling: Literal["class", "mean"] | None = None


@dataclass(frozen=True)
class Reshaped:
    """A model as it was wished for, and in words what was done to it: nothing where it was so already."""

    artefact: "Artefact"
    changes: tuple[str, ...]


def reshape(artefact: "Artefact", wish: Wish) -> Reshaped:
    """The model in the shape that is wished for, fed and labelled accordingly."""
    from vitkit.checkpoints.adapt import Feeding, Labels, adapt, fed, fed_changes
    from vitkit.checkpoints.native import Artefact
    from vitkit.zoo.lookup import name_of

    labels, only_named = new_labels(artefact.labels, wish)
    by_name = labels != artefact.labels and not only_named and wish.labels is not None and has_names(artefact)
    new_head = labels != artefact.labels and not only_named and not by_name
    config = wished(artefact.config, wish, classes=len(labels), new_head=new_head)
    pairing = Labels(old=artefact.labels, new=labels) if by_name else None
    feeding = Feeding(old=artefact.preprocessing, new=fed(artefact.preprocessing, config))
    fitted = adapt(artefact.state, old=artefact.config, new=config, new_head=new_head, labels=pairing, feeding=feeding)
    named = [f"labels: names for {len(labels):,} classes that had numbers"] if only_named else []
    made = Artefact(
        name=artefact.name if config == artefact.config else name_of(config),
        config=config,
        state=fitted.state,
        preprocessing=feeding.new,
        labels=labels,
    )
    return Reshaped(made, (*fitted.changes, *named, *fed_changes(feeding)))


def new_labels(old: tuple[str, ...], wish: Wish) -> tuple[tuple[str, ...], bool]:
    """The labels of the new model, and whether they do no more than name classes that had only numbers.

    >>> new_labels(("0", "1"), Wish(labels=("cat", "dog"))), new_labels(("cat", "dog"), Wish(classes=3))
    ((('cat', 'dog'), True), (('0', '1', '2'), False))
    """
    if wish.labels is not None:
        return wish.labels, are_numbers(old) and len(old) == len(wish.labels) and wish.labels != old
    if wish.classes is None or wish.classes == len(old):
        return old, False
    return tuple(map(str, range(wish.classes))), False


def has_names(artefact: "Artefact") -> bool:
    """Whether classes can be carried over by name: they have names, and each a row of the head, with none before it."""
    hidden = any(name.startswith("pre_logits.") for name in artefact.state)
    return bool(artefact.labels) and not are_numbers(artefact.labels) and not hidden


def wished(config: "ModelConfig", wish: Wish, *, classes: int, new_head: bool) -> "ModelConfig":
    """The configuration that is wished for. A new head is the plain one of fine-tuning (section 3.2)."""
    from vitkit.core.errors import ConfigError
    from vitkit.model.config import ViTConfig
    from vitkit.zoo.lookup import configure

    if not isinstance(config, ViTConfig) and (wish.patch_size or wish.pooling):
        raise ConfigError("a ResNet has no patches and no class token", hint="leave --patch-size and --pooling out")
    settings = []
    if wish.pooling and wish.pooling != getattr(config, "pooling", None):
        # The token goes and comes with the pooling that reads it.
        settings = [f"pooling={wish.pooling}", "tokens.class_token=none"]
    if new_head and isinstance(config, ViTConfig):
        config = replace(config, head=replace(config.head, pre_logits=None, bias=0.0))
    return configure(
        config,
        image_size=wish.image_size,
        patch_size=wish.patch_size,
        channels=wish.channels,
        classes=classes,
        settings=settings,
    )


def read_labels(path: Path) -> tuple[str, ...]:
    """The labels in a file, a JSON list or a line for each class; or those of a trained model, or of a data set."""
    from vitkit.checkpoints.native import LABELS
    from vitkit.core.errors import ConfigError

    if path.is_dir() and not (path / LABELS).is_file():
        return labels_of_images(path)
    try:
        text = (path / LABELS if path.is_dir() else path).read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        hint = "--labels names a file with a class on each line, the folder of a run, or one of images"
        raise ConfigError(f"{path}: no such file", hint=hint) from error
    except ValueError as error:
        raise ConfigError(f"{path}: not a text in UTF-8") from error
    if text.lstrip().startswith("["):
        try:
            listed = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: not a JSON list: {error}") from error
        if not all(isinstance(name, str) for name in listed):
            raise ConfigError(f"{path}: not a list of names", expected='["cat", "dog"]')
        names = tuple(listed)
    else:
        names = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not names:
        raise ConfigError(f"{path}: no labels in it", expected="a class on each line")
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"{path}: two classes are called {repeated[0]}", hint="each class needs a name of its own")
    return names


def labels_of_images(folder: Path) -> tuple[str, ...]:
    """The classes of a data set, in the order that training on it gives them."""
    from vitkit.core.errors import ConfigError
    from vitkit.data.sources.detect import open_data

    found = open_data(folder)
    if not found.classes:
        hint = "give each class a folder, or name a file with a class on each line"
        raise ConfigError(f"{folder}: its images have no classes", hint=hint)
    return tuple(found.classes)
