// The inputs of the step with their placements; names that differ in numbers alone are one row.

function grouped() {
  const groups = new Map();
  for (const [path, type, spec, stage, local] of plan.arrays) {
    const key = [textOf(path).replace(/\d+/g, "*"), type, spec, isPipeline ? stage : 0].join("|");
    if (!groups.has(key)) groups.set(key, { members: [], type, spec, stage, local });
    groups.get(key).members.push(textOf(path));
  }
  return [...groups.values()];
}

function common(names) {
  const parts = names.map((name) => name.split(/(\d+)/));
  return parts[0].map((part, i) => (parts.every((one) => one[i] === part) ? part : "*")).join("");
}

function arrays() {
  const rows = grouped().map(({ members, type, spec, stage, local }) => {
    const name = common(members);
    const cell = make("td", { class: "wide" }, make("button", { type: "button", class: "op code", "aria-expanded": "false" }, name));
    const texts = [count(members.length), textOf(spec), textOf(type), local ? bytes(local) : "", ...(isPipeline ? [String(stage)] : [])];
    const line = make("tr", {}, cell, ...texts.map((text, i) => make("td", { class: i === 0 || i > 2 ? "right" : "wide" }, i === 1 || i === 2 ? make("code", {}, text) : text)));
    const button = cell.firstChild;
    button.addEventListener("click", () => {
      const isOpen = button.getAttribute("aria-expanded") === "true";
      button.setAttribute("aria-expanded", String(!isOpen));
      if (isOpen) line.nextSibling.remove();
      else line.after(make("tr", {}, make("td", { colspan: String(texts.length + 1) }, tiles(name, textOf(spec), plan.programs[stage], textOf(type)))));
    });
    return line;
  });
  const headings = ["array", ">count", "placement", "type", ">each device", ...(isPipeline ? [">stage"] : [])];
  const head = headings.map((h) => make("th", { scope: "col", class: h.startsWith(">") ? "right" : null }, h.replace(/^>/, "")));
  const shown = make("div", { class: "scroll ops" }, make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows)));
  return section("arrays", "Arrays that enter the step", make("p", { class: "soft" }, "[x, -] is cut over mesh axis x along its first dimension and whole along its second. Choose a name to see its tiles."), make("details", { open: rows.length <= 60 }, make("summary", {}, plural(plan.arrays.length, "array")), shown));
}
