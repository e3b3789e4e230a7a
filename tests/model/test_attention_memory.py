"""Capturing the attention of one layer takes the memory of one map, not of the maps of all layers."""

import os
import subprocess
import sys

# VmHWM is the peak of this program. On Linux a new process inherits ru_maxrss from its parent, and a test runner's is
# large.
SCRIPT = """
import pathlib, re, resource, sys, torch, vitkit
from vitkit.model.encoder import Capture

def peak():
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

torch.set_num_threads(1)
model = vitkit.create("Ti/16", image_size=1024, settings={"depth": 3}).eval()
images = torch.rand(1, 3, 1024, 1024)
before = peak()
with torch.inference_mode():
    encoded = model.encode(model.embed(images), capture=Capture(attention=LAYERS))
assert [tuple(weights.shape) for weights in encoded.attention.values()] == [(1, 3, 4097, 4097)] * len(LAYERS)
print(before, peak())
"""


def test_capturing_one_layer_takes_the_memory_of_one_map() -> None:
    def start(layers: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SCRIPT.replace("LAYERS", layers)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    def peaks(process: subprocess.Popen[str]) -> tuple[int, int]:
        output, _ = process.communicate()
        assert process.returncode == 0
        before, after = map(int, output.split())
        return after, after - before

    runs = [start("[]"), start("[1]")]  # in parallel: each takes seconds of one core
    (plain, plain_encoding), (capturing, capturing_encoding) = map(peaks, runs)
    one_map = 3 * 4097**2 * 4
    one_head = one_map // 3
    # The factor 1.5 allows for the kernel's work space, which differs between CPUs.
    assert capturing <= 1.5 * plain + one_map
    # The same without the weights and torch itself. The logits of one head and their softmax are held next to the map.
    assert capturing_encoding <= 1.5 * plain_encoding + one_map + 2 * one_head
    # The plain pass holds no map, the other one does.
    assert plain_encoding < one_map < capturing_encoding
