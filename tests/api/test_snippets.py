"""Code that users of timm, Hugging Face, torchvision, fastai and ultralytics write without reading the documentation.

Runs of the fixtures are two layers of Ti/16 at 32 pixels, so that all snippets together take less than a minute.
"""

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import oracles
import PIL.Image
import pytest
import torch
from torch.nn.functional import cross_entropy

import vitkit
import vitkit.api.training

pytestmark = pytest.mark.usefixtures("forked_examples")

NAMES = ("ants", "bees", "cats")


def draw(seed: int) -> PIL.Image.Image:
    """Return an image whose mean color depends on the class."""
    rng = np.random.default_rng(seed)
    base = np.zeros(3)
    base[seed % 3] = 120
    return PIL.Image.fromarray((base + rng.integers(0, 120, (40, 48, 3))).astype(np.uint8))


def write_images(directory: Path, *, per_class: int, seed: int) -> None:
    for index, name in enumerate(NAMES):
        (directory / name).mkdir(parents=True)
        for number in range(per_class):
            draw(3 * (seed + number) + index).save(directory / name / f"{number}.jpg")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Iterator[Path]:
    """A directory with photos/, new/, cat.jpg and two finished runs."""
    path = tmp_path_factory.mktemp("snippets")
    write_images(path / "photos", per_class=10, seed=0)
    write_images(path / "new", per_class=7, seed=100)
    draw(2).save(path / "cat.jpg")
    with contextlib.chdir(path):
        for name, lr in (("photos", 1e-3), ("tuned", 3e-3)):
            vitkit.train(
                "photos/",
                out=f"runs/{name}",
                model="Ti/16",
                image_size=32,
                steps=2,
                batch_size=8,
                lr=lr,
                workers=0,
                settings={"model.settings": ("depth=2",)},
                progress=False,
            )
        yield path


@pytest.fixture(autouse=True)
def _inside(workspace, monkeypatch) -> None:
    monkeypatch.chdir(workspace)


@pytest.fixture
def m() -> vitkit.ViT:
    return vitkit.create("Ti/16", num_classes=10)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.rand(2, 3, 224, 224)


@pytest.fixture
def run(workspace) -> vitkit.Run:
    return vitkit.Run("runs/photos")


def test_01_create_with_pretrained_weights(hub, x) -> None:
    assert vitkit.create("vit_tiny_patch16_224", pretrained=True, num_classes=10)(x).shape == (2, 10)


def test_02_list_models() -> None:
    assert "B/16" in vitkit.list_models("*B*")
    assert "vit_tiny_patch16_224" in str(vitkit.list_models(pretrained=True))


def test_03_forward_features_and_head(m, x) -> None:
    assert m.forward_features(x).shape == (2, 197, 192)
    assert m.forward_head(m.forward_features(x)).shape == (2, 10)


def test_04_forward_intermediates(m, x) -> None:
    _, maps = m.forward_intermediates(x, indices=[3, -1])
    assert maps[0].shape == (2, 192, 14, 14)


def test_05_reset_classifier(m) -> None:
    m.reset_classifier(3)
    assert m.get_classifier().out_features == 3


def test_06_grad_checkpointing(m, x) -> None:
    m.set_grad_checkpointing()
    m(x).sum().backward()
    assert m.head.weight.grad is not None


def test_07_set_input_size(m) -> None:
    m.set_input_size(160)
    assert m(m.preprocess("cat.jpg")).shape == (1, 10)


def test_08_model_without_head(x) -> None:
    assert vitkit.create("Ti/16", num_classes=0)(x).shape == (2, 192)


def test_09_state_dict_loads_in_timm(m) -> None:
    timm = oracles.import_timm()
    loaded = timm.create_model("vit_tiny_patch16_224", num_classes=10).load_state_dict(m.state_dict())
    assert str(loaded) == "<All keys matched successfully>"


