"""A real Chromium, started once; every test gets a fresh profile."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page, sync_playwright

from tests.e2e.browser.fake_service import FakeService, running

ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def chromium() -> Iterator[object]:
    """The browser's launcher: `context(profile)` opens it on a profile folder."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "these tests need Chromium: apt-get install chromium, or set CHROMIUM to its path"
    with sync_playwright() as playwright:
        yield lambda profile, **options: playwright.chromium.launch_persistent_context(
            profile, executable_path=path, args=ARGUMENTS, headless=True, **options
        )


@pytest.fixture
def context(chromium, tmp_path: Path) -> Iterator[BrowserContext]:
    """A browser with nothing in it. The test fails if a page threw or broke its content policy."""
    opened = chromium(tmp_path / "profile", viewport={"width": 1200, "height": 800})
    opened.set_default_timeout(15_000)
    errors: list[str] = []
    opened.on("weberror", lambda error: errors.append(str(error.error)))
    opened.on("console", lambda line: "Content Security Policy" in line.text and errors.append(line.text))
    yield opened
    opened.close()
    assert errors == []


@pytest.fixture
def page(context: BrowserContext) -> Page:
    """The first tab."""
    return context.pages[0]


@pytest.fixture
def fake() -> Iterator[FakeService]:
    """A service that misbehaves on demand; `fake.origin` is where."""
    service = FakeService()
    with running(service) as origin:
        service.origin = origin  # type: ignore[attr-defined]
        yield service
