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
    from vitkit.data.transforms import Preprocessing
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
    from vitkit.checkpoints.adapt import Labels, adapt
    from vitkit.checkpoints.native import Artefact
    from vitkit.zoo.lookup import name_of

    labels, only_named = new_labels(artefact.labels, wish)
    by_name = labels != artefact.labels and not only_named and wish.labels is not None and has_names(artefact)
    new_head = labels != artefact.labels and not only_named and not by_name
    config = wished(artefact.config, wish, classes=len(labels), new_head=new_head)
    pairing = Labels(old=artefact.labels, new=labels) if by_name else None
    fitted = adapt(artefact.state, old=artefact.config, new=config, new_head=new_head, labels=pairing)
    named = [f"labels: names for {len(labels):,} classes that had numbers"] if only_named else []
    feeding = fed(artefact.preprocessing, config)
    made = Artefact(
        name=artefact.name if config == artefact.config else name_of(config),
        config=config,
        state=fitted.state,
        preprocessing=feeding,
        labels=labels,
    )
    return Reshaped(made, (*fitted.changes, *named, *feeding_changes(artefact.preprocessing, feeding)))


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
    """Whether classes can be carried over by name: they have names, and each a row of one linear layer."""
    rows = {name for name in artefact.state if name.startswith(("head.", "pre_logits."))}
    return not are_numbers(artefact.labels) and rows == {"head.weight", "head.bias"}


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


def fed(old: "Preprocessing", config: "ModelConfig") -> "Preprocessing":
    """The preprocessing at the model's size; other channels all have the mean of the old ones."""
    from vitkit.core.shapes import pair

    found = old if pair(old.image_size) == pair(config.image_size) else replace(old, image_size=config.image_size)
    if config.channels == found.channels:
        return found
    mean, deviation = (sum(numbers) / len(numbers) for numbers in (found.mean, found.deviation))
    return replace(found, channels=config.channels, mean=(mean,), deviation=(deviation,))


def feeding_changes(old: "Preprocessing", new: "Preprocessing") -> list[str]:
    """What became of the preprocessing, in words."""
    from vitkit.cli.describing import sides

    changes = []
    if old.image_size != new.image_size:
        changes.append(f"preprocessing: images of {sides(old.image_size)} → {sides(new.image_size)}")
    if old.channels != new.channels:
        changes.append(f"preprocessing: {old.channels} channels → {new.channels}, of one mean and deviation")
    return changes


def read_labels(path: Path) -> tuple[str, ...]:
    """The labels in a file: a JSON list, or a line for each class."""
    from vitkit.core.errors import ConfigError

    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file", hint="--labels names a file with a class on each line") from error
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
