"""The UI after a run, seen in a real browser: graph, a partition page with plots, checks."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from agentpipe_tests.acceptance.conftest import Home
from agentpipe_tests.acceptance.harness import Loop, Served

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.slow]
PATIENCE = 60_000
LAUNCHES = 3


def chromium() -> str:
    """The machine's own browser; skips where there is none and none can be had."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found:
            return found
    pytest.skip("no chromium on this machine (on Debian: apt-get install chromium; `make test` does so for root)")


@pytest.fixture(scope="module")
def served(finished: tuple[Home, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The UI and the daemon over a copy of the home: here the table is edited."""
    chromium()
    folder = tmp_path_factory.mktemp("browser")
    shutil.copytree(finished[0].path, folder / "home", symlinks=True)
    served = Served(Home(folder / "home"), folder / "ui.log")
    assert served.url.startswith("http://127.0.0.1:")
    yield served
    served.stop()


@pytest.fixture(scope="module")
def url(served: Served) -> str:
    return served.url


@pytest.fixture(scope="module")
def page(url: str) -> Iterator[Page]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        page = next(filter(None, (opened(playwright, url) for _ in range(LAUNCHES))), None)
        assert page is not None, f"the browser fell over {LAUNCHES} times in its first seconds"
        yield page
        assert page.context.browser is not None
        page.context.browser.close()


def opened(playwright: Any, url: str) -> Page | None:
    """A page of a browser that has shown the UI; None where it fell over meanwhile, as browsers without a GPU may."""
    from playwright.sync_api import Error

    browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
    page: Page = browser.new_page(viewport={"width": 1700, "height": 1200})
    page.set_default_timeout(PATIENCE)
    try:
        page.goto(f"{url}/asset-groups")
        page.wait_for_timeout(2_000)
    except Error:
        if browser.is_connected():
            raise
        return None
    return page if browser.is_connected() else None


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


def test_an_edit_of_the_table_is_seen_from_the_tick_to_the_green_partitions(
    served: Served, page: Page, tmp_path: Path
) -> None:
    loop = Loop(served.home, served)
    where = "kind = load and intensity = 4 and variant = 0"
    with contextlib.ExitStack() as failed:
        failed.callback(lambda: page.is_closed() or page.screenshot(path=tmp_path / "failed.png"))
        loop.command("table", "set", "network_rtt_ms=33", "--where", where, "--who", "eve", "--why", "switch")
        page.goto(f"{served.url}/locations/agentpipe/sensors/table_changes")
        page.get_by_text(re.compile(r"^[1-9]\d* (runs?|backfills?) requested$")).first.wait_for()
        [backfill] = loop.backfills()
        page.goto(f"{served.url}/runs/b/{backfill.backfill_id}")
        page.get_by_text("load-4", exact=True).first.wait_for()
        loop.wait(lambda: loop.instance.get_backfill(backfill.backfill_id).status.value != "REQUESTED", "its end")
        for asset in ("disturbance_table", "environment_pool_health", "trajectories", "champion_evaluation"):
            page.get_by_text(asset, exact=True).first.wait_for()
        page.get_by_text("Succeeded", exact=True).nth(1).wait_for()  # the other one heads a column
        page.get_by_text("100% completed").nth(3).wait_for()
        page.goto(f"{served.url}/assets/trajectories?view=partitions&partition=load-4")
        page.get_by_text("Materialized (15)").wait_for()
        page.get_by_text("Materialized", exact=True).first.wait_for()
        failed.pop_all()
