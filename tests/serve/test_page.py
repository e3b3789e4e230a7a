"""The page as people use it: real Chromium, the real server, models small enough to answer at once."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from serve.browser import Keys, Page, logged_run, needs_chromium
from serve.serving import PATIENCE, Running, picture, served

import vitkit
from vitkit.core.runlog import RunLog, truncate_after
from vitkit.data.transforms import Preprocessing
from vitkit.model.config import ViTConfig
from vitkit.model.vit import ViT
from vitkit.predict.predictor import Predictor

pytestmark = needs_chromium

HOSTILE = "<img src=x onerror=window.hacked=1>"
LABELS = [HOSTILE, '"><script>window.hacked=1</script>', "&lt;b&gt;", "dog\u202ecat", "javascript:window.hacked=1"]


def model(folder: Path, *, seed: int, resize: str = "squash") -> Path:
    """A small model with hostile names for its classes."""
    config = ViTConfig(image_size=32, patch_size=8, width=32, depth=3, heads=2, mlp_dim=64, classes=len(LABELS))
    made = ViT(config)
    made.reset_parameters(torch.Generator().manual_seed(seed))
    torch.nn.init.normal_(made.head.weight, std=1.0, generator=torch.Generator().manual_seed(seed))
    how = Preprocessing(image_size=32, resize=resize, filter="bicubic")  # type: ignore[arg-type]
    vitkit.save(made, folder, labels=LABELS, preprocessing=how)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, images and runs on the disk."""
    folder = tmp_path_factory.mktemp("page")
    model(folder / "first", seed=0)
    model(folder / "second", seed=1, resize="crop")
    (folder / "calibration").mkdir()
    for seed in range(3):
        (folder / f"{seed}.png").write_bytes(picture(seed, side=40 + 60 * seed))
        (folder / "calibration" / f"{seed}.png").write_bytes(picture(10 + seed))
    (folder / f"{HOSTILE}.png").write_bytes(picture(7))
    (folder / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 not a picture")
    (folder / "scan.tif").write_bytes(picture(3, kind="TIFF"))
    wide = BytesIO()
    Image.fromarray(np.random.default_rng(5).integers(0, 255, (60, 180, 3), dtype=np.uint8)).save(wide, "PNG")
    (folder / "wide.png").write_bytes(wide.getvalue())
    logged_run(folder / "runs", "early", steps=40)
    logged_run(folder / "runs", HOSTILE.replace("/", ""), steps=20)
    return folder


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Running]:
    names = [f"{name}={place / name}" for name in ("first", "second")]
    options = ("--precision", "fp32,int8", "--calibration", place / "calibration", "--runs", place / "runs")
    with served(*names, *options) as running:
        yield running


def percent(share: float) -> str:
    if 0 < share < 0.001:
        return "< 0.1 %"
    return "> 99.9 %" if 0.999 < share < 1 else f"{100 * share:.1f} %"


# What it answers


def test_the_page_says_what_the_predictor_says(page: Page, place: Path) -> None:
    page.open()
    page.give(place / "0.png", place / "1.png", place / "2.png")
    files = [place / f"{seed}.png" for seed in range(3)]
    for card, said in zip(page.all(".card"), Predictor(place / "first")(files), strict=True):
        rows = page.run(
            "return [...arguments[0].querySelectorAll('.labels li')].map((row) =>"
            "[row.querySelector('.label').textContent, row.querySelector('.share').textContent])",
            card,
        )
        assert rows == [[each.label, percent(each.probability)] for each in said]
        assert len(page.run("return [...arguments[0].querySelectorAll('.nearest li')]", card)) == 5
    widths = page.run("return [...document.querySelectorAll('.labels .fill')].map((bar) => bar.style.width)")
    assert all(width.endswith("%") for width in widths)


