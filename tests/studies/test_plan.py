"""Plans: declared studies, studies of users, and what is wrong with them."""

import pytest

from vitkit.core.errors import ConfigError
from vitkit.studies.plan import plan_runs
from vitkit.studies.registry import NAMES, find_study
from vitkit.studies.user_study import load_study
from vitkit.zoo.cost import EXA, TABLE6


@pytest.mark.parametrize("name", NAMES)
def test_declared_study_is_consistent(name) -> None:
    study = find_study(name)
    study.check()
    if not study.inspects:
        full, quick = (plan_runs(study, data={}, settings={}, quick=quick) for quick in (False, True))
        assert len(quick) < len(full)
        names = [run.name for run in full]
        assert all(names.index(need) < index for index, run in enumerate(full) for need in run.needs)


def test_families_have_about_equal_flops() -> None:
    runs = plan_runs(find_study("fig5"), data={}, settings={}, quick=True)
    flops = [run.forward_flops for run in runs]
    assert max(flops) < 1.15 * min(flops)


def test_large_study_adds_a_budget() -> None:
    runs = plan_runs(find_study("fig5").make_large(), data={}, settings={}, quick=False)
    assert {run.labels["budget"] for run in runs} == {"3e13", "1e14", "3e14", "1e15"}
    assert max(run.flops for run in runs) == pytest.approx(1e15, rel=0.01)
    with pytest.raises(ConfigError, match="fig4 has no large form"):
        find_study("fig4").make_large()


@pytest.mark.parametrize("name", [name for name in NAMES if not find_study(name).inspects])
def test_study_at_the_scale_of_the_paper_is_consistent(name) -> None:
    study = find_study(name).make_paper_scale()
    runs = plan_runs(study, data={}, settings={}, quick=False)
    assert all(run.flops > 1e16 or run.is_tuned_here for run in runs)
    assert set(study.pretraining_data) <= set(study.data)


def test_compute_at_the_scale_of_the_paper_is_that_of_table_6() -> None:
    runs = plan_runs(find_study("fig5").make_paper_scale(), data={}, settings={}, quick=False)
    counted = {run.labels["model"].split()[1]: run.flops / EXA for run in runs}
    expected = {model.removeprefix("BiT-"): exaflops for model, epochs, exaflops in TABLE6 if epochs == 7}
    assert counted.keys() == expected.keys()
    assert all(counted[model] == pytest.approx(expected[model], rel=0.05) for model in counted)


def test_study_of_checkpoints_has_no_other_scale() -> None:
    with pytest.raises(ConfigError, match="fig7 trains nothing at the paper's scale"):
        find_study("fig7").make_paper_scale()


def test_settings_of_several_axes_add_up_and_the_last_of_a_key_counts() -> None:
    runs = plan_runs(find_study("fig3").make_paper_scale(), data={}, settings={}, quick=False)
    by_name = {run.name: run.config.model.settings for run in runs}
    assert by_name["large-ViT_1.28e6_seed0"] == ("head.pre_logits=1024", "head.bias=0.0", "dropout.dense=0.1")


def test_rung_adds_a_dataset() -> None:
    data = {"upstream": "here", "cifar10": "ten", "cifar100": "hundred"}
    study = find_study("fig3")
    runs = {run.name: run.config.data for run in plan_runs(study, data=data, settings={}, quick=True)}
    assert (runs["small-ViT_1.5_seed0"].path, runs["small-ViT_1.5_seed0"].add) == ("here", ("hundred",))
    assert runs["small-ViT_1.0_seed0"].add == runs["small-ViT_1.5_cifar10_seed0"].add == ()
    assert study.pretraining_data == {"upstream": ("cifar100",)}


def test_table5_is_another_figure_of_the_runs_of_fig3() -> None:
    fig3, table5 = find_study("fig3"), find_study("table5")
    plans = [plan_runs(study, data={}, settings={}, quick=False) for study in (fig3, table5)]
    assert plans[0] == plans[1]
    assert (fig3.claims, fig3.measures) == (table5.claims, table5.measures)


@pytest.mark.parametrize("name", [name for name in NAMES if not find_study(name).inspects])
def test_sgd_has_no_weight_decay_which_the_optimizer_refuses(name) -> None:
    study = find_study(name)
    for scale in (study, study.make_paper_scale()):
        optimizers = {run.config.optimizer for run in plan_runs(scale, data={}, settings={}, quick=False)}
        assert all(each.weight_decay == 0 for each in optimizers if each.name == "sgd")


def test_one_learning_rate_is_chosen_without_tune_by() -> None:
    runs = {run.name: run for run in plan_runs(find_study("table8"), data={}, settings={}, quick=False)}
    rates = ("1-D-stem_lr0.0003_seed0", "1-D-stem_lr0.001_seed0", "1-D-stem_lr0.003_seed0")
    assert runs["none_seed3"].needs == runs["1-D-stem_seed0"].needs == rates
    assert len(runs) == 8 * 5 + 3


def test_runs_from_scratch_have_no_first_stage() -> None:
    for study in (find_study("masked"), find_study("masked").make_paper_scale()):
        runs = {run.name: run for run in plan_runs(study, data={}, settings={}, quick=False)}
        assert "none_seed0" not in runs
        assert runs["none_0.1_seed1"].init is None
        assert runs["L2_0.1_seed1"].init == "L2_seed1"


