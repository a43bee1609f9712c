// Search over blocks, operators, source lines and arrays.

const MOST_RESULTS = 40;

function entries() {
  const all = [];
  plan.blocks.forEach(([name, stage, , lists], index) => {
    const of = isPipeline ? `, stage ${stage}` : "";
    all.push({ words: `${name}${of}`, kind: "layer", go: () => open(index) });
    const seen = new Set();
    PHASES.forEach((phase, i) => {
      for (const row of plan.lists[lists[i]]) {
        const words = `${textOf(row[0])}  ${textOf(row[2])}  ${name}/${textOf(row[3])}${of}, ${phase}`;
        if (seen.has(words)) continue;
        seen.add(words);
        all.push({ words, kind: "operator", go: () => open(index, phase) });
      }
    });
  });
  const owners = new Map();
  plan.blocks.forEach(([name, stage], index) => weightsOf(name, stage).forEach((array) => owners.set(array, index)));
  for (const array of plan.arrays) {
    const words = `${textOf(array[0])}  ${textOf(array[2])}  ${textOf(array[1])}`;
    all.push({ words, kind: "array", go: () => (owners.has(array) ? open(owners.get(array)) : showSection("arrays")) });
  }
  return all;
}

function showSection(id) {
  const place = document.getElementById(id);
  const inside = place.querySelector("details");
  if (inside) inside.open = true;
  place.scrollIntoView();
}

// The list beneath the box: what matches, and which of it is chosen.
function resultList(input, box) {
  const list = { results: [], at: -1, all: null };
  list.select = (index) => {
    list.at = index;
    [...box.children].forEach((child, i) => child.setAttribute("aria-selected", String(i === index)));
    if (!box.children[index]) return;
    input.setAttribute("aria-activedescendant", box.children[index].id);
    box.children[index].scrollIntoView({ block: "nearest" });
  };
  list.hide = () => {
    box.hidden = true;
    input.setAttribute("aria-expanded", "false");
  };
  list.go = (index) => {
    if (!list.results[index]) return;
    list.hide();
    list.results[index].go();
  };
  list.look = () => {
    list.all = list.all || entries();
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return list.hide();
    const matches = (one) => words.every((word) => one.words.toLowerCase().includes(word));
    list.results = list.all.filter(matches).slice(0, MOST_RESULTS);
    box.replaceChildren(...(list.results.length ? list.results.map(option) : [make("div", { class: "soft" }, "nothing of that name")]));
    box.hidden = false;
    input.setAttribute("aria-expanded", "true");
    return list.select(list.results.length ? 0 : -1);
  };
  const option = (one, i) =>
    make("div", { role: "option", id: `result-${i}`, onclick: () => list.go(i) }, make("span", { class: "soft small" }, `${one.kind}  `), make("code", {}, one.words));
  return list;
}

function search() {
  const input = document.getElementById("search");
  const list = resultList(input, document.getElementById("results"));
  input.addEventListener("input", list.look);
  input.addEventListener("focus", list.look);
  input.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && list.results.length) {
      event.preventDefault();
      list.select((list.at + step + list.results.length) % list.results.length);
    } else if (event.key === "Enter") list.go(list.at);
    else if (event.key === "Escape") { list.hide(); input.blur(); }
  });
  document.addEventListener("click", (event) => { if (!event.target.closest(".search")) list.hide(); });
  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input")) return;
    if (event.key === "/") {
      event.preventDefault();
      input.focus();
    } else if (event.key === "Escape" && !detail.hidden) close();
  });
}