def test_the_file_goes_out_as_it_is(page: Page, place: Path, server: Running) -> None:
    page.open()
    page.shown("#facts", "pixels")
    page.run("window.sent = []; const real = fetch; window.fetch = (path, how) => {"
             "if (how?.body) window.sent.push(how.body); return real(path, how); }")  # fmt: skip
    page.give(place / "2.png")
    sizes = page.run("return Promise.all(window.sent.map(async (body) => (await body.arrayBuffer()).byteLength))")
    assert set(sizes) == {(place / "2.png").stat().st_size}


def test_a_photo_taken_sideways_is_shown_upright(page: Page, place: Path) -> None:
    file, turned = place / "turned.jpg", Image.Exif()
    turned[0x0112] = 6  # a quarter turn, as phones write it
    Image.new("RGB", (160, 80), "teal").save(file, exif=turned)
    page.open()
    page.give(file)
    assert page.run("const {width, height} = document.querySelector('.stage canvas'); return width < height")


def test_images_can_be_dropped_and_pasted(page: Page, place: Path) -> None:
    page.open()
    page.shown("#facts", "pixels")
    page.carry("drop", place / "0.png")
    page.carry("paste", place / "1.png")
    page.wait("document.querySelectorAll('.labels li').length === 10")
    assert page.texts(".card h2") == ["0.png", "1.png"]


def test_a_photo_can_be_taken(page: Page) -> None:
    page.open()
    page.shown("#facts", "pixels")
    page.one("#photograph").click()
    page.wait("document.querySelector('#camera-dialog video')?.videoWidth > 0")
    page.one("#camera-dialog button.main").click()
    page.wait("document.querySelectorAll('.labels li').length === 5")
    assert page.text(".card h2").startswith("photo ")
    assert page.all("dialog") == []


def test_a_format_that_the_browser_does_not_know_is_answered_without_a_picture(page: Page, place: Path) -> None:
    page.open()
    page.give(place / "scan.tif")
    assert len(page.all(".labels li")) == 5
    page.shown(".card .small", "cannot show the picture")
    assert page.run("return document.querySelector('.stage').hidden")


# Attention


def test_the_sliders_change_what_is_over_the_picture(page: Page, place: Path) -> None:
    page.open()
    page.give(place / "2.png")
    page.shown(".caption", "Rollout")
    seen = {"rollout": page.picture()}
    for layer, head in ((1, 0), (2, 0), (2, 1), (2, 2)):
        page.set("#layer", layer)
        page.set("#head", head)
        seen[f"{layer}/{head}"] = page.picture()
        assert f"Layer {layer}, {f'head {head}' if head else 'mean of heads'}" in page.text(".caption")
    page.one("input[value=picture]").find_element("xpath", "..").click()
    seen["picture"] = page.picture()
    assert page.text(".caption") == ""
    assert len(set(seen.values())) == len(seen)
    page.one("input[value=rollout]").find_element("xpath", "..").click()
    assert page.picture() == seen["rollout"]
    page.set("#opacity", 0)
    assert page.picture() == seen["picture"]


def test_pointing_at_a_patch_shows_what_that_patch_looks_at(page: Page, place: Path, server: Running) -> None:
    page.open()
    page.give(place / "2.png")
    page.set("#layer", 2)
    page.set("#head", 1)
    before = page.picture()
    page.point(page.one(".stage canvas"), across=0.6, down=0.3)
    page.shown(".caption", "row 2, column 3 looks most at")
    pointed = page.picture()
    assert pointed != before
    body = (place / "2.png").read_bytes()
    answer = server.post("/v1/attention?model=first&layer=1&head=0", body).json  # the server counts from 0
    seen = np.array(answer["patches"])[1 * 4 + 2].reshape(4, 4)
    row, column = np.unravel_index(seen.argmax(), seen.shape)
    assert f"looks most at row {row + 1}, column {column + 1}, {percent(float(seen.max()))}" in page.text(".caption")
    page.point(page.one("#mode-said"), across=0.5, down=0.5)
    page.wait("!document.querySelector('.caption').textContent.includes('looks')")
    assert page.picture() == before


