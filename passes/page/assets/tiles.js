// An array as tiles, cut over the devices of a mesh, and the mesh coloured by the tile that each device has.

const MOST_TILES = 256;

// "[x, -, y+z] add@w" -> {dims: [["x"], [], ["y", "z"]], partial: ["w"], kind: "add"}
function parseSpec(text) {
  const match = /^\[(.*?)\](?: (\w+)@(.*))?$/.exec(text);
  const axes = (part) => (part === "-" || part === "" ? [] : part.split("+"));
  const dims = match[1] === "" ? [] : match[1].split(", ").map(axes);
  return { dims, kind: match[2], partial: match[3] ? axes(match[3]) : [] };
}

function sizeOf(mesh, axes) {
  return axes.reduce((product, axis) => product * mesh.sizes[mesh.axes.indexOf(axis)], 1);
}

// The coordinates of each device of a mesh, row-major: the last axis joins neighbours.
function coordinates(mesh) {
  const total = mesh.sizes.reduce((product, size) => product * size, 1);
  return Array.from({ length: total }, (_, device) => {
    const at = {};
    for (let i = mesh.axes.length - 1, left = device; i >= 0; i -= 1) {
      at[mesh.axes[i]] = left % mesh.sizes[i];
      left = Math.floor(left / mesh.sizes[i]);
    }
    return at;
  });
}

const placeIn = (mesh, axes, at) => axes.reduce((place, axis) => place * sizeOf(mesh, [axis]) + at[axis], 0);

// Rows and columns of tiles: the last dimension goes across, so does every cut one but the first.
function grid(spec, mesh) {
  const cut = spec.dims.map((axes, dim) => ({ axes, dim })).filter(({ axes }) => axes.length);
  const isDown = cut.length > 0 && cut[0].dim < spec.dims.length - 1;
  const [down, across] = isDown ? [cut.slice(0, 1), cut.slice(1)] : [[], cut];
  const flat = (parts) => parts.flatMap(({ axes }) => axes);
  const [rows, columns] = [sizeOf(mesh, flat(down)), sizeOf(mesh, flat(across))];
  const devices = Array.from({ length: rows * columns }, () => []);
  const tileOf = coordinates(mesh).map((at, device) => {
    const tile = placeIn(mesh, flat(down), at) * columns + placeIn(mesh, flat(across), at);
    devices[tile].push(device + mesh.first);
    return tile;
  });
  return { rows, columns, devices, tileOf, down, across };
}

function names(devices) {
  if (devices.length <= 4) return devices.join(" ");
  return `${devices[0]} … ${devices[devices.length - 1]} (${devices.length})`;
}

function cells(columns, rows, width, height, labelOf, colourOf, titleOf) {
  const [w, h] = [width / columns, height / rows];
  const children = [];
  for (let i = 0; i < rows * columns; i += 1) {
    const [x, y] = [(i % columns) * w, Math.floor(i / columns) * h];
    const box = { x, y, width: w, height: h, fill: colourOf(i), stroke: "var(--card)", "stroke-width": Math.min(2, w / 8) };
    children.push(draw("rect", box, draw("title", {}, titleOf(i))));
    const label = labelOf(i);
    const size = Math.min(13, (1.7 * w) / Math.max(3, label.length), 0.7 * h);
    if (size < 6.5) continue;
    const middle = { x: x + w / 2, y: y + h / 2 + size / 3, "text-anchor": "middle", "font-size": size, class: "dark" };
    children.push(draw("text", middle, label));
  }
  return draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" }, ...children);
}

function figure(caption, label, picture) {
  picture.setAttribute("aria-label", label);
  return make("figure", {}, make("figcaption", {}, caption), picture);
}

function sizes(spec, mesh, shape) {
  if (!shape || !shape.length) return "";
  const each = shape.map((size, dim) => (spec.dims[dim].length ? size / sizeOf(mesh, spec.dims[dim]) : size));
  return `; each device has [${each.join(", ")}]`;
}

// The picture of one placement on a program's mesh; `type` may be "float32[8,64]" or empty.
function tiles(name, text, mesh, type) {
  const spec = parseSpec(text);
  const cut = grid(spec, mesh);
  const shape = /\[(.*)\]/.exec(type || "");
  const known = shape && shape[1] ? shape[1].split(",").map(Number) : null;
  const pieces = cut.devices.length;
  const how = pieces === 1 ? "whole on every device" : plural(pieces, "tile");
  const partial = spec.partial.length ? `; a partial ${spec.kind === "add" ? "sum" : spec.kind} over ${spec.partial.join(", ")}` : "";
  const caption = [make("b", {}, name), " ", make("code", {}, `${type || ""} ${text}`), make("br"), `${how}${partial}${sizes(spec, mesh, known)}`];
  if (pieces > MOST_TILES || mesh.sizes.length === 0) return make("figure", {}, make("figcaption", {}, ...caption));
  const paint = (tile) => colour(tile, pieces);
  const width = spec.dims.length === 0 ? 60 : 190;
  const height = cut.rows === 1 && spec.dims.length < 2 ? 34 : Math.max(64, Math.min(190, cut.rows * 22));
  const array = cells(cut.columns, cut.rows, width, height, (i) => names(cut.devices[i]), paint, (i) => `tile ${i}: devices ${cut.devices[i].join(" ")}`);
  const last = mesh.sizes[mesh.sizes.length - 1];
  const across = last > 16 && last % 8 === 0 ? 8 : last;
  const down = cut.tileOf.length / across;
  const onMesh = cells(across, down, Math.min(190, across * 40), Math.min(190, down * 30), (i) => String(i + mesh.first), (i) => paint(cut.tileOf[i]), (i) => `device ${i + mesh.first}: tile ${cut.tileOf[i]}`);
  const meshText = mesh.axes.map((axis, i) => `${axis}=${mesh.sizes[i]}`).join(" x ");
  const both = make("div", { class: "tiles" }, figure("the array", `${name} ${text}: ${how}`, array), figure(`devices, mesh ${meshText}`, "devices by tile", onMesh));
  return make("div", {}, make("figcaption", { class: "small" }, ...caption), both);
}
