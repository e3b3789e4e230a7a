"""What the tests of the page share: a browser on the `server` of their module, and an end without a console error."""

from collections.abc import Iterator

import pytest
from serve.browser import Page, chromium, silent
from serve.serving import Running


@pytest.fixture(scope="module")
def session(server: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield Page(driver, server.url)


@pytest.fixture
def page(session: Page) -> Iterator[Page]:
    with silent(session):
        yield session
