"use strict";
const page = document.getElementById("page"), tip = document.getElementById("tip");
const SVG = "http://www.w3.org/2000/svg";

/* Create an HTML or SVG element. Text is inserted as text nodes only. */
function h(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "circle", "rect", "text", "g"].includes(tag);
  const element = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(element.style, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children.flat().filter(child => child !== null && child !== undefined));
  return element;
}
/* There are eight colours; further lines reuse them with dashes. */
const colour = i => `var(--c${i % 8})`, dashes = i => i < 8 ? {} : { "stroke-dasharray": "6 3" };
const swatch = i => h("i", { style: { background: i < 8 ? colour(i) : `repeating-linear-gradient(90deg, ${colour(i)} 0 4px, transparent 4px 6px)` } });
const count = n => n.toLocaleString("en-US"), many = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;
const fixed = (v, digits) => (+v.toFixed(digits) || 0).toFixed(digits);  /* no -0.00 */
function number(v) {
  if (v === null || v === undefined) return "–";
  const size = Math.abs(v);
  if (v === 0) return "0";
  if (size >= 1e5 || size < 1e-3) return v.toExponential(1).replace("e+", "e");
  return String(+v.toPrecision(size >= 100 ? 4 : 3));
}
function showTip(event, text) {
  tip.textContent = text;
  tip.style.display = "block";
  const box = tip.getBoundingClientRect(), pad = 14;
  const x = event.clientX + pad + box.width > innerWidth ? event.clientX - box.width - pad : event.clientX + pad;
  const y = event.clientY + pad + box.height > innerHeight ? event.clientY - box.height - pad : event.clientY + pad;
  tip.style.left = Math.max(4, x) + "px";
  tip.style.top = Math.max(4, y) + "px";
}
const hideTip = () => { tip.style.display = "none"; };

