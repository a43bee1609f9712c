"""Draw the pictures of the documentation from the tutorial's step and a GPT: `python -m benchmarks.pictures`.

They are SVG files in docs/pictures, the same ones from the same plans, and a PNG of a plan's page where Playwright and
the system's Chromium are installed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax.training.train_state import TrainState

import autopar
from models import gpt
from passes.cluster import Mesh
from passes.sharding import ShardingSpec
from passes.text import nbytes, quantities

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
CLUSTER = "8:a100-80g"
PIPELINE = autopar.Pipeline(stages=4, microbatches=24)
GPT = gpt.Config(vocab_size=8192, sequence_length=1024, hidden=2048, layers=8, heads=16, dtype="bfloat16")
ROWS = 192  # of the pipeline's batch, eight a microbatch: enough work for transfers to be small beside it

WIDTH, MARGIN = 720, 16  # of a picture in pixels, and what stays free around it
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")
SCREEN = 1200, 760  # pixels of the page's picture, across and down


@contextmanager
def tutorial_step() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The step of the tutorial's train.py and its arguments, while that is a module in a folder of its own."""
    (source,) = re.findall(r'```python title="train.py"\n(.*?)```', (ROOT / "docs" / "tutorial.md").read_text(), re.S)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work"  # plans show it with source lines
        work.mkdir()
        (work / "train.py").write_text(source)
        sys.path.insert(0, str(work))
        sys.modules.pop("train", None)
        try:
            yield __import__("train").example()
        finally:
            sys.path.remove(str(work))
            sys.modules.pop("train", None)


def pipeline() -> Any:
    """The plan of a GPT's step in stages, large enough to show what a pipeline is like where one pays."""

    def make_state() -> TrainState:
        return TrainState.create(apply_fn=None, params=gpt.init(GPT, jax.random.key(0)), tx=optax.adamw(1e-3))

    def train_step(state: TrainState, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda params: gpt.loss(GPT, params, batch))(state.params)
        return state.apply_gradients(grads=grads), loss

    batch = jax.eval_shape(lambda: gpt.example_batch(GPT, ROWS, jax.random.key(0)))
    step = autopar.parallelize(train_step, cluster=CLUSTER, planner=PIPELINE, donate_argnums=0)
    return step.plan(jax.eval_shape(make_state), batch)


def text(x: float, y: float, words: str, anchor: str = "start", size: int = 13, fill: str = "#222") -> str:
    """Words at a place of a picture, as SVG."""
    escaped = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">{escaped}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str = "#fff") -> str:
    """A rectangle of a picture, as SVG."""
    size = f'width="{round(width, 2):g}" height="{round(height, 2):g}"'
    return f'<rect x="{round(x, 2):g}" y="{round(y, 2):g}" {size} fill="{fill}" stroke="{stroke}"/>'


def svg(height: float, about: str, parts: Sequence[str]) -> str:
    """A picture on a light ground, which is readable on a dark page as well."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" font-family="sans-serif" role="img">'
    )
    ground = f'<rect width="{WIDTH}" height="{height:g}" rx="8" fill="#fbfbf8"/>'
    return "\n".join([head, f"<title>{about}</title>", ground, *parts, "</svg>", ""])


def tiles(spec: ShardingSpec, mesh: Mesh) -> dict[tuple[int, ...], list[int]]:
    """The devices that hold each tile of an array, by the tile's place along each dimension."""
    places: dict[tuple[int, ...], list[int]] = {}
    for device, at in enumerate(product(*map(range, mesh.sizes))):
        where = dict(zip(mesh.axes, at, strict=True))
        tile = []
        for axes in spec.dims:
            sizes = [mesh.axis_size(axis) for axis in axes]
            tile.append(int(np.ravel_multi_index([where[a] for a in axes], sizes)) if axes else 0)
        places.setdefault(tuple(tile), []).append(device)
    return places


def placements(plan: Any) -> str:
    """The weights of one block as tiles on the mesh."""
    parts = [text(MARGIN, 28, f"Weights of Block_0 on mesh {plan.mesh}", size=15)]
    y = 48.0
    for name, type, spec in zip(plan.input_names, plan.input_types, plan.inputs, strict=True):
        if not name.startswith("state.params['params']['Block_0']"):
            continue
        path = "/".join(re.findall(r"\['([^']+)'\]", name)[2:])
        height = 84 if type.rank > 1 else 24
        rows, columns = ([1, *type.shape][-2:]) if type.rank else (1, 1)
        width = 340 if columns >= rows else 200
        places = tiles(spec, plan.mesh)
        down, across = (
            [len({tile[d] for tile in places}) for d in range(type.rank)] if type.rank > 1 else [1, len(places)]
        )
        for number, (tile, devices) in enumerate(sorted(places.items())):
            row, column = tile if type.rank > 1 else (0, tile[0])
            x, top = 340 + column * width / across, y + row * height / down
            parts.append(box(x, top, width / across, height / down, COLOURS[number % len(COLOURS)]))
            label = "all" if len(devices) == plan.mesh.size else " ".join(map(str, devices))
            middle = top + height / down / 2 + 4
            parts.append(text(x + width / across / 2, middle, label, "middle", 11, "#fff"))
        parts.append(text(MARGIN, y + 14, path))
        parts.append(text(MARGIN + 150, y + 14, f"{type}  {spec}", size=12, fill="#555"))
        y += height + 12
    parts.append(text(MARGIN, y + 10, "In each tile: the devices that hold it.", size=12, fill="#555"))
    return svg(y + 24, "Weights of one block, cut over a mesh", parts)


