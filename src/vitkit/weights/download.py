"""Download of weights in a process of its own, so that a run need not wait for it.

The threads in which huggingface_hub downloads would keep a run alive after its end until they are done.
"""

import atexit
import json
import os
import subprocess
import sys
from pathlib import Path

from vitkit.core.errors import WeightsError
from vitkit.weights.hub import announce_download, resolve_hub_name


def download(name: str) -> Path:
    """Return the path of the weights of a `hub:` name, after a child process has downloaded what is not cached.

    The child ends with this process at the latest; until then it may finish a download that nothing waits for.
    """
    if not announce_download(name):  # the hub cannot be reached
        return resolve_hub_name(name, local=True)
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "vitkit.weights.download", name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | environment,
    )
    atexit.register(process.kill)
    output, _ = process.communicate()
    atexit.unregister(process.kill)
    if process.returncode:
        raise WeightsError(f"{name}: the download ended with exit code {process.returncode}")
    result = json.loads(output)
    if "error" in result:
        raise WeightsError(result["error"], hint=result["hint"])
    return Path(result["path"])


def main() -> None:
    """Download the weights of the name in the arguments, and write their path or the error to stdout as JSON."""
    try:
        result: dict[str, str | None] = {"path": str(resolve_hub_name(sys.argv[1]))}
    except WeightsError as error:
        result = {"error": error.message, "hint": error.hint}
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main()
