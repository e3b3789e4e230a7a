"""Fixtures of the public functions: a stand-in for the Hugging Face hub."""

from pathlib import Path

import pytest
from hub_cache import make_hub_cache


@pytest.fixture(scope="session")
def hub_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    return make_hub_cache(tmp_path_factory.mktemp("published"))


@pytest.fixture
def hub(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a cache of the hub with three models, without a network."""
    monkeypatch.setenv("HF_HUB_CACHE", str(hub_cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
