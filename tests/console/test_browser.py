"""The console in a real headless Chromium: bars move, errors are found, nothing is logged."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import console_showcase as showcase
from chromium import CHROMIUM, chromium
from console_server import serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="Chromium is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="no playwright"),
]

TOKEN = "a-token-of-this-test-alone"
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("console") / "db"
    showcase.add_hostile_names(showcase.make(path, rows=120))
    return str(path)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def address(uri: str) -> Iterator[str]:
    with serving(uri) as where:
        yield where


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that must not log an error, raise one, or miss anything it asks for."""
    with quiet_page(browser) as opened:
        yield opened


class quiet_page:
    """Opens a page and fails at the end when it logged an error."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self._context = browser.new_context(**options)
        self.troubles: list[str] = []

    def __enter__(self) -> Any:
        page = self._context.new_page()
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.troubles.append(str(error)))
        page.on("requestfailed", self._on_failed)
        return page

    def __exit__(self, kind: object, *_: object) -> None:
        self._context.close()
        if kind is None:
            assert self.troubles == []

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.troubles.append(message.text)

    def _on_failed(self, request: Any) -> None:
        # What is still on its way when the page is left is aborted: that is no trouble.
        if "ERR_ABORTED" not in str(request.failure):
            self.troubles.append(f"{request.url}: {request.failure}")


def start_slow_job(uri: str, folder: Path) -> subprocess.Popen[bytes]:
    code = f"import console_showcase; console_showcase.run_slow_job({uri!r}, 12, 50)"
    with (folder / "job.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", code], cwd=Path(showcase.__file__).parent, stdout=log, stderr=log
        )


def running_job_id(uri: str) -> str:
    db = showcase.connect(uri)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for job in db.list_jobs("photos", "RUNNING"):
            return job.job_id
        time.sleep(0.2)
    raise AssertionError("the job did not start")


@pytest.mark.parametrize(
    "way", ["/", "/tables/pictures", "/tables/odd-names", "/views", "/jobs", "/errors"]
)
@pytest.mark.parametrize("size", [None, PHONE], ids=["wide", "phone"])
def test_a_page_loads_without_an_error_and_fits(
    browser: Any, address: str, way: str, size: Any
) -> None:
    with quiet_page(browser, **({"viewport": size} if size else {})) as page:
        page.goto(address + way)
        page.wait_for_selector("[aria-busy]", state="detached")
        page.wait_for_timeout(200)
        assert page.locator("h1").count() == 1
        wider = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(wider) <= 0, "the page scrolls sideways"
        # Every picture that is in sight was drawn.
        broken = "[...document.images].filter(i => i.complete && !i.naturalWidth).length"
        assert page.evaluate(broken) == 0


def test_freshness_comes_by_itself(page: Any, address: str) -> None:
    page.goto(address)
    page.wait_for_selector("text=30 of 390 rows stale")


def test_the_keyboard_goes_everywhere(page: Any, address: str) -> None:
    page.goto(address)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    seen = set()
    for _ in range(12):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.textContent"))
    assert "pictures" in seen
    page.goto(address)
    for _ in range(4):
        page.keyboard.press("Tab")
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid"


def test_a_running_job_moves_its_bar_to_the_end(
    page: Any, address: str, uri: str, tmp_path: Path
) -> None:
    job = start_slow_job(uri, tmp_path)
    try:
        job_id = running_job_id(uri)
        page.goto(address + "/jobs")
        page.click(f"text={job_id[:8]}")
        page.wait_for_selector("#status >> text=running")
        bar = "document.getElementById('committed-bar').value"
        seen = [page.evaluate(bar)]
        end = time.monotonic() + 60
        while page.locator("#status >> text=done").count() == 0 and time.monotonic() < end:
            seen.append(page.evaluate(bar))
            page.wait_for_timeout(300)
        page.wait_for_selector("#status >> text=done")
        seen.append(page.evaluate(bar))
        assert seen == sorted(seen)
        assert seen[-1] == 600
        assert len(set(seen)) >= 3, seen
        assert page.inner_text("#say") == "The job is done."
        assert page.locator("svg.plot").count() == 1
        assert "600 of 600" in page.inner_text("#committed-text")
    finally:
        job.kill()
        job.wait()


def test_an_error_can_be_found_with_its_row_and_text(page: Any, address: str) -> None:
    page.goto(address)
    page.click("nav >> text=Errors")
    group = page.locator("details.error", has_text="cannot decode")
    assert "ValueError" in group.locator("h2").inner_text()
    row = group.locator("tr", has_text="fragment 0, row 13")
    assert "cannot decode the image of row 13: <b>truncated</b>" in row.inner_text()
    assert "id=13" in row.inner_text()
    group.locator("summary", has_text="Traceback").click()
    assert "in decoded" in group.locator("pre").inner_text()
    row.locator("a").last.click()
    page.wait_for_selector("h1 >> text=Backfill of decoded")


def test_dark_and_light_differ(browser: Any, address: str, tmp_path: Path) -> None:
    grounds = {}
    for scheme in ("light", "dark"):
        with quiet_page(browser, color_scheme=scheme) as page:
            page.goto(address + "/views")
            grounds[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
            picture = tmp_path / f"{scheme}.png"
            page.screenshot(path=picture)
            assert picture.stat().st_size > 10_000
    assert grounds == {"light": "rgb(246, 247, 248)", "dark": "rgb(14, 19, 23)"}


def test_a_job_is_cancelled_from_its_page(browser: Any, tmp_path: Path) -> None:
    uri = str(tmp_path / "db")
    job = start_slow_job(uri, tmp_path)
    try:
        job_id = running_job_id(uri)
        with serving(uri, TOKEN) as address, quiet_page(browser) as page:
            page.goto(f"{address}/jobs/{job_id}")
            page.fill("input[name=token]", TOKEN)
            page.click("text=Open")
            page.wait_for_selector("h1 >> text=Tables")
            page.goto(f"{address}/jobs/{job_id}")
            page.on("dialog", lambda dialog: dialog.accept())
            page.click("text=Cancel job")
            page.wait_for_selector("#status >> text=cancelled", timeout=30_000)
    finally:
        job.kill()
        job.wait()
