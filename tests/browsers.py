"""A browser for tests of pages."""

import shutil
from typing import TYPE_CHECKING

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from tests.servers import MissingProgram

if TYPE_CHECKING:
    from selenium.webdriver import Chrome


_PATIENCE_S = 120
"""How long a script may take, where all cores are busy."""


def open_browser() -> "Chrome":
    """Chromium without a window. Raises MissingProgram."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        raise MissingProgram(
            "Chromium is not installed; type: apt-get install chromium chromium-driver"
        )
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu"):
        options.add_argument(f"--{argument}")
    options.add_argument("--window-size=1100,1000")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options, Service(driver))
    browser.set_script_timeout(_PATIENCE_S)
    return browser
