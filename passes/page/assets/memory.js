// Bytes of one device over the step, a curve a submesh, under the memory that the device has.

function path(points, x, y) {
  return points.map(([at, size], i) => `${i ? `H${x(at).toFixed(1)}V${y(size).toFixed(1)}` : `M${x(at).toFixed(1)},${y(size).toFixed(1)}`}`).join("");
}

function memoryChart(curves) {
  const [width, height, left, bottom] = [1200, 260, 90, 24];
  const last = Math.max(...curves.flatMap(({ points }) => points.map(([at]) => at)));
  const most = Math.max(...curves.flatMap(({ points }) => points.map(([, size]) => size)));
  const isLimitNear = plan.limit < 3 * most;
  const top = 1.08 * (isLimitNear ? Math.max(most, plan.limit) : most);
  const x = (at) => left + (at / last) * (width - left);
  const y = (size) => (height - bottom) * (1 - size / top);
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => [
    draw("line", { x1: left, x2: width, y1: y(share * most), y2: y(share * most), class: "axis" }),
    draw("text", { x: left - 8, y: y(share * most) + 4, "font-size": 13, "text-anchor": "end" }, bytes(share * most)),
  ]);
  const lines = curves.map(({ points }, i) =>
    draw("path", { d: path(points, x, y), fill: "none", stroke: colour(i, Math.max(HUES.length, curves.length)), "stroke-width": 2.2 }));
  const stays = curves.length === 1 ? [draw("rect", { x: left, width: width - left, y: y(curves[0].persistent), height: height - bottom - y(curves[0].persistent), fill: colour(0), opacity: 0.25 }, draw("title", {}, `stays for the whole step: ${bytes(curves[0].persistent)}`))] : [];
  const limit = isLimitNear ? [draw("line", { x1: left, x2: width, y1: y(plan.limit), y2: y(plan.limit), stroke: "var(--warn)", "stroke-width": 2, "stroke-dasharray": "7 5" }), draw("text", { x: width - 6, y: y(plan.limit) + 17, "text-anchor": "end", "font-size": 13 }, `a device has ${bytes(plan.limit)}`)] : [];
  const words = (share) => (curves[0].unit === "s" ? seconds(share * last) : `${100 * share} % of the step`);
  const axis = [0, 0.5, 1].map((share, i) => draw("text", { x: x(share * last), y: height - 6, "font-size": 13, "text-anchor": ["start", "middle", "end"][i] }, share ? words(share) : "0"));
  return draw("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": `Memory of one device over the step, at most ${bytes(most)}`, style: "min-width:34rem" }, ...ticks.flat(), ...stays, ...lines, ...limit, ...axis);
}

function memory() {
  const curves = plan.memory.filter(({ points }) => points.length);
  const legend = curves.length > 1 ? [make("div", { class: "legend" }, ...curves.map((_, i) => make("span", {}, make("span", { class: "swatch", style: `background:${colour(i, Math.max(HUES.length, curves.length))}` }), `submesh ${i}`)))] : [];
  const far = plan.limit >= 3 * Math.max(0, ...curves.flatMap(({ points }) => points.map(([, size]) => size)));
  const note = `One device of each submesh.${far ? ` The limit, ${bytes(plan.limit)}, is far above.` : ""}${curves.length === 1 ? " Shaded: parameters and optimizer state, which stay." : ""}`;
  const rows = plan.holders.map(([stage, name, cause, size]) => [make("code", {}, name), cause, bytes(size), ...(isPipeline ? [String(stage)] : [])]);
  const where = plan.programs.length === 1 && plan.programs[0].where ? `, at ${plan.programs[0].where}` : "";
  return section(
    "memory",
    "Memory over time",
    make("p", { class: "soft" }, curves.length ? note : "This plan does not say how its memory goes over time."),
    ...(curves.length ? [...legend, make("div", { class: "scroll" }, memoryChart(curves))] : []),
    ...(rows.length ? [make("details", { open: !isPipeline }, make("summary", {}, `Largest at the peak${where}`), table(["array", "cause", ">bytes", ...(isPipeline ? [">stage"] : [])], rows, "largest arrays"))] : []),
  );
}
