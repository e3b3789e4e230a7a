"""Fixtures: one real server for all tests of routes, and a browser for tests of the page."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from server.serving import RunningServer, run_server, save_tiny_model

import vitkit

if TYPE_CHECKING:
    from server.browser import Page

HOSTILE_LABELS = ["</script><script>alert(1)</script>", "\x1b[2J\r\nX-Evil: 1", "\u202e\udcff"]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of models: pets, birds, eyes without classes, and one with hostile labels."""
    path = tmp_path_factory.mktemp("models")
    save_tiny_model(path / "pets")
    save_tiny_model(path / "birds", num_classes=5, seed=1)
    save_tiny_model(path / "eyes", num_classes=0, seed=2)
    sizes = {"depth": 1, "width": 16, "heads": 1, "mlp_dim": 16}
    hostile = vitkit.create("B/16", image_size=16, patch_size=8, num_classes=3, settings=sizes)
    vitkit.save(hostile, path / "hostile", labels=HOSTILE_LABELS)
    return path


@pytest.fixture(scope="session")
def server(models: Path) -> Iterator[RunningServer]:
    sources = (models / "pets", f"sky={models / 'birds'}", models / "eyes", models / "hostile")
    with run_server(*sources, "--access-log", "--log-format", "json") as running:
        yield running


@pytest.fixture(scope="module")
def session(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Page]":
    from server.browser import Page, chromium  # noqa: PLC0415  skips without selenium

    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield Page(driver, server.url)


@pytest.fixture
def page(session: "Page") -> "Iterator[Page]":
    from server.browser import without_side_effects  # noqa: PLC0415

    with without_side_effects(session):
        yield session
