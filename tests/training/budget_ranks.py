"""Script that runs a time budget on the ranks of torchrun: budget_ranks.py WEIGHTS OUT."""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from quick_runs import shorten_runs
from training.test_auto import Ticker, start

if __name__ == "__main__":
    torch.set_num_threads(1)
    shorten_runs()
    tick = 0.2 * (1 + int(os.environ["RANK"]))  # the clocks of machines differ
    assert start(sys.argv[1], Path(sys.argv[2]), clock=Ticker(tick), minutes=1.0).summary is not None
