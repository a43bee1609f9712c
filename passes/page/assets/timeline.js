// A pipeline's tasks over time, a row a submesh; wheel, buttons and keys zoom.

const DARKER = { forward: 0, backward: 10, input_gradient: 10, weight_gradient: 18 };
const ROW = { height: 34, left: 90, width: 1200 };

// The part of the step that is shown, and where a second of it is drawn.
function viewOf(total, redraw) {
  const view = { from: 0, to: total };
  view.size = () => view.to - view.from;
  view.x = (second) => ROW.left + ((second - view.from) / view.size()) * (ROW.width - ROW.left);
  view.move = (from, size = view.size()) => {
    view.from = Math.max(0, Math.min(total - size, from));
    view.to = view.from + size;
    redraw();
  };
  view.zoom = (factor, centre = (view.from + view.to) / 2) => {
    const size = Math.min(total, Math.max(total / 2000, view.size() * factor));
    view.move(centre - ((centre - view.from) / view.size()) * size, size);
  };
  view.shift = (share) => view.move(view.from + share * view.size());
  view.all = () => view.move(0, total);
  return view;
}

// A box from `start` to `end` in the row of a submesh; null where it is out of sight.
function boxIn(view, group, start, end, look) {
  const [x, right] = [Math.max(ROW.left, view.x(start)), Math.min(ROW.width, view.x(end))];
  if (right <= x) return null;
  return { x, y: group * ROW.height + 3, width: Math.max(0.4, right - x), height: ROW.height - 6, ...look };
}

function taskIn(view, [group, stage, microbatch, kind, start, end]) {
  const name = plan.timeline.kinds[kind];
  const fillColour = `hsl(${HUES[stage % HUES.length]} 55% ${74 - DARKER[name]}%)`;
  const box = boxIn(view, group, start, end, { fill: fillColour, stroke: "var(--card)" });
  if (!box) return null;
  box["stroke-width"] = box.width > 5 ? 1 : 0;
  const words = `${name.replaceAll("_", " ")} of microbatch ${microbatch}, stage ${stage}: ${seconds(end - start)} from ${seconds(start)}`;
  const middle = { x: box.x + box.width / 2, y: box.y + 19, "text-anchor": "middle", "font-size": 13, class: "dark" };
  const label = box.width > 26 ? [draw("text", middle, `${name[0].toUpperCase()}${microbatch}`)] : [];
  return draw("g", {}, draw("rect", box, draw("title", {}, words)), ...label);
}

function finishIn(view, [start, end], group) {
  const box = end > start && boxIn(view, group, start, end, { fill: "var(--soft)", opacity: 0.5 });
  return box ? draw("rect", box, draw("title", {}, `end of step: ${seconds(end - start)}`)) : null;
}

function ticksIn(view, height) {
  const anchors = ["start", "middle", "middle", "middle", "middle", "end"];
  return anchors.flatMap((anchor, i) => {
    const second = view.from + (view.size() * i) / 5;
    const x = view.x(second);
    return [
      draw("line", { x1: x, x2: x, y1: 0, y2: height - 22, class: "axis" }),
      draw("text", { x, y: height - 6, "font-size": 12, "text-anchor": anchor }, second ? seconds(second) : "0"),
    ];
  });
}

function secondAt(view, svg, event) {
  const box = svg.getBoundingClientRect();
  const x = ((event.clientX - box.left) / box.width) * ROW.width;
  return view.from + (Math.max(0, x - ROW.left) / (ROW.width - ROW.left)) * view.size();
}

function listen(svg, view) {
  const keys = {
    "+": () => view.zoom(0.5), "=": () => view.zoom(0.5), "-": () => view.zoom(2), 0: view.all,
    ArrowLeft: () => view.shift(-0.2), ArrowRight: () => view.shift(0.2),
  };
  svg.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  const zoom = (event) => {
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    view.zoom(event.deltaY + event.deltaX > 0 ? 1.25 : 0.8, secondAt(view, svg, event));
  };
  svg.addEventListener("wheel", zoom, { passive: false });
  let held = null;
  svg.addEventListener("pointerdown", (event) => { held = secondAt(view, svg, event); });
  svg.addEventListener("pointermove", (event) => {
    if (held != null && event.buttons) view.move(view.from + held - secondAt(view, svg, event));
  });
  addEventListener("pointerup", () => { held = null; });
}

function timeline() {
  if (!plan.timeline) return [];
  const { spans, ends, bubbles, name } = plan.timeline;
  const height = ends.length * ROW.height + 26;
  const about = `Timeline of ${name}; plus and minus zoom, arrows move, 0 shows all`;
  const svg = draw("svg", { viewBox: `0 0 ${ROW.width} ${height}`, class: "chart", role: "img", tabindex: "0", "aria-label": about, style: "min-width:36rem" });
  const label = (_, group) =>
    draw("text", { x: 0, y: group * ROW.height + 22, "font-size": 13 }, `submesh ${group}`, draw("title", {}, `idle ${percent(bubbles[group])}`));
  const redraw = () => {
    const tasks = spans.map((span) => taskIn(view, span));
    const finishes = ends.map((end, group) => finishIn(view, end, group));
    svg.replaceChildren(...[...ticksIn(view, height), ...ends.map(label), ...tasks, ...finishes].filter(Boolean));
  };
  const view = viewOf(Math.max(...ends.map(([, end]) => end)), () => redraw());
  listen(svg, view);
  redraw();
  const button = (words, run) => make("button", { type: "button", onclick: run }, words);
  const controls = make(
    "div", { class: "buttons" }, button("Zoom in", () => view.zoom(0.5)), button("Zoom out", () => view.zoom(2)),
    button("Earlier", () => view.shift(-0.5)), button("Later", () => view.shift(0.5)), button("All", view.all),
  );
  const note =
    "Predicted. F forward, B backward, I gradients of inputs, W gradients of weights, with the number of the microbatch; " +
    "grey is the end of the step, empty is waiting. Drag to move, Shift and wheel to zoom.";
  return [section("timeline", "Pipeline timeline", make("p", { class: "soft" }, note), controls, make("div", { class: "scroll" }, svg))];
}
