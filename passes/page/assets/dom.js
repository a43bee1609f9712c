// The plan, elements made in one call, numbers with their units, and colours.

const plan = JSON.parse(document.getElementById("plan").textContent);
const textOf = (place) => plan.texts[place];
const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child != null));
  return element;
}

const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

function withUnit(value, scale, units) {
  let unit = 0;
  while (Math.abs(value) >= 999.5 && unit < units.length - 1) {
    value /= scale;
    unit += 1;
  }
  return `${Number(value.toPrecision(3))} ${units[unit]}`;
}

const seconds = (value) =>
  value == null ? "unknown" : value < 1 ? withUnit(value * 1e9, 1000, ["ns", "us", "ms", "s"]) : withUnit(value, 1000, ["s"]);
const bytes = (value) => withUnit(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
const count = (value) => Number(value).toLocaleString("en");
const percent = (value) => `${(100 * value).toFixed(1)} %`;
const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

// Hues that are told apart in either theme and, by their lightness, by most who see few colours.
const HUES = [212, 28, 140, 330, 48, 265, 180, 0, 90, 300];

function colour(index, total = HUES.length) {
  const hue = total <= HUES.length ? HUES[index % HUES.length] : (index * 360) / total;
  const light = index % 2 ? 68 : 58;
  return `hsl(${hue} 62% ${light}%)`;
}

function section(id, title, ...children) {
  return make("section", { id, "aria-labelledby": `${id}-title` }, make("h2", { id: `${id}-title` }, title), ...children);
}

function table(headings, rows, caption) {
  const isRight = headings.map((heading) => heading.startsWith(">"));
  const head = headings.map((h, i) => make("th", { scope: "col", class: isRight[i] ? "right" : null }, h.replace(/^>/, "")));
  const cells = (row) => row.map((cell, i) => make("td", { class: isRight[i] ? "right" : "wide" }, cell));
  const body = rows.map((row) => make("tr", {}, ...cells(row)));
  const shown = make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body));
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, shown);
}

// Rows of [name, value, text] or [name, value, text, second value]: bars on one scale.
function bars(rows) {
  const most = Math.max(1e-30, ...rows.flatMap((row) => [row[1], row[3] || 0]));
  const track = (value, kind) =>
    make("span", { class: "track" }, make("span", { class: `fill ${kind}`, style: `width:${(100 * value) / most}%` }));
  const cells = rows.flatMap(([name, value, words, second]) => {
    const tracks = second == null ? track(value, "") : make("span", { class: "tracks" }, track(value, ""), track(second, "second"));
    return [make("span", { class: "name" }, name), tracks, make("span", { class: "value" }, words)];
  });
  return make("div", { class: "bars" }, ...cells);
}
