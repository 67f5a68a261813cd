let data;
function frontier({ x, y, points }) {
  let places = [];
  const svg = drawing(190, (svg, width) => {
    const [X, Y] = axes(svg, width, 190, range(points.map(p => p[1]), true), range(points.map(p => p[2])), x);
    places = points.map(p => [X(p[1]), Y(p[2]), p]);
    svg.append(h("path", { d: pathOf(points.map(p => [p[1], p[2]]), X, Y), fill: "none", stroke: "var(--c4)", opacity: 0.35 }));
    places.forEach(([cx, cy], i) => svg.append(h("circle", { cx, cy, r: 3.2, fill: "var(--c4)", opacity: 0.25 + 0.75 * i / points.length })));
  });
  svg.setAttribute("aria-label", `${y} against ${x}`);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), far = q => Math.hypot(q[0] - event.clientX + box.left, q[1] - event.clientY + box.top);
    const [, , p] = places.reduce((a, b) => far(b) < far(a) ? b : a);
    mark(p[0]);
    showTip(event, `step ${p[0]}\n${short(y)}  ${number(p[2])}\nKL  ${number(p[1])}`);
  });
  svg.addEventListener("pointerleave", () => { mark(null); hideTip(); });
  return h("div", { class: "card" }, h("h3", {}, "Reward against KL"), h("div", { class: "legend" }, `${short(y)}; later steps are stronger`), svg);
}
function timeCard({ phases, whole, steps }) {
  const byStep = new Map();
  phases.forEach((phase, i) => phase.points.forEach(([s, v]) => byStep.set(s, Object.assign(byStep.get(s) || [], { [i]: Math.max(0, v) }))));
  const rows = [...byStep].sort((a, b) => a[0] - b[0]), sum = row => phases.reduce((a, _, i) => a + (row[i] || 0), 0);
  let X;
  const svg = drawing(280, (svg, width) => {
    let Y;
    const first = rows[0][0], last = rows.at(-1)[0], half = (last - first) / Math.max(1, rows.length - 1) / 2 || 0.5;
    [X, Y] = axes(svg, width, 280, [first - half, last + half], [0, Math.max(...rows.map(([, r]) => sum(r))) * 1.05 || 1], "seconds by step");
    const wide = Math.max(0.5, (X(half) - X(0)) * 2 * (rows.length < 80 ? 0.8 : 1));
    for (const [step, row] of rows) {
      let below = 0;
      phases.forEach((_, i) => { const v = row[i] || 0; svg.append(h("rect", { x: X(step) - wide / 2, width: wide, y: Y(below + v), height: Math.max(0, Y(below) - Y(below + v)), fill: colour(i) })); below += v; });
    }
  });
  svg.setAttribute("aria-label", "seconds per phase, by step");
  svg.addEventListener("pointermove", event => {
    const x = event.clientX - svg.getBoundingClientRect().left, [step, row] = rows.reduce((a, b) => Math.abs(X(b[0]) - x) < Math.abs(X(a[0]) - x) ? b : a);
    mark(step);
    showTip(event, [`step ${step}: ${number(sum(row))} s`, ...phases.map((p, i) => `${p.label}  ${number(row[i] || 0)} s`)].join("\n"));
  });
  svg.addEventListener("pointerleave", () => { mark(null); hideTip(); });
  const line = (label, seconds, share, i) => h("tr", {}, h("td", {}, i === null ? null : h("i", { style: { background: colour(i) } }), label), h("td", { class: "n" }, fixed(seconds, seconds < 10 ? 2 : 1)), h("td", { class: "n" }, fixed(100 * share, 1) + "%"), h("td", { class: "n" }, number(+(seconds / steps).toFixed(6))),
    h("td", { style: { width: "22%" } }, h("div", { class: "bar", style: { width: 100 * share + "%", background: i === null ? "var(--line)" : colour(i) } })));
  return h("div", { class: "grid wide" }, rows.length > 1 ? h("div", { class: "card" }, h("h3", {}, "Wall clock, step by step"), svg) : null, h("div", { class: "card" },
    h("table", { id: "times" }, h("tr", {}, h("th", {}, "phase"), h("th", { class: "n" }, "seconds"), h("th", { class: "n" }, "share"), h("th", { class: "n" }, "s / step"), h("th", {})), phases.map((p, i) => line(p.label, p.seconds, p.share, i)), line("whole step", whole, 1, null))));
}