def test_what_the_model_is_not_shown_fades_and_has_no_patches(page: Page, place: Path) -> None:
    page.open()
    page.give(place / "wide.png")
    page.set("#model", "second")  # which cuts out the middle
    page.settle()
    canvas = page.one(".stage canvas")
    page.point(canvas, across=0.05, down=0.5)
    assert "column" not in page.text(".caption").partition("most at")[0]
    # Of 180 × 60 pixels the middle of 32 / 36 of the height is seen: 53 pixels, from 63.3 to 116.7.
    page.point(canvas, across=0.36, down=0.5)
    page.shown(".caption", "column 1 has")
    page.point(canvas, across=0.64, down=0.5)
    page.shown(".caption", "column 4 has")
    middle, edge = page.run(
        "const canvas = arguments[0];"
        "const line = canvas.getContext('2d').getImageData(0, canvas.height / 2, canvas.width, 1);"
        "return [0.5, 0.02].map((x) => [...line.data.slice(4 * Math.floor(x * canvas.width)).slice(0, 4)])",
        canvas,
    )
    assert middle != edge


# Two models


def test_two_models_are_set_side_by_side(page: Page, place: Path) -> None:
    page.open()
    page.give(*(place / f"{seed}.png" for seed in range(3)))
    page.set("#second", "second")
    page.wait("document.querySelectorAll('.badge:not([hidden])').length === 3")
    files = [place / f"{seed}.png" for seed in range(3)]
    one, two = (Predictor(place / name).probabilities(files) for name in ("first", "second"))
    same = (one.argmax(1) == two.argmax(1)).tolist()
    badges = page.run(
        "return [...document.querySelectorAll('.badge')].map((each) => each.classList.contains('agrees'))"
    )
    assert badges == same
    largest = 100 * float((one - two).abs().max())
    assert f"The same answer on {sum(same)} of 3 images." in page.text("#verdict")
    assert f"{largest:.1f} points" in page.text("#verdict")
    changes = page.texts(".card:first-child .side:last-child .change")
    order = two[0].argsort(descending=True).tolist()
    expected = [100 * float(two[0, number] - one[0, number]) for number in order]
    got = [float(text.replace("−", "-").replace("±", "")) for text in changes]
    assert got == pytest.approx(expected, abs=0.051)  # shown to a tenth
    page.set("#second", "")
    page.wait("document.querySelectorAll('.side').length === 3")
    assert page.texts(".change") == []


def test_what_int8_changes_is_shown_beside_what_was_measured(page: Page, place: Path) -> None:
    page.open()
    page.give(*(place / f"{seed}.png" for seed in range(3)))
    page.set("#second", "first-int8")
    page.wait("document.querySelectorAll('.badge:not([hidden])').length === 3")
    assert "What int8 changes" in page.text("#verdict")
    assert "images" in page.text("#facts .measured")
    assert "against fp32" in page.text("#facts p:last-child")
    shown = page.run(
        "return [...document.querySelectorAll('#second option')].map((each) => [each.value, each.disabled])"
    )
    assert ["first", True] in shown  # nothing is compared with itself
    assert ["second-int8", False] in shown


# When things go wrong


def test_a_broken_file_is_named_in_plain_words_and_the_others_are_answered(page: Page, place: Path) -> None:
    page.open()
    page.give(place / "0.png", place / "broken.jpg", place / "1.png")
    assert len(page.all(".labels ol")) == 2
    assert "The server cannot take this image." in page.text(".state.failed")
    said = page.texts("#said p")
    assert any("broken.jpg: The server cannot take this image." in text for text in said)
    assert any("0.png: first says" in text for text in said)
    assert page.all(".state.failed button") == []  # asking again would not help


