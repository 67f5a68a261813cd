
/* Runs over each other: a chart for each metric that has a line of two points or more, the customary ones first.
   A page with #metric=NAME&x=AXIS shows that chart alone. */
const { title, about, labels, seeds, metrics } = JSON.parse(document.getElementById("data").textContent);
const FIRST = ["rollout/reward", "validation/reward", "validation/accuracy", "kl/initial_k1"];
const AXES = { step: "step", sampled: "sampled tokens", tokens: "learned tokens", seconds: "seconds" };
const asked = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
const full = labels.map((label, i) => seeds[i] > 1 ? `${label} (${seeds[i]} seeds)` : label);
const drawn = Object.keys(metrics).filter(name => !name.startsWith("sum/") && metrics[name].some(line => line.points.length > 1));
const first = FIRST.filter(name => drawn.includes(name)), others = drawn.filter(name => !FIRST.includes(name)).sort();

/* The cost of a curve up to a step, which lies between two steps at which it is known. */
function cost(axis, i, step) {
  const points = metrics[`sum/${axis}`][i].points, after = points.findIndex(p => p[0] >= step);
  if (after < 0) return points.length ? points.at(-1)[1] : 0;
  const [s1, v1] = points[after], [s0, v0] = after ? points[after - 1] : [0, 0];
  return s1 === s0 ? v1 : v0 + (v1 - v0) * (step - s0) / (s1 - s0);
}
const axes_ = Object.keys(AXES).filter(axis => axis === "step" || metrics[`sum/${axis}`]);
function along(line, axis, i) {
  if (axis === "step") return line;
  return metrics[`sum/${axis}`][i].points.length ? { ...line, points: line.points.map(p => [cost(axis, i, p[0]), p[1]]) } : { points: [], spread: null };
}
const panel = axis => name => chart({ title: asked.title ?? name, section: FIRST.includes(name) ? "reward" : "other", along: AXES[axis],
  lines: metrics[name].map((line, i) => ({ ...along(line, axis, i), name, label: full[i] })) });

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
    labels.map((label, i) => h("tr", {}, h("td", {}, swatch(i), label),
      [String(seeds[i]), within(metrics[held][i], 0), within(metrics[held][i], -1), total("sampled", i), total("tokens", i), total("seconds", i)].map((text, n) => h("td", { class: "n", title: heads[n + 1] }, text))))));
}
function show(axis) {
  const press = axes_.map(name => h("button", { "aria-pressed": name === axis, onclick: () => show(name) }, AXES[name]));
  page.replaceChildren(h("h1", {}, title), h("p", {}, about),
    h("p", { class: "soft small" }, "A line is the mean over the seeds, and a band the 95% interval of that mean by Student's t; one seed has no band, and more than eight lines have none. Steps are rollouts, each with its gradient steps; tokens are those that gradient steps learned from, and seconds leave evaluations out."),
    table(), h("div", { class: "controls" }, h("span", { class: "toggle", role: "group" }, press)),
    h("div", { class: "grid wide" }, first.map(panel(axis))), h("h2", {}, "Everything else"), h("div", { class: "grid" }, others.map(panel(axis))));
}
if (drawn.includes(asked.metric)) {
  document.body.style.background = "var(--card)";
  page.style.padding = "6px";
  page.replaceChildren(panel(asked.x in AXES ? asked.x : "step")(asked.metric), h("p", { class: "legend", style: { padding: "0 15px", fontSize: "13px" } }, full.map((label, i) => h("span", {}, swatch(i), label))));
  page.firstChild.style.border = 0;
} else show(axes_.includes(asked.x) ? asked.x : "step");