/* Overlap: when each actor worked, how old the groups were, and what actors waited for. */
const WORK = { sample: "sampling", advance: "sampling", evaluate: "evaluating", grade: "grading", learn: "learning", weights: "packing weights", state: "saving" };
const KINDS = [...new Set(Object.values(WORK)), "other work"], workOf = what => WORK[what] ?? "other work";
function timelineCard({ spans: all, seconds }) {
  const actors = Object.keys(seconds), last = Math.max(...all.map(span => span[3])), start = Math.max(Math.min(...all.map(span => span[2])), last - 60), end = last - start;
  const spans = all.filter(span => span[3] > start).map(([actor, what, from, to, version]) => [actor, what, from - start, to - start, version]), seen = KINDS.filter(kind => spans.some(span => workOf(span[1]) === kind)), row = 26, height = row * actors.length + 42;
  const svg = drawing(height, (svg, width) => {
    const left = Math.max(...actors.map(name => name.length)) * 6.2 + 12, X = v => left + Math.max(0, v) / end * (width - left - 10);
    for (const v of ticks(0, end, Math.max(3, width / 90))) svg.append(h("line", { x1: X(v), x2: X(v), y1: 2, y2: height - 34, stroke: "var(--line)" }), h("text", { x: X(v), y: height - 19, "text-anchor": "middle" }, number(v)));
    actors.forEach((name, i) => svg.append(h("text", { x: left - 8, y: row * i + row / 2 + 5, "text-anchor": "end" }, name)));
    spans.forEach(([actor, what, from, to], i) => svg.append(h("rect", { x: X(from), width: Math.max(0.7, X(to) - X(from)), y: row * actors.indexOf(actor) + 4, height: row - 7, rx: 2, fill: colour(KINDS.indexOf(workOf(what))), "data-i": i })));
    svg.append(h("text", { x: (left + width - 10) / 2, y: height - 4, "text-anchor": "middle" }, "seconds"));
  });
  svg.setAttribute("aria-label", "the calls of each actor, by time");
  svg.addEventListener("pointermove", event => {
    const span = spans[event.target.dataset.i];
    if (!span) return hideTip();
    const [actor, what, from, to, version] = span;
    showTip(event, [`${actor}: ${workOf(what)} (${what})`, `${number(to - from)} s, until second ${number(to)}`, version === null ? "" : `version ${version}`].join("\n").trim());
  });
  svg.addEventListener("pointerleave", hideTip);
  return h("div", { class: "card" }, h("h3", {}, `Work of each actor, last ${number(+end.toPrecision(2))} s`), h("div", { class: "legend" }, seen.map(kind => h("span", {}, h("i", { style: { background: colour(KINDS.indexOf(kind)) } }), kind))), svg);
}
function lagCard(lags) {
  const apart = Math.min(...lags.slice(1).map(([lag], i) => lag - lags[i][0]), 10), sum = lags.reduce((a, [, n]) => a + n, 0);
  const svg = drawing(190, (svg, width) => {
    const [X, Y] = axes(svg, width, 190, [lags[0][0] - apart / 2, lags.at(-1)[0] + apart / 2], [0, Math.max(...lags.map(([, n]) => n)) * 1.05], "lag, versions");
    for (const [lag, n] of lags) svg.append(h("rect", { x: X(lag - 0.4 * apart), width: X(0.8 * apart) - X(0), y: Y(n), height: Y(0) - Y(n), fill: "var(--c0)", "data-tip": `lag ${lag}: ${many(n, "group")}, ${fixed(100 * n / sum, 1)}%` }));
  });
  svg.setAttribute("aria-label", "groups by lag");
  svg.addEventListener("pointermove", event => event.target.dataset.tip ? showTip(event, event.target.dataset.tip) : hideTip());
  return h("div", { class: "card" }, h("h3", {}, "Lag of the groups that were trained on"), h("div", { class: "legend" }, `${many(sum, "group")}; mean ${number(lags.reduce((a, [lag, n]) => a + lag * n, 0) / sum)}, largest ${lags.at(-1)[0]} versions`), svg);
}
const WAITS = ["weights", "samples", "", "grades", "other generators", "a checkpoint", "an evaluation", "the driver"];  /* in the order of colours; "" is an actor's own work */
function waitCard({ seconds }) {
  const own = ([actor, causes]) => {
    const whole = Object.values(causes).reduce((a, b) => a + b, 0), parts = Object.entries(causes).sort((a, b) => (a[0] !== "") - (b[0] !== "") || b[1] - a[1]);
    const tint = ([cause]) => cause === "the driver" ? "var(--line)" : colour(WAITS.indexOf(cause)), share = ([, value]) => fixed(100 * value / whole, 1) + "%";
    return [h("div", { class: "legend" }, h("b", {}, actor), parts.filter(([, value]) => value > whole / 1000).map(part => h("span", {}, h("i", { style: { background: tint(part) } }), `${part[0] ? "waits for " + part[0] : "works"} `, h("b", {}, share(part)), ` ${fixed(part[1], 2)} s`))),
      h("div", { class: "shares" }, parts.map(part => h("div", { style: { width: share(part), background: tint(part) } })))];
  };
  return h("div", { class: "card", id: "waits" }, h("h3", {}, "Work and waiting, by cause"), Object.entries(seconds).flatMap(own));
}
const CAUSES = { numerics: "mismatch/logprob_mean", staleness: "drift/staleness", update: "drift/update" };
function causesCard(series) {
  const lines = Object.entries(CAUSES).filter(([, key]) => series[key]).map(([name, key]) => ({ name, points: series[key].points }));
  return lines.some(line => line.points.length > 1) ? chart({ title: "Gap between sampling and learning by cause, nats per token", lines, section: "overlap" }) : null;
}

/* Rollouts: rows of the run's files. A row contains "response" only if its tokens do not spell it, and "whole", its full
   size in tokens and characters, only if it was truncated. */
