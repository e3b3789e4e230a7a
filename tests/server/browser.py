"""Headless Chromium and the actions of a user."""

import json
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from server.serving import wait_until

from vitkit.core.metrics_log import MetricsLog

selenium = pytest.importorskip("selenium.webdriver", reason="selenium drives the page's tests")

from selenium.webdriver import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="Chromium and chromedriver are not installed"
)

FREQUENT_POLLS = """{
  const real = window.setTimeout;
  window.setTimeout = (callback, ms, ...rest) => real(callback, ms === 2000 ? 200 : ms, ...rest);
}"""
"""Makes the page ask for logs five times a second, not every two seconds."""
NAMED_ROLES = {"button", "checkbox", "radio", "slider", "combobox", "textbox", "link", "image", "img", "application"}

CONTRASTS = """
const numbers = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
const light = (rgb) => {
  const curve = (value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const linear = rgb.slice(0, 3).map((value) => curve(value / 255));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
};
const ground = (element) => {
  for (let each = element; each; each = each.parentElement) {
    const color = numbers(getComputedStyle(each).backgroundColor);
    if (color.length === 3 || color[3] === 1) return color;
  }
  return [255, 255, 255];
};
const poor = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  const box = element.getBoundingClientRect();
  const hidden = element.closest("svg, option, script, noscript, .visually-hidden, .skip");
  if (hidden || box.width < 2 || box.height < 2 || !walker.currentNode.data.trim()) continue;
  const [front, back] = [light(numbers(getComputedStyle(element).color)), light(ground(element))];
  const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
  if (ratio < 4.5) poor.push([walker.currentNode.data.trim().slice(0, 40), Number(ratio.toFixed(2))]);
}
return poor;
"""

SETTLED = """document.querySelector('.model-panel') && !document.querySelector('.model-panel[aria-busy=true]')
  && [...document.querySelectorAll('.card')].every((card) =>
    card.querySelector('.stage:not([hidden]), .state.failed') || !card.querySelector('.card > .small').hidden)"""
RECORDER = """
const [selector] = arguments;
window.recorded = [];
const record = () => window.recorded.push(...[...document.querySelectorAll(selector)].map((each) => each.textContent));
new MutationObserver(record).observe(document.body, {childList: true, subtree: true, characterData: true});
"""


