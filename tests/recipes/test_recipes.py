"""Recipes: complete headers, TOML round trips, existing models, and the papers' settings."""

import pytest

from vitkit.api.plans import plan_training
from vitkit.core.config import load_toml, parse_assignments
from vitkit.core.errors import UnknownNameError
from vitkit.core.sizes import pair
from vitkit.data.config import AugmentConfig
from vitkit.data.preprocessing import get_preprocessing
from vitkit.model.vit import ViT
from vitkit.recipes import distillation, paper, self_supervised
from vitkit.recipes.recipe import Recipe
from vitkit.recipes.registry import RECIPES, find_recipe, match_recipes
from vitkit.training.config import RunConfig
from vitkit.zoo.cost import TRAINING_FACTOR
from vitkit.zoo.flops import count_forward_flops
from vitkit.zoo.registry import configure, create

SMALL = {
    "digits",
    "fashion-mnist",
    "fashion-mnist-hybrid",
    "cifar10-hybrid",
    "cifar10-bit",
    "cifar10-small",
    "cifar10-after-fractals",
    "fractals-small",
    "folder",
    "finetune-folder",
}

WITHOUT_LABELS = {
    "masked-b16",
    "mae-b16",
    "masked-folder",
    "mae-folder",
    *(f"{method}-{data}" for method in ("masked", "mae") for data in ("fashion-mnist", "cifar10-small")),
    *(f"{data}-1-percent{after}" for data in ("fashion-mnist", "cifar10") for after in ("", "-after")),
}

DISTILLED = {"digits-distilled", "deit-ti16-distilled", "deit-s16-distilled", "deit-b16-distilled"}

# Table 3: name, model, epochs, lr, decay, its end, weight decay, dropout, clip.
TABLE_3 = """
jft300m-b16           B/16        7    8e-4  linear  1e-5  0.1   0    none
jft300m-b32           B/32        7    8e-4  linear  1e-5  0.1   0    none
jft300m-l32           L/32        7    6e-4  linear  1e-5  0.1   0    none
jft300m-l16-7ep       L/16        7    4e-4  linear  1e-5  0.1   0    none
jft300m-l16-14ep      L/16        14   4e-4  linear  1e-5  0.1   0    none
jft300m-h14           H/14        14   3e-4  linear  1e-5  0.1   0    none
jft300m-r50x1         BiT-R50x1   7    1e-3  linear  1e-5  0.1   0    none
jft300m-r50x2         BiT-R50x2   7    1e-3  linear  1e-5  0.1   0    none
jft300m-r101x1        BiT-R101x1  7    8e-4  linear  1e-5  0.1   0    none
jft300m-r152x1        BiT-R152x1  7    6e-4  linear  1e-5  0.1   0    none
jft300m-r152x2        BiT-R152x2  7    6e-4  linear  1e-5  0.1   0    none
jft300m-r50-b16       R50+B/16    7    8e-4  linear  1e-5  0.1   0    none
jft300m-r50-b32       R50+B/32    7    8e-4  linear  1e-5  0.1   0    none
jft300m-r50-l32       R50+L/32    7    2e-4  linear  1e-5  0.1   0    none
jft300m-r50-l16-7ep   R50+L/16    7    4e-4  linear  1e-5  0.1   0    none
jft300m-r50-l16-14ep  R50+L/16    14   4e-4  linear  1e-5  0.1   0    none
imagenet21k-b16       B/16        90   1e-3  linear  1e-5  0.03  0.1  none
imagenet21k-b32       B/32        90   1e-3  linear  1e-5  0.03  0.1  none
imagenet21k-l16-30ep  L/16        30   1e-3  linear  1e-5  0.03  0.1  none
imagenet21k-l16-90ep  L/16        90   1e-3  linear  1e-5  0.03  0.1  none
imagenet21k-l32-30ep  L/32        30   1e-3  linear  1e-5  0.03  0.1  none
imagenet21k-l32-90ep  L/32        90   1e-3  linear  1e-5  0.03  0.1  none
imagenet-b16          B/16        300  3e-3  cosine  0     0.3   0.1  1.0
imagenet-b32          B/32        300  3e-3  cosine  0     0.3   0.1  1.0
imagenet-l16          L/16        300  3e-3  cosine  0     0.3   0.1  1.0
imagenet-l32          L/32        300  3e-3  cosine  0     0.3   0.1  1.0
imagenet-h14          H/14        300  3e-3  cosine  0     0.3   0.1  1.0
"""

