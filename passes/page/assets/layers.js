// What each layer costs: seconds of computing and of moving arrays, bytes at the peak.

function split(values, most) {
  const part = (value, kind) => make("span", { class: `part ${kind}`, style: `width:${(100 * value) / most}%` });
  return make("span", { class: "split", "aria-hidden": "true" }, part(values[0], ""), part(values[1], "second"));
}

function layerButton(name, stage) {
  const index = plan.blocks.findIndex(([block, of]) => block === name && of === stage);
  if (index < 0) return name;
  return make("button", { type: "button", class: "link", onclick: () => open(index) }, name);
}

function layerCosts() {
  const rows = plan.layers;
  if (!rows.length) return [];
  const total = rows.reduce((sum, row) => sum + row[2] + row[3], 0) || 1;
  const [longest, largest] = [Math.max(1e-30, ...rows.map((row) => row[2] + row[3])), Math.max(1, ...rows.map((row) => row[4] + row[5]))];
  const cells = rows.map(([name, stage, computing, moving, state, live]) => [
    layerButton(name, stage), ...(isPipeline ? [String(stage)] : []), split([computing, moving], longest), seconds(computing), seconds(moving),
    percent((computing + moving) / total), split([state, live], largest), bytes(state), bytes(live),
  ]);
  const headings = ["layer", ...(isPipeline ? [">stage"] : []), "seconds", ">computing", ">communication", ">share", "bytes", ">arrays", ">temporaries"];
  const note =
    `Of a device in one step${isPipeline ? ", all microbatches together, waiting apart" : ""}. Full: computing, or arrays that are named after the layer and stay; ` +
    "pale: communication and copies, or what of the temporaries at the peak the layer computes. What belongs to no layer is the update's.";
  const shown = table(headings, cells, "costs by layer");
  shown.classList.add("tall");
  return [section("layer-costs", "Costs by layer", make("p", { class: "soft" }, note), shown)];
}
