
/* Runs over each other: a chart for each metric that has a line of two points or more, the customary ones first. */
const { labels, metrics } = JSON.parse(document.getElementById("data").textContent);
const FIRST = ["rollout/reward", "validation/reward", "validation/accuracy", "kl/initial_k1"];
const panel = name => chart({ title: name, section: FIRST.includes(name) ? "reward" : "other", lines: metrics[name].map((line, i) => ({ ...line, name, label: labels[i] })) });
const drawn = Object.keys(metrics).filter(name => metrics[name].some(line => line.points.length > 1));
const first = FIRST.filter(name => drawn.includes(name)), others = drawn.filter(name => !FIRST.includes(name)).sort();
page.replaceChildren(h("h1", {}, "Runs compared"),
  h("p", { class: "legend", style: { display: "block", fontSize: "14px" } }, labels.map((label, i) => h("span", { style: { display: "block" } }, h("i", { style: { background: colour(i) } }), label))),
  h("p", { class: "soft small" }, "A band is one standard deviation over the seeds. Steps are rollouts, each with its gradient steps."),
  h("div", { class: "grid wide" }, first.map(panel)), h("h2", {}, "Everything else"), h("div", { class: "grid" }, others.map(panel)));
