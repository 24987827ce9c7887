"""A real browser without a window, for tests of pages: Chromium through its own driver."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = "no chromium and chromedriver on this machine: the pages are not opened in a browser"


class Browser:
    """One page at a time."""

    def __init__(self, driver) -> None:
        self.driver = driver

    def open(self, page: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get_log("browser"), self.driver.get_log("performance")  # of the page before
        self.driver.get(page.resolve().as_uri())

    def run(self, script: str):
        return self.driver.execute_script(script)

    def unfold(self) -> None:
        """Open everything that can be opened and wait until every picture is there."""
        script = """
            const done = arguments[arguments.length - 1];
            document.querySelectorAll('details').forEach(d => d.open = true);
            const images = [...document.images];
            images.forEach(i => i.loading = 'eager');
            const waits = images.map(i => i.complete ? null : new Promise(ready => {
                i.addEventListener('load', ready); i.addEventListener('error', ready); }));
            Promise.all(waits).then(() => done(images.length));
        """
        self.driver.set_script_timeout(60)
        self.driver.execute_async_script(script)

    def console(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses that the page has asked for, itself included."""
        events = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        return [
            e["params"]["request"]["url"]
            for e in events
            if e["method"] == "Network.requestWillBeSent"
        ]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(self.driver.get_screenshot_as_png())


@contextmanager
def browser() -> Iterator[Browser]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    arguments = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
                 "--no-first-run", "--disable-background-networking"]  # fmt: skip
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        arguments.append("--no-sandbox")  # Chromium as root does not start with it
    for argument in arguments:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
