"""Latencies of the same arrivals without a server, as JSON: when each request was due and done.

python tests/soak/bare_arrivals.py MODEL RATE SECONDS even|random SEED PHOTO…

One thread per core takes requests in order, each from bytes to probabilities on its core: the best that a server could
do on this machine. Alternate it with S2, because machines change.
"""

import itertools
import json
import os
import sys
import threading
import time
from pathlib import Path

import torch

if __name__ == "__main__":  # as a script: the directory of this file would hide the package
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from soak.load import due_times

from vitkit.inference.engine import ThreadedEngine
from vitkit.inference.predictor import Predictor


def main() -> None:
    model, rate, seconds, arrivals, seed, *photos = sys.argv[1:]
    contents = itertools.cycle([Path(photo).read_bytes() for photo in photos])
    predictor = Predictor(model)
    if isinstance(predictor.engine, ThreadedEngine):
        predictor.engine = predictor.engine.with_threads(1)
    for content in itertools.islice(contents, 20):
        predictor([content])
    coming = iter(due_times(float(rate), seconds=float(seconds), even=arrivals == "even", seed=int(seed)))
    lock, responses, start = threading.Lock(), list[tuple[float, float]](), time.perf_counter()

    def run_thread() -> None:
        torch.set_num_threads(1)
        while True:
            with lock:
                due, content = next(coming, None), next(contents)
            if due is None:
                return
            time.sleep(max(0.0, start + due - time.perf_counter()))
            predictor([content])
            responses.append((start + due, time.perf_counter()))

    threads = [threading.Thread(target=run_thread) for _ in range(len(os.sched_getaffinity(0)))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    sys.stdout.write(json.dumps(responses) + "\n")


if __name__ == "__main__":
    main()