/* Charts are redrawn when their width changes; the step under the pointer is marked in all charts. */
const charts = new Set();
function mark(step) { for (const chart of charts) if (chart.svg.isConnected) chart.mark(step); else charts.delete(chart); }
function ticks(low, high, most) {
  const raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw));
  const unit = [1, 2, 2.5, 5, 10].find(m => m * power >= raw * 0.999) * power, found = [];
  for (let i = Math.ceil(low / unit - 1e-9); i * unit <= high + unit * 1e-6; i++) found.push(+(i * unit).toPrecision(12));
  return found;
}
function range(values, zero) {
  let low = Math.min(...values), high = Math.max(...values);
  if (zero) low = Math.min(low, 0);
  if (low === high) { const room = Math.abs(low) / 2 || 0.5; return [low >= 0 ? Math.max(0, low - room) : low - room, high + room]; }
  return [low >= 0 && low < (high - low) * 0.5 ? 0 : low - (high - low) * 0.06, high + (high - low) * 0.06];
}
function mean(points, width) {
  return points.map((p, i) => { const part = points.slice(Math.max(0, i - width + 1), i + 1); return [p[0], part.reduce((a, q) => a + q[1], 0) / part.length]; });
}
function drawing(height, draw) {
  const svg = h("svg", { height, role: "img" });
  let last = 0;
  new ResizeObserver(() => { const width = svg.clientWidth; if (width && width !== last) { last = width; svg.setAttribute("viewBox", `0 0 ${width} ${height}`); svg.replaceChildren(); draw(svg, width); } }).observe(svg);
  return svg;
}
/* Labels of ticks that lie closer together than three digits tell get as many digits as they need. */
function tickLabels(marks) {
  const short = marks.map(number);
  if (new Set(short).size === marks.length) return short;
  const gap = (marks.at(-1) - marks[0]) / (marks.length - 1);
  let digits = 0;
  while (digits < 15 && marks.some(v => Math.abs(v.toFixed(digits) - v) > gap / 100)) digits++;
  return marks.map(v => v.toFixed(digits));
}
function axes(svg, width, height, [x0, x1], [y0, y1], label) {
  const marks = ticks(y0, y1, height / 45), texts = tickLabels(marks), left = Math.max(...texts.map(text => text.length)) * 6.2 + 10;
  const X = v => left + (v - x0) / (x1 - x0 || 1) * (width - left - 10), Y = v => height - 32 - (v - y0) / (y1 - y0) * (height - 42);
  marks.forEach((v, i) => svg.append(h("line", { x1: left, x2: width - 10, y1: Y(v), y2: Y(v), stroke: "var(--line)" }), h("text", { x: left - 6, y: Y(v) + 4, "text-anchor": "end" }, texts[i])));
  const along = x1 > x0 ? ticks(x0, x1, Math.max(3, width / 75)) : [x0];
  for (const v of /step$|^lag/.test(label) ? along.filter(v => Number.isInteger(v) && v >= 0) : along) svg.append(h("text", { x: X(v), y: height - 17, "text-anchor": "middle" }, number(v)));
  svg.append(h("text", { x: (left + width - 10) / 2, y: height - 3, "text-anchor": "middle" }, label));
  return [X, Y];
}
const pathOf = (points, X, Y) => points.map((p, i) => `${i ? "L" : "M"}${X(p[0]).toFixed(1)} ${Y(p[1]).toFixed(1)}`).join("");
const short = name => name.replace(/^rollout\/(part_|grades_)?|^train\/|^kl\/(initial_|previous_|reference_)?|^mismatch\/|^drift\//, "").replace(/^(kl\/held_out_|validation\/)(part_|grades_)?/, "held-out ").replaceAll("_", " ").replaceAll("/", " ");

const around = (line, sign) => line.points.map((p, i) => [p[0], p[1] + sign * line.spread[i]]);

/* Each line has a name, or a label that is shown beside the chart; its spread is drawn as a band, or each of its runs as a thin line. */
function chart({ title, lines, section, along = "step" }) {
  if (lines.length > 8) lines = lines.map(line => ({ ...line, spread: null, each: null }));  /* bands would hide each other */
  const height = section === "reward" ? 250 : 190, xs = lines.flatMap(l => l.points.map(p => p[0])), ys = lines.flatMap(l => l.points).map(p => p[1]);
  const room = (Math.max(...ys) - Math.min(...ys) || Math.abs(ys[0]) || 1) / 2, near = v => Math.min(Math.max(...ys) + room, Math.max(Math.min(...ys) - room, v));
  const bounds = range(ys.concat(lines.flatMap(l => l.spread ? [...around(l, 1), ...around(l, -1)] : []).map(p => near(p[1])), lines.flatMap(l => l.each ?? []).flat().map(p => p[1])));
  const span = [Math.min(...xs), Math.max(...xs)], steps = [...new Set(xs)].sort((a, b) => a - b), smooth = lines[0].name.startsWith("rollout/reward") || section === "reward";
  const readout = h("div", { class: "legend" });
  const legend = step => readout.replaceChildren(...lines.map((line, i) => {
    const at = step === null ? line.points.at(-1) : line.points.find(p => p[0] === step);
    const [label, value] = step === null && line.head || [line.label === undefined ? short(line.name) : "", at ? number(at[1]) : "–"];
    return h("span", {}, swatch(i), `${label} `, h("b", {}, value));
  }));
  let cursor, X;
  const svg = drawing(height, (svg, width) => {
    let Y;
    [X, Y] = axes(svg, width, height, span, bounds, along);
    lines.forEach((line, i) => {
      const sparse = line.points.length <= 24, soft = smooth && !line.spread && !line.each && line.points.length > 24;
      const stroke = { fill: "none", stroke: colour(i), "stroke-width": 1.8, "stroke-linejoin": "round", ...dashes(i) };
      for (const run of line.each ?? []) svg.append(h("path", { ...stroke, class: "run", d: pathOf(run, X, Y), "stroke-width": 1, opacity: 0.45 }));
      if (line.spread) svg.append(h("path", { d: pathOf(around(line, 1).concat(around(line, -1).reverse()).map(p => [p[0], Math.min(bounds[1], Math.max(bounds[0], p[1]))]), X, Y), fill: colour(i), opacity: lines.length > 3 ? 0.08 : 0.15 }));
      svg.append(h("path", { ...stroke, d: pathOf(line.points, X, Y), ...(soft ? { "stroke-width": 1, opacity: 0.45 } : {}) }));
      if (soft) svg.append(h("path", { ...stroke, d: pathOf(mean(line.points, 5), X, Y) }));
      if (sparse) for (const p of line.points) svg.append(h("circle", { cx: X(p[0]), cy: Y(p[1]), r: 3, fill: colour(i) }));
    });
    cursor = h("line", { y1: 8, y2: height - 32, stroke: "var(--soft)", "stroke-dasharray": "3 3", visibility: "hidden" });
    svg.append(cursor);
  });
  svg.setAttribute("aria-label", `${title}, by ${along}`);
  svg.addEventListener("pointermove", event => {
    const x = event.clientX - svg.getBoundingClientRect().left;
    const step = steps.reduce((a, b) => Math.abs(X(b) - x) < Math.abs(X(a) - x) ? b : a);
    mark(step);
    showTip(event, [`${along} ${along === "step" ? step : number(step)}`, ...lines.map(l => [l, l.points.find(p => p[0] === step)]).filter(([, p]) => p).map(([l, p]) => `${l.label ?? short(l.name)}  ${number(p[1])}`)].join("\n"));
  });
  svg.addEventListener("pointerleave", () => { mark(null); hideTip(); });
  charts.add({ svg, mark(step) {
    legend(step);
    if (!cursor) return;
    const inside = step !== null && step >= span[0] && step <= span[1];
    cursor.setAttribute("visibility", inside ? "visible" : "hidden");
    if (inside) { cursor.setAttribute("x1", X(step)); cursor.setAttribute("x2", X(step)); }
  } });
  legend(null);
  return h("div", { class: "card" }, h("h3", {}, title), readout, svg);
}
