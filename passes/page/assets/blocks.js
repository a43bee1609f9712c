// The model's layers as blocks; a block opens to its operators, an operator to its tiles.

const PHASES = ["forward", "backward", "update"];
const isPipeline = plan.programs.length > 1;

// Blocks of one stage are coloured by it; on one mesh, blocks with equal placements have one colour.
const kinds = new Map();
for (const [, , , lists] of plan.blocks) {
  const key = lists.join();
  if (!kinds.has(key)) kinds.set(key, kinds.size);
}
const colourOf = ([, stage, , lists]) => (isPipeline ? colour(stage, Math.max(HUES.length, plan.programs.length)) : colour(kinds.get(lists.join())));

const detail = make("div", { class: "detail", hidden: true, tabindex: "-1", role: "region", "aria-label": "Operators" });
const model = make("div", { class: "model" });
const buttons = [];

function blockButton(block, index) {
  const [name, , operators, , nbytes] = block;
  const about = [plural(operators, "operator"), ...(nbytes ? [`${bytes(nbytes)} of arrays`] : [])];
  const button = make(
    "button",
    { type: "button", class: "block", style: `border-left-color:${colourOf(block)}`, "aria-expanded": "false", tabindex: index ? "-1" : "0", onclick: () => open(index) },
    name,
    ...about.map((words) => make("small", {}, words)),
  );
  button.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const to = event.key === "Home" ? 0 : event.key === "End" ? buttons.length - 1 : step ? index + step : null;
    if (to == null || !buttons[to]) return;
    event.preventDefault();
    buttons.forEach((one, i) => one.setAttribute("tabindex", i === to ? "0" : "-1"));
    buttons[to].focus();
  });
  buttons.push(button);
  return button;
}

function meshText(program) {
  return program.axes.map((axis, i) => `${axis}=${program.sizes[i]}`).join(" x ") || "1 device";
}

function layers() {
  const stages = plan.programs.map((program, stage) => {
    const members = plan.blocks.map((block, index) => [block, index]).filter(([block]) => block[1] === stage);
    const last = program.first + program.sizes.reduce((product, size) => product * size, 1) - 1;
    const title = isPipeline ? `Stage ${stage}` : "One mesh";
    const swatch = isPipeline ? [make("span", { class: "swatch", style: `background:${colour(stage, Math.max(HUES.length, plan.programs.length))}` })] : [];
    const about = make("span", { class: "soft small" }, `mesh ${meshText(program)}, devices ${program.first} to ${last}`);
    return make("div", { class: "stage" }, make("h3", {}, ...swatch, title, about), make("div", { class: "blocks" }, ...members.map(([block, index]) => blockButton(block, index))));
  });
  model.append(make("div", {}, ...stages), detail);
  const note = isPipeline ? "Coloured by stage." : "Blocks of one colour have all their operators placed alike.";
  return section("layers", "The model's layers", make("p", { class: "soft" }, `${note} Choose a block to see its operators; arrow keys move, Enter opens, Escape closes.`), model);
}

function close() {
  detail.hidden = true;
  model.classList.remove("open");
  const opened = buttons.find((button) => button.getAttribute("aria-expanded") === "true");
  buttons.forEach((button) => button.setAttribute("aria-expanded", "false"));
  if (opened) opened.focus();
}

function operatorRow(row, program, block) {
  const [primitive, placement, , , depth, times] = row;
  const words = `${"  ".repeat(depth)}${textOf(primitive)}${times > 1 ? ` × ${times}` : ""}`;
  const text = textOf(placement);
  const shown = text.length > 160 ? `${text.slice(0, 160)} …` : text;
  const line = make("tr", {}, make("td", { class: "wide" }), make("td", { class: "wide" }, make("code", {}, shown)));
  const button = make("button", { type: "button", class: "op code", "aria-expanded": "false" }, words);
  button.addEventListener("click", () => toggle(line, button, row, program));
  line.firstChild.append(button);
  return line;
}

const MOST_PICTURES = 8;

function toggle(line, button, row, program) {
  if (line.nextSibling && line.nextSibling.dataset && line.nextSibling.dataset.pictures) {
    line.nextSibling.remove();
    line.classList.remove("chosen");
    button.setAttribute("aria-expanded", "false");
    return;
  }
  const [operands, results] = textOf(row[1]).split("->").map((part) => part.match(/\[[^\]]*\](?: \w+@[^\s\[\]]+)?/g) || []);
  const named = [...operands.map((spec, i) => [`operand ${i}`, spec]), ...(results || []).map((spec, i) => [`result ${i}`, spec])];
  const pictures = named.slice(0, MOST_PICTURES).map(([name, spec]) => tiles(name, spec, program, ""));
  const more = named.length > MOST_PICTURES ? [make("p", { class: "soft" }, `and ${named.length - MOST_PICTURES} more`)] : [];
  const cell = make("td", { colspan: "2" }, make("div", { class: "columns" }, ...pictures), ...more);
  const added = make("tr", { "data-pictures": "1" }, cell);
  line.after(added);
  line.classList.add("chosen");
  button.setAttribute("aria-expanded", "true");
}

function operators(list, program, block) {
  const rows = [];
  let before = "";
  for (const row of plan.lists[list]) {
    const where = `${textOf(row[2])}  ${textOf(row[3])}`.trim();
    if (where !== before) rows.push(make("tr", { class: "line" }, make("td", { colspan: "2" }, where || "no source line")));
    before = where;
    rows.push(operatorRow(row, program, block));
  }
  return make("div", { class: "scroll ops" }, make("table", {}, make("tbody", {}, ...rows)));
}

// The arrays that are named after each block, found once.
const weights = new Map();

function weightsOf(name, stage) {
  const key = `${stage} ${name}`;
  if (!weights.has(key)) {
    const named = new RegExp(`(^|[^\\w.])${name.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}(?!\\w)`);
    weights.set(key, plan.arrays.filter(([path, , , of]) => of === stage && named.test(textOf(path))));
  }
  return weights.get(key);
}

function open(index, phase) {
  const [name, stage, , lists] = plan.blocks[index];
  const program = plan.programs[stage];
  buttons.forEach((button, i) => {
    button.setAttribute("aria-expanded", String(i === index));
    button.setAttribute("tabindex", i === index ? "0" : "-1");
  });
  const mine = weightsOf(name, stage);
  const first = phase || PHASES.find((_, i) => plan.lists[lists[i]].length);
  const body = make("div", {});
  const show = (which) => body.replaceChildren(operators(lists[PHASES.indexOf(which)], program, name));
  const choices = PHASES.filter((_, i) => plan.lists[lists[i]].length).map((which) => make("button", { type: "button", onclick: () => show(which) }, which));
  const large = [...mine].sort((one, other) => other[4] - one[4]).slice(0, 4);
  const pictures = large.map(([path, type, spec]) => tiles(textOf(path), textOf(spec), program, textOf(type)));
  detail.replaceChildren(
    make("div", { class: "head" }, make("h3", {}, `${name}${isPipeline ? `, stage ${stage}` : ""}`), make("button", { type: "button", onclick: close }, "Close")),
    ...(pictures.length ? [make("p", { class: "soft small" }, `The largest of its ${plural(mine.length, "array")}:`), make("div", { class: "columns" }, ...pictures)] : []),
    make("div", { class: "buttons" }, make("span", { class: "soft" }, "Operators of"), ...choices),
    body,
  );
  show(first);
  detail.hidden = false;
  model.classList.add("open");
  detail.focus({ preventScroll: true });
  detail.scrollIntoView({ block: "nearest" });
}
