"""The web page while servers restart, runs appear and disappear, and views change."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from server.browser import Page, create_run, needs_chromium, without_side_effects
from server.front_end import run_front_end
from server.serving import RunningServer, encode_image, run_server, wait_until

import vitkit
from vitkit.core.metrics_log import MetricsLog
from vitkit.data.decode_limits import DEFAULT_LIMITS
from vitkit.inference.predictor import Predictor
from vitkit.model.config import ViTConfig
from vitkit.model.vit import ViT

pytestmark = needs_chromium

NAMESAKES = ["crane", "crane", "lamp", "cup"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create models, two of them with duplicate class names, images and runs."""
    folder = tmp_path_factory.mktemp("open")
    for seed, name in enumerate(("first", "second")):
        config = ViTConfig(
            image_size=32, patch_size=8, width=32, depth=2, heads=2, mlp_dim=64, num_classes=len(NAMESAKES)
        )
        model = ViT(config)
        model.reset_parameters(torch.Generator().manual_seed(seed))
        torch.nn.init.normal_(model.head.weight, std=0.2, generator=torch.Generator().manual_seed(seed))
        vitkit.save(model, folder / name, labels=NAMESAKES)
    for seed in range(4):
        (folder / f"{seed}.png").write_bytes(encode_image(seed, side=60))
    create_run(folder / "runs", "early", steps=40)
    return folder


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[RunningServer]:
    names = [f"{name}={directory / name}" for name in ("first", "second")]
    with run_server(*names, "--runs", directory / "runs") as running:
        yield running


def select_runs(page: Page, *names: str) -> None:
    """Select exactly these runs."""
    for name in names:
        page.wait_for_text(".run-name", name)
    script = """for (const row of document.querySelectorAll("#runs li")) {
        const box = row.querySelector("input");
        if (box.checked !== arguments[0].includes(row.dataset.name)) box.click(); }"""
    page.run(script, names)
    wait_until(lambda: sorted(page.texts("#latest tbody th")) == sorted(names))


def append_record(run: Path, **record: float) -> None:
    with MetricsLog(run / "metrics.jsonl") as log:
        log.write(**record)


# Views


@pytest.mark.parametrize("way", ["back", "the link"])
def test_curves_continue_after_the_skip_link(page: Page, directory: Path, way: str) -> None:
    run = create_run(directory / "runs", f"skipped-{way}", steps=40)
    page.open("/#training")
    select_runs(page, run.name)
    page.wait_for_text("#latest td", "0.3")
    page.run("document.querySelector('.skip').click()")
    page.wait("location.hash === '#main'")
    assert page.run("return document.querySelector('#images-view').hidden")
    if way == "back":
        page.driver.back()
    else:
        page.one("#to-training").click()
    page.wait("location.hash === '#training'")
    append_record(run, step=20, loss=0.0625)
    page.wait_for_text("#latest td", "0.0625")


def test_table_is_updated_in_place(page: Page, directory: Path) -> None:
    run = create_run(directory / "runs", "placed", steps=40)
    page.open("/#training", width=390)
    select_runs(page, run.name)
    page.wait_for_text("#latest td", "0.3")
    page.tab_to("#latest .scroll")
    page.run("""window.box = document.activeElement; box.scrollLeft = 40;
        window.cells = [...box.querySelectorAll('tbody > tr > *')]; window.head = box.querySelector('thead th');""")
    assert page.run("return box.scrollLeft") == 40  # wider than a phone
    append_record(run, step=20, loss=0.0625)
    page.wait_for_text("#latest td", "0.0625")
    assert page.run("return document.activeElement === box && box.scrollLeft === 40 && head.isConnected")
    assert page.run("return cells.map((cell) => cell.isConnected)") == [True, False, True, True, True, True]


@pytest.mark.parametrize("kind", ["drop", "paste"])
def test_image_dropped_in_the_training_view_is_shown(page: Page, directory: Path, kind: str) -> None:
    page.open("/#training")
    page.wait_for_text(".run-name", "early")
    page.wait_for_text("#facts", "pixels")
    page.transfer(kind, directory / "0.png")
    page.wait("!document.querySelector('#images-view').hidden && document.querySelector('#training-view').hidden")
    page.settle()
    assert page.texts(".card h2") == ["0.png"]
    page.driver.back()
    page.wait("!document.querySelector('#training-view').hidden")


