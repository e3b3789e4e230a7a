"""What every test runs under: one thread a worker, known random numbers, and property tests of a modest size."""

import os

import pytest
import torch
from hypothesis import settings

# Models are slow to build and a laptop's clock is noisy, so no deadline. In CI the same examples run every time.
settings.register_profile("local", deadline=None, max_examples=40)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, print_blob=True)


def pytest_configure() -> None:
    settings.load_profile("ci" if os.environ.get("CI") else "local")
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # the workers share the cores: more threads would only wait for each other


@pytest.fixture(autouse=True)
def _same_random_numbers_every_time() -> None:
    torch.manual_seed(2020)
