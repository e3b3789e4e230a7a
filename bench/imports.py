"""Import times: CPU milliseconds of a new Python process that imports a package, beyond those of an empty one.

python bench/imports.py
"""

import os
import subprocess
import sys

ROUNDS = 3
STATEMENTS = {
    "import vitkit": "import vitkit",
    "vitkit.list_models()": "import vitkit; vitkit.list_models()",
    "vitkit.create": "import vitkit; vitkit.create",
    "import torch": "import torch",
}


def measure(code: str) -> float:
    """Return the smallest CPU time of several processes in milliseconds, which other programs hardly change."""
    times = []
    for _ in range(ROUNDS):
        before = os.times()
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        times.append(after.children_user - before.children_user + after.children_system - before.children_system)
    return 1000 * min(times)


def main() -> None:
    """Print a table."""
    empty = measure("pass")
    print("| statement | CPU time |\n|---|---|")
    for name, code in STATEMENTS.items():
        print(f"| `{name}` | {measure(code) - empty:.0f} ms |")


if __name__ == "__main__":
    main()