def test_10_timm_optimizer(m) -> None:
    oracles.import_timm()
    from timm.optim import create_optimizer_v2  # noqa: PLC0415  after torchvision is repaired

    assert create_optimizer_v2(m, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75).param_groups


def test_11_load_from_hugging_face(hub) -> None:
    b = vitkit.load("google/vit-base-patch16-224")
    assert isinstance(b.labels[b(b.preprocess("cat.jpg")).argmax()], str)


def test_12_load_revision_from_hub(hub) -> None:
    assert len(vitkit.load("hub:me/cats@main").labels) > 0


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # importing torch.compile's backend
def test_13_save_compiled_model(m) -> None:
    vitkit.save(torch.compile(m), "my-model")
    assert vitkit.load("my-model").num_classes == 10


def test_14_parameters_device_dtype(m) -> None:
    assert m.num_parameters(only_trainable=True) == 5_526_346
    assert (m.device, m.dtype) == (torch.device("cpu"), torch.float32)


def test_15_attention(m, x) -> None:
    assert m.attention(x, layers=[-1])[11].shape == (2, 3, 197, 197)


def test_16_predict() -> None:
    assert vitkit.predict("runs/photos", "cat.jpg")[0].label in NAMES


def test_17_export_for_transformers() -> None:
    transformers = oracles.import_transformers()
    vitkit.export("runs/photos", "hf")
    assert transformers.AutoModelForImageClassification.from_pretrained("hf").config.num_labels == 3


def test_18_preprocess_takes_any_image(m) -> None:
    images = ["cat.jpg", PIL.Image.open("cat.jpg"), np.zeros((40, 30, 3), np.uint8)]
    assert m.preprocess(images).shape == (3, 3, 224, 224)


def test_19_transforms(m) -> None:
    assert m.transforms(train=True)(PIL.Image.open("cat.jpg")).shape == (3, 224, 224)