def test_controls_are_not_restored_on_reload(page: Page) -> None:
    page.open()  # Firefox restores controls unless autocomplete is off
    values = page.run("return [...document.querySelectorAll('#controls input')].map((each) => each.autocomplete)")
    assert values == ["off"] * 6


# Runs


def test_removed_run_disappears(page: Page, directory: Path) -> None:
    kept, removed = (create_run(directory / "runs", name, steps=40) for name in ("kept", "removed"))
    page.open("/#training")
    select_runs(page, kept.name, removed.name)
    page.wait("document.querySelectorAll('#charts .chart:first-child .line.trained').length === 2")
    shutil.rmtree(removed)
    page.wait("!document.querySelector('#runs li[data-name=removed]')")
    page.wait("document.querySelectorAll('#latest tbody tr').length === 1")
    assert page.texts("#latest tbody th") == ["kept"]
    assert len(page.all("#charts .chart:first-child .line.trained")) == 1


def test_missing_run_does_not_affect_others(page: Page, directory: Path) -> None:
    present, missing = (create_run(directory / "runs", name, steps=40) for name in ("present", "missing"))
    page.open("/#training")
    select_runs(page, present.name, missing.name)
    page.run("""const real = window.fetch; window.requested = 0;
        window.fetch = (path, options) => {
          if (!String(path).startsWith("v1/runs/missing")) return real(path, options);
          window.requested += 1;
          return Promise.resolve(new Response('{"error": "no such run"}', {status: 404}));
        };""")
    page.wait("window.requested > 0")
    append_record(present, step=20, loss=0.0625)
    page.wait_for_text("#latest td", "0.0625")
    assert not page.run("return document.querySelector('#training-note').textContent")


def test_new_run_is_listed_first(page: Page, directory: Path) -> None:
    for file in (directory / "runs" / "early").iterdir():
        os.utime(file, (time.time() - 7200.0,) * 2)
    page.open("/#training")
    page.wait_for_text("#runs li[data-name=early] .step", "step 10 of 40 · 2 h ago")
    create_run(directory / "runs", "newest", steps=40)
    page.wait_for_text(".run-name", "newest")
    assert page.texts(".run-name")[0] == "newest"


def test_rarely_logged_metric_keeps_its_chart(page: Page, directory: Path) -> None:
    run = create_run(directory / "runs", "long", steps=1000)
    with MetricsLog(run / "metrics.jsonl") as log:
        for step in range(11, 301):
            log.write(step=step, loss=3.0 / step)
            if step == 150:
                log.write(step=step, val_loss=0.2, val_top5=0.9)
    page.open("/#training")
    select_runs(page, run.name)
    page.wait_for_text(".more figcaption b", "top5")
    assert page.run("return [...document.querySelectorAll('.more .chart')].filter((each) => !each.hidden).length") == 2


# Servers


def test_server_without_models_shows_runs(page: Page, directory: Path) -> None:
    with (
        run_front_end(models=(), runs=directory / "runs") as front_end,
        without_side_effects(Page(page.driver, front_end.url)) as other,
    ):
        other.open()
        other.wait("location.hash === '#training' && !document.querySelector('#training-view').hidden")
        other.wait_for_text(".run-name", "early")
        other.wait_for_text("#health", "ready, no models")
        other.transfer("drop", directory / "0.png")  # switches to the images view
        other.wait("!document.querySelector('#images-view').hidden")
        other.wait_for_text("#announcements p", "This server has no models")
        assert other.one("#no-models").text == "This server has no models. Start it with vitkit serve RUN."
        assert [other.one(part).is_displayed() for part in ("#drop", "#model", "#controls")] == [False] * 3
        assert other.all(".card") == []
        other.driver.get("about:blank")


HELD = """
const real = window.fetch;
const open = new Promise((resolve) => { window.release = resolve; });
let failures = FAILURES;
window.fetch = async (path, options) => {
  if (path === "v1/models") await open;
  if (path === "v1/models/first" && failures-- > 0) throw new TypeError("failed to fetch");
  return real(path, options);
};
"""


