"""Chromium without a window, which people use with the keyboard or the mouse."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Dialog,
    Locator,
    Page,
    Request,
    sync_playwright,
)

Open = Callable[..., Page]
"""Opens a window; takes settings of Playwright's contexts."""
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_MAX_TABS = 200
_IS_FOCUSED = "element => element === document.activeElement"
_HAS_OUTLINE = "element => getComputedStyle(element).outlineStyle !== 'none'"
_RESPONSE = "Failed to load resource: the server responded with a status of"
"""Chromium says this of each page whose status is an error."""


@contextlib.contextmanager
def a_chromium() -> Iterator[Browser]:
    """Run the Chromium of this machine; skip the test if there is none."""
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no Chromium: install the package chromium (looked for {', '.join(_NAMES)})")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Observed:
    """What a browser has done that pages of the console must not make it do."""

    origins: set[str] = field(default_factory=set)
    """Origins from which something was loaded."""
    errors: list[str] = field(default_factory=list)
    """Errors, such as what the Content-Security-Policy has refused."""
    dialogs: list[str] = field(default_factory=list)
    """Texts of dialogs, which only scripts open."""

    def watch(self, context: BrowserContext) -> None:
        """Observe all pages of a context."""
        context.on("request", self._note_request)
        context.on("console", self._note_message)
        context.on("weberror", lambda error: self.errors.append(str(error.error)))
        context.on("dialog", self._note_dialog)

    def _note_request(self, request: Request) -> None:
        parts = urlsplit(request.url)
        self.origins.add(f"{parts.scheme}://{parts.netloc}")

    def _note_message(self, message: ConsoleMessage) -> None:
        if message.type == "error" and not message.text.startswith(_RESPONSE):
            self.errors.append(message.text)

    def _note_dialog(self, dialog: Dialog) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()


@dataclass(frozen=True)
class Keyboard:
    """Uses a page with nothing but the keyboard."""

    page: Page

    def go_to(self, wanted: Locator) -> None:
        """Press Tab until an element has the focus, which must be visible."""
        for _ in range(_MAX_TABS):
            self.page.keyboard.press("Tab")
            if wanted.evaluate(_IS_FOCUSED):
                assert wanted.evaluate(_HAS_OUTLINE), f"no outline: {wanted}"
                return
        raise AssertionError(f"not reached with {_MAX_TABS} times Tab: {wanted}")

    def press(self, wanted: Locator, key: str = "Enter") -> None:
        """Go to an element and press a key."""
        self.go_to(wanted)
        self.page.keyboard.press(key)

    def fill(self, wanted: Locator, text: str) -> None:
        """Go to a field, write a text in place of its value, and press Enter."""
        self.go_to(wanted)
        self.page.keyboard.press("Control+a")
        self.page.keyboard.type(text)
        self.page.keyboard.press("Enter")