class Page:
    """The web page in a browser."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver, self.url = driver, url

    def open(self, path: str = "/", *, width: int = 1280, dark: bool = False) -> None:
        """Load the page with a width and a color scheme."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.command("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get("about:blank")  # a URL with another hash only would not be reloaded
        self.driver.get(self.url + path)

    def command(self, name: str, options: dict[str, Any]) -> Any:
        return self.driver.execute_cdp_cmd(name, options)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> Any:
        (element,) = self.all(selector)
        return element

    def texts(self, selector: str) -> list[str]:
        """Return the texts of all elements with one script, because elements may be replaced meanwhile."""
        return self.run("return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)", selector)

    def text(self, selector: str) -> str:
        return " ".join(self.texts(selector))

    def wait(self, script: str, *arguments: Any) -> Any:
        """Wait until a JavaScript expression is true."""
        return wait_until(lambda: self.run(f"return {script}", *arguments), interval=0.05)

    def wait_for_text(self, selector: str, text: str) -> None:
        """Wait until an element contains a text."""
        script = "[...document.querySelectorAll(arguments[0])].some((each) => each.textContent.includes(arguments[1]))"
        self.wait(script, selector, text)

    def upload(self, *files: Path) -> None:
        """Choose files and wait for all predictions."""
        self.wait_for_text("#facts", "pixels")
        before = len(self.all(".card"))
        self.one("#files").send_keys("\n".join(map(str, files)))
        self.wait("document.querySelectorAll('.card').length === arguments[0]", before + len(files))
        self.settle()

    def transfer(self, kind: str, file: Path) -> None:
        """Drop a file on the page, or paste it."""
        script = """
            const [kind, name, bytes] = arguments;
            const data = new DataTransfer();
            data.items.add(new File([Uint8Array.from(bytes)], name, {type: "image/png"}));
            const options = {bubbles: true, cancelable: true, dataTransfer: data, clipboardData: data};
            const event = kind === "drop" ? new DragEvent("drop", options) : new ClipboardEvent("paste", options);
            document.querySelector("main").dispatchEvent(event);"""
        self.run(script, kind, file.name, list(file.read_bytes()))

    def settle(self) -> None:
        """Wait until all panels have their results and all previews are drawn or known to be impossible."""
        self.wait(SETTLED)

    def select_model(self, name: str) -> None:
        """Select the first model and wait for its results."""
        self.set("#model", name)
        self.wait_for_text(".panel-title", name)
        self.settle()

    def record_texts(self, selector: str) -> None:
        """Record all texts that elements have from now on, however briefly, for `wait_for_recorded`."""
        self.run(RECORDER, selector)

    def wait_for_recorded(self, text: str) -> None:
        self.wait("window.recorded.some((each) => each.includes(arguments[0]))", text)

    def set(self, selector: str, value: object) -> None:
        """Set the value of a control and send its events."""
        script = """const [control, value] = arguments; control.value = value;
            for (const name of ["input", "change"]) control.dispatchEvent(new Event(name, {bubbles: true}));"""
        self.run(script, self.one(selector), value)

    def canvas_data(self, card: int = 0) -> str:
        """Return the canvas of a card as a data URL."""
        return self.run("return document.querySelectorAll('.stage canvas')[arguments[0]].toDataURL()", card)

    def point(self, element: Any, *, across: float, down: float) -> None:
        """Move the pointer to a position in an element, as fractions of its size."""
        box = self.run(
            "arguments[0].scrollIntoView({block: 'center'});"
            "const {x, y, width, height} = arguments[0].getBoundingClientRect(); return {x, y, width, height}",
            element,
        )
        chain = ActionChains(self.driver, duration=0)
        chain.w3c_actions.pointer_action.move_to_location(
            int(box["x"] + across * box["width"]), int(box["y"] + down * box["height"])
        )
        chain.perform()

    def press(self, *keys: str, back: bool = False) -> None:
        """Press keys, with Shift if `back` is set."""
        chain = ActionChains(self.driver)
        if back:
            chain = chain.key_down(Keys.SHIFT)
        for key in keys:
            chain = chain.send_keys(key)
        (chain.key_up(Keys.SHIFT) if back else chain).perform()

    def tab_to(self, selector: str, *, max_presses: int = 40) -> None:
        """Press Tab until a matching element has the focus."""
        for _ in range(max_presses):
            if self.run("return document.activeElement.matches(arguments[0])", selector):
                return
            self.press(Keys.TAB)
        raise AssertionError(f"the Tab key does not lead to {selector}")

    def unnamed_elements(self) -> list[str]:
        """Return the roles of elements without an accessible name."""
        nodes = self.command("Accessibility.getFullAXTree", {})["nodes"]
        controls = [node for node in nodes if not node.get("ignored") and node["role"]["value"] in NAMED_ROLES]
        assert controls
        return [node["role"]["value"] for node in controls if not str(node.get("name", {}).get("value", "")).strip()]

    def low_contrast_texts(self) -> list[tuple[str, float]]:
        """Return texts with a contrast below 4.5."""
        return self.run(CONTRASTS)

    def widths(self) -> tuple[int, int]:
        """Return the widths of page and window."""
        return tuple(self.run("return [document.documentElement.scrollWidth, innerWidth]"))

    def console_errors(self) -> list[str]:
        """Return console messages except those about expected 4xx and 503 responses."""
        expected = ("status of 4", "status of 503")
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] in ("SEVERE", "WARNING") and not any(text in entry["message"] for text in expected)
        ]

    def requests(self) -> list[str]:
        """Return all requested URLs."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"]


@contextmanager
def without_side_effects(page: Page) -> Iterator[Page]:
    """Check that a test causes no console errors and no requests to other hosts."""
    page.driver.get("about:blank")
    page.console_errors(), page.requests()
    yield page
    assert page.console_errors() == []
    own = (page.url + "/", "blob:", "data:", "about:blank")
    assert [address for address in page.requests() if not address.startswith(own)] == []
    assert page.run("return window.hacked") is None


def create_run(folder: Path, name: str, *, steps: int) -> Path:
    """Create a run with ten records and an evaluation."""
    path = folder / name
    path.mkdir(parents=True)
    (path / "config.toml").write_text(f"[schedule]\nsteps = {steps}\n", encoding="utf-8")
    with MetricsLog(path / "metrics.jsonl") as log:
        for step in range(1, 11):
            log.write(step=step, epoch=step / 10, loss=3.0 / step, top1=step / 20, lr=1e-3, gradient_norm=1.0)
        log.write(step=10, val_loss=0.4, val_top1=0.45)
    return path


class Driver(selenium.ChromeService):
    """chromedriver, checked with a plain socket: selenium uses urllib, which the audit of the tests reports."""

    def is_connectable(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def send_remote_shutdown_command(self) -> None:
        self.process.terminate()


@contextmanager
def chromium(profile: Path) -> Iterator[Any]:
    """Run a browser with a new profile and a fake camera."""
    options = selenium.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--use-fake-device-for-media-stream",
        "--use-fake-ui-for-media-stream",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = selenium.Chrome(options=options, service=Driver(DRIVER))
    driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": FREQUENT_POLLS})
    try:
        yield driver
    finally:
        driver.quit()