def test_axial_model_is_compared_at_equal_flops() -> None:
    runs = plan_runs(find_study("axial"), data={}, settings={}, quick=True)
    flops = {run.labels["model"]: run.forward_flops for run in runs}
    assert flops["ViT, equal FLOPs"] == pytest.approx(flops["axial"], rel=0.05)


def test_learning_rate_is_chosen_once_per_family() -> None:
    runs = {run.name: run for run in plan_runs(find_study("fig4"), data={}, settings={}, quick=False)}
    expected = ("ViT_0.3_lr0.0003_seed0", "ViT_0.3_lr0.001_seed0", "ViT_0.3_lr0.003_seed0")
    assert runs["ViT_0.03_seed2"].needs == runs["ViT_0.3_seed0"].needs == expected
    assert runs["ViT_0.3_seed0"].is_tuned_here
    assert runs["ViT_0.3_seed0"].flops == 0.0
    assert not runs["ViT_0.3_seed1"].is_tuned_here


def test_fine_tuning_rate_is_chosen_by_model_and_dataset() -> None:
    runs = {run.name: run for run in plan_runs(find_study("fig3"), data={}, settings={}, quick=False)}
    run = runs["BiT_1.0_pets_seed2"]
    assert run.init == "BiT_1.0_seed2"
    assert run.needs == ("BiT_1.0_seed2", *(f"BiT_0.1_pets_lr{rate}_seed0" for rate in (0.003, 0.01, 0.03)))
    assert runs["BiT_0.1_pets_lr0.01_seed0"].init == "BiT_0.1_seed0"


def test_base_belongs_to_every_group() -> None:
    study = find_study("fig8")
    rows = [{"shape": "base", "scaled": "base", "y": 1}, {"shape": "depth 2", "scaled": "depth", "y": 2}]
    spread = study.spread_base(rows)
    assert [row["y"] for row in spread if row["scaled"] == "depth"] == [2, 1]
    assert [row["y"] for row in spread if row["scaled"] == "patch"] == [1]


USER_STUDY = """
title = "Mine"
seeds = 2
rates = [0.1, 0.01]
tune_by = "depth"
[settings.model]
name = "Ti/16"
[axes.depth.1]
"model.settings" = ["depth=1"]
[axes.depth.2]
"model.settings" = ["depth=2"]
[axes.set.a.data]
path = "upstream"
[axes.set.b.data]
path = "elsewhere"
[tune_at]
set = "b"
[[measures]]
shots = [1]
[[claims]]
text = "deeper is better"
kind = "greater"
column = "top1"
axis = "depth"
labels = ["2", "1"]
where = ["set=a"]
[transfer]
rates = [0.2]
[transfer.axes.labels.few]
"data.label_fraction" = 0.1
"""


def write(tmp_path, *replacements: tuple[str, str]):
    text = USER_STUDY
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "mine.toml").write_text(text)
    return tmp_path / "mine.toml"


def test_user_study_is_a_toml_file(tmp_path) -> None:
    study = load_study(write(tmp_path))
    data = {"upstream": "here", "downstream": "there"}
    runs = {run.name: run for run in plan_runs(study, data=data, settings={}, quick=False)}
    assert study.data == ("upstream", "downstream")
    assert runs["1_a_seed0"].config.data.path == "here"
    assert runs["1_b_seed1"].config.data.path == "elsewhere"
    assert runs["1_a_seed1"].needs == ("1_b_lr0.1_seed0", "1_b_lr0.01_seed0")
    assert runs["2_a_few_seed1"].config.data.label_fraction == 0.1
    assert runs["2_a_few_seed1"].needs == ("2_a_seed1", "2_b_few_lr0.2_seed0")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('column = "top1"', 'column = "top_1"', "column that does not exist.*top_1.*\n.*did you mean top1"),
        ('axis = "depth"', 'axis = "detph"', "axis that does not exist.*detph.*\n.*did you mean depth"),
        ('labels = ["2", "1"]', 'labels = ["2", "3"]', "depth has no such label.*1, 2.*3"),
        ('labels = ["2", "1"]', 'labels = ["2"]', "greater has a wrong number of labels.*at least 2"),
        ('kind = "greater"', 'kind = "steeper"', "steeper needs x"),
        ('kind = "greater"', 'kind = "steeper"\nx = "set"', "x=set has a label that is no number.*a"),
        ('kind = "greater"', 'kind = "above"', "claims.kind"),
        ("[tune_at]", '[quick]\nset = ["c"]\n[tune_at]', "quick: set has no such label"),
        ('[tune_at]\nset = "b"', '[tune_at]\nset = "c"', "tune_at: set has no such label.*a, b.*c"),
        ("[tune_at]\nset", "[tune_at]\nsets", "tune_at is about an axis that does not exist.*sets"),
        ("[[claims]]", "[claims]", "claims is not a list"),
    ],
)
def test_error_in_a_user_study_is_named(tmp_path, old, new, message) -> None:
    path = write(tmp_path, (old, new))
    with pytest.raises(ConfigError, match=message):
        load_study(path)


def test_labels_with_the_same_run_name_are_refused(tmp_path) -> None:
    same_names = '[axes.set."x y".data]\npath = ""\n[axes.set.x-y.data]\npath = ""\n[axes.set.b.data]'
    study = load_study(write(tmp_path, ("[axes.set.b.data]", same_names)))
    with pytest.raises(ConfigError, match="two runs are called"):
        plan_runs(study, data={}, settings={}, quick=False)