let rows = [], pairs = [], total = 0, ends = false, widest = 0, mode = "logprob";
function take(rollouts) {
  ({ rows = [], pairs = [], total, ends } = rollouts);
  const gaps = rows.flatMap(row => row.learner_logprobs.map((_, k) => Math.abs(gap(row, k) ?? 0))).sort((a, b) => a - b);
  widest = gaps[Math.floor(gaps.length * 0.99)] || gaps.at(-1) || 0;
}
function gap(row, k) {  /* sampler − learner; null if one of them is unknown */
  const ours = row.logprobs[k] ?? null, theirs = row.learner_logprobs[k] ?? null;
  return ours === null || theirs === null ? null : ours - theirs;
}
const DEEPEST = 6, contents = messages => messages.map(message => message.content);
const textOf = row => row.turns ? [...contents(row.first_messages), ...row.turns.flatMap(turn => [turn.text, ...contents(turn.messages)])].join("\n") : row.response ?? row.tokens.join("");
const forced = row => row.forced ?? [];  /* indices of tokens that were inserted, not sampled */
const meanLogprob = row => row.logprobs.reduce((a, v, k) => a + (forced(row).includes(k) ? 0 : v ?? 0), 0) / (row.logprobs.length - forced(row).length || 1);
function visible(text) {  /* escape characters without a glyph, and those that reorder their neighbours */
  return text.replace(/[\u0000-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g, c => {
    const code = c.charCodeAt(0);
    return c === "\n" ? "↵\n" : c === "\t" ? "⇥\t" : `⟨${code.toString(16).toUpperCase().padStart(code < 256 ? 2 : 4, "0")}⟩`;
  });
}
function shade(row, k) {
  const logprob = row.logprobs[k] ?? null, apart = gap(row, k);
  const [name, strength] = mode === "logprob" ? ["hot", logprob === null ? null : -logprob / DEEPEST] : [apart > 0 ? "hot" : "cold", apart === null || !widest ? null : Math.abs(apart) / widest];
  return strength === null ? "" : `rgb(var(--${name}) / ${(0.7 * Math.min(1, strength)).toFixed(3)})`;
}
function body(row) {
  if (row.turns) return conversation(row);
  if (mode === "plain") return h("div", { class: "text" }, visible(textOf(row)) || "(empty)");
  return coloured(row, 0, row.tokens.length);
}
function coloured(row, start, end) {  /* the tokens in this range */
  const element = h("div", { class: "text" }, row.tokens.slice(start, end).map((token, i) => h("span", { "data-k": start + i, class: forced(row).includes(start + i) ? "forced" : "", style: { backgroundColor: shade(row, start + i) } }, visible(token))));
  if (start >= end) element.append("(empty)");
  element.addEventListener("pointermove", event => {
    const k = event.target.dataset.k;
    if (k === undefined) return hideTip();
    const ours = row.logprobs[k] ?? null, theirs = row.learner_logprobs[k] ?? null, apart = gap(row, k);
    const lines = [`token ${+k + 1}: ${visible(JSON.stringify(row.tokens[k].slice(0, 60)))}`];
    if (forced(row).includes(+k)) lines.push("inserted, not sampled");
    if (ours !== null) lines.push(`log p  ${number(ours)}   p  ${number(Math.exp(ours))}`);
    if (theirs !== null) lines.push(`learner's log p  ${number(theirs)}`);
    if (apart !== null) lines.push(`sampler − learner  ${number(+apart.toFixed(4))}`);
    showTip(event, lines.join("\n"));
  });
  element.addEventListener("pointerleave", hideTip);
  return element;
}

/* Episodes: a conversation of the policy and its environment. A turn without tokens has only the error of an environment
   that failed before the first turn. */
const CALL = /<tool_call>\s*([\s\S]*?)\s*(?:<\/tool_call>|$)/g;
function callsOf(message) {  /* tool calls as [name, arguments]; the name is null for a call that is not JSON */
  const own = (message.tool_calls ?? []).map(call => call.function ?? call), inText = [...(message.text ?? message.content ?? "").matchAll(CALL)].map(match => { try { return JSON.parse(match[1]); } catch { return match[1]; } });
  return [...own, ...inText].map(call => {
    if (typeof call?.name !== "string") return [null, typeof call === "string" ? call : JSON.stringify(call)];
    const given = call.arguments ?? call.parameters ?? {};
    return [call.name, typeof given === "string" ? given : JSON.stringify(given)];
  });
}
const callLine = ([name, given]) => h("div", { class: "call" }, name === null ? "calls a tool with text that is not a call: " : h("b", {}, `calls ${visible(name)} `), h("code", {}, visible(given)));
const isTaken = turn => turn.end > turn.start;
const opponent = row => "requests" in row.parts ? "agent" : "environment";  /* an agent's episode has this part */
function openingOf(row, turn) {  /* the messages with which an agent begins another conversation */
  const all = row.sequences ?? [], place = all.findIndex(one => one.start === turn.start && isTaken(turn));
  if (place < 0 || !all[place].messages.length) return [];
  return [all.length > 1 ? h("div", { class: "end" }, `conversation ${place + 1} of ${all.length}`) : null, ...all[place].messages.map(messageOf)];
}
const clock = seconds => seconds === undefined ? null : seconds < 0.1 ? `${number(1000 * seconds)} ms` : `${number(seconds)} s`;
function bubble(role, head, ...inside) {
  return h("div", { class: `bubble ${["user", "tool", "system", "assistant"].includes(role) ? role : "user"}` }, h("div", { class: "meta" }, h("b", {}, visible(role)), head.filter(fact => fact).map(fact => h("span", {}, fact))), inside.flat());
}
const clipped = record => record.characters ? h("div", { class: "small soft" }, `truncated here: ${count(record.content?.length ?? record.text.length)} of ${many(record.characters, "character")}`) : null;
const said = text => h("div", { class: "text" }, visible(text) || "(empty)");
const messageOf = message => bubble(message.role, [message.name ? visible(message.name) : null], said(message.content), callsOf(message).map(callLine), clipped(message));
function turnOf(row, turn, i) {
  const metrics = Object.entries(turn.metrics).map(([name, value]) => `${visible(name)} ${number(value)}`), calls = callsOf(turn).map(callLine), took = clock(turn.seconds);
  const isHere = mode !== "plain" && turn.end <= row.tokens.length;  /* otherwise the page lacks some of its tokens */
  const answered = turn.error === null ? null : h("div", { class: "fault" }, h("b", {}, `The ${opponent(row)} failed: `), visible(turn.error));
  if (!isTaken(turn)) return [h("div", { class: "fault" }, h("b", {}, opponent(row) === "agent" ? "The agent failed: " : "The environment did not start: "), visible(turn.error ?? "unknown"))];
  const head = [`turn ${i + 1}`, many(turn.end - turn.start, "token"), turn.reward === null ? null : h("b", { class: turn.reward > 0 ? "reward" : "" }, `reward ${number(turn.reward)}`), took === null ? null : `${opponent(row)} ${took}`, ...metrics];
  return [...openingOf(row, turn), bubble("assistant", head, isHere ? coloured(row, turn.start, turn.end) : said(turn.text), calls, isHere ? null : clipped(turn)), ...turn.messages.map(messageOf), answered];
}
function endOf(row) {  /* why the episode ended */
  const taken = row.turns.filter(isTaken).length + row.turn_count - row.turns.length, turns = many(taken, "turn");
  if (row.failed) return opponent(row) === "agent" ? `the agent failed after ${turns}` : taken ? `the environment failed in turn ${taken}` : "the environment did not start";
  if (row.finish === "length") return `truncated after ${turns}`;
  return row.finish === "stop" ? `ended by the ${opponent(row)} after ${turns}` : `${row.finish === "abort" ? "aborted by the engine" : row.finish} after ${turns}`;
}
function conversation(row) {
  const hidden = row.turn_count - row.turns.length;
  return h("div", { class: "conversation" }, row.first_messages.map(messageOf), row.turns.flatMap((turn, i) => turnOf(row, turn, i)),
    hidden ? h("div", { class: "small soft" }, `${many(hidden, "further turn")} not shown`) : null, row.failed && !hidden ? null : h("div", { class: `end ${row.finish === "stop" && !row.failed ? "" : "cut"}` }, endOf(row)));
}
function versions(row) {  /* several if weights were updated while it was sampled; rows of older files have only one */
  if ((row.versions ?? []).length < 2) return `version ${row.version}`;
  return `versions ${row.versions.map(([version, tokens]) => `${version} (${many(tokens, "token")})`).join(", ")}`;
}
function response(row) {
  const ended = row.turns ? endOf(row) : { stop: "ended by itself", length: "truncated" }[row.finish] ?? row.finish;
  const facts = [
    row.source ? "held out" : `group ${row.group}`,
    `sample ${row.sample}`,
    row.advantage === null ? null : `advantage ${number(row.advantage)}`,
    many((row.whole ? row.whole[0] : row.tokens.length) - forced(row).length, "token"),
    row.logprobs.length ? `${number(meanLogprob(row))} nats per token` : null,
    ended,
    row.version === null ? null : versions(row),
    row.status === "scored" ? null : row.status,
    ...Object.entries(row.parts).map(([name, value]) => `${name} ${number(value)}`),
  ];
  return h("div", {}, h("div", { class: "meta" }, h("b", {}, `step ${row.step}`), h("b", {}, `reward ${number(row.reward)}`), facts.filter(f => f).map(f => h("span", {}, f))), body(row),
    row.whole && row.turns ? h("div", { class: "small soft" }, `only the turns within the first ${many(row.tokens.length, "token")} are coloured here`) :
    row.whole ? h("div", { class: "small soft" }, `truncated here: ${count(row.tokens.length)} of ${many(row.whole[0], "token")}, ${many(row.whole[1], "character")} in all`) : null);
}
function prompt(row) {
  return row.turns ? null : promptText(row);  /* the bubbles of an episode begin with it */
}
function promptText(row) {  /* the complete prompt; a long one is unfolded by a click */
  const text = visible(row.asked).replaceAll("↵\n", "\n"), start = text.slice(0, 240).replace(/\s+\S*$/, "");
  if (text.length <= 600 && text.split("\n").length <= 12) return h("div", { class: "prompt" }, text);
  const head = h("summary", {}, h("span", { class: "start" }, `${start} … `), `(${many(text.length, "character")})`);
  return h("div", { class: "prompt" }, h("details", { "data-key": `${row.source} ${row.step} ${row.group} ${row.sample}` }, head, text));
}

function browser() {
  const field = (name, input) => h("label", {}, name, input);
  const bound = id => h("input", { id, type: "number", step: "any" });
  const inputs = { text: h("input", { id: "text", type: "search", placeholder: "in prompt or response" }), low: bound("low"), high: bound("high"), from: bound("from"), to: bound("to") };
  const select = (id, options) => h("select", { id, onchange: () => list(PAGE) }, options.map(([value, text]) => h("option", { value }, text)));
  const source = select("source", [["", "all"], ["0", "training"], ["1", "held out"]]);
  const order = select("order", [["", "by step"], ["-step", "newest first"], ["reward", "lowest reward"], ["-reward", "highest reward"], ["likely", "least likely"], ["gap", "largest gap"]]);
  const largestGap = row => row.learner_logprobs.reduce((a, _, k) => Math.max(a, Math.abs(gap(row, k) ?? 0)), 0);
  const keys = { step: row => row.step, reward: row => row.reward ?? 0, likely: meanLogprob, gap: row => -largestGap(row) };
  const counts = h("p", { id: "counts", class: "soft small" }), shown = h("div", { class: "list", id: "list" }), more = h("button", { id: "more", onclick: () => list(limit + PAGE) }, "show more");
  const before = h("div", { class: "list", id: "pairs" }), morePairs = h("button", { id: "more-pairs", onclick: () => compare(pairLimit + 8) }, "show more pairs"), pairCount = h("p", { class: "soft small", id: "pair-count" });
  const PAGE = 12;
  let limit = PAGE, pairLimit = 4;
  function list(size) {
    limit = size;
    const wanted = inputs.text.value.toLowerCase(), isBound = input => input.value !== "";
    const within = (value, low, high) => !(isBound(low) || isBound(high)) || (value !== null && (!isBound(low) || value >= +low.value) && (!isBound(high) || value <= +high.value));
    const found = rows.filter(row => (source.value === "" || String(row.source) === source.value) && within(row.reward, inputs.low, inputs.high) && within(row.step, inputs.from, inputs.to)
      && (!wanted || row.asked.toLowerCase().includes(wanted) || textOf(row).toLowerCase().includes(wanted)));
    if (order.value) { const key = keys[order.value.replace("-", "")], sign = order.value[0] === "-" ? -1 : 1; found.sort((a, b) => sign * (key(a) - key(b))); }
    counts.textContent = `${count(Math.min(size, found.length))} shown, ${count(found.length)} match, ${count(rows.length)} in this page` + (rows.length < total ? `, sampled from the ${count(total)} ${ends ? "at both ends of the run's files" : "on disk to bound the file's size"}.` : ends ? ", those at both ends of the run's files." : ", all that are on disk.");
    swap(shown, found.slice(0, size).map(r => h("div", { class: "card" }, prompt(r), response(r))));
    more.hidden = found.length <= size;
  }
  function compare(size) {
    pairLimit = size;
    swap(before, pairs.slice(0, size).map(([a, b]) => h("div", { class: "card" }, prompt(rows[a]), h("div", { class: "pair" }, [rows[a], rows[b]].map(response)))));
    morePairs.hidden = pairs.length <= size;
    pairCount.textContent = pairs.length ? `The same prompt, first and last seen: ${count(Math.min(size, pairs.length))} of ${count(pairs.length)} pairs.` : "No prompt has been seen at two steps yet.";
  }
  for (const input of Object.values(inputs)) input.addEventListener("input", () => list(PAGE));
  const scale = h("span", { class: "small soft", id: "scale" });
  const modes = [["logprob", "log-probability"], ["gap", "sampler − learner"], ["plain", "plain"]];
  const toggle = h("div", { class: "toggle", role: "group", "aria-label": "colour of tokens" }, modes.map(([name, text]) => h("button", { "data-mode": name, onclick: () => paint(name) }, text)));
  function paint(name) {
    mode = name;
    for (const button of toggle.children) button.setAttribute("aria-pressed", button.dataset.mode === name);
    toggle.children[1].hidden = !rows.some(row => row.learner_logprobs.length);
    const ramp = (from, to) => h("span", { class: "scale", style: { background: `linear-gradient(90deg, ${from}, ${to})` } });
    scale.replaceChildren(...(name === "logprob" ? ["log p  0", ramp("transparent", "rgb(var(--hot) / .7)"), `−${DEEPEST}`] : name === "gap" ? [`learner higher by ${number(widest)}`, ramp("rgb(var(--cold) / .7), transparent", "rgb(var(--hot) / .7)"), `sampler higher by ${number(widest)}; uncoloured where the learner did not score`] : []));
    compare(pairLimit);
    list(limit);
  }
  function refresh() {
    for (const [key, low, high] of [["reward", inputs.low, inputs.high], ["step", inputs.from, inputs.to]]) {
      const values = rows.map(row => row[key]).filter(value => value !== null);
      low.placeholder = values.length ? values.reduce((a, b) => Math.min(a, b)) : "";
      high.placeholder = values.length ? values.reduce((a, b) => Math.max(a, b)) : "";
    }
    paint(mode);
  }
  if (data.live) order.value = "-step";
  const elements = [h("div", { class: "controls sticky" }, toggle, scale), h("h3", {}, "Before and after"), pairCount, before, h("p", { style: { marginTop: "12px" } }, morePairs), h("h3", { style: { margin: "26px 0 8px" } }, "All responses"),
    h("div", { class: "controls" }, field("text", inputs.text), field("reward from", inputs.low), field("reward to", inputs.high), field("step from", inputs.from), field("step to", inputs.to), field("source", source), field("order", order)), counts, shown, h("p", { style: { marginTop: "12px" } }, more)];
  return { elements, refresh, isRead: () => [shown, before].some(e => e.matches(":hover") || (!getSelection().isCollapsed && getSelection().containsNode(e, true))) };
}

/* Panels: section, title, and pattern of the metrics. A metric is shown in the first panel whose pattern matches it. */
const PANELS = [
  ["reward", "Reward", /^(rollout|validation)\/reward$/],
  ["reward", "Parts of the reward", /^(rollout|validation)\/part_/],
  ["drift", "KL to the initial model, nats per token", /^kl\/(initial|held_out)_k.$/],
  ["drift", "KL to the initial model, nats per response", /^kl\/(initial|held_out)_.*_response$/],
  ["drift", "KL to the previous step, nats per token", /^kl\/previous_k.$/],
  ["drift", "KL to the previous step, nats per response", /^kl\/previous_.*_response$/],
  ["drift", "KL to the reference, nats per token", /^kl\/reference_k.$/],
  ["drift", "Sampler against learner, nats", /^mismatch\//],
  ["drift", "Older tokens, and the move within a step, nats", /^drift\//],
  ["policy", "Entropy, nats per token", /\/entropy/],
  ["policy", "Response length, tokens", /\/length/],
  ["policy", "Ended and truncated, share", /\/(ended|truncated)/],
  ["policy", "Clipped, share of tokens", /\/clip_fraction/],
  ["policy", "Ratio to the proximal policy", /\/ratio_/],
  ["policy", "Gradient norm", /\/grad_norm/],
  ["policy", "Turns and tool calls per episode", /\/(turns|tool_calls|tool_errors)$/],
  ["policy", "Tokens of observations per episode", /\/observation_tokens$/],
  ["policy", "Critic: explained variance", /\/explained_variance/],
  ["policy", "Critic: value loss", /\/value_loss/],
  ["policy", "Loss", /^train\/loss|^validation\/loss$/],
  ["policy", "Groups without variance, share", /\/dead_groups/],
  ["policy", "Grades, share", /\/grades_/],
  ["policy", "Lag, versions", /\/lag/],
  ["policy", "Tokens per second", /tokens_per_second/],
];
const PHASES = {
  generate: "rollout generation",
  environments: "waiting for environments",
  grade: "reward computation",
  score: "policy optimization: scoring",
  learn: "policy optimization: steps",
  publish: "weight synchronization",
  evaluate: "evaluation",
  checkpoint: "checkpointing",
  other: "unclaimed",
};
const KL = "kl/initial_k1";

/* Headline figures by metric: label, value, note. The legend of the metric's curve repeats them. */
function headlines({ series }) {
  const found = new Map();
  function add(name, label, { averaged = false, unit = "" } = {}) {
    const line = series[name];
    if (!line) return;
    const [first, last] = averaged ? line.ends : [line.points[0][1], line.points.at(-1)[1]];
    const notes = [line.count > 1 ? `from ${number(Math.abs(first) < 1e-5 ? 0 : first)}` : "one measurement"];
    if (unit) notes.unshift(unit);
    if (name.startsWith("validation/") && line.count > 1) {
      const sign = name.endsWith("/loss") ? -1 : 1, [step, best] = line.points.reduce((a, b) => sign * b[1] > sign * a[1] ? b : a);
      notes.push(`best ${number(best)} at step ${step}`);
    }
    const over = averaged && line.window > 1 ? `, last ${line.window} steps` : "";
    found.set(name, [label + over, number(last), notes.join("; ")]);
  }
  add("rollout/reward", "reward", { averaged: true });
  add("validation/reward", "held-out reward");
  if (!series["rollout/reward"]) add("train/loss", "loss", { averaged: true });
  add("validation/loss", "held-out loss");
  add(KL, "KL to the initial model, k1, last step", { unit: "nats per token" });
  add("rollout/ended", "ended", { averaged: true });
  return found;
}
function tilesOf({ series, clocks }, heads) {
  const found = [...heads.values()], responses = series["rollout/responses"]?.sum, seconds = clocks["time/step"]?.sum;
  if (responses) found.push(["responses", count(responses), "sampled for training"]);
  if (seconds) found.push(["time", seconds < 600 ? `${fixed(seconds, 0)} s` : `${fixed(seconds / 60, 0)} min`, "wall clock of the steps"]);
  return found;
}

/* Return the panels, which need a line of at least two points, and the metrics that were measured only once. A metric that
   no panel takes gets its own. */
function panelsOf(series, heads) {
  const isHeldOut = name => name.startsWith("validation/"), left = new Set(Object.keys(series).sort((a, b) => isHeldOut(a) - isHeldOut(b)));
  const drawn = [], once = [];
  function add(section, title, names) {
    names.forEach(name => left.delete(name));
    const lines = names.slice(0, 8).map(name => ({ name, points: series[name].points, head: heads.get(name) }));
    if (lines.some(line => line.points.length > 1)) drawn.push({ section, title, lines });
    else once.push(...lines.map(line => [line.name, line.points[0][1]]));
  }
  for (const [section, title, takes] of PANELS) add(section, title, [...left].filter(name => takes.test(name)));
  for (const name of [...left]) add("other", name, [name]);
  return [drawn, once];
}

/* Reward against KL at each step. In a long run, a point of the KL combines several steps and has the step of the last. */
function frontierOf({ series }) {
  const name = series["validation/reward"]?.points.length > 3 ? "validation/reward" : "rollout/reward", drift = series[KL];
  if (!series[name] || !drift) return null;
  const stride = Math.ceil(drift.count / drift.points.length), points = [];
  for (const [step, reward] of series[name].points) {
    const at = drift.points.find(p => p[0] >= step);
    if (at && at[0] - step < stride) points.push([step, at[1], reward]);
  }
  return points.length > 2 ? { x: "KL to the initial model (k1), nats per token", y: name, points } : null;
}

/* Seconds per phase, the largest first: in total and for each step. */
function timeOf(clocks) {
  const phase = name => name.slice("time/".length), sum = name => clocks[name].sum;
  const names = Object.keys(clocks).filter(name => name.startsWith("time/") && name !== "time/step").sort((a, b) => (a === "time/other") - (b === "time/other") || sum(b) - sum(a)).slice(0, 12);
  if (!names.length) return null;
  const whole = clocks["time/step"]?.sum || names.reduce((total, name) => total + sum(name), 0);
  const phases = names.map(name => ({ label: PHASES[phase(name)] ?? phase(name).replaceAll("_", " "), seconds: sum(name), share: whole > 0 ? sum(name) / whole : 0, points: clocks[name].points }));
  return { phases, whole, steps: Math.max(...names.map(name => clocks[name].count)) };
}
function arrange(data) {
  const heads = headlines(data), speeds = Object.entries(data.clocks).filter(([name]) => !name.startsWith("time/"));
  const [panels, once] = panelsOf({ ...data.series, ...Object.fromEntries(speeds) }, heads);
  return { panels, once, tiles: tilesOf(data, heads), front: frontierOf(data), time: timeOf(data.clocks) };
}

/* The page. A section is rebuilt only if its part of the data has changed. */
function swap(element, children) {
  const open = new Set([...element.querySelectorAll("details[open]")].map(d => d.dataset.key));
  element.replaceChildren(...children.filter(child => child));
  for (const details of element.querySelectorAll("details")) details.open = open.has(details.dataset.key);
}
const parts = new Map(), chip = h("span", { class: "chip", id: "state" }), now = h("div", { class: "now card", id: "now", hidden: "" });
const trouble = h("div", { class: "card trouble", id: "trouble", hidden: "" }), warnings = h("div", { class: "card trouble silent-edge", id: "warnings", hidden: "" });
const tiles = h("div", { class: "grid tiles" }), nav = h("nav", { "aria-label": "sections" }), note = h("p", { style: { marginTop: "28px" } });
const titles = { reward: "Reward", drift: "Drift", policy: "Policy", overlap: "Overlap", time: "Time", rollouts: "Rollouts", recipe: "Recipe and environment", other: "Everything else" };
for (const id in titles) parts.set(id, { element: h("section", { id, hidden: "" }), key: "" });
function section(id, isThere, part, build) {
  const known = parts.get(id), key = isThere ? JSON.stringify(part) : "";
  if (known.key === key) return;
  known.key = key;
  known.element.hidden = !isThere;
  swap(known.element, isThere ? [h("h2", {}, titles[id]), ...build()] : []);
}
let responses = null, unread = false;
function readRollouts() {  /* wait while somebody reads or selects the responses */
  unread = responses !== null && responses.isRead();
  if (unread) return;
  take(data.rollouts);
  responses ??= browser();
  section("rollouts", total > 0, "made once", () => responses.elements);
  responses.refresh();
}
/* The state, and for a run that has ended early why, and how to continue it. */
function showState({ kind, text, error, command }) {
  chip.className = `chip ${kind}`;
  chip.textContent = text;
  const said = error?.lead ?? { silent: "if its process has ended, continue with" }[kind] ?? "continue with";
  const lead = said[0].toUpperCase() + said.slice(1);
  trouble.hidden = !command && !error;
  trouble.className = `card trouble ${kind}-edge`;
  trouble.replaceChildren(...[error ? h("p", {}, h("b", {}, "Failed: "), error.kind) : null, error ? h("pre", {}, error.message) : null,
    error?.remedy ? h("p", {}, h("b", {}, "Remedy: "), error.remedy) : null,
    command ? h("p", {}, `${lead}: `, h("code", {}, command)) : error ? h("p", {}, `${lead}.`) : null].filter(child => child));
}
function draw(fresh) {
  const first = data === undefined;
  data = fresh;
  const { panels, once, tiles: heads, front, time } = arrange(data), { reading } = data;
  document.title = `${data.run} · burnish`;
  if (first) page.replaceChildren(h("header", {}, data.live?.home ? h("p", {}, h("a", { href: "/" }, "← all runs")) : "", h("div", { class: "top" }, h("h1", {}, data.name), chip), data.description ? h("p", {}, data.description) : "", data.note.text || data.note.tags.length ? h("p", { class: "note" }, data.note.text, data.note.tags.map(tag => h("span", { class: "soft small" }, ` ${tag}`))) : "",
    h("p", { class: "soft small" }, `run ${data.run} · seed ${data.seed} · as of `, h("span", { id: "asof" })), now, trouble, warnings, tiles, nav, note), ...[...parts.values()].map(part => part.element));
  showState(data.state);
  warnings.hidden = !data.warnings.length;
  warnings.replaceChildren(...data.warnings.map(text => h("p", {}, h("b", {}, "Warning: "), text)));
  document.getElementById("asof").textContent = new Date(1000 * data.asof).toISOString().slice(0, 16).replace("T", " ") + " UTC";
  tiles.replaceChildren(...heads.map(([label, value, said]) => h("div", { class: "card tile" }, h("span", { class: "small soft" }, label), h("b", {}, value), h("span", { class: "small soft" }, said))));
  note.hidden = panels.length > 0;
  note.textContent = panels.length ? "" : data.done ? "Curves begin with a second measurement." : data.live ? "No step has finished yet." : "No step has finished yet. Write the report again later: it is made from the run's files.";
  const of = name => panels.filter(panel => panel.section === name), reward = of("reward"), drift = of("drift"), policy = of("policy"), other = of("other");
  section("reward", reward.length, reward, () => [h("div", { class: "grid wide" }, reward.map(chart))]);
  section("drift", drift.length || front, [drift, front, reading], () => [reading.length ? h("div", { class: "card reading", id: "reading" }, reading.map(s => h("p", {}, s))) : null,
    h("div", { class: "grid" }, front ? [chart({ ...panels[0], section: "drift" }), frontier(front)] : null, drift.map(chart))]);
  section("policy", policy.length, policy, () => [h("div", { class: "grid" }, policy.map(chart))]);
  const { timeline, lags, series } = data;
  const hasCalls = timeline.spans.length;
  section("overlap", hasCalls || lags.length, [timeline, lags, Object.values(CAUSES).map(name => series[name])], () => [h("div", { class: "stack" }, hasCalls ? [timelineCard(timeline), waitCard(timeline)] : null,
    h("div", { class: "grid wide" }, lags.length ? lagCard(lags) : null, causesCard(series)))]);
  section("time", time, time, () => [timeCard(time)]);
  readRollouts();
  section("recipe", true, [data.recipe, data.environment], () => [h("div", { class: "grid wide" }, [data.recipe, data.environment].filter(text => text).map(text => h("div", { class: "card" }, h("pre", {}, text))))]);
  section("other", other.length || once.length, [other, once], () => [other.length ? h("details", { "data-key": "other" }, h("summary", {}, many(other.length, "more metric")), h("div", { class: "grid" }, other.map(chart))) : null,
    once.length ? h("details", { "data-key": "once" }, h("summary", {}, `${many(once.length, "metric")} measured once`), h("table", {}, once.map(([name, value]) => h("tr", {}, h("td", {}, name), h("td", { class: "n" }, number(value)))))) : null]);
  nav.replaceChildren(...[...parts].filter(([, part]) => part.key).map(([id]) => h("a", { href: "#" + id }, titles[id])));
}
document.addEventListener("pointermove", event => { if (!event.target.closest?.("svg, .text")) hideTip(); });  /* the element that the tooltip described may be gone */

/* Live: request the state every few seconds, and the data when its version has changed. */
async function ask(what) {
  const answer = await fetch(`${location.pathname}/${what}`);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}
function inPlace(change) {  /* keep the section in view at its place on the screen, even if sections above it grow */
  const top = element => element.getBoundingClientRect().top, seen = [...page.querySelectorAll("section, #pairs, #list")].filter(e => !e.hidden && top(e) < innerHeight / 2).at(-1);
  const before = seen && top(seen);
  change();
  if (seen && scrollY > 0) scrollBy({ top: top(seen) - before, behavior: "instant" });
}
async function look() {
  if (document.hidden) return;
  try {
    const status = await ask("status"), fresh = status.version === data.version ? null : await ask("data");
    inPlace(() => {
      if (fresh) draw(fresh);
      else if (unread) readRollouts();
      showState(status.state);
      const { doing, share } = status.state;
      now.hidden = !doing;
      now.replaceChildren(doing, share === null ? "" : h("div", { class: "track" }, h("div", { class: "bar", style: { width: 100 * share + "%" } })));
    });
  } catch (error) {
    now.hidden = false;
    now.replaceChildren(error instanceof TypeError ? "burnish watch has ended: this is the last state of the run." : `The run can't be read: ${error.message}`);
  }
}
async function follow() { await look(); setTimeout(follow, 1000 * data.live.every); }
draw(JSON.parse(document.getElementById("data").textContent));
if (data.live) { document.documentElement.style.overflowAnchor = "none"; follow(); }