@pytest.mark.parametrize("failures", [0, 1])
def test_image_waits_for_the_models(page: Page, directory: Path, failures: int) -> None:
    script = {"source": HELD.replace("FAILURES", str(failures))}
    script_id = page.command("Page.addScriptToEvaluateOnNewDocument", script)["identifier"]
    try:
        page.open()
        page.one("#files").send_keys(str(directory / "0.png"))
        page.wait_for_text(".card .state.working", "waiting for the models")
        page.record_texts("#upload-note")
        page.run("release()")
        if failures:  # of the first request for model details, which is retried
            page.wait_for_recorded("The page reconnects when it is back.")
        page.wait("document.querySelectorAll('.labels li').length === 4")
        assert "waiting" not in page.text(".card")
        page.wait("document.querySelector('#health').dataset.state === 'ready'")
        assert "are not stored" in page.text("#upload-note")
    finally:
        page.command("Page.removeScriptToEvaluateOnNewDocument", {"identifier": script_id})


def test_selection_survives_a_server_restart(page: Page, directory: Path) -> None:
    with run_front_end(models=("first", "second")) as front_end:
        other, port = Page(page.driver, front_end.url), front_end.address[1]
        other.open()
        other.upload(directory / "0.png")
        other.run("document.querySelector('.stage').focus()")
    other.set("#second", "second")
    other.wait_for_text("#upload-note", "The page reconnects when it is back.")
    with run_front_end(models=("first", "second", "third"), port=port):
        other.wait("document.querySelectorAll('.model-panel .labels ol').length === 2")
        other.wait("document.querySelector('#health').dataset.state === 'ready'")
        assert other.run("return document.querySelector('#second').value") == "second"
        assert other.texts("#model option") == ["first", "second", "third"]
        assert other.run("return document.activeElement.matches('.stage')")  # the focus is kept
        assert "are not stored" in other.text("#upload-note")
        assert [each for each in other.console_errors() if "net::ERR_" not in each] == []
        other.driver.get("about:blank")
    other.requests()


def test_removed_model_is_replaced_by_the_first(page: Page, directory: Path) -> None:
    page.open()
    page.upload(directory / "0.png")
    page.run("""const real = window.fetch;
        window.fetch = async (path, options) => {
          const all = path === "v1/models" ? (await (await real(path, options)).json()).models : [];
          if (all.length) return new Response(JSON.stringify({models: all.filter(({name}) => name === "second")}));
          if (!path.includes("model=first")) return real(path, options);
          return new Response('{"error": "no such model"}', {status: 404});
        };""")
    page.one("#files").send_keys(str(directory / "1.png"))
    page.wait("document.querySelectorAll('.labels ol[aria-label*=second]').length === 2")
    page.settle()
    assert page.texts("#model option") == page.texts("#facts b") == ["second"]


# Comparison and upload


def test_of_duplicate_classes_the_more_probable_is_compared(page: Page, directory: Path) -> None:
    files = [directory / f"{seed}.png" for seed in range(4)]
    one, two = (Predictor(directory / name).probabilities(files) for name in ("first", "second"))
    merged = [torch.stack((each[:, :2].amax(1), each[:, 2], each[:, 3]), 1) for each in (one, two)]
    largest = 100 * float((merged[0] - merged[1]).abs().max())
    crosswise = 100 * float((one[:, :2].amin(1) - merged[1][:, 0]).abs().max())
    assert crosswise > largest + 0.1  # otherwise the test proves nothing
    page.open()
    page.upload(*files)
    page.set("#second", "second")
    page.wait("document.querySelectorAll('.badge:not([hidden])').length === 4")
    assert f"{largest:.1f} points" in page.text("#comparison")
    names = page.texts(".card:first-child .model-panel:last-child .label")
    changes = page.texts(".card:first-child .model-panel:last-child .change")
    assert sorted(names) == sorted(NAMESAKES)
    second = [index for index, name in enumerate(names) if name == "crane"][1]
    assert [index for index, change in enumerate(changes) if change == "–"] == [second]


def test_file_chooser_accepts_the_supported_formats(page: Page) -> None:
    page.open()
    offered = page.run("return document.querySelector('#files').accept").split(",")
    Image.init()
    # PPM has no MIME type in browsers; Pillow itself has none for HEIF, of which phones write the kind HEIC.
    others = {"PPM": [".ppm"], "HEIF": ["image/heic", "image/heif"]}
    kinds = [kind for name in DEFAULT_LIMITS.formats for kind in others.get(name) or [Image.MIME[name]]]
    assert sorted(offered) == sorted(kinds)
