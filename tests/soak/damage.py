"""A number of damages goes in; they are done to a run's newest checkpoint, and what was seen comes out: promise R4."""

import random
import shutil
from pathlib import Path

import torch
from soak.faults import Finding, finish, never_touched, the_same
from soak.victim import Launcher, Run, until

from vitkit.train.state import Checkpoints, Loaded

FILES = ("state.safetensors", "state.json", "checksums.json")


def damaged_checkpoints(launcher: Launcher, folder: Path, *, count: int, runs: int, seed: int = 0) -> Finding:
    """R4: files that are cut short, have a bit flipped or are gone; the checkpoint before is taken, and they are named.

    `count` of each kind are shown to what looks for checkpoints, and `runs` to whole commands.
    """
    finding = Finding(
        "R4 damaged checkpoint", {"truncations": 0, "bit flips": 0, "missing files": 0, "runs compared": 0}
    )
    chance = random.Random(seed)
    reference = never_touched(launcher, folder / "reference")
    interrupted = Run(folder / "interrupted")
    victim = launcher.start(interrupted)
    until(lambda: interrupted.last_step() >= 30, victim)
    victim.send(15)
    victim.wait()
    newest = interrupted.steps()[-1]
    shelf = Checkpoints(interrupted.checkpoints)
    place = interrupted.checkpoints / f"step-{newest:08d}"
    shutil.copytree(place, folder / "whole")
    place.rename(folder / "aside")
    expected = shelf.newest()
    (folder / "aside").rename(place)
    assert expected is not None
    for number in range(2 * count + len(FILES)):
        file = FILES[number % len(FILES)] if number >= 2 * count else chance.choice(FILES)
        kind = "missing files" if number >= 2 * count else ("truncations", "bit flips")[number % 2]
        harm(place / file, folder / "whole" / file, kind, chance)
        finding.count(kind)
        falls_back(finding, shelf.newest(), expected, f"{kind}, {file}")
        shutil.copyfile(folder / "whole" / file, place / file)
    for number in range(runs):
        run = Run(folder / f"damaged-{number}")
        shutil.copytree(interrupted.path, run.path)
        file = FILES[number % len(FILES)]
        kind = ("truncations", "bit flips", "missing files")[number // 3 % 3]
        harm(run.checkpoints / place.name / file, folder / "whole" / file, kind, chance)
        again = launcher.start(run)
        finding.expect(again.wait(60) == 0, f"run {number} did not finish")
        finding.expect(place.name in again.words(), f"run {number} does not name what is damaged")
        finish(launcher, run)
        the_same(finding, run, reference)
    return finding


def harm(path: Path, whole: Path, kind: str, chance: random.Random) -> None:
    """Cut the file short, flip one of its bits, or remove it."""
    content = bytearray(whole.read_bytes())
    if kind == "missing files":
        path.unlink()
        return
    if kind == "truncations":
        del content[chance.randrange(len(content) - 1) :]  # a list of checksums is whole without its last newline
    else:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def falls_back(finding: Finding, found: Loaded | None, expected: Loaded, what: str) -> None:
    """Expect the checkpoint before, bit for bit, and the damaged one named."""
    if not finding.expect(found is not None and found.step == expected.step, f"{what}: not the checkpoint before"):
        return
    finding.expect(len(found.damaged) == 1 and "step-" in found.damaged[0], f"{what}: not named: {found.damaged}")
    same = found.tensors.keys() == expected.tensors.keys() and all(
        torch.equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items()
    )
    finding.expect(same, f"{what}: other numbers than were saved")
