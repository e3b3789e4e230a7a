"""What a user types after `vitkit serve` goes in; the models by name and the settings of the server come out."""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from vitkit.core.config import apply_overrides
from vitkit.core.errors import ConfigError, check_not_negative, check_positive, did_you_mean

Precision = Literal["fp32", "bf16", "int8"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8")
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
"""What a model may be called: its name is part of addresses."""
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, kw_only=True)
class LimitsConfig:
    """What a client may use at most: numbers of things, seconds, bytes."""

    queue: int = 0
    """Images that are accepted and not yet answered, those at work included; beyond, 429, and then only what keeps the
    cores busy, half of it at most, until nobody has been refused for a while: a rush may fill it, a crowd would only
    wait in it. 0 is fifteen for each thread of our own engine and at least 30, or six batches of another."""
    batch: int = 8
    """Images that go through a model together. Our own engine takes them one by one, each on a thread, and what waits
    is shared out; on a GPU they are one product."""
    deadline: float = 10.0
    """Seconds from a request's last byte to its answer; beyond, 504."""
    receive: float = 10.0
    """Seconds to receive a whole request in, and for a client to take an answer; beyond, 408 or the end."""
    keep_alive: float = 5.0
    """Seconds that a connection may be idle between requests."""
    drain: float = 30.0
    """Seconds to answer what was accepted, once asked to stop."""
    bytes: int = 20_000_000
    """Of one request; beyond, 413."""
    buffer: int = 256_000_000
    """Bytes of all requests that are being received or wait; beyond, 429."""
    pixels: int = 50_000_000
    """Of one image, by its header; beyond, 422."""
    images: int = 16
    """In one request."""
    connections: int = 4096
    """Open at once; beyond, the one that has been silent for longest makes room."""

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = f"limits.{field.name}", getattr(self, field.name)
            if field.name == "queue":
                check_not_negative(name, value)
            else:
                check_positive(name, value)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the models run."""

    threads: int = 0
    """Threads of one batch; 0 is as many as torch takes, one for each core."""
    decoders: int = 0
    """Requests whose images are decoded at the same time, which takes memory; 0 is a quarter of the threads of our own
    engine and at least 4, or for another one for every two cores and at most 4."""
    device: str = "auto"
    """cpu, cuda, mps, or auto: a GPU where there is one."""
    merge: int = 0
    """Tokens that each layer merges into others, faster and less exact; 0 is none."""

    def __post_init__(self) -> None:
        for name in ("threads", "decoders", "merge"):
            check_not_negative(f"engine.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The settings of a server.

    `hosts` are the names by which clients may call it, besides those of this machine's loopback and its --host:
    a page elsewhere cannot make a browser talk to it under a name of its own.
    """

    hosts: tuple[str, ...] = ()
    limits: LimitsConfig = LimitsConfig()
    engine: EngineConfig = EngineConfig()


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One model: its name in addresses, the place of its weights, and the precision it runs in."""

    name: str
    place: str
    precision: Precision = "fp32"


def settings_and_models(
    arguments: Sequence[str], *, precisions: Sequence[Precision] = ("fp32",)
) -> tuple[ServeConfig, tuple[ModelConfig, ...]]:
    """The settings, `section.key=value`, and the models, `[NAME=]RUN`, among the arguments.

    The first of several precisions keeps a model's name, the others append theirs.

    >>> settings, models = settings_and_models(["limits.batch=4", "pets=runs/a"], precisions=("fp32", "int8"))
    >>> settings.limits.batch, [model.name for model in models]
    (4, ['pets', 'pets-int8'])
    """
    sections = [field.name for field in fields(ServeConfig)]
    assignments, models = [], []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and key.partition(".")[0] in sections:
            assignments.append(argument if key != "hosts" or value.startswith("[") else f"hosts={_listed(value)}")
            continue
        name, place = (key, value) if equals and not Path(argument).exists() else (_name_of(argument), argument)
        if equals and "." in key and not Path(value).exists():
            known = [f"{section}.{name}" for section in sections for name in _keys(section)]
            if hint := did_you_mean(key, known):
                raise ConfigError(f"{key} is not a known setting", hint=hint)
        if not NAME.fullmatch(name):
            raise ConfigError(
                "the name of a model is part of addresses",
                expected="letters, digits, . _ -",
                got=name,
                hint="give it one: NAME=RUN",
            )
        for number, precision in enumerate(precisions):
            models.append(
                ModelConfig(name=name if number == 0 else f"{name}-{precision}", place=place, precision=precision)
            )
    _check_distinct([model.name for model in models])
    return apply_overrides(ServeConfig(), assignments), tuple(models)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _keys(section: str) -> list[str]:
    owners: dict[str, type[LimitsConfig] | type[EngineConfig]] = {"limits": LimitsConfig, "engine": EngineConfig}
    return [field.name for field in fields(owners[section])] if section in owners else []


def _listed(value: str) -> str:
    names = [f'"{name.strip()}"' for name in value.split(",") if name.strip()]
    return f"[{', '.join(names)}]"


def _name_of(place: str) -> str:
    path = Path(place)
    return (path.name if path.is_dir() or not path.suffix else path.stem) or path.resolve().name or "model"


def _check_distinct(names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError("two models have one name", got=", ".join(twice), hint="give one another name: NAME=RUN")
