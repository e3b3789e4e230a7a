"""Arguments of `vitkit serve`: models, names and settings; host names and routes."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from vitkit.core.errors import ConfigError
from vitkit.inference.engine import Precision
from vitkit.server.clock import RunningClock
from vitkit.server.config import (
    LimitsConfig,
    ModelConfig,
    ServeConfig,
    ServerOptions,
    configure_server,
    is_loopback,
    parse_arguments,
)
from vitkit.server.metrics import Metrics
from vitkit.server.middleware import ROUTES, AllowedHosts, match_route
from vitkit.server.queue import RequestQueue
from vitkit.server.routes import create_app
from vitkit.server.supervisor import Supervisor


def parse(
    arguments: Sequence[str], *, precisions: Sequence[Precision] = ("fp32",)
) -> tuple[ServeConfig, tuple[ModelConfig, ...]]:
    """Return settings and models, as the command passes them on."""
    return configure_server(*parse_arguments(arguments), precisions=precisions)


def names(*arguments: str) -> list[str]:
    return [model.name for model in parse(arguments)[1]]


def test_model_name_defaults_to_directory_or_file(tmp_path: Path) -> None:
    (tmp_path / "v1.5").mkdir()
    assert names("runs/photos", "pets=runs/photos", "weights/B_16.npz") == ["photos", "pets", "B_16"]
    assert names(str(tmp_path / "v1.5")) == ["v1.5"]


def test_settings_and_models_may_be_mixed() -> None:
    settings, models = parse(["limits.batch=3", "a", "hosts=x.example,y.example", "engine.threads=2"])
    assert (settings.limits.batch, settings.engine.threads) == (3, 2)
    assert settings.hosts == ("x.example", "y.example")
    assert [model.source for model in models] == ["a"]


def test_default_settings_are_used() -> None:
    assert parse(["a"])[0] == ServeConfig()


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("limits.batc=3", "limits.batch|batch"),
        ("limit.batch=3", "limits.batch"),
        ("limits.target_delay=-1", "positive"),
        ("limits.batch=0", "positive"),
        ("limits.batch=many", "integer"),
        ("engine.threads=-1", "negative"),
        ("a b=runs/x", "letters"),
        ("../=runs/x", "letters"),
        (".hidden=runs/x", "letters"),
        ("<script>=runs/x", "letters"),
    ],
)
def test_wrong_argument_is_an_error_with_hint(argument: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse([argument])
    assert any(word in f"{error.value} {error.value.hint}" for word in words.split("|"))


def test_duplicate_names_are_an_error() -> None:
    with pytest.raises(ConfigError, match="duplicate model name"):
        parse(["runs/a", "other/a"])
    with pytest.raises(ConfigError, match="duplicate model name"):
        parse(["a=x", "a-int8=y"], precisions=("fp32", "int8"))


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("", False),
        ("localhost.evil.example", False),
        ("::ffff:10.0.0.1", False),
    ],
)
def test_only_loopback_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_addresses_are_allowed_if_other_machines_can_connect() -> None:
    public, private = AllowedHosts("0.0.0.0"), AllowedHosts("127.0.0.1")
    assert public.matches(b"192.168.1.5:8000")
    assert public.matches(b"[2001:db8::1]:8000")
    assert not public.matches(b"evil.example")
    assert not private.matches(b"192.168.1.5:8000")
    assert not private.matches(b"localhost.evil.example")
    assert not private.matches(b"evil.example:localhost")
    assert AllowedHosts("127.0.0.1", ["*"]).matches(b"anything")


def test_middleware_lets_exactly_the_routes_pass() -> None:
    options, queue = ServerOptions(models=[], config=ServeConfig()), RequestQueue(LimitsConfig(), metrics=Metrics())
    app = create_app(Supervisor(options, queue=queue, clock=RunningClock()))
    assert set(app.openapi()["paths"]) | {"/", "/docs", "/openapi.json", "/web/{name}"} == ROUTES


@pytest.mark.parametrize("path", ["/x", "/v1/models/a/b", "//", "/v2/models//infer/x", "/metrics/", "/%00", "/web"])
def test_unknown_paths_share_one_label(path: str) -> None:
    assert match_route(path) == "other"