def test_20_train_within_minutes(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(vitkit.api.training, "budget_clock", lambda: 3.0 * next(ticks))
    run = vitkit.train("photos/", minutes=0.5, progress=False)
    assert run.metrics.accuracy == run.metrics.top1
    assert run.to_dict()["selection"]["tried"][0]["name"] == "probe-embedded-64"


def test_21_predict_with_run(run) -> None:
    assert 0 < run.predict("new/")[0].probability <= 1
    assert len([p.label for p in run.predict(["cat.jpg", "cat.jpg"])]) == 2


def test_22_plot_evaluation(run) -> None:
    run.evaluate("new/").plot().savefig("confusion.png")
    assert Path("confusion.png").stat().st_size > 1000


def test_23_export_onnx(run) -> None:
    assert run.export("model", to="onnx").files


def test_24_history_as_data_frame(run) -> None:
    pandas = pytest.importorskip("pandas")
    assert len(pandas.DataFrame(run.history.to_dict())) == len(run.history.steps)
    assert 0 <= run.history["val_top1"][-1] <= 1
    assert Path(run.report_path).exists()


def test_25_train_with_settings() -> None:
    run = vitkit.train(
        "photos/",
        init="scratch",
        model="Ti/16",
        image_size=32,
        epochs=1,
        settings={"optimizer.weight_decay": 0.05},
    )
    assert run.config.optimizer.weight_decay == 0.05
    assert run.path == Path("runs/photos-2")


def test_26_train_by_recipe() -> None:
    run = vitkit.train(vitkit.recipe("digits").override({"schedule.steps": 5}), out="runs/digits")
    assert run.config.schedule.steps == 5


def test_27_train_on_pairs() -> None:
    pairs = [(p, p.parent.name) for p in Path("photos").rglob("*.jpg")]
    assert vitkit.train(pairs, init="scratch", steps=2).labels == NAMES


def test_28_finetune_with_sweep() -> None:
    run = vitkit.finetune("runs/photos", "new/", out="runs/new", image_size=64, steps=5, sweep=[1e-3, 3e-3])
    assert len(run.trials) == 2


def test_29_interrupt_and_resume() -> None:
    class Stop(vitkit.Callback):
        def on_step(self, metrics): raise KeyboardInterrupt  # fmt: skip

    with pytest.raises(vitkit.Interrupted):
        vitkit.train("photos/", out="runs/i", steps=5, callbacks=[Stop()])
    vitkit.load("runs/i")
    assert vitkit.train("photos/", out="runs/i", steps=5).status == "finished"


def test_30_fewshot() -> None:
    assert 0 <= vitkit.fewshot("runs/photos", "new/", shots=[1, 5]).shots[5].mean <= 1


def test_31_inspect_shows_page() -> None:
    result = vitkit.inspect("runs/photos", "cat.jpg", only=["rollout"])
    assert "&lt;img" in result._repr_html_()  # a page of its own, in an iframe


def test_32_compare() -> None:
    differences = vitkit.compare(["runs/photos", "runs/tuned"], data="new/").differences
    assert 0 <= differences[0].p_value <= 1


def test_33_adapt() -> None:
    assert vitkit.adapt("runs/photos", image_size=96, channels=1).model(torch.rand(1, 1, 96, 96)).shape == (1, 3)


def test_34_convert_verify_check_data() -> None:
    assert not vitkit.convert("runs/photos", "for-timm", to="timm").dropped
    assert vitkit.verify("runs/photos").agrees
    assert vitkit.check_data("photos/").counts


def test_35_serve(run) -> None:
    with vitkit.serve(run, port=0, block=False) as server:
        response = httpx.post(f"{server.url}/v1/predict", content=Path("cat.jpg").read_bytes())
    assert response.json()["predictions"][0]["label"] in NAMES


def test_36_plain_loop() -> None:
    m = vitkit.create("Ti/16", num_classes=10, image_size=32)
    loader = [(torch.rand(4, 3, 32, 32), torch.arange(4))]
    opt = torch.optim.AdamW(m.parameters(), lr=1e-4)
    for images, targets in loader:
        opt.zero_grad()
        cross_entropy(m(images), targets).backward()
        opt.step()
    assert m.head.weight.abs().max() > 0


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_37_lightning() -> None:
    lightning = oracles.import_lightning()

    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = vitkit.create("Ti/16", num_classes=3)

        def training_step(self, batch, _):
            return cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    batches = [(torch.rand(2, 3, 224, 224), torch.tensor([0, 1]))]
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_steps=1, accelerator="cpu", enable_checkpointing=False, **options)
    module = Lit()
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    trainer.save_checkpoint("lit.ckpt")
    loaded = vitkit.load("lit.ckpt", format="timm:vit_tiny_patch16_224")  # tensors do not tell how they are pooled
    assert torch.equal(loaded.head.weight, module.model.head.weight)


COMPILE_AND_EXPORT = """
import torch, vitkit
m = vitkit.create("Ti/16", num_classes=10, settings={"depth": 2})
x = torch.rand(2, 3, 224, 224)
assert torch.compile(m, fullgraph=True, backend="aot_eager")(x).shape == (2, 10)
program = torch.export.export(m.eval(), (x,), dynamic_shapes=({0: torch.export.Dim("B")},))
assert program.module()(torch.rand(3, 3, 224, 224)).shape == (3, 10)
"""


def test_38_compile_and_export() -> None:  # without run-time shape checks, which cannot be traced
    subprocess.run([sys.executable, "-c", COMPILE_AND_EXPORT], check=True)


def test_39_ddp(m, x, tmp_path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        ddp = torch.nn.parallel.DistributedDataParallel(m)
        cross_entropy(ddp(x), torch.tensor([0, 1])).backward()
        assert m.head.weight.grad is not None
    finally:
        torch.distributed.destroy_process_group()


def test_40_import_without_torch() -> None:
    code = "import sys, vitkit; vitkit.__all__; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
