"""The page left open while things change: servers go and come back, runs begin and vanish, views are left and found."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from serve.browser import Page, logged_run, needs_chromium, silent
from serve.serving import Running, picture, served, tiny_model

import vitkit
from vitkit.core.runlog import RunLog
from vitkit.data.decode import DEFAULT_GATE
from vitkit.model.config import ViTConfig
from vitkit.model.vit import ViT
from vitkit.predict.predictor import Predictor

pytestmark = needs_chromium

NAMESAKES = ["crane", "crane", "lamp", "cup"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, two of them with a name for two classes, images and runs."""
    folder = tmp_path_factory.mktemp("open")
    for seed, name in enumerate(("first", "second")):
        config = ViTConfig(image_size=32, patch_size=8, width=32, depth=2, heads=2, mlp_dim=64, classes=len(NAMESAKES))
        model = ViT(config)
        model.reset_parameters(torch.Generator().manual_seed(seed))
        torch.nn.init.normal_(model.head.weight, std=0.2, generator=torch.Generator().manual_seed(seed))
        vitkit.save(model, folder / name, labels=NAMESAKES)
    tiny_model(folder / "third", classes=3, seed=3)
    for seed in range(4):
        (folder / f"{seed}.png").write_bytes(picture(seed, side=60))
    logged_run(folder / "runs", "early", steps=40)
    return folder


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Running]:
    names = [f"{name}={place / name}" for name in ("first", "second")]
    with served(*names, "--runs", place / "runs") as running:
        yield running


def watch(page: Page, *names: str) -> None:
    """See the curves of these runs, and of no other."""
    for name in names:
        page.shown(".run-name", name)
    script = """for (const row of document.querySelectorAll("#runs li")) {
        const box = row.querySelector("input");
        if (box.checked !== arguments[0].includes(row.dataset.name)) box.click(); }"""
    page.run(script, names)
    page.wait("document.querySelectorAll('#latest tbody tr').length === arguments[0]", len(names))


def log(run: Path, **numbers: float) -> None:
    with RunLog(run / "metrics.jsonl") as lines:
        lines.write(**numbers)


# Views that are left and found again


@pytest.mark.parametrize("way", ["back", "the link"])
def test_curves_go_on_after_the_skip_link(page: Page, place: Path, way: str) -> None:
    run = logged_run(place / "runs", f"skipped-{way}", steps=40)
    page.open("/#training")
    watch(page, run.name)
    page.shown("#latest td", "0.3")
    page.run("document.querySelector('.skip').click()")
    page.wait("location.hash === '#main'")
    assert page.run("return document.querySelector('#images-view').hidden")
    if way == "back":
        page.driver.back()
    else:
        page.one("#to-training").click()
    page.wait("location.hash === '#training'")
    log(run, step=20, loss=0.0625)
    page.shown("#latest td", "0.0625")


def test_the_numbers_change_in_their_place(page: Page, place: Path) -> None:
    run = logged_run(place / "runs", "placed", steps=40)
    page.open("/#training", width=390)
    watch(page, run.name)
    page.shown("#latest td", "0.3")
    page.tab_to("#latest .scroll")
    page.run("""window.kept = document.activeElement; kept.scrollLeft = 40;
        window.cells = [...kept.querySelectorAll('tbody > tr > *')]; window.head = kept.querySelector('thead th');""")
    assert page.run("return kept.scrollLeft") == 40  # it is wider than a phone
    log(run, step=20, loss=0.0625)
    page.shown("#latest td", "0.0625")
    assert page.run("return document.activeElement === kept && kept.scrollLeft === 40 && head.isConnected")
    assert page.run("return cells.map((cell) => cell.isConnected)") == [True, False, True, True, True, True]


@pytest.mark.parametrize("kind", ["drop", "paste"])
def test_an_image_given_in_the_training_view_is_seen(page: Page, place: Path, kind: str) -> None:
    page.open("/#training")
    page.shown(".run-name", "early")
    page.shown("#facts", "pixels")
    page.carry(kind, place / "0.png")
    page.wait("!document.querySelector('#images-view').hidden && document.querySelector('#training-view').hidden")
    page.settle()
    assert page.texts(".card h2") == ["0.png"]
    page.driver.back()
    page.wait("!document.querySelector('#training-view').hidden")


