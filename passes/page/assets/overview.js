// What was chosen, what it should cost and why, what was rejected.

function facts() {
  const cards = [
    ["predicted step", seconds(plan.seconds), `${plan.solver.join(", ")}, gap ${plan.gap == null ? "unknown" : percent(plan.gap)}`],
    ["peak of one device", bytes(plan.peak), `${percent(plan.peak / plan.limit)} of ${bytes(plan.limit)}`],
    ["devices", count(plan.devices), plan.facts.cluster],
    ["mesh", meshes(), plural(plan.programs.length, "program")],
    ["planner", plan.facts.planner, `program ${plan.facts.program}`],
  ];
  if (plan.measured) cards.splice(1, 0, ["measured step", seconds(plan.measured.seconds), `${Number((plan.measured.seconds / plan.seconds).toPrecision(3))} times the predicted`]);
  if (plan.timeline) cards.push(["bubble", percent(plan.timeline.bubble), plan.timeline.name]);
  const card = ([name, value, more]) =>
    make("div", { class: "card" }, make("span", { class: "soft" }, name), make("b", {}, value), make("span", { class: "soft small" }, more));
  return make("div", { class: "cards" }, ...cards.map(card));
}

// "x=8, 7 of x=2 x y=4": the meshes of all programs, equal ones counted.
function meshes() {
  const counts = new Map();
  for (const program of plan.programs) counts.set(meshText(program), (counts.get(meshText(program)) || 0) + 1);
  return [...counts].map(([mesh, times]) => (times > 1 ? `${times} of ${mesh}` : mesh)).join(", ");
}

function added(programs, field) {
  const sums = {};
  for (const program of programs) {
    for (const [cause, value] of Object.entries(program[field])) sums[cause] = (sums[cause] || 0) + (value || 0);
  }
  return Object.entries(sums).sort((one, other) => other[1] - one[1]);
}

function byCause(rows, write) {
  const total = rows.reduce((sum, row) => sum + row[1], 0) || 1;
  return bars(rows.map(([name, value]) => [name.replaceAll("_", " "), value, `${write(value)}\u2002${percent(value / total)}`]));
}

function costs() {
  const isPipeline = Boolean(plan.timeline);
  const fullest = plan.programs.reduce((most, program, i) => {
    const size = (p) => Object.values(p.nbytes).reduce((sum, value) => sum + value, 0);
    return size(program) > size(plan.programs[most]) ? i : most;
  }, 0);
  const peak = Object.entries(plan.programs[fullest].nbytes);
  const of = isPipeline ? ", all stages added up, waiting apart" : "";
  return make(
    "div",
    { class: "columns" },
    make("div", {}, make("h3", {}, `Seconds by cause${of}`), byCause(added(plan.programs, "seconds"), seconds)),
    make("div", {}, make("h3", {}, "Seconds by phase"), byCause(added(plan.programs, "phases"), seconds)),
    make("div", {}, make("h3", {}, isPipeline ? `Bytes by cause, stage ${fullest} alone` : "Bytes at the peak by cause"), byCause(peak, bytes)),
  );
}

function measured() {
  const shares = plan.measured ? plan.measured.shares : [];
  if (!shares.length) return [];
  const causes = [...new Set(shares.flatMap((share) => Object.keys(share)))];
  const groups = shares.map((share, group) => {
    const promised = {};
    for (const program of plan.programs.filter((one) => one.group === group)) {
      for (const [cause, value] of Object.entries(program.seconds)) {
        const name = causes.includes(cause) ? cause : "compute";
        promised[name] = (promised[name] || 0) + value;
      }
    }
    const rows = causes
      .map((cause) => [cause.replaceAll("_", " "), promised[cause] || 0, `${seconds(promised[cause] || 0)} / ${seconds(share[cause] || 0)}`, share[cause] || 0])
      .filter((row) => row[1] || row[3]);
    return make("div", {}, make("h3", {}, shares.length > 1 ? `Submesh ${group}` : "A device on average"), bars(rows));
  });
  return [section("measured", "Predicted and measured", make("p", { class: "soft" }, "Filled: predicted. Outlined: measured."), make("div", { class: "columns" }, ...groups))];
}

function rejected() {
  const words = plan.alternatives.length
    ? "Plans that the search met and did not take, and what a step of them would take. Of a mesh that is clearly dearer, the search stops early: its number is that of the best plan it had by then."
    : "Nothing: this planner lays the plan out by hand, or there was no other mesh to compare.";
  const chosen = ["chosen", plan.seconds, `${seconds(plan.seconds)}`];
  const others = plan.alternatives.map((one) => [one.name, one.seconds, `${seconds(one.seconds)}\u2002${times(one.seconds)}`]);
  const rows = plan.alternatives.map((one) => [one.name, seconds(one.seconds), times(one.seconds), one.peak == null ? "not counted" : bytes(one.peak), one.why]);
  return section(
    "rejected",
    "What was rejected",
    make("p", { class: "soft" }, words),
    ...(rows.length ? [bars([chosen, ...others]), table(["plan", ">step", ">against the chosen", ">peak", "why"], rows, "rejected plans")] : []),
  );
}

const times = (value) => (value == null ? "" : `${((100 * value) / plan.seconds - 100).toFixed(1).replace(/^(?=\d)/, "+")} %`);

function dearest() {
  const rows = plan.dearest.map((one) => [
    seconds(one.seconds), percent(one.seconds / (plan.seconds || 1)), one.kind.replaceAll("_", " "), one.axes, count(one.count), bytes(one.nbytes),
    make("code", {}, one.where || "input or output"), ...(plan.programs.length > 1 ? [String(one.stage)] : []),
  ]);
  const stage = plan.programs.length > 1 ? [">stage"] : [];
  const note = rows.length ? "By kind, axes of the mesh and your source line, one after another; some of it hides behind computing where links allow." : "No device sends anything.";
  return section("collectives", "The dearest collectives", make("p", { class: "soft" }, note), table([">seconds", ">of the step", "kind", "axes", ">count", ">bytes", "where", ...stage], rows, "dearest collectives"));
}