STUB = """
window.count = 0;
const real = window.fetch;
window.fetch = (path, how) => {
  if (String(path).includes("v1/predict") && window.count++ < arguments_count) {
    const how = {status: STATUS, headers: {"Retry-After": "1"}};
    return Promise.resolve(new Response(JSON.stringify({error: "the queue is full"}), how));
  }
  return real(path, how);
};
"""


@pytest.mark.parametrize(
    ("status", "words"),
    [(429, "The server is busy. Trying again in"), (503, "The server is not ready. Trying again in")],
)
def test_a_busy_server_is_asked_again_by_itself(page: Page, place: Path, status: int, words: str) -> None:
    page.open()
    page.shown("#facts", "pixels")
    page.run(STUB.replace("arguments_count", "1").replace("STATUS", str(status)))
    page.one("#files").send_keys(str(place / "0.png"))
    page.shown(".state.busy", words)
    page.wait("document.querySelectorAll('.labels li').length === 5")
    assert page.run("return window.count") == 2


@pytest.mark.parametrize(
    ("status", "words", "again"),
    [(413, "larger than this server takes", False), (504, "did not get to this in time", True)],
)
def test_a_refusal_is_told_in_plain_words(page: Page, place: Path, status: int, words: str, again: bool) -> None:
    page.open()
    page.shown("#facts", "pixels")
    page.run(STUB.replace("arguments_count", "1").replace("STATUS", str(status)))
    page.one("#files").send_keys(str(place / "0.png"))
    page.shown(".state.failed", words)
    page.shown(".state.failed", "The queue is full.")
    buttons = page.all(".state.failed button")
    assert bool(buttons) == again
    if again:
        buttons[0].click()
        page.wait("document.querySelectorAll('.labels li').length === 5")


def test_when_the_server_is_gone_the_page_says_so_and_goes_on_once_it_is_back(page: Page, place: Path) -> None:
    page.open()
    page.give(place / "0.png")
    gone = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.command("Network.enable", {})
    page.command("Network.emulateNetworkConditions", gone)
    try:
        page.one("#files").send_keys(str(place / "1.png"))
        page.shown(".state.failed", "The server does not answer.")
        page.wait("document.querySelector('#health').dataset.state === 'gone'")
        assert len(page.all(".labels li")) == 5  # what was answered stays
    finally:
        page.command("Network.emulateNetworkConditions", gone | {"offline": False})
    page.wait("document.querySelectorAll('.labels li').length === 10")
    page.wait("document.querySelector('#health').dataset.state === 'ready'")
    lost = [each for each in page.complaints() if "ERR_INTERNET_DISCONNECTED" not in each]
    assert lost == []


def test_names_of_classes_files_and_runs_stay_text(page: Page, place: Path) -> None:
    page.open()
    page.give(place / f"{HOSTILE}.png")
    page.set("#second", "second")
    page.wait("document.querySelectorAll('.badge:not([hidden])').length === 1")
    assert set(page.texts(".side:first-child .label")) == set(LABELS)
    assert page.texts(".card h2") == [f"{HOSTILE}.png"]
    assert page.run("return document.querySelectorAll('main img, main script, main b b').length") == 0
    page.run("location.hash = '#training'")
    page.shown(".run-name", HOSTILE)
    page.run(
        "[...document.querySelectorAll('#runs input')].filter((box) => !box.checked).forEach((box) => box.click())"
    )
    page.wait("document.querySelectorAll('#latest tbody tr').length >= 2")
    assert page.run("return document.querySelectorAll('main img, main script').length") == 0


# Training