# Table 4: steps, rates, share of the training set that chooses among them, image size, decay of averaged weights.
TABLE_4 = {
    "finetune-imagenet": (20_000, (0.003, 0.01, 0.03, 0.06), 0.01, 384, None),
    "finetune-cifar10": (10_000, (0.001, 0.003, 0.01, 0.03), 0.02, 384, None),
    "finetune-cifar100": (10_000, (0.001, 0.003, 0.01, 0.03), 0.02, 384, None),
    "finetune-pets": (500, (0.001, 0.003, 0.01, 0.03), 0.1, 384, None),
    "finetune-flowers": (500, (0.001, 0.003, 0.01, 0.03), 0.1, 384, None),
    "finetune-vtab1k": (2500, (0.01,), 0.2, 384, None),
    "finetune-imagenet-l16-512": (20_000, (0.003, 0.01, 0.03, 0.06), 0.01, 512, 0.9999),
    "finetune-imagenet-h14-518": (20_000, (0.003, 0.01, 0.03, 0.06), 0.01, 518, 0.9999),
}

# "How to train your ViT?": mixup, then RandAugment's layers and magnitude.
LEVELS = {
    "none": (0.0, 0, 0),
    "light1": (0.0, 2, 0),
    "light2": (0.2, 2, 10),
    "medium1": (0.2, 2, 15),
    "medium2": (0.5, 2, 15),
    "strong1": (0.5, 2, 20),
    "strong2": (0.8, 2, 20),
}

rows = pytest.mark.parametrize("row", TABLE_3.split("\n")[1:-1], ids=lambda row: row.split()[0])
every = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


@every
def test_recipe_has_a_complete_header(recipe: Recipe):
    assert RECIPES[recipe.name] is recipe
    assert all((recipe.group, recipe.summary, recipe.command, recipe.time, recipe.expected))
    assert "\n" not in "".join([recipe.summary, *recipe.header().values()])
    verb = "finetune" if recipe.kind == "finetune" else "train"
    assert f"vitkit {verb} " in recipe.command
    assert " --out " in recipe.command
    assert bool(recipe.rates) == (recipe.kind == "finetune")


