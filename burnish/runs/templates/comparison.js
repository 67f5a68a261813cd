
/* Compare runs: a chart for each metric that has a line of at least two points, the metrics of FIRST first.
   A page with #metric=NAME&x=AXIS shows only that chart. */
const { title, about, labels, seeds, runs, metrics } = JSON.parse(document.getElementById("data").textContent);
const FIRST = ["rollout/reward", "validation/reward", "validation/accuracy", "kl/initial_k1"];
const AXES = { step: "step", sampled: "sampled tokens", tokens: "learned tokens", seconds: "seconds" };
const query = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
const full = labels.map((label, i) => seeds[i] > 1 ? `${label} (${seeds[i]} seeds)` : label);
const drawn = Object.keys(metrics).filter(name => !name.startsWith("sum/") && metrics[name].some(line => line.points.length > 1));
const first = FIRST.filter(name => drawn.includes(name)), others = drawn.filter(name => !FIRST.includes(name)).sort();

/* The cost of a curve up to a step, interpolated between the steps at which it is known. */
function cost(axis, i, step) {
  const points = metrics[`sum/${axis}`][i].points, after = points.findIndex(p => p[0] >= step);
  if (after < 0) return points.length ? points.at(-1)[1] : 0;
  const [s1, v1] = points[after], [s0, v0] = after ? points[after - 1] : [0, 0];
  return s1 === s0 ? v1 : v0 + (v1 - v0) * (step - s0) / (s1 - s0);
}
const axes_ = Object.keys(AXES).filter(axis => axis === "step" || metrics[`sum/${axis}`]);
function along(line, axis, i) {
  if (axis === "step") return line;
  const known = metrics[`sum/${axis}`][i].points;
  if (!known.length) return { points: [], spread: null, each: null };
  const moved = points => points.filter(p => p[0] <= known.at(-1)[0]).map(p => [cost(axis, i, p[0]), p[1]]);
  return { ...line, points: line.points.map(p => [cost(axis, i, p[0]), p[1]]), each: line.each?.map(moved) };
}
const panel = axis => name => chart({ title: query.title ?? name, section: FIRST.includes(name) ? "reward" : "other", along: AXES[axis],
  lines: metrics[name].map((line, i) => ({ ...along(line.each ? { ...line, spread: null } : line, axis, i), name, label: full[i] })) });

function within(line, i) {
  if (!line.points.length) return "–";
  const mean = number(line.points.at(i)[1]), digits = Math.max(2, (mean.split(".")[1] ?? "").length);
  return line.spread ? `${mean} ± ${+fixed(line.spread.at(i), digits)}` : mean;
}
function table() {
  const held = ["validation/reward", "validation/loss", "rollout/reward", "train/loss"].find(name => metrics[name]);
  const words = { "validation/reward": "held-out reward", "validation/loss": "held-out loss", "rollout/reward": "reward", "train/loss": "loss" }[held];
  const total = (axis, i) => count(Math.round(metrics[`sum/${axis}`]?.[i].points.at(-1)?.[1] ?? 0));
  const heads = ["", "seeds", `first ${words}`, "last", "sampled tokens", "learned tokens", "seconds"];
  return h("div", { class: "card", style: { margin: "12px 0 14px" } }, h("table", {}, h("tr", {}, heads.map((head, i) => h("th", i ? { class: "n" } : {}, head))),
    labels.map((label, i) => h("tr", {}, h("td", {}, swatch(i), label, h("div", { class: "soft small" }, runs[i].flatMap((run, n) => [n ? ", " : "", run.href ? h("a", { href: run.href }, run.name) : run.name]))),
      [String(seeds[i]), within(metrics[held][i], 0), within(metrics[held][i], -1), total("sampled", i), total("tokens", i), total("seconds", i)].map((text, n) => h("td", { class: "n", title: heads[n + 1] }, text))))));
}
function show(axis) {
  const press = axes_.map(name => h("button", { "aria-pressed": name === axis, onclick: () => show(name) }, AXES[name]));
  page.replaceChildren(h("h1", {}, title), h("p", {}, about),
    h("p", { class: "soft small" }, "A line is the mean over the seeds. With four seeds or more, a band is the 95% confidence interval of that mean by Student's t; with two or three, each seed has a thin line. More than eight lines have neither. A step is a rollout with its gradient steps. Learned tokens are the tokens in the loss. Seconds exclude evaluations."),
    table(), h("div", { class: "controls" }, h("span", { class: "toggle", role: "group" }, press)),
    h("div", { class: "grid wide" }, first.map(panel(axis))), h("h2", {}, "Everything else"), h("div", { class: "grid" }, others.map(panel(axis))));
}
if (drawn.includes(query.metric)) {
  document.body.style.background = "var(--card)";
  page.style.padding = "6px";
  page.replaceChildren(panel(query.x in AXES ? query.x : "step")(query.metric), h("p", { class: "legend", style: { padding: "0 15px", fontSize: "13px" } }, full.map((label, i) => h("span", {}, swatch(i), label))));
  page.firstChild.style.border = 0;
} else show(axes_.includes(query.x) ? query.x : "step");