def test_curves_grow_while_a_run_does(page: Page, place: Path) -> None:
    path = logged_run(place / "runs", "growing", steps=30) / "metrics.jsonl"
    page.open("/#training")
    page.shown(".run-name", "growing")
    assert page.text("#runs li[data-name=growing] .run-state") == "running"
    box = page.one("#runs li[data-name=growing] input")
    if not box.is_selected():
        box.click()
    for other in page.all("#runs li:not([data-name=growing]) input"):
        if other.is_selected():
            other.click()
    page.wait("document.querySelectorAll('#latest tbody tr').length === 1")
    page.shown("#latest td", "0.3")
    before = page.run("return document.querySelector('.line').getAttribute('points')")
    with RunLog(path) as log:
        log.write(step=20, loss=0.125, top1=0.9, lr=5e-4)
    page.shown("#latest td", "0.125")
    page.shown("#runs li[data-name=growing] .step", "step 20 of 30")
    assert page.run("return document.querySelector('.line').getAttribute('points')") != before
    with RunLog(path) as log:
        log.write(step=20, val_loss=0.5, val_top1=0.8)  # an evaluation takes its time
    page.shown("#latest td", "80.0 %")
    truncate_after(path, 10)
    page.shown("#latest td", "0.3")
    (path.parent / "summary.json").write_text(json.dumps({"result": {"top1": 0.777}}), encoding="utf-8")
    page.shown("#latest td", "77.7 %")
    page.shown("#runs li[data-name=growing] .run-state", "done")


def test_curves_are_read_with_the_pointer_and_the_arrow_keys(page: Page) -> None:
    page.open("/#training")
    page.wait("document.querySelectorAll('#charts .line').length > 0")
    page.run(
        "[...document.querySelectorAll('#runs input')].filter((box) => !box.checked).forEach((box) => box.click())"
    )
    page.wait("document.querySelectorAll('#charts .chart:first-child .line.trained').length >= 2")
    plots = page.all("#charts .plot")
    page.point(plots[0], across=0.5, down=0.5)
    page.shown("#charts .chart:first-child .readout", "step ")
    page.wait("document.querySelector('#charts .chart:nth-child(2) .readout').textContent.includes('%')")
    page.point(page.one("h2"), across=0.5, down=0.5)
    page.run("arguments[0].focus()", plots[0])
    page.press(Keys.ARROW_RIGHT)
    page.shown("#charts .chart:first-child .readout", "step 1")
    page.press(Keys.ARROW_RIGHT)
    page.shown("#charts .chart:first-child .readout", "step 2")
    assert "1.5" in page.text("#charts .chart:first-child .readout")
    said = "Loss, step 2. "
    page.shown("#said p", said)
    heard = page.run("return arguments[0].getAttribute('aria-label')", plots[0])
    assert heard in page.texts("#said p")
    told = heard.removeprefix(said).removesuffix(".").split("; ")
    assert "early: 1.5" in told
    assert "early, held out: 0.4 at step 10" in told


# For everyone


@pytest.mark.parametrize("dark", [False, True])
def test_texts_stand_out_and_everything_has_a_name(page: Page, place: Path, dark: bool) -> None:
    page.open(dark=dark)
    page.give(place / "0.png", place / "broken.jpg")
    page.set("#second", "second")
    page.wait("document.querySelectorAll('.badge:not([hidden])').length === 1")
    page.settle()
    ground = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground.removeprefix("rgb(").removesuffix(")").split(","))) < 380) == dark
    assert page.poor_contrasts() == []
    assert page.nameless() == []
    for path, there in (("/#training", "#latest td"), ("/docs", ".route")):
        page.open(path, dark=dark)
        page.wait("document.querySelectorAll(arguments[0]).length > 0", there)
        page.run("for (const each of document.querySelectorAll('details')) each.open = true")
        assert page.poor_contrasts() == []
        assert page.nameless() == []


def test_a_phone_shows_it_all_without_sideways_scrolling(page: Page, place: Path) -> None:
    page.open(width=390)
    page.give(place / f"{HOSTILE}.png", place / "wide.png", place / "broken.jpg")
    page.set("#second", "second")
    page.wait("document.querySelectorAll('.badge:not([hidden])').length === 2")
    page.settle()
    for path, there in ((None, ".card"), ("/#training", "#latest td"), ("/docs", ".route")):
        if path:
            page.open(path, width=390)
        page.wait("document.querySelectorAll(arguments[0]).length > 0", there)
        page.run("for (const each of document.querySelectorAll('details')) each.open = true")
        wide, window = page.widths()
        assert wide <= window == 390
        beyond = page.run(
            "return [...document.querySelectorAll('main *')]"
            ".filter((each) => !each.closest('.scroll, pre, .unseen, svg')"
            "&& each.getBoundingClientRect().right > innerWidth + 0.5).map((each) => each.className)"
        )
        assert beyond == []


