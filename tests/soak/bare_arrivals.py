"""A model, a rate and photos go in; how long answers take without a server comes out, where requests come by the clock.

python tests/soak/bare_arrivals.py MODEL RATE SECONDS even|random SEED PHOTO…  prints JSON: when each was due and done.

As many threads as there are cores take what is due, first come first, each from bytes to probabilities on a core of its
own: what this machine gives a server that costs nothing itself. Compare with S2 in turns, for machines change.
"""

import itertools
import json
import os
import sys
import threading
import time
from pathlib import Path

import torch

if __name__ == "__main__":  # run as a script, this file's folder comes first, and would hide the package of its name
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from soak.load import due_times

from vitkit.engine.engine import Divisible
from vitkit.predict.predictor import Predictor


def main() -> None:
    place, rate, seconds, way, seed, *photos = sys.argv[1:]
    contents = itertools.cycle([Path(photo).read_bytes() for photo in photos])
    predictor = Predictor(place)
    if isinstance(predictor.engine, Divisible):
        predictor.engine = predictor.engine.on_threads(1)
    for content in itertools.islice(contents, 20):
        predictor([content])
    coming = iter(due_times(float(rate), seconds=float(seconds), even=way == "even", seed=int(seed)))
    lock, answers, start = threading.Lock(), list[tuple[float, float]](), time.perf_counter()

    def hand() -> None:
        torch.set_num_threads(1)
        while True:
            with lock:
                due, content = next(coming, None), next(contents)
            if due is None:
                return
            time.sleep(max(0.0, start + due - time.perf_counter()))
            predictor([content])
            answers.append((start + due, time.perf_counter()))

    hands = [threading.Thread(target=hand) for _ in range(len(os.sched_getaffinity(0)))]
    for each in hands:
        each.start()
    for each in hands:
        each.join()
    sys.stdout.write(json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