def test_no_browser_moves_the_controls_back_by_itself_on_a_reload(page: Page) -> None:
    page.open()  # Firefox would, unless it is told not to, and the pictures would show something else
    told = page.run("return [...document.querySelectorAll('#controls input')].map((each) => each.autocomplete)")
    assert told == ["off"] * 6


# Runs that come and go


def test_a_run_that_was_removed_leaves_nothing_behind(page: Page, place: Path) -> None:
    stays, goes = (logged_run(place / "runs", name, steps=40) for name in ("stays", "goes"))
    page.open("/#training")
    watch(page, stays.name, goes.name)
    page.wait("document.querySelectorAll('#charts .chart:first-child .line.trained').length === 2")
    shutil.rmtree(goes)
    page.wait("!document.querySelector('#runs li[data-name=goes]')")
    page.wait("document.querySelectorAll('#latest tbody tr').length === 1")
    assert page.texts("#latest tbody th") == ["stays"]
    assert len(page.all("#charts .chart:first-child .line.trained")) == 1


def test_a_run_that_is_removed_while_it_is_asked_for_does_not_stop_the_others(page: Page, place: Path) -> None:
    stays, goes = (logged_run(place / "runs", name, steps=40) for name in ("lasting", "leaving"))
    page.open("/#training")
    watch(page, stays.name, goes.name)
    page.run("""const real = window.fetch; window.missed = 0;
        window.fetch = (path, how) => {
          if (!String(path).startsWith("v1/runs/leaving")) return real(path, how);
          window.missed += 1;
          return Promise.resolve(new Response('{"error": "there is no run of that name"}', {status: 404}));
        };""")
    page.wait("window.missed > 0")
    log(stays, step=20, loss=0.0625)
    page.shown("#latest td", "0.0625")
    assert not page.run("return document.querySelector('#training-note').textContent")


def test_a_new_run_comes_in_above_the_older_ones(page: Page, place: Path) -> None:
    page.open("/#training")
    page.shown(".run-name", "early")
    logged_run(place / "runs", "newest", steps=40)
    page.shown(".run-name", "newest")
    assert page.texts(".run-name")[0] == "newest"


def test_a_number_that_is_seldom_logged_keeps_its_chart(page: Page, place: Path) -> None:
    run = logged_run(place / "runs", "long", steps=1000)
    with RunLog(run / "metrics.jsonl") as lines:
        for step in range(11, 301):
            lines.write(step=step, loss=3.0 / step)
            if step == 150:
                lines.write(step=step, val_loss=0.2, val_top5=0.9)
    page.open("/#training")
    watch(page, run.name)
    page.shown(".more figcaption b", "top5")
    assert page.run("return [...document.querySelectorAll('.more .chart')].filter((each) => !each.hidden).length") == 2


# Servers that have no models, or not yet, or others than before


def test_a_server_of_runs_alone_shows_them_first_and_says_what_it_lacks(page: Page, place: Path) -> None:
    with served("--runs", place / "runs") as bare, silent(Page(page.driver, bare.url)) as there:
        there.open()
        there.wait("location.hash === '#training' && !document.querySelector('#training-view').hidden")
        there.shown(".run-name", "early")
        there.shown("#health", "ready, without models")
        there.carry("drop", place / "0.png")  # which turns to the images, where it is told
        there.wait("!document.querySelector('#images-view').hidden")
        there.shown("#said p", "This server has no models")
        assert there.one("#no-models").text == "This server has no models: start it with vitkit serve RUN."
        assert [there.one(part).is_displayed() for part in ("#drop", "#model", "#controls")] == [False] * 3
        assert there.all(".card") == []
        there.driver.get("about:blank")


HELD = """
const real = window.fetch;
const open = new Promise((resolve) => { window.release = resolve; });
let failures = FAILURES;
window.fetch = async (path, how) => {
  if (path === "v1/models") await open;
  if (path === "v1/models/first" && failures-- > 0) throw new TypeError("nobody there");
  return real(path, how);
};
"""