@every
def test_toml_round_trip(recipe: Recipe, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(recipe.toml(), encoding="utf-8")
    assert load_toml(path, RunConfig, recipes={}) == recipe.make()


def test_models_of_recipes_exist():
    seen = set()
    for recipe in RECIPES.values():
        run = recipe.make()
        choice = run.model
        if recipe.kind == "finetune":
            assert choice.name is choice.init is None
            assert choice.new_head or recipe.name == "embedded-continue"
            continue
        assert choice.name is not None
        config = configure(
            choice.name,
            image_size=choice.image_size,
            patch_size=choice.patch_size,
            channels=run.data.channels,
            settings=parse_assignments(choice.settings),
        )
        if config not in seen:
            seen.add(config)
            assert next(create(config, device="meta").parameters()).is_meta
        if run.data.preprocessing is not None:
            assert pair(get_preprocessing(run.data.preprocessing, image_size=config.image_size).image_size) == (
                224,
                224,
            )


def test_registry_has_exactly_the_expected_recipes():
    pretraining = {row.split()[0] for row in TABLE_3.split("\n")[1:-1]}
    by_group: dict[str, set[str]] = {}
    for recipe in RECIPES.values():
        by_group.setdefault(recipe.group, set()).add(recipe.name)
    assert by_group.pop(paper.PRETRAINING) == pretraining
    assert by_group.pop(paper.FINETUNING) == set(TABLE_4)
    assert len(by_group.pop(paper.AUGREG)) == 2 * 9 * 7
    assert by_group.pop(self_supervised.GROUP) == WITHOUT_LABELS
    assert by_group.pop(distillation.GROUP) == DISTILLED
    assert by_group.pop(distillation.EMBEDDED) == {"embedded", "embedded-continue"}
    assert list(by_group.values()) == [SMALL]


@pytest.mark.parametrize(
    ("name", "images", "flops"),
    [("cifar10-hybrid", 49_000, 1.8e14), ("cifar10-bit", 49_000, 1.8e14), ("fashion-mnist-hybrid", 58_800, 6e13)],
)
def test_short_runs_with_muon_have_their_compute(name: str, images: int, flops: float):
    run = find_recipe(name).make()
    choice, shape = run.model, {"channels": run.data.channels, "num_classes": 10}
    settings = parse_assignments(choice.settings)
    model = configure(
        choice.name, image_size=choice.image_size, patch_size=choice.patch_size, settings=settings, **shape
    )
    total = TRAINING_FACTOR * sum(count_forward_flops(model).values()) * images * run.schedule.epochs
    assert 0.95 * flops < total <= flops
    assert run.optimizer.name == "muon"


@rows
def test_pretraining_matches_table_3(row: str):
    name, model, epochs, lr, decay, end_lr, weight_decay, dropout, clip = row.split()
    run = find_recipe(name).make()
    assert (run.model.name, run.model.image_size) == (model, 224)
    schedule, optimizer = run.schedule, run.optimizer
    assert (schedule.batch_size, schedule.warmup_steps, schedule.accumulate) == (4096, 10_000, "auto")
    assert (schedule.epochs, schedule.lr, schedule.decay) == (float(epochs), float(lr), decay)
    assert schedule.end_lr == float(end_lr)
    assert (optimizer.name, optimizer.beta1, optimizer.beta2) == ("adam", 0.9, 0.999)
    assert optimizer.weight_decay == float(weight_decay)
    assert optimizer.clip == (None if clip == "none" else float(clip))
    assert run.augment == AugmentConfig()
    assert run.data.preprocessing == "paper"
    made = create(configure(model, settings=parse_assignments(run.model.settings)), device="meta")
    several = not name.startswith("imagenet-")
    assert run.objective.loss == ("sigmoid" if several else "softmax")
    if isinstance(made, ViT):
        assert made.config.head.pre_logits == made.config.width
        assert made.config.head.bias == (-10.0 if several else 0.0)
        assert made.config.dropout.dense == float(dropout)
    else:
        assert float(dropout) == 0.0


@pytest.mark.parametrize("name", TABLE_4)
def test_fine_tuning_matches_table_4(name: str):
    steps, rates, dev_fraction, image_size, average = TABLE_4[name]
    recipe = find_recipe(name)
    run = recipe.make()
    assert recipe.rates == rates
    assert run.schedule.lr in rates
    schedule, optimizer = run.schedule, run.optimizer
    assert (schedule.steps, schedule.epochs, schedule.batch_size) == (steps, None, 512)
    assert (schedule.decay, schedule.end_lr) == ("cosine", 0.0)
    # Warm-up is the released code's 500 steps; where these were the whole run, nothing would be left to decay.
    assert schedule.warmup_steps == (500 if steps > 500 else 100)
    assert (optimizer.name, optimizer.momentum, optimizer.weight_decay, optimizer.clip) == ("sgd", 0.9, 0.0, 1.0)
    assert (run.data.val_fraction, run.model.image_size, optimizer.ema_decay) == (dev_fraction, image_size, average)
    assert run.augment == AugmentConfig()
    assert run.model.new_head


def test_masked_patches_match_appendix_b_1_2():
    run = find_recipe("masked-b16").make()
    schedule, optimizer, masked = run.schedule, run.optimizer, run.objective.masked
    assert (run.model.name, run.model.image_size, run.objective.name) == ("B/16", 224, "masked")
    assert (schedule.batch_size, schedule.steps, schedule.warmup_steps) == (4096, 1_000_000, 10_000)
    assert (schedule.lr, schedule.decay, optimizer.name) == (2e-4, "cosine", "adam")
    ratios = (masked.corrupt_ratio, masked.mask_token_ratio, masked.other_patch_ratio)
    assert (masked.target, *ratios) == ("mean_color", 0.5, 0.8, 0.1)


def test_mae_matches_its_paper():
    run = find_recipe("mae-b16").make()
    schedule, optimizer, decoder = run.schedule, run.optimizer, run.objective.mae
    assert (run.model.name, run.model.image_size, run.objective.name) == ("B/16", 224, "mae")
    assert (schedule.batch_size, schedule.epochs, schedule.decay) == (4096, 800.0, "cosine")
    assert schedule.lr == pytest.approx(2.4e-3)
    assert schedule.warmup_steps == 12511  # 40 epochs of 1,281,167 images
    assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay, optimizer.clip) == (0.9, 0.95, 0.05, None)
    assert (decoder.width, decoder.depth, decoder.heads) == (512, 8, 16)
    assert (decoder.mask_ratio, decoder.normalize) == (0.75, True)
    assert (run.augment.crop, run.augment.crop_area, run.augment.flip) == ("inception", (0.2, 1.0), True)


