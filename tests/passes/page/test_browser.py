"""The page in a real browser, headless Chromium: no errors, by keyboard, from a telephone's width to 4K, at once."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from passes.cluster import Mesh
from passes.page import Measured, MeasuredSpan, html
from passes.plan import AnyPlan, LayerCost, Operator, Plan
from tests.passes.plan.made_up import CLUSTER, DOWN, UP, floats, make_pipeline, make_plan

pytestmark = pytest.mark.slow

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    driver = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
    if BROWSER is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with driver.sync_playwright() as play:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        opened = play.chromium.launch(executable_path=BROWSER, args=arguments)
        yield opened
        opened.close()


class Shown:
    """A plan's page in a tab of its own, with everything that its console says."""

    def __init__(
        self,
        browser: Any,
        plan: AnyPlan,
        folder: Path,
        width: int = 1280,
        scheme: str = "light",
        measured: Measured | None = None,
    ) -> None:
        self.tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.messages: list[str] = []
        self.tab.on("console", lambda message: self.messages.append(message.text))
        self.tab.on("pageerror", lambda error: self.messages.append(str(error)))
        self.tab.on("request", lambda request: self.asked(request.url))
        (folder / "plan.html").write_text(html(plan, measured), encoding="utf-8")
        self.tab.goto((folder / "plan.html").as_uri())
        self.tab.wait_for_selector("#arrays")

    def asked(self, url: str) -> None:
        if not url.startswith(("file:", "data:")):
            self.messages.append(f"asked for {url}")

    def close(self) -> list[str]:
        self.tab.close()
        return self.messages


def deep(layers: int = 48) -> Plan:
    """A plan of many layers of many operators on 64 devices, with three inputs a weight as an optimizer has them."""
    (group,) = CLUSTER.groups
    cluster = replace(CLUSTER, groups=(replace(group, hosts=8, devices_per_host=8),))
    mesh = Mesh(axes=("data", "tensor"), sizes=(16, 4), cluster=cluster)
    operators = tuple(
        Operator(
            primitive=f"op_{i % 40}", source=f"m.py:{i} (f)", scope=f"jvp(M)/Block_{n}/mlp", placement=(UP, DOWN)[i % 2]
        )
        for n in range(layers)
        for i in range(300)
    )
    plan = make_plan()
    weight = plan.inputs[1]
    names = [
        f"state.{part}['Block_{n}']['w{i}']" for part in ("p", "mu", "nu") for n in range(layers) for i in range(12)
    ]
    return replace(
        plan,
        cluster=cluster,
        mesh=mesh,
        operators=operators,
        inputs=(weight,) * len(names),
        input_names=tuple(names),
        input_types=(floats(512, 512),) * len(names),
    )


@pytest.mark.parametrize("width", [400, 1280, 3840])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("plan", [make_plan(), make_pipeline()], ids=["mesh", "pipeline"])
def test_nothing_is_wider_than_the_window_and_the_console_is_empty(browser, plan, scheme, width, tmp_path) -> None:
    shown = Shown(browser, plan, tmp_path, width, scheme)
    shown.tab.click(".block >> nth=0")
    shown.tab.click(".detail .op >> nth=0")
    assert shown.tab.evaluate("document.documentElement.scrollWidth") <= width
    assert shown.tab.evaluate("document.documentElement.dataset.theme") == scheme
    shown.tab.click("#theme")
    assert shown.tab.evaluate("document.documentElement.dataset.theme") != scheme
    assert shown.close() == []


def test_a_large_plan_is_small_and_opens_at_once(browser, tmp_path) -> None:
    shown = Shown(browser, deep(), tmp_path)
    assert (tmp_path / "plan.html").stat().st_size < 2_000_000
    timing = "performance.getEntriesByType('navigation')[0]"
    assert shown.tab.evaluate(f"{timing}.loadEventEnd - {timing}.responseEnd") < 1000
    assert shown.tab.locator(".block").count() == 48
    assert shown.close() == []


def test_tiles_are_where_a_mesh_has_its_devices(browser, tmp_path) -> None:
    shown = Shown(browser, make_plan(), tmp_path)
    shown.tab.click(".block >> nth=0")
    shown.tab.click(".detail .op >> nth=0")
    titles = shown.tab.locator("tr[data-pictures] rect title").all_text_contents()
    tiles = [re.findall(r"\d+", title)[1:] for title in titles if title.startswith("tile")]
    devices = np.arange(8).reshape(4, 2)  # data=4 x tensor=2
    rows = [list(row) for row in devices]  # operand 0, [data, -]
    columns = [list(column) for column in devices.T]  # operand 1, [-, tensor]
    each = [[device] for device in devices.ravel()]  # result 0, [data, tensor]
    assert [list(map(int, tile)) for tile in tiles] == [*rows, *columns, *each]
    assert shown.close() == []


