"""Campaign for guarantee R4: damaged checkpoints."""

import random
import shutil
from pathlib import Path

import torch
from soak.faults import Finding, expect_same, finish, run_undisturbed
from soak.victim import Launcher, Run, until

from vitkit.training.checkpoint import Checkpoints, LoadedCheckpoint

FILES = ("state.safetensors", "state.json", "checksums.json")


def damaged_checkpoints(
    launcher: Launcher, folder: Path, *, count: int, runs: int, seed: int = 0, reference: Run | None = None
) -> Finding:
    """R4: truncate, flip a bit of, or remove files; the previous checkpoint is loaded, and the damage is named.

    `count` of each kind are checked with the loader of checkpoints, and `runs` with whole commands.
    """
    finding = Finding(
        "R4 damaged checkpoint", {"truncations": 0, "bit flips": 0, "missing files": 0, "runs compared": 0}
    )
    chance = random.Random(seed)
    reference = reference or run_undisturbed(launcher, folder / "reference")
    interrupted = Run(folder / "interrupted")
    victim = launcher.start(interrupted)
    until(lambda: interrupted.last_step() >= 30, victim)
    victim.send(15)
    victim.wait()
    newest = interrupted.steps()[-1]
    checkpoints = Checkpoints(interrupted.checkpoints)
    path = interrupted.checkpoints / f"step-{newest:08d}"
    shutil.copytree(path, folder / "whole")
    path.rename(folder / "aside")
    expected = checkpoints.load_newest()
    (folder / "aside").rename(path)
    assert expected is not None
    for number in range(2 * count + len(FILES)):
        file = FILES[number % len(FILES)] if number >= 2 * count else chance.choice(FILES)
        kind = "missing files" if number >= 2 * count else ("truncations", "bit flips")[number % 2]
        harm(path / file, folder / "whole" / file, kind, chance)
        finding.count(kind)
        falls_back(finding, checkpoints.load_newest(), expected, f"{kind}, {file}")
        shutil.copyfile(folder / "whole" / file, path / file)
    for number in range(runs):
        run = Run(folder / f"damaged-{number}")
        shutil.copytree(interrupted.path, run.path)
        file = FILES[number % len(FILES)]
        kind = ("truncations", "bit flips", "missing files")[number // 3 % 3]
        harm(run.checkpoints / path.name / file, folder / "whole" / file, kind, chance)
        again = launcher.start(run)
        finding.expect(again.wait(600) == 0, f"run {number} did not finish")
        finding.expect(path.name in again.words(), f"run {number} does not name what is damaged")
        finish(launcher, run)
        expect_same(finding, run, reference)
    return finding


def harm(path: Path, whole: Path, kind: str, chance: random.Random) -> None:
    """Truncate a file, flip one of its bits, or remove it."""
    content = bytearray(whole.read_bytes())
    if kind == "missing files":
        path.unlink()
        return
    if kind == "truncations":
        del content[chance.randrange(len(content) - 1) :]  # checksums are complete without the last newline
    else:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def falls_back(finding: Finding, found: LoadedCheckpoint | None, expected: LoadedCheckpoint, what: str) -> None:
    """Expect the previous checkpoint, bit for bit, and the name of the damaged one."""
    if not finding.expect(found is not None and found.step == expected.step, f"{what}: not the previous checkpoint"):
        return
    finding.expect(len(found.damaged) == 1 and "step-" in found.damaged[0], f"{what}: not named: {found.damaged}")
    same = found.tensors.keys() == expected.tensors.keys() and all(
        torch.equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items()
    )
    finding.expect(same, f"{what}: different from what was saved")