def test_one_percent_runs_use_the_same_labels():
    for data in ("fashion-mnist", "cifar10"):
        scratch, after = (find_recipe(f"{data}-1-percent{ending}").make() for ending in ("", "-after"))
        assert scratch.data == after.data
        assert scratch.data.label_fraction == 0.01
        assert (scratch.schedule, scratch.augment, scratch.objective) == (
            after.schedule,
            after.augment,
            after.objective,
        )
        for before in match_recipes(f"m*-{data}*"):
            assert before.make().model == scratch.model


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("ending", ["", "-21k"])
def test_augreg_levels(level: str, ending: str):
    found = match_recipes(f"augreg-*-{level}{ending}")
    assert len(found) == 9
    for recipe in found:
        run = recipe.make()
        augment, schedule = run.augment, run.schedule
        assert (augment.mixup, augment.randaugment_layers, augment.randaugment_magnitude) == LEVELS[level]
        assert (schedule.batch_size, schedule.epochs, schedule.lr, schedule.warmup_steps) == (4096, 300.0, 1e-3, 10_000)
        assert (schedule.decay, run.optimizer.clip, run.optimizer.weight_decay) == ("cosine", 1.0, 0.1)
        assert run.model.settings == (("head.bias=-10.0",) if ending else ())


def test_compute_in_headers_matches_the_zoo():
    images = {"imagenet": 1.281e6, "imagenet21k": 14e6}
    counted = [(row.model, row.epochs, images.get(row.corpus.name), row.exaflops) for row in paper.TABLE3]
    for model, row in paper.AUGREG_MODELS.items():
        counted += [(model, 300, count, row.exaflops[index]) for index, count in enumerate(images.values())]
    for model, epochs, count, exaflops in counted:
        if count is not None:  # the paper's own count is held against ours in docs/table6.md
            ours = 3 * sum(count_forward_flops(configure(model)).values()) * count * epochs / 1e18
            assert exaflops == pytest.approx(ours, rel=0.02), model  # as rounded in the head


def test_names_are_case_insensitive_with_suggestions():
    assert find_recipe("Digits") is RECIPES["digits"]
    with pytest.raises(UnknownNameError) as caught:
        find_recipe("imagenet-b61")
    assert caught.value.hint == "did you mean imagenet-b16?"


def test_fractals_and_cifar_share_a_model():
    fractals, cifar = find_recipe("fractals-small").make(), find_recipe("cifar10-small").make()
    assert fractals.model == cifar.model
    assert fractals.data.fractals.size == cifar.model.image_size


def test_recipe_is_added_by_one_registry_entry(monkeypatch, tmp_path) -> None:
    short = Recipe(
        name="short-digits",
        group="Tests",
        summary="Digits for two steps",
        command="vitkit train short-digits --out runs/short",
        time="a second",
        expected="nothing",
        make=lambda: find_recipe("digits").make().override({"steps": 2, "workers": 0}),
    )
    monkeypatch.setitem(RECIPES, short.name, short)
    assert plan_training("Short-Digits").config.schedule.steps == 2
    assert [recipe.name for recipe in match_recipes("short-*")] == ["short-digits"]
    (tmp_path / "mine.toml").write_text('base = "short-digits"\nseed = 5\n', encoding="utf-8")
    assert plan_training(tmp_path / "mine.toml").config.seed == 5
