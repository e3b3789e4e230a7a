"""Looking at one layer's attention costs that layer's map, not the maps of all layers."""

import os
import subprocess
import sys

# VmHWM is the most that this program ever held. ru_maxrss would do elsewhere, but on Linux a new process takes its
# parent's over, and a test runner's is large.
SCRIPT = """
import pathlib, re, resource, sys, torch, vitkit
from vitkit.model.encoder import Keep

def peak():
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

torch.set_num_threads(1)
model = vitkit.create("B/16", image_size=1024).eval()
images = torch.rand(1, 3, 1024, 1024)
before = peak()
with torch.inference_mode():
    encoded = model.encode(model.embed(images), keep=Keep(attention=KEEP))
assert [tuple(weights.shape) for weights in encoded.attention.values()] == [(1, 12, 4097, 4097)] * len(KEEP)
print(before, peak())
"""


def test_keeping_one_layers_attention_at_1024_pixels_costs_one_map() -> None:
    def start(keep: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SCRIPT.replace("KEEP", keep)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    def peaks(process: subprocess.Popen[str]) -> tuple[int, int]:
        output, _ = process.communicate()
        assert process.returncode == 0
        before, after = map(int, output.split())
        return after, after - before

    runs = [start("[]"), start("[5]")]  # beside each other: each takes half a minute of one core
    (plain, plain_encoding), (keeping, keeping_encoding) = map(peaks, runs)
    one_map = 12 * 4097**2 * 4
    # The kernel is free in how it splits work, and one head's logits stand beside the map while it is made: 1.5.
    assert keeping <= 1.5 * plain + one_map
    # The same without what every process holds anyway, the weights and torch itself.
    assert keeping_encoding <= 1.5 * plain_encoding + one_map
    # The plain pass has no map in it at all, and the other one has.
    assert plain_encoding < one_map < keeping_encoding
