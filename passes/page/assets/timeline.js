// A pipeline's tasks over time, a row a submesh, and one below for what was measured; wheel, buttons and keys zoom.

const DARKER = { forward: 0, backward: 10, input_gradient: 10, weight_gradient: 18 };
const NEAR = 3; // times the prediction that a measured step may take to be drawn on its scale at first
const ROW = { height: 34, left: 90, width: 1200 };

// The part of the `reach()` seconds that is shown, and where a second of it is drawn.
function viewOf(reach, redraw) {
  const view = { from: 0, to: reach() };
  view.size = () => view.to - view.from;
  view.x = (second) => ROW.left + ((second - view.from) / view.size()) * (ROW.width - ROW.left);
  view.move = (from, size = view.size()) => {
    view.from = Math.max(0, Math.min(reach() - size, from));
    view.to = view.from + size;
    redraw();
  };
  view.zoom = (factor, centre = (view.from + view.to) / 2) => {
    const size = Math.min(reach(), Math.max(reach() / 2000, view.size() * factor));
    view.move(centre - ((centre - view.from) / view.size()) * size, size);
  };
  view.shift = (share) => view.move(view.from + share * view.size());
  view.all = () => view.move(0, reach());
  return view;
}

// A box from `start` to `end` in a row; null where it is out of sight.
function boxIn(view, row, start, end, look) {
  const [x, right] = [Math.max(ROW.left, view.x(start)), Math.min(ROW.width, view.x(end))];
  if (right <= x) return null;
  return { x, y: row * ROW.height + 3, width: Math.max(0.4, right - x), height: ROW.height - 6, ...look };
}

// A task in a `row`, its seconds drawn `scale` times as long.
function taskIn(view, [group, stage, microbatch, kind, start, end], row = group, scale = 1) {
  const name = plan.timeline.kinds[kind];
  if (name === "rest") return restIn(view, [start, end], row, scale, "before or after the tasks");
  const fillColour = `hsl(${HUES[stage % HUES.length]} 55% ${74 - DARKER[name]}%)`;
  const box = boxIn(view, row, scale * start, scale * end, { fill: fillColour, stroke: "var(--card)" });
  if (!box) return null;
  box["stroke-width"] = box.width > 5 ? 1 : 0;
  const words = `${name.replaceAll("_", " ")} of microbatch ${microbatch}, stage ${stage}: ${seconds(end - start)} from ${seconds(start)}`;
  const middle = { x: box.x + box.width / 2, y: box.y + 19, "text-anchor": "middle", "font-size": 13, class: "dark" };
  const label = box.width > 26 ? [draw("text", middle, `${name[0].toUpperCase()}${microbatch}`)] : [];
  return draw("g", {}, draw("rect", box, draw("title", {}, words)), ...label);
}

function restIn(view, [start, end], row, scale = 1, about = "end of step") {
  const box = end > start && boxIn(view, row, scale * start, scale * end, { fill: "var(--soft)", opacity: 0.5 });
  return box ? draw("rect", box, draw("title", {}, `${about}: ${seconds(end - start)}`)) : null;
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

function rowLabel(row, words, about) {
  return draw("text", { x: 0, y: row * ROW.height + 22, "font-size": 13 }, words, draw("title", {}, about));
}

// Rows of the timeline: what is in each, at any zoom. Measured seconds are drawn `scale()` times as long.
function rowsOf({ spans, ends, bubbles, measured }, scale) {
  const each = measured.length ? 2 : 1;
  return (view) =>
    ends.flatMap((end, group) => [
      rowLabel(each * group, `submesh ${group}`, `predicted, idle ${percent(bubbles[group])}`),
      ...spans.filter((span) => span[0] === group).map((span) => taskIn(view, span, each * group)),
      restIn(view, end, each * group),
      ...(each > 1 ? [rowLabel(each * group + 1, "measured", `submesh ${group} as a step ran`)] : []),
      ...measured.filter((span) => span[0] === group).map((span) => taskIn(view, span, each * group + 1, scale())),
    ]);
}

function timelineNote({ measured }, longest) {
  const words =
    "F forward, B backward, I gradients of inputs, W gradients of weights, with the number of the microbatch; " +
    "grey is what is done once a step, empty is waiting. Drag to move, Shift and wheel to zoom.";
  if (!measured.length) return `Predicted. ${words}`;
  return `Predicted, and below it one step as it was measured with a profile, from its first task to its last ${seconds(longest)}. ${words}`;
}

function timeline() {
  if (!plan.timeline) return [];
  const { ends, measured, name } = plan.timeline;
  const predicted = Math.max(...ends.map(([, end]) => end));
  const longest = Math.max(0, ...measured.map((span) => span[5]));
  const height = ends.length * (measured.length ? 2 : 1) * ROW.height + 26;
  const about = `Timeline of ${name}; plus and minus zoom, arrows move, 0 shows all`;
  const svg = draw("svg", { viewBox: `0 0 ${ROW.width} ${height}`, class: "chart", role: "img", tabindex: "0", "aria-label": about, style: "min-width:36rem" });
  let isOneScale = longest < NEAR * predicted && predicted < NEAR * longest;
  const scale = () => (isOneScale || !longest ? 1 : predicted / longest);
  const rows = rowsOf(plan.timeline, scale);
  let view = null;
  const redraw = () => svg.replaceChildren(...[...ticksIn(view, height), ...rows(view)].filter(Boolean));
  const reach = () => (isOneScale ? Math.max(predicted, longest) : predicted);
  view = viewOf(reach, redraw);
  listen(svg, view);
  redraw();
  const button = (words, run) => make("button", { type: "button", onclick: run }, words);
  const scaling = () => (isOneScale ? "Measured as long as predicted" : "Both on one scale");
  const rescale = button(scaling(), () => {
    isOneScale = !isOneScale;
    rescale.textContent = scaling();
    view.all();
  });
  const controls = make(
    "div", { class: "buttons" }, button("Zoom in", () => view.zoom(0.5)), button("Zoom out", () => view.zoom(2)),
    button("Earlier", () => view.shift(-0.5)), button("Later", () => view.shift(0.5)), button("All", view.all),
    ...(measured.length ? [rescale] : []),
  );
  const note = make("p", { class: "soft" }, timelineNote(plan.timeline, longest));
  return [section("timeline", "Pipeline timeline", note, controls, make("div", { class: "scroll" }, svg))];
}