@pytest.mark.parametrize("failures", [0, 1])
def test_an_image_given_before_the_models_are_there_waits_for_them(page: Page, place: Path, failures: int) -> None:
    script = {"source": HELD.replace("FAILURES", str(failures))}
    held = page.command("Page.addScriptToEvaluateOnNewDocument", script)["identifier"]
    try:
        page.open()
        page.one("#files").send_keys(str(place / "0.png"))
        page.shown(".card .state.working", "waiting for the models")
        page.run("release()")
        if failures:  # of the first model's details: the page asks for them again by itself
            page.shown("#intake-note", "This goes on once it is back.")
        page.wait("document.querySelectorAll('.labels li').length === 4")
        assert "waiting" not in page.text(".card")
        page.wait("document.querySelector('#health').dataset.state === 'ready'")
        assert "are not kept" in page.text("#intake-note")
    finally:
        page.command("Page.removeScriptToEvaluateOnNewDocument", {"identifier": held})


def test_a_server_that_comes_back_goes_on_with_what_was_chosen(page: Page, place: Path) -> None:
    def models(*names: str) -> list[str]:
        return [f"{name}={place / name}" for name in names]

    with served(*models("first", "second")) as before:
        there, port = Page(page.driver, before.url), before.url.rpartition(":")[2]
        there.open()
        there.give(place / "0.png")
        there.run("document.querySelector('.stage').focus()")
    there.set("#second", "second")
    there.shown("#intake-note", "This goes on once it is back.")
    with served(*models("first", "second", "third"), "--port", port):
        there.wait("document.querySelectorAll('.side .labels ol').length === 2")
        there.wait("document.querySelector('#health').dataset.state === 'ready'")
        assert there.run("return document.querySelector('#second').value") == "second"
        assert there.texts("#model option") == ["first", "second", "third"]
        assert there.run("return document.activeElement.matches('.stage')")  # nobody is thrown out of what they read
        assert "are not kept" in there.text("#intake-note")
        assert [each for each in there.complaints() if "net::ERR_" not in each] == []
        there.driver.get("about:blank")
    there.requests()


def test_a_server_that_has_other_models_all_of_a_sudden_is_asked_with_those(page: Page, place: Path) -> None:
    page.open()
    page.give(place / "0.png")
    page.run("""const real = window.fetch;
        window.fetch = async (path, how) => {
          const known = path === "v1/models" ? (await (await real(path, how)).json()).models : [];
          if (known.length) return new Response(JSON.stringify({models: known.filter(({name}) => name === "second")}));
          if (!path.includes("model=first")) return real(path, how);
          return new Response('{"error": "there is no model of this name"}', {status: 404});
        };""")
    page.one("#files").send_keys(str(place / "1.png"))
    page.wait("document.querySelectorAll('.labels ol[aria-label*=second]').length === 2")
    page.settle()
    assert page.texts("#model option") == page.texts("#facts b") == ["second"]


# What is compared and what is offered


def test_of_two_classes_of_one_name_the_likelier_is_compared(page: Page, place: Path) -> None:
    files = [place / f"{seed}.png" for seed in range(4)]
    one, two = (Predictor(place / name).probabilities(files) for name in ("first", "second"))
    merged = [torch.stack((each[:, :2].amax(1), each[:, 2], each[:, 3]), 1) for each in (one, two)]
    largest = 100 * float((merged[0] - merged[1]).abs().max())
    crosswise = 100 * float((one[:, :2].amin(1) - merged[1][:, 0]).abs().max())
    assert crosswise > largest + 0.1  # else the test would not tell them apart
    page.open()
    page.give(*files)
    page.set("#second", "second")
    page.wait("document.querySelectorAll('.badge:not([hidden])').length === 4")
    assert f"{largest:.1f} points" in page.text("#verdict")
    names = page.texts(".card:first-child .side:last-child .label")
    changes = page.texts(".card:first-child .side:last-child .change")
    assert sorted(names) == sorted(NAMESAKES)
    second = [place for place, name in enumerate(names) if name == "crane"][1]
    assert [place for place, change in enumerate(changes) if change == "–"] == [second]


def test_the_chooser_offers_the_formats_that_the_server_reads(page: Page) -> None:
    page.open()
    offered = page.run("return document.querySelector('#files').accept").split(",")
    Image.init()
    kinds = [Image.MIME[name] for name in DEFAULT_GATE.formats]
    kinds[DEFAULT_GATE.formats.index("PPM")] = ".ppm"  # whose kind browsers do not know
    assert sorted(offered) == sorted(kinds)