def meshes(plan: Any) -> str:
    """The chosen plan beside what the search met."""
    rows = [("chosen: " + plan.shape, plan.step_seconds, COLOURS[2])]
    rows += [(other.name, other.seconds, COLOURS[0]) for other in sorted(plan.met, key=lambda other: other.seconds)]
    return bars("Predicted step", rows)


def bars(title: str, rows: Sequence[tuple[str, float, str]]) -> str:
    """Seconds as bars on one scale."""
    parts = [text(MARGIN, 28, title, size=15)]
    most = max(value for _, value, _ in rows)
    for number, (name, value, colour) in enumerate(rows):
        y = 44 + 28 * number
        parts += [text(MARGIN, y + 15, name), box(280, y, 340 * value / most, 20, colour)]
        parts.append(text(288 + 340 * value / most, y + 15, quantities.seconds(value), size=12))
    return svg(52 + 28 * len(rows), title, parts)


def memory(plan: Any) -> str:
    """Bytes of one device over the step."""
    sizes = plan.memory.over_time
    most, height, width = max(sizes), 160, WIDTH - 2 * MARGIN
    parts = [text(MARGIN, 28, f"Memory of one device over the step, at most {nbytes(most)}", size=15)]
    for number, size in enumerate(sizes):
        tall = height * size / most
        colour = COLOURS[1] if size == most else COLOURS[0]
        parts.append(box(MARGIN + number * width / len(sizes), 44 + height - tall, width / len(sizes), tall, colour))
    state = sum(plan.nbytes[cause] for cause in ("parameters", "optimizer state"))
    y = 44 + height - height * state / most
    parts.append(f'<path d="M{MARGIN} {y:.2f}H{WIDTH - MARGIN}" stroke="#222" stroke-dasharray="4 3"/>')
    parts.append(text(MARGIN + 4, y - 5, f"parameters and optimizer state, {nbytes(state)}", size=12))
    parts.append(text(WIDTH - MARGIN, 44 + height + 18, "time", "end", 12, "#555"))
    return svg(44 + height + 28, "Memory of one device over the step", parts)


def timeline(plan: Any) -> str:
    """The tasks of a pipeline, a row a submesh."""
    line = plan.timeline
    total, width = max(line.end_seconds), WIDTH - MARGIN - 100
    title = f"{line.schedule}: {quantities.seconds(total)}, bubble {100 * line.bubble:.1f} %"
    parts = [text(MARGIN, 28, title, size=15)]
    for group in range(len(line.end_seconds)):
        parts.append(text(MARGIN, 62 + 34 * group, f"submesh {group}"))
        end, last = line.end_seconds[group], line.finish_seconds[group]
        parts.append(box(100 + width * (end - last) / total, 44 + 34 * group, width * last / total, 28, "#bbb"))
    for span in line.spans:
        y = 44 + 34 * line.schedule.group_of(span.task.stage)
        x, end = (100 + width * at / total for at in (span.start_seconds, span.end_seconds))
        forward = span.task.kind == "forward"
        parts.append(box(x, y, end - x, 28, COLOURS[0] if forward else COLOURS[1]))
        if end - x > 3 + 7 * len(str(span.task.microbatch)):
            parts.append(text((x + end) / 2, y + 18, str(span.task.microbatch), "middle", 11, "#fff"))
    y = 44 + 34 * len(line.end_seconds) + 14
    parts += [box(100, y - 11, 14, 14, COLOURS[0]), text(120, y, "forward", size=12)]
    parts += [box(200, y - 11, 14, 14, COLOURS[1]), text(220, y, "backward", size=12)]
    parts += [box(310, y - 11, 14, 14, "#bbb"), text(330, y, "end of step", size=12)]
    return svg(y + 14, "Timeline of a pipeline", parts)


def pictures(staged: Any) -> Mapping[str, str]:
    """The pictures by the names of their files, with the timeline of a pipeline."""
    with tutorial_step() as (step, arguments):
        plan = step.replan(cluster=CLUSTER).plan(*arguments)
    return {
        "placements.svg": placements(plan),
        "meshes.svg": meshes(plan),
        "memory.svg": memory(plan),
        "timeline.svg": timeline(staged),
    }


def photograph(page: str, path: Path) -> bool:
    """Whether the first screen of a page could be saved as a PNG."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return False
    if chromium is None:
        return False
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        (Path(folder) / "plan.html").write_text(page)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": SCREEN[0], "height": SCREEN[1]}, color_scheme="light")
        tab.goto(f"file://{folder}/plan.html")
        tab.screenshot(path=str(path))
        browser.close()
    return True


def main() -> None:
    """Draws all pictures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pictures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    PICTURES.mkdir(exist_ok=True)
    staged = pipeline()
    for name, picture in pictures(staged).items():
        (PICTURES / name).write_text(picture)
        print(f"docs/pictures/{name}")
    print(
        "docs/pictures/page.png"
        if photograph(staged.to_html(), PICTURES / "page.png")
        else "no Chromium: page.png stays"
    )


if __name__ == "__main__":
    main()
