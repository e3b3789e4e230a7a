"""The web page in Chromium with a real server and small models."""

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
from server.browser import Keys, Page, create_run, needs_chromium
from server.front_end import run_front_end
from server.serving import TIMEOUT, RunningServer, encode_image, run_server

import vitkit
from vitkit.core.lock import lock_directory
from vitkit.core.metrics_log import MetricsLog, truncate_metrics
from vitkit.data.preprocessing import Preprocessing
from vitkit.inference.predictor import Predictor
from vitkit.model.config import ViTConfig
from vitkit.model.vit import ViT

pytestmark = needs_chromium

HOSTILE = "<img src=x onerror=window.hacked=1>"
LABELS = [HOSTILE, '"><script>window.hacked=1</script>', "&lt;b&gt;", "dog\u202ecat", "javascript:window.hacked=1"]


def model(folder: Path, *, seed: int, resize: str = "squash") -> Path:
    """Save a small model with hostile class names."""
    config = ViTConfig(image_size=32, patch_size=8, width=32, depth=3, heads=2, mlp_dim=64, num_classes=len(LABELS))
    created = ViT(config)
    created.reset_parameters(torch.Generator().manual_seed(seed))
    torch.nn.init.normal_(created.head.weight, std=1.0, generator=torch.Generator().manual_seed(seed))
    preprocessing = Preprocessing(image_size=32, resize=resize, interpolation="bicubic")  # type: ignore[arg-type]
    vitkit.save(created, folder, labels=LABELS, preprocessing=preprocessing)
    return folder


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create models, images and runs."""
    folder = tmp_path_factory.mktemp("page")
    model(folder / "first", seed=0)
    model(folder / "second", seed=1, resize="crop")
    (folder / "calibration").mkdir()
    for seed in range(3):
        (folder / f"{seed}.png").write_bytes(encode_image(seed, side=40 + 60 * seed))
        (folder / "calibration" / f"{seed}.png").write_bytes(encode_image(10 + seed))
    (folder / f"{HOSTILE}.png").write_bytes(encode_image(7))
    (folder / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 not a picture")
    (folder / "scan.tif").write_bytes(encode_image(3, image_format="TIFF"))
    wide = BytesIO()
    Image.fromarray(np.random.default_rng(5).integers(0, 255, (60, 180, 3), dtype=np.uint8)).save(wide, "PNG")
    (folder / "wide.png").write_bytes(wide.getvalue())
    create_run(folder / "runs", "early", steps=40)
    create_run(folder / "runs", HOSTILE.replace("/", ""), steps=20)
    return folder


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[RunningServer]:
    names = [f"{name}={directory / name}" for name in ("first", "second")]
    options = ("--precision", "fp32,int8", "--calibration", directory / "calibration", "--runs", directory / "runs")
    with run_server(*names, *options) as running:
        yield running


def percent(fraction: float) -> str:
    if 0 < fraction < 0.001:
        return "< 0.1 %"
    return "> 99.9 %" if 0.999 < fraction < 1 else f"{100 * fraction:.1f} %"


# Predictions


def test_page_shows_the_predictions(page: Page, directory: Path) -> None:
    page.open()
    page.upload(directory / "0.png", directory / "1.png", directory / "2.png")
    files = [directory / f"{seed}.png" for seed in range(3)]
    for card, expected in zip(page.all(".card"), Predictor(directory / "first")(files), strict=True):
        rows = page.run(
            "return [...arguments[0].querySelectorAll('.labels li')].map((row) =>"
            "[row.querySelector('.label').textContent, row.querySelector('.value').textContent])",
            card,
        )
        assert rows == [[each.label, percent(each.probability)] for each in expected.predictions]
        assert len(page.run("return [...arguments[0].querySelectorAll('.nearest li')]", card)) == 5
    widths = page.run("return [...document.querySelectorAll('.labels .fill')].map((bar) => bar.style.width)")
    assert all(width.endswith("%") for width in widths)


def test_file_is_sent_unmodified(page: Page, directory: Path, server: RunningServer) -> None:
    page.open()
    page.wait_for_text("#facts", "pixels")
    page.run("window.sent = []; const real = fetch; window.fetch = (path, options) => {"
             "if (options?.body) window.sent.push(options.body); return real(path, options); }")  # fmt: skip
    page.upload(directory / "2.png")
    sizes = page.run("return Promise.all(window.sent.map(async (body) => (await body.arrayBuffer()).byteLength))")
    assert set(sizes) == {(directory / "2.png").stat().st_size}


def test_rotated_photo_is_displayed_upright(page: Page, directory: Path) -> None:
    file, exif = directory / "turned.jpg", Image.Exif()
    exif[0x0112] = 6  # a quarter turn, as phones write it
    Image.new("RGB", (160, 80), "teal").save(file, exif=exif)
    page.open()
    page.upload(file)
    assert page.run("const {width, height} = document.querySelector('.stage canvas'); return width < height")


def test_images_can_be_dropped_and_pasted(page: Page, directory: Path) -> None:
    page.open()
    page.wait_for_text("#facts", "pixels")
    page.transfer("drop", directory / "0.png")
    page.transfer("paste", directory / "1.png")
    page.wait("document.querySelectorAll('.labels li').length === 10")
    assert page.texts(".card h2") == ["0.png", "1.png"]


def test_photo_can_be_taken(page: Page) -> None:
    page.open()
    page.wait_for_text("#facts", "pixels")
    page.one("#photograph").click()
    page.wait("document.querySelector('#camera-dialog video')?.videoWidth > 0")
    page.one("#camera-dialog button.main").click()
    page.wait("document.querySelectorAll('.labels li').length === 5")
    assert page.text(".card h2").startswith("photo ")
    assert page.all("dialog") == []


def test_unsupported_format_is_classified_without_preview(page: Page, directory: Path) -> None:
    page.open()
    page.upload(directory / "scan.tif")
    assert len(page.all(".labels li")) == 5
    page.wait_for_text(".card .small", "cannot display the image")
    assert page.run("return document.querySelector('.stage').hidden")


# Attention


def test_sliders_change_the_overlay(page: Page, directory: Path) -> None:
    page.open()
    page.upload(directory / "2.png")
    page.wait_for_text(".caption", "Rollout")
    images = {"rollout": page.canvas_data()}
    for layer, head in ((1, 0), (2, 0), (2, 1), (2, 2)):
        page.set("#layer", layer)
        page.set("#head", head)
        images[f"{layer}/{head}"] = page.canvas_data()
        assert f"Layer {layer}, {f'head {head}' if head else 'mean of heads'}" in page.text(".caption")
    page.one("input[value=image]").find_element("xpath", "..").click()
    images["image"] = page.canvas_data()
    assert page.text(".caption") == ""
    assert len(set(images.values())) == len(images)
    page.one("input[value=rollout]").find_element("xpath", "..").click()
    assert page.canvas_data() == images["rollout"]
    page.set("#opacity", 0)
    assert page.canvas_data() == images["image"]


def test_pointing_at_a_patch_shows_its_attention(page: Page, directory: Path, server: RunningServer) -> None:
    page.open()
    page.upload(directory / "2.png")
    page.set("#layer", 2)
    page.set("#head", 1)
    before = page.canvas_data()
    page.point(page.one(".stage canvas"), across=0.6, down=0.3)
    page.wait_for_text(".caption", "row 2, column 3 attends most to")
    assert page.canvas_data() != before
    body = (directory / "2.png").read_bytes()
    response = server.post("/v1/attention?model=first&layer=1&head=0", body).json  # the server counts from 0
    weights = np.array(response["patches"])[1 * 4 + 2].reshape(4, 4)
    row, column = np.unravel_index(weights.argmax(), weights.shape)
    strongest = f"row {row + 1}, column {column + 1}, {percent(float(weights.max()))}"
    assert f"attends most to {strongest}" in page.text(".caption")
    page.point(page.one("#mode-help"), across=0.5, down=0.5)
    page.wait("!document.querySelector('.caption').textContent.includes('attends')")
    assert page.canvas_data() == before


def test_cropped_parts_are_dimmed_and_have_no_patches(page: Page, directory: Path) -> None:
    page.open()
    page.upload(directory / "wide.png")
    page.select_model("second")  # which crops to the middle
    canvas = page.one(".stage canvas")
    page.point(canvas, across=0.05, down=0.5)
    assert "column" not in page.text(".caption").partition("strongest patch")[0]
    # Of 180 × 60 pixels the model sees a square in the middle, 32 / 36 of the height: from 63.3 to 116.7.
    page.point(canvas, across=0.36, down=0.5)
    page.wait_for_text(".caption", "column 1 has")
    page.point(canvas, across=0.64, down=0.5)
    page.wait_for_text(".caption", "column 4 has")
    middle, edge = page.run(
        "const canvas = arguments[0];"
        "const line = canvas.getContext('2d').getImageData(0, canvas.height / 2, canvas.width, 1);"
        "return [0.5, 0.02].map((x) => [...line.data.slice(4 * Math.floor(x * canvas.width)).slice(0, 4)])",
        canvas,
    )
    assert middle != edge


# Two models


def test_two_models_are_compared(page: Page, directory: Path) -> None:
    page.open()
    page.upload(*(directory / f"{seed}.png" for seed in range(3)))
    page.set("#second", "second")
    page.wait("document.querySelectorAll('.badge:not([hidden])').length === 3")
    files = [directory / f"{seed}.png" for seed in range(3)]
    one, two = (Predictor(directory / name).probabilities(files) for name in ("first", "second"))
    same = (one.argmax(1) == two.argmax(1)).tolist()
    badges = page.run(
        "return [...document.querySelectorAll('.badge')].map((each) => each.classList.contains('agrees'))"
    )
    assert badges == same
    largest = 100 * float((one - two).abs().max())
    assert f"Same top-1 class on {sum(same)} of 3 images." in page.text("#comparison")
    assert f"{largest:.1f} points" in page.text("#comparison")
    changes = page.texts(".card:first-child .model-panel:last-child .change")
    order = two[0].argsort(descending=True).tolist()
    expected = [100 * float(two[0, number] - one[0, number]) for number in order]
    got = [float(text.replace("−", "-").replace("±", "")) for text in changes]
    assert got == pytest.approx(expected, abs=0.051)  # shown to a tenth
    page.set("#second", "")
    page.wait("document.querySelectorAll('.model-panel').length === 3")
    assert page.texts(".change") == []


def test_effect_of_int8_is_shown_with_its_agreement(page: Page, directory: Path) -> None:
    page.open()
    page.upload(*(directory / f"{seed}.png" for seed in range(3)))
    page.set("#second", "first-int8")
    page.wait("document.querySelectorAll('.badge:not([hidden])').length === 3")
    assert "Effect of int8" in page.text("#comparison")
    assert "images" in page.text("#facts .measured")
    assert "compared with fp32" in page.text("#facts p:last-child")
    options = page.run(
        "return [...document.querySelectorAll('#second option')].map((each) => [each.value, each.disabled])"
    )
    assert ["first", True] in options  # nothing is compared with itself
    assert ["second-int8", False] in options


# Errors


def test_broken_file_is_an_error_on_its_own_card(page: Page, directory: Path) -> None:
    page.open()
    page.upload(directory / "0.png", directory / "broken.jpg", directory / "1.png")
    assert len(page.all(".labels ol")) == 2
    assert "The server cannot read this image." in page.text(".state.failed")
    announcements = page.texts("#announcements p")
    assert any("broken.jpg: The server cannot read this image." in text for text in announcements)
    assert any("0.png: first predicts" in text for text in announcements)
    assert page.all(".state.failed button") == []  # a retry would not help


STUB = """
window.count = 0;
const real = window.fetch;
window.fetch = (path, options) => {
  if (String(path).includes("v1/predict") && window.count++ === 0) {
    const rejection = {status: STATUS, headers: {"Retry-After": "1"}};
    return Promise.resolve(new Response(JSON.stringify({error: "the queue is full"}), rejection));
  }
  return real(path, options);
};
"""


@pytest.mark.parametrize(
    ("status", "words"),
    [(429, "The server is busy. Retrying in"), (503, "The server is not ready. Retrying in")],
)
def test_busy_server_is_retried(page: Page, directory: Path, status: int, words: str) -> None:
    page.open()
    page.wait_for_text("#facts", "pixels")
    page.run(STUB.replace("STATUS", str(status)))
    page.record_texts(".state.busy")
    page.one("#files").send_keys(str(directory / "0.png"))
    page.wait_for_recorded(words)
    page.wait("document.querySelectorAll('.labels li').length === 5")
    assert page.run("return window.count") == 2


@pytest.mark.parametrize(
    ("status", "words", "again"),
    [(413, "larger than the server accepts", False), (504, "did not respond in time", True)],
)
def test_rejection_is_explained(page: Page, directory: Path, status: int, words: str, again: bool) -> None:
    page.open()
    page.wait_for_text("#facts", "pixels")
    page.run(STUB.replace("STATUS", str(status)))
    page.one("#files").send_keys(str(directory / "0.png"))
    page.wait_for_text(".state.failed", words)
    page.wait_for_text(".state.failed", "The queue is full.")
    buttons = page.all(".state.failed button")
    assert bool(buttons) == again
    if again:
        buttons[0].click()
        page.wait("document.querySelectorAll('.labels li').length === 5")


def test_page_reconnects_after_the_server_was_unreachable(page: Page, directory: Path) -> None:
    page.open()
    page.upload(directory / "0.png")
    offline = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.command("Network.enable", {})
    page.command("Network.emulateNetworkConditions", offline)
    try:
        page.one("#files").send_keys(str(directory / "1.png"))
        page.wait_for_text(".state.failed", "The server is not reachable.")
        page.wait("document.querySelector('#health').dataset.state === 'down'")
        assert len(page.all(".labels li")) == 5  # what was answered stays
    finally:
        page.command("Network.emulateNetworkConditions", offline | {"offline": False})
    page.wait("document.querySelectorAll('.labels li').length === 10")
    page.wait("document.querySelector('#health').dataset.state === 'ready'")
    assert [each for each in page.console_errors() if "ERR_INTERNET_DISCONNECTED" not in each] == []


def test_names_are_never_interpreted_as_html(page: Page, directory: Path) -> None:
    page.open()
    page.upload(directory / f"{HOSTILE}.png")
    page.set("#second", "second")
    page.wait("document.querySelectorAll('.badge:not([hidden])').length === 1")
    assert set(page.texts(".model-panel:first-child .label")) == set(LABELS)
    assert page.texts(".card h2") == [f"{HOSTILE}.png"]
    assert page.run("return document.querySelectorAll('main img, main script, main b b').length") == 0
    page.run("location.hash = '#training'")
    page.wait_for_text(".run-name", HOSTILE)
    page.run(
        "[...document.querySelectorAll('#runs input')].filter((box) => !box.checked).forEach((box) => box.click())"
    )
    page.wait("document.querySelectorAll('#latest tbody tr').length >= 2")
    assert page.run("return document.querySelectorAll('main img, main script').length") == 0


# Training


def test_curves_follow_a_growing_log(page: Page, directory: Path) -> None:
    path = create_run(directory / "runs", "growing", steps=30) / "metrics.jsonl"
    with lock_directory(path.parent):
        page.open("/#training")
        page.wait_for_text("#runs li[data-name=growing] .run-state", "running")
    box = page.one("#runs li[data-name=growing] input")
    if not box.is_selected():
        box.click()
    for other in page.all("#runs li:not([data-name=growing]) input"):
        if other.is_selected():
            other.click()
    page.wait("document.querySelectorAll('#latest tbody tr').length === 1")
    page.wait_for_text("#latest td", "0.3")
    before = page.run("return document.querySelector('.line').getAttribute('points')")
    with MetricsLog(path) as log:
        log.write(step=20, loss=0.125, top1=0.9, lr=5e-4)
    page.wait_for_text("#latest td", "0.125")
    page.wait_for_text("#runs li[data-name=growing] .step", "step 20 of 30")
    assert page.run("return document.querySelector('.line').getAttribute('points')") != before
    with MetricsLog(path) as log:
        log.write(step=20, val_loss=0.5, val_top1=0.8)  # an evaluation takes its time
    page.wait_for_text("#latest td", "80.0 %")
    truncate_metrics(path, 10)
    page.wait_for_text("#latest td", "0.3")
    (path.parent / "summary.json").write_text(json.dumps({"result": {"top1": 0.777}}), encoding="utf-8")
    page.wait_for_text("#latest td", "77.7 %")
    page.wait_for_text("#runs li[data-name=growing] .run-state", "done")


def test_curves_are_read_with_pointer_and_arrow_keys(page: Page) -> None:
    page.open("/#training")
    page.wait("document.querySelectorAll('#charts .line').length > 0")
    page.run(
        "[...document.querySelectorAll('#runs input')].filter((box) => !box.checked).forEach((box) => box.click())"
    )
    page.wait("document.querySelectorAll('#charts .chart:first-child .line.trained').length >= 2")
    plots = page.all("#charts .plot")
    page.point(plots[0], across=0.5, down=0.5)
    page.wait_for_text("#charts .chart:first-child .readout", "step ")
    page.wait("document.querySelector('#charts .chart:nth-child(2) .readout').textContent.includes('%')")
    page.point(page.one("h2"), across=0.5, down=0.5)
    page.run("arguments[0].focus()", plots[0])
    page.press(Keys.ARROW_RIGHT)
    page.wait_for_text("#charts .chart:first-child .readout", "step 1")
    page.press(Keys.ARROW_RIGHT)
    page.wait_for_text("#charts .chart:first-child .readout", "step 2")
    assert "1.5" in page.text("#charts .chart:first-child .readout")
    title = "Loss, step 2. "
    page.wait_for_text("#announcements p", title)
    label = page.run("return arguments[0].getAttribute('aria-label')", plots[0])
    assert label in page.texts("#announcements p")
    values = label.removeprefix(title).removesuffix(".").split("; ")
    assert "early: 1.5" in values
    assert "early, validation: 0.4 at step 10" in values


# Accessibility and documentation


@pytest.mark.parametrize("dark", [False, True])
def test_contrast_and_accessible_names(page: Page, directory: Path, dark: bool) -> None:
    page.open(dark=dark)
    page.upload(directory / "0.png", directory / "broken.jpg")
    page.set("#second", "second")
    page.wait("document.querySelectorAll('.badge:not([hidden])').length === 1")
    page.settle()
    ground = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground.removeprefix("rgb(").removesuffix(")").split(","))) < 380) == dark
    assert page.low_contrast_texts() == []
    assert page.unnamed_elements() == []
    for path, content in (("/#training", "#latest td"), ("/docs", ".route")):
        page.open(path, dark=dark)
        page.wait("document.querySelectorAll(arguments[0]).length > 0", content)
        page.run("for (const each of document.querySelectorAll('details')) each.open = true")
        assert page.low_contrast_texts() == []
        assert page.unnamed_elements() == []


def test_phone_layout_has_no_horizontal_scrolling(page: Page, directory: Path) -> None:
    page.open(width=390)
    page.upload(directory / f"{HOSTILE}.png", directory / "wide.png", directory / "broken.jpg")
    page.set("#second", "second")
    page.wait("document.querySelectorAll('.badge:not([hidden])').length === 2")
    page.settle()
    for path, content in ((None, ".card"), ("/#training", "#latest td"), ("/docs", ".route")):
        if path:
            page.open(path, width=390)
        page.wait("document.querySelectorAll(arguments[0]).length > 0", content)
        page.run("for (const each of document.querySelectorAll('details')) each.open = true")
        page_width, window_width = page.widths()
        assert page_width <= window_width == 390
        beyond = page.run(
            "return [...document.querySelectorAll('main *')]"
            ".filter((each) => !each.closest('.scroll, pre, .visually-hidden, svg')"
            "&& each.getBoundingClientRect().right > innerWidth + 0.5).map((each) => each.className)"
        )
        assert beyond == []


def test_page_works_with_the_keyboard(page: Page, directory: Path) -> None:
    page.open()
    page.wait_for_text("#facts", "pixels")
    page.run("window.clicks = 0; document.querySelector('#files').click = () => { window.clicks += 1; }")
    page.tab_to("#pick")
    outline = page.run("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"
    page.press(Keys.ENTER)
    page.press(Keys.SPACE)
    assert page.run("return window.clicks") == 2
    page.upload(directory / "2.png")
    page.tab_to("input[name=mode]")
    page.press(Keys.ARROW_RIGHT)
    page.wait_for_text("#mode-help", "Attention of the class token")
    page.tab_to("#layer")
    page.press(Keys.ARROW_LEFT)
    page.wait_for_text("#layer-value", "2 of 3")
    page.tab_to(".stage")
    page.wait_for_text(".caption", "row 3, column 3 attends most to")
    page.press(Keys.ARROW_UP, Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    page.wait_for_text("#announcements", "row 2, column 1 attends most to")
    page.press(Keys.ESCAPE)
    page.wait_for_text(".caption", "mean of heads: strongest patch")
    page.press(Keys.TAB, back=True)
    assert page.run("return document.activeElement.className") == "remove"
    page.press(Keys.ENTER)
    page.wait("document.querySelectorAll('.card').length === 0")
    assert page.run("return document.activeElement.id") == "pick"


def test_docs_list_all_routes_with_examples(page: Page, server: RunningServer) -> None:
    page.open("/docs")
    page.wait("document.querySelectorAll('.route').length > 0")
    paths = server.get("/openapi.json").json["paths"]
    assert page.texts(".path") == [path for path, methods in paths.items() for _ in methods]
    assert "probability: number" in page.text(".route pre")
    assert all(text.startswith("curl") for text in page.texts(".route .curl"))


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_examples_work_unmodified(page: Page, directory: Path, tmp_path: Path) -> None:
    large = np.random.default_rng(0).integers(0, 255, (400, 400, 3), dtype=np.uint8)  # too long for an argument
    Image.fromarray(large).save(tmp_path / "photo.jpg", quality=98)
    page.open("/docs")
    page.wait("document.querySelectorAll('.route').length > 0")
    examples = [text for text in page.texts(".route .curl") if "photo.jpg" in text]
    assert any("/infer'" in text for text in examples)
    for text in examples:
        command = text.replace("/NAME/", "/first/").replace("curl ", "curl --silent --show-error --fail ", 1)
        result = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, timeout=TIMEOUT, check=False)
        assert result.returncode == 0, f"{text}: {result.stderr.decode()}"
        assert json.loads(result.stdout)


def test_token_is_requested_once(page: Page, directory: Path) -> None:
    secret = "correct horse battery"
    with run_front_end(token=secret) as front_end:
        other = Page(page.driver, front_end.url)
        other.open()
        other.wait("document.querySelector('#token-dialog')?.open")
        other.one("#token").send_keys("wrong")
        other.press(Keys.ENTER)
        other.wait_for_text("#token-help", "was not accepted")
        other.one("#token").send_keys(secret)
        other.press(Keys.ENTER)
        other.upload(directory / "0.png")
        assert other.texts(".labels .label") == ["cat"]
        other.driver.refresh()
        other.wait_for_text("#facts", "pixels")
        assert other.all("dialog") == []
        other.run("location.hash = '#training'")
        other.wait_for_text("#training-note", "--runs")
        assert other.run("return [localStorage.length, document.cookie]") == [0, ""]
        other.run("sessionStorage.clear()")
        assert [each for each in other.requests() if secret in each] == []
        other.driver.get("about:blank")
