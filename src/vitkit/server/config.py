"""Settings of the server, and the parser for the arguments of `vitkit serve`."""

import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from vitkit.core.config import apply_settings, parse_assignments
from vitkit.core.errors import ConfigError, check_not_negative, check_positive, did_you_mean
from vitkit.core.formatting import LogFormat
from vitkit.typing import Settings

Precision = Literal["fp32", "bf16", "int8"]
MODEL_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
"""Model names are part of URLs."""
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
TOKEN_VARIABLE = "VITKIT_TOKEN"
"""Environment variable with the token; child processes do not get it."""


@dataclass(frozen=True, kw_only=True)
class LimitsConfig:
    """Limits on what clients may use: seconds, bytes and counts."""

    target_delay: float = 0.5
    """Seconds that an accepted request should wait in the queue at most; requests beyond that are rejected with 429."""
    batch: int = 8
    """Images processed together. vitkit's CPU engine processes one image per thread instead."""
    deadline: float = 10.0
    """Seconds from a request's last byte to its response; then 504."""
    receive: float = 10.0
    """Seconds to receive a complete request, and for a client to read a response; then 408 or a closed connection."""
    keep_alive: float = 5.0
    """Seconds that a connection may be idle between requests."""
    drain: float = 30.0
    """Seconds to answer accepted requests after a stop was requested."""
    bytes: int = 20_000_000
    """Bytes of one request body; more are rejected with 413."""
    buffer: int = 256_000_000
    """Bytes of all request bodies in memory; more are rejected with 429."""
    pixels: int = 50_000_000
    """Pixels of one image according to its header; more are rejected with 422."""
    images: int = 16
    """Images per request."""
    connections: int = 4096
    """Open connections; beyond that the connection that was idle for longest is closed."""

    def __post_init__(self) -> None:
        for field in fields(self):
            check_positive(f"limits.{field.name}", getattr(self, field.name))


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of the inference engine."""

    threads: int = 0
    """CPU threads; 0 means one per usable core."""
    decoders: int = 0
    """Requests whose images are decoded at the same time, which takes memory; 0 chooses by the number of threads."""
    device: str = "auto"
    """cpu, cuda, mps, or auto: a GPU if there is one."""
    merge: int = 0
    """Tokens merged per layer: faster and less exact."""

    def __post_init__(self) -> None:
        for name in ("threads", "decoders", "merge"):
            check_not_negative(f"engine.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Settings of a server.

    `hosts` lists the host names that clients may use in addition to loopback and --host. Other names are rejected, so
    that a foreign web page cannot reach the server through DNS rebinding.
    """

    hosts: tuple[str, ...] = ()
    limits: LimitsConfig = LimitsConfig()
    engine: EngineConfig = EngineConfig()


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A served model: its name in URLs, the path of its weights, and its precision."""

    name: str
    source: str
    precision: Precision = "fp32"


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """All options of a server.

    A shared socket is one that other servers listen on too: this one accepts connections only when its models are
    ready.
    """

    models: Sequence[ModelConfig]
    config: ServeConfig
    host: str = "127.0.0.1"
    token: str | None = None
    runs: Path | None = None
    calibration: str | None = None
    access_log: bool = False
    log_format: LogFormat = "text"
    shares_socket: bool = False


SECTIONS: dict[str, type[LimitsConfig] | type[EngineConfig]] = {"limits": LimitsConfig, "engine": EngineConfig}


class TokenError(ConfigError):
    """A token that is missing or invalid."""


def parse_arguments(arguments: Sequence[str]) -> tuple[dict[str, str], dict[str, object]]:
    """Return the models (`[NAME=]RUN`) by name and the settings (`section.key=value`) of a command line.

    >>> parse_arguments(["pets=runs/a", "runs/photos"])
    ({'pets': 'runs/a', 'photos': 'runs/photos'}, {})
    """
    overrides, models = [], dict[str, str]()
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and key.partition(".")[0] in (*SECTIONS, "hosts"):
            hosts = json.dumps([name.strip() for name in value.split(",") if name.strip()])
            overrides.append(f"hosts={hosts}" if key == "hosts" and value[:1] != "[" else argument)
            continue
        has_name = equals and not Path(argument).exists()
        name, source = (key, value) if has_name else (default_name(argument), argument)
        if name in models:
            raise ConfigError("duplicate model name", got=name, hint="choose another name: NAME=RUN")
        models[name] = source
    return models, parse_assignments(overrides)


def configure_server(
    models: Mapping[str, str], settings: Settings, *, precisions: Sequence[Precision] = ("fp32",)
) -> tuple[ServeConfig, tuple[ModelConfig, ...]]:
    """Return the configuration of a server, and each model in each precision.

    With several precisions, the first keeps the model's name and the others are appended to it.

    >>> config, models = configure_server({"pets": "runs/a"}, {"limits.batch": 4}, precisions=("fp32", "int8"))
    >>> config.limits.batch, [model.name for model in models]
    (4, ['pets', 'pets-int8'])
    """
    configs: dict[str, ModelConfig] = {}
    for model, source in models.items():
        _check_model_name(model, source)
        for number, precision in enumerate(precisions):
            name = f"{model}-{precision}" if number else model
            if name in configs or (number and name in models):
                raise ConfigError("duplicate model name", got=name, hint="choose another name: NAME=RUN")
            configs[name] = ModelConfig(name=name, source=source, precision=precision)
    return apply_settings(ServeConfig(), settings), tuple(configs.values())


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_model_name(name: str, source: str) -> None:
    if "." in name and not Path(source).exists():
        settings = [f"{section}.{field.name}" for section, config in SECTIONS.items() for field in fields(config)]
        if hint := did_you_mean(name, settings):
            raise ConfigError(f"unknown setting {name}", hint=hint)
    if not MODEL_NAME.fullmatch(name):
        hint = "choose a name: NAME=RUN"
        raise ConfigError("invalid model name", expected="letters, digits, . _ -", got=name, hint=hint)


def default_name(source: str) -> str:
    """Return the name of a model that has none: that of its directory or file."""
    path = Path(source)
    return (path.name if path.is_dir() or not path.suffix else path.stem) or path.resolve().name or "model"