def test_it_can_be_used_without_a_mouse(page: Page, place: Path) -> None:
    page.open()
    page.shown("#facts", "pixels")
    page.run("window.asked = 0; document.querySelector('#files').click = () => { window.asked += 1; }")
    page.tab_to("#pick")
    outline = page.run("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"
    page.press(Keys.ENTER)
    page.press(Keys.SPACE)
    assert page.run("return window.asked") == 2
    page.give(place / "2.png")
    page.tab_to("input[name=mode]")
    page.press(Keys.ARROW_RIGHT)
    page.shown("#mode-said", "What the answer's token looks at")
    page.tab_to("#layer")
    page.press(Keys.ARROW_LEFT)
    page.shown("#layer-said", "2 of 3")
    page.tab_to(".stage")
    page.shown(".caption", "row 3, column 3 looks most at")
    page.press(Keys.ARROW_UP, Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    page.shown("#said", "row 2, column 1 looks most at")
    page.press(Keys.ESCAPE)
    page.shown(".caption", "mean of heads: most at")
    page.press(Keys.TAB, back=True)
    assert page.run("return document.activeElement.className") == "remove"
    page.press(Keys.ENTER)
    page.wait("document.querySelectorAll('.card').length === 0")
    assert page.run("return document.activeElement.id") == "pick"


def test_the_addresses_are_shown_with_an_example_each(page: Page, server: Running) -> None:
    page.open("/docs")
    page.wait("document.querySelectorAll('.route').length > 0")
    described = server.get("/openapi.json").json["paths"]
    assert page.texts(".path") == [path for path, methods in described.items() for _ in methods]
    assert all(text.startswith("curl") for text in page.texts(".route .curl"))


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_examples_that_ask_about_an_image_work_as_they_are_written(page: Page, place: Path, tmp_path: Path) -> None:
    large = np.random.default_rng(0).integers(0, 255, (400, 400, 3), dtype=np.uint8)  # too long for an argument
    Image.fromarray(large).save(tmp_path / "photo.jpg", quality=98)
    page.open("/docs")
    page.wait("document.querySelectorAll('.route').length > 0")
    asking = [text for text in page.texts(".route .curl") if "photo.jpg" in text]
    assert any("/infer'" in text for text in asking)
    for text in asking:
        command = text.replace("/NAME/", "/first/").replace("curl ", "curl --silent --show-error --fail ", 1)
        done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, f"{text}: {done.stderr.decode()}"
        assert json.loads(done.stdout)


def test_a_server_with_a_token_asks_for_it_once(page: Page, place: Path) -> None:
    secret = "correct horse battery"
    with served(place / "first", environment={"VITKIT_TOKEN": secret}) as guarded:
        there = Page(page.driver, guarded.url)
        there.open()
        there.wait("document.querySelector('#token-dialog')?.open")
        there.one("#token").send_keys("wrong")
        there.press(Keys.ENTER)
        there.shown("#token-said", "was not accepted")
        there.one("#token").send_keys(secret)
        there.press(Keys.ENTER)
        there.give(place / "0.png")
        assert len(there.all(".labels li")) == 5
        there.driver.refresh()
        there.shown("#facts", "pixels")
        assert there.all("dialog") == []
        there.run("location.hash = '#training'")
        there.shown("#training-note", "--runs")
        assert there.run("return [localStorage.length, document.cookie]") == [0, ""]
        there.run("sessionStorage.clear()")
        assert [each for each in there.requests() if secret in each] == []
        there.driver.get("about:blank")
