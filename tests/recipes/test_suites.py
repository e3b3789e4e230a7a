"""Suites say which models are fine-tuned and judged on which data sets: the paper's are its tables."""

import re
from dataclasses import replace
from pathlib import Path

from vitkit.recipes.suites import find_suite, parts


def test_the_suite_of_the_guide_is_one(tmp_path):
    guide = Path(__file__).parents[2] / "docs" / "guides" / "judging.md"
    [text] = re.findall(r"^```toml\n(.*?)^```$", guide.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    todo = parts(find_suite(str(tmp_path / "mine.toml")), assignments=["schedule.steps=100", "schedule.epochs=none"])
    assert [(part.model, part.set, part.rates, part.judge) for part in todo[:3]] == [
        ("ViT-B_16", "pets", (0.001, 0.003, 0.01, 0.03), None),
        ("ViT-B_16", "birds", (0.003, 0.01), None),
        ("ViT-B_16", "imagenet-r", todo[2].rates, "weights"),
    ]
    birds = todo[1].config
    assert (birds.data.path, birds.schedule.steps, birds.parallel.precision) == ("data/birds", 100, "bf16")
    assert not birds.augment.flip


def test_the_papers_suites_are_its_tables(tmp_path):
    """Table 4's steps and rates for Table 2's data sets; ReaL is judged with ImageNet's model."""
    (tmp_path / "vtab-1k/cifar100").mkdir(parents=True)  # the other name of that folder
    table = replace(find_suite("table2"), weights={"L/16": "L.npz"}, root=str(tmp_path))
    made = {part.set: part for part in parts(table)}
    steps = {name: made[name].config.schedule.steps for name in ("imagenet", "cifar10", "cifar100", "pets", "flowers")}
    assert steps == {"imagenet": 20_000, "cifar10": 10_000, "cifar100": 10_000, "pets": 500, "flowers": 500}
    assert made["imagenet"].rates == (0.003, 0.01, 0.03, 0.06)
    assert made["imagenet"].config.data.kind == "val-as-test"
    assert (made["real"].judge, made["real"].protocol.real) == ("imagenet", str(tmp_path / "imagenet/real.json"))
    tasks = [part for name, part in made.items() if name.startswith("vtab-")]
    assert len(tasks) == 19
    assert {part.config.schedule.steps for part in tasks} == {2500}
    assert {part.rates for part in tasks} == {(0.01,)}
    assert {part.config.model.image_size for part in made.values() if part.judge is None} == {384}
    assert made["vtab-cifar100"].config.data.path == str(tmp_path / "vtab-1k/cifar100")
    assert made["vtab-svhn"].config.data.path == str(tmp_path / "vtab-1k/svhn")


def test_flips_and_crops_are_left_out_where_bit_leaves_them_out():
    made = {part.set: part.config.augment for part in parts(replace(find_suite("vtab-1k"), weights={"A": "a"}))}
    unflipped = {name for name, augment in made.items() if not augment.flip}
    uncropped = {name for name, augment in made.items() if augment.crop == "none"}
    assert unflipped == {"dsprites-orientation", "smallnorb-azimuth", "dsprites-location"}
    assert uncropped == {"clevr-count", "clevr-distance", "dmlab", "kitti-distance", "dsprites-location"}
