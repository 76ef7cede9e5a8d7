"""The UI after a run, seen in a real browser: graph, a partition page with plots, checks."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from agentpipe_tests.acceptance.conftest import Home

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.slow]
PATIENCE = 60_000


def chromium() -> str:
    """The machine's own browser; skips where there is none and none can be had."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found:
            return found
    pytest.skip("no chromium on this machine (on Debian: apt-get install chromium; `make test` does so for root)")


@pytest.fixture(scope="module")
def url(finished: tuple[Home, dict[str, Any]]) -> Iterator[str]:
    chromium()
    home, _ = finished
    process = subprocess.Popen(
        [sys.executable, "-m", "agentpipe", "ui", "--port", "0", "--home", str(home.path), "--json"],
        env=home.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if line.startswith("}"):
            break
    document = json.loads(text)
    assert document["url"].startswith("http://127.0.0.1:")
    yield document["url"]
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert not left_over(document["process"]), "the UI left processes behind"


def left_over(group: int) -> list[str]:
    """Processes that still belong to a process group."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(folder.name)) == group:
                found.append((folder / "cmdline").read_text())
        except (ProcessLookupError, FileNotFoundError, PermissionError):
            continue
    return [command for command in found if command]


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1700, "height": 1200})
        page.set_default_timeout(PATIENCE)
        yield page
        browser.close()


def test_the_graph_shows_every_group_and_asks_nothing_of_the_outside(url: str, page: Page) -> None:
    outside: list[str] = []
    page.on("request", lambda request: outside.append(request.url) if request.url.startswith("http") else None)
    page.goto(f"{url}/asset-groups")
    for group in ("environments", "experience", "learning", "evaluation", "deployment", "feedback"):
        page.get_by_text(group, exact=True).first.wait_for()
    page.goto(f"{url}/locations/agentpipe/asset-groups/evaluation/lineage")
    for asset in ("holdout_evaluation", "failure_attribution", "policy_drift", "weekly_drift_report"):
        page.get_by_text(asset).first.wait_for()
    assert {address for address in outside if not address.startswith(url)} == set()


def test_a_partition_page_shows_figures_and_plots(url: str, page: Page, finished: tuple[Home, dict[str, Any]]) -> None:
    _, document = finished
    page.goto(f"{url}/assets/holdout_evaluation?view=partitions&partition={quote(document['partition'])}")
    page.get_by_text("Materialized", exact=True).first.wait_for()
    page.get_by_text("scoreboard").first.wait_for()
    for player in ("oracle", "policy", "random"):
        page.get_by_text(player, exact=True).first.wait_for()
    page.get_by_text("[Show Markdown]").first.click()
    image = page.locator("img[src^='data:image/png']").first
    image.wait_for()
    width = image.evaluate("element => element.decode().then(() => element.naturalWidth)")
    assert width > 200


def test_the_checks_of_an_asset_are_shown_with_their_outcome(url: str, page: Page) -> None:
    page.goto(f"{url}/assets/holdout_evaluation?view=checks")
    for check in ("beats_random", "success", "success_target", "decision_time"):
        page.get_by_text(check, exact=True).first.wait_for()
    page.get_by_text("blocking", exact=True).first.wait_for()
    page.get_by_text(re.compile("Passed|Succeeded")).first.wait_for()


def test_every_cell_is_green(url: str, page: Page) -> None:
    page.goto(f"{url}/assets/trajectories?view=partitions")
    page.get_by_text("Materialized (15)").wait_for()
    page.get_by_text("Missing (0)").wait_for()
