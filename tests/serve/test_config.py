"""What is typed after `vitkit serve`: models, names and settings, told from each other, and mistakes named."""

from pathlib import Path

import pytest

from vitkit.core.errors import ConfigError
from vitkit.serve.config import ServeConfig, is_loopback, settings_and_models
from vitkit.serve.gate import Hosts, route_of


def names(*arguments: str) -> list[str]:
    return [model.name for model in settings_and_models(arguments)[1]]


def test_a_model_is_called_by_its_folder_or_file_unless_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "v1.5").mkdir()
    assert names("runs/photos", "pets=runs/photos", "weights/B_16.npz") == ["photos", "pets", "B_16"]
    assert names(str(tmp_path / "v1.5")) == ["v1.5"]


def test_settings_and_models_may_be_mixed() -> None:
    settings, models = settings_and_models(["limits.queue=3", "a", "hosts=x.example,y.example", "engine.threads=2"])
    assert (settings.limits.queue, settings.engine.threads) == (3, 2)
    assert settings.hosts == ("x.example", "y.example")
    assert [model.place for model in models] == ["a"]


def test_without_settings_everything_is_as_written_down() -> None:
    assert settings_and_models(["a"])[0] == ServeConfig()


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("limits.batc=3", "limits.batch|batch"),
        ("limit.queue=3", "limits.queue"),
        ("limits.queue=-1", "negative"),
        ("limits.batch=0", "positive"),
        ("limits.queue=many", "integer"),
        ("engine.threads=-1", "negative"),
        ("a b=runs/x", "letters"),
        ("../=runs/x", "letters"),
        (".hidden=runs/x", "letters"),
        ("<script>=runs/x", "letters"),
    ],
)
def test_a_mistake_is_named(argument: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        settings_and_models([argument])
    assert any(word in f"{error.value} {error.value.hint}" for word in said.split("|"))


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="one name"):
        settings_and_models(["runs/a", "other/a"])
    with pytest.raises(ConfigError, match="one name"):
        settings_and_models(["a=x", "a-int8=y"], precisions=("fp32", "int8"))


@pytest.mark.parametrize(
    ("host", "alone"),
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
def test_only_loopback_is_loopback(host: str, alone: bool) -> None:
    assert is_loopback(host) is alone


def test_an_address_is_a_name_where_others_can_connect_and_a_strangers_name_never() -> None:
    public, private = Hosts("0.0.0.0"), Hosts("127.0.0.1")
    assert public.know(b"192.168.1.5:8000")
    assert public.know(b"[2001:db8::1]:8000")
    assert not public.know(b"evil.example")
    assert not private.know(b"192.168.1.5:8000")
    assert not private.know(b"localhost.evil.example")
    assert not private.know(b"evil.example:localhost")
    assert Hosts("127.0.0.1", ["*"]).know(b"anything")


@pytest.mark.parametrize("path", ["/x", "/v1/models/a/b", "//", "/v2/models//infer/x", "/metrics/", "/%00", "/web"])
def test_strange_paths_are_counted_as_one(path: str) -> None:
    assert route_of(path) == "other"
