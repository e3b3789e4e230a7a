"""Suites: the paper's tables, and the example of the guide."""

import re
from dataclasses import replace
from pathlib import Path

from vitkit.recipes.suites import find_suite, suite_tasks


def test_suite_of_the_guide_is_valid(tmp_path):
    guide = Path(__file__).parents[2] / "docs" / "guides" / "evaluation.md"
    [text] = re.findall(r"^```toml\n(.*?)^```$", guide.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    todo = suite_tasks(find_suite(str(tmp_path / "mine.toml")), settings={"steps": 100})
    assert [(task.model, task.dataset, task.rates, task.model_from) for task in todo[:3]] == [
        ("ViT-B_16", "pets", (0.001, 0.003, 0.01, 0.03), None),
        ("ViT-B_16", "birds", (0.003, 0.01), None),
        ("ViT-B_16", "imagenet-r", todo[2].rates, "init"),
    ]
    birds = todo[1].config
    assert (birds.data.path, birds.schedule.steps, birds.parallel.precision) == ("data/birds", 100, "bf16")
    assert not birds.augment.flip


def test_table2_matches_the_paper(tmp_path):
    """Compare with Table 4's steps and rates for Table 2's datasets."""
    (tmp_path / "vtab-1k/cifar100").mkdir(parents=True)  # the other name of that folder
    table = replace(find_suite("table2"), models={"L/16": "L.npz"}, root=str(tmp_path))
    made = {task.dataset: task for task in suite_tasks(table)}
    steps = {name: made[name].config.schedule.steps for name in ("imagenet", "cifar10", "cifar100", "pets", "flowers")}
    assert steps == {"imagenet": 20_000, "cifar10": 10_000, "cifar100": 10_000, "pets": 500, "flowers": 500}
    assert made["imagenet"].rates == (0.003, 0.01, 0.03, 0.06)
    assert made["imagenet"].config.data.layout == "val-as-test"
    assert (made["real"].model_from, made["real"].protocol.real) == ("imagenet", str(tmp_path / "imagenet/real.json"))
    tasks = [task for name, task in made.items() if name.startswith("vtab-")]
    assert len(tasks) == 19
    assert {task.config.schedule.steps for task in tasks} == {2500}
    assert {task.rates for task in tasks} == {(0.01,)}
    assert {task.config.model.image_size for task in made.values() if task.model_from is None} == {384}
    assert made["vtab-cifar100"].config.data.path == str(tmp_path / "vtab-1k/cifar100")
    assert made["vtab-svhn"].config.data.path == str(tmp_path / "vtab-1k/svhn")


def test_flips_and_crops_match_bit():
    made = {
        task.dataset: task.config.augment for task in suite_tasks(replace(find_suite("vtab-1k"), models={"A": "a"}))
    }
    unflipped = {name for name, augment in made.items() if not augment.flip}
    uncropped = {name for name, augment in made.items() if augment.crop == "none"}
    assert unflipped == {"dsprites-orientation", "smallnorb-azimuth", "dsprites-location"}
    assert uncropped == {"clevr-count", "clevr-distance", "dmlab", "kitti-distance", "dsprites-location"}
