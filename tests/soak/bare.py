"""Cost of predictions without a server: images, seconds and CPU seconds, as one line of JSON.

python tests/soak/bare.py MODEL BATCH SECONDS PHOTO…

It is a process of its own, so that its threads are configured like the server's and nothing else is counted.
"""

import itertools
import json
import sys
import time
from pathlib import Path

from vitkit.inference.predictor import Predictor

WARM_UP = 5
"""Batches before the measurement."""


def main() -> None:
    model, batch, seconds, *photos = sys.argv[1:]
    contents = itertools.cycle([Path(photo).read_bytes() for photo in photos])
    predictor, size = Predictor(model, batch_size=int(batch)), int(batch)
    for _ in range(WARM_UP):
        predictor(list(itertools.islice(contents, size)))
    images, start, spent = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - start < float(seconds):
        images += len(predictor(list(itertools.islice(contents, size))))
    taken, cpu = time.perf_counter() - start, time.process_time() - spent
    sys.stdout.write(json.dumps({"images": images, "seconds": taken, "cpu": cpu}) + "\n")


if __name__ == "__main__":
    main()