def test_everything_is_reached_by_keyboard(browser, tmp_path) -> None:
    shown = Shown(browser, make_pipeline(), tmp_path)
    keys, tab = shown.tab.keyboard, shown.tab
    tab.focus(".block >> nth=0")
    keys.press("ArrowRight")
    keys.press("Enter")
    assert tab.inner_text(".detail h3").startswith(tab.locator(".block").nth(1).inner_text().split("\n")[0])
    keys.press("Escape")
    assert tab.locator(".detail").is_hidden()
    keys.press("/")
    keys.type("dot_general h_1")
    assert tab.locator("#results [role=option]").count() > 0
    keys.press("Enter")
    assert tab.inner_text(".detail h3").startswith("h_1")
    before = tab.locator("#timeline svg").inner_html()
    tab.focus("#timeline svg")
    keys.press("+")
    assert tab.locator("#timeline svg").inner_html() != before
    keys.press("0")
    assert tab.locator("#timeline svg").inner_html() == before
    assert shown.close() == []


@pytest.mark.parametrize("times", [1.0, 50.0], ids=["as predicted", "much slower"])
def test_measured_tasks_are_below_the_predicted_ones(browser, times, tmp_path) -> None:
    """Tasks that ran just as predicted, but for a factor, are drawn as long; on one scale, that many times as long."""
    plan = make_pipeline()
    spans = tuple(
        MeasuredSpan(
            group=plan.timeline.schedule.group_of(span.task.stage),
            stage=span.task.stage,
            microbatch=span.task.microbatch,
            kind=span.task.kind,
            start_seconds=times * span.start_seconds,
            end_seconds=times * span.end_seconds,
        )
        for span in plan.timeline.spans
    )
    longest = max(span.end_seconds for span in spans)
    shares = tuple({"compute": times} for _ in plan.submeshes)
    measured = Measured(
        program=plan.fingerprint, shape=plan.shape, step_seconds=times * plan.step_seconds, shares=shares, spans=spans
    )
    shown = Shown(browser, plan, tmp_path, measured=measured)
    drawn = """[...document.querySelectorAll("#timeline svg g rect")].map((rect) => [+rect.getAttribute("y"),
        +rect.getAttribute("x"), +rect.getAttribute("width")])"""

    def rows() -> list[list[float]]:
        """The widths of the boxes of each row, from above."""
        boxes = shown.tab.evaluate(drawn)
        return [[width for _, _, width in sorted(b for b in boxes if b[0] == y)] for y in sorted({b[0] for b in boxes})]

    scale = times if times < 3 else plan.timeline.seconds / longest * times
    before = rows()
    assert len(before) == 2 * len(plan.submeshes)
    for predicted, ran in zip(before[::2], before[1::2], strict=True):
        assert ran == pytest.approx([scale * width for width in predicted], abs=0.5)
    assert ["measured step" in text for text in shown.tab.locator(".card").all_inner_texts()].count(True) == 1
    shown.tab.click("#timeline button >> nth=-1")
    after = rows()
    ratio = sum(after[1]) / sum(after[0])
    assert ratio == pytest.approx(times if scale != times else plan.timeline.seconds / longest, rel=0.05)
    assert shown.close() == []


def test_a_layer_is_opened_from_its_costs(browser, tmp_path) -> None:
    layers = tuple(
        LayerCost(name=name, compute_seconds=seconds, moving_seconds=seconds / 2, state_nbytes=2**20, live_nbytes=2**10)
        for name, seconds in (("h_0", 1e-3), ("h_1", 2e-3))
    )
    shown = Shown(browser, replace(make_plan(), layers=layers), tmp_path, width=400)
    rows = shown.tab.locator("#layer-costs tbody tr").all_inner_texts()
    assert [re.split(r"\s*\t\s*", row.strip()) for row in rows] == [
        ["h_0", "1 ms", "500 us", "33.3 %", "1 MiB", "1 KiB"],
        ["h_1", "2 ms", "1 ms", "66.7 %", "1 MiB", "1 KiB"],
    ]
    shown.tab.click("#layer-costs button >> nth=1")
    assert shown.tab.inner_text(".detail h3") == "h_1"
    assert shown.close() == []
