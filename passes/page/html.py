"""The page of a plan: its data in a template, with the styles and scripts that are shipped beside this file."""

from __future__ import annotations

import html as markup
import json
from functools import cache
from importlib.resources import files

from passes.page.data import page_data
from passes.page.measured import Measured
from passes.plan import AnyPlan

SCRIPTS = (
    *("dom.js", "tiles.js", "overview.js", "blocks.js", "layers.js", "timeline.js"),
    *("memory.js", "arrays.js", "search.js", "main.js"),
)
"""The scripts of a page, in the order in which they run."""


@cache
def asset(name: str) -> str:
    """The text of a file that is shipped beside this one."""
    return (files("passes.page") / "assets" / name).read_text(encoding="utf-8")


def html(plan: AnyPlan, measured: Measured | None = None) -> str:
    """The page of a plan, one file that needs no network, with steps of it beside if they were `measured`.

    Raises PlanningError for steps of another plan.
    """
    if measured:
        measured.check(plan)
    data = json.dumps(page_data(plan, measured), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    parts = {
        "title": markup.escape(f"Plan: {plan.planner} on {plan.cluster.name}"),
        "styles": asset("page.css"),
        "scripts": "\n".join(map(asset, SCRIPTS)),
        # Nothing in a script may end it, be it in a string of the user's.
        "data": data.replace("<", "\\u003c"),
    }
    before, *rest = asset("page.html").split("{{")
    filled = [before]
    for part in rest:
        name, _, after = part.partition("}}")
        filled += [parts[name], after]
    return "".join(filled)
