// Charts: lines by uPlot, histograms as bars.

import uPlot from "./uplot.js";
import { h, number, replace, visible } from "./dom.js";

const HUES = ["#2f6fde", "#d9480f", "#2b8a3e", "#9c36b5", "#c92a2a", "#0c8599", "#b08900", "#e64980", "#a0694b", "#6b7785", "#74b816", "#4dabf7",
  "#f59f00", "#845ef7", "#20c997", "#ff8787"];

/** Return the colour of a line. The first sixteen differ, and further lines differ by their dash. */
export function colour(position) {
  return HUES[position % HUES.length];
}

export function dash(position) {
  return [undefined, [8, 4], [2, 3]][Math.floor(position / HUES.length) % 3];
}

function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Return the exponential moving average. `weight` in [0, 1) is the weight of the past. Missing values stay missing. */
export function smooth(values, weight) {
  let average = null;
  let power = 1;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    average = (average ?? 0) * weight + value * (1 - weight);
    power *= weight;
    return average / (1 - power);
  });
}

/** Return a function that interpolates points linearly at ascending x, and returns null outside of them. */
function reader(points) {
  let after = 0;
  return (x) => {
    while (after < points.length && points[after][0] < x) after += 1;
    if (after === points.length) return null;
    const [right, high] = points[after];
    if (right === x) return high;
    if (after === 0) return null;
    const [left, low] = points[after - 1];
    return low + ((high - low) * (x - left)) / (right - left);
  };
}

/** Return {points, low, high} of a group of lines: their mean, and the mean minus and plus one standard deviation (n - 1), at each x of the longest. */
export function meanAndBand(lines) {
  const longest = lines.reduce((best, line) => (line.length > best.length ? line : best), []);
  const answer = { points: [], low: [], high: [] };
  const readers = lines.map(reader);
  for (const [x] of longest) {
    const values = readers.map((read) => read(x)).filter((value) => value !== null);
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    const deviation = values.length < 2 ? 0 : Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (values.length - 1));
    answer.points.push([x, mean]);
    answer.low.push([x, mean - deviation]);
    answer.high.push([x, mean + deviation]);
  }
  return answer;
}

/** Join series of (x, y) points into the aligned columns that uPlot expects. */
function aligned(series) {
  const xs = [...new Set(series.flatMap((points) => points.map(([x]) => x)))].sort((left, right) => left - right);
  const place = new Map(xs.map((x, position) => [x, position]));
  const columns = series.map((points) => {
    const column = new Array(xs.length).fill(null);
    for (const [x, y] of points) column[place.get(x)] = y;
    return column;
  });
  return [xs, ...columns];
}

function tickText(tick) {
  return tick === null ? "" : tick && Math.abs(tick) < 1e-3 ? tick.toExponential(1) : number(tick);
}

/** Mark the steps of evaluations with dashed lines. */
function drawMarks(plot, marks) {
  const context = plot.ctx;
  const { left, top, width, height } = plot.bbox;
  context.save();
  context.strokeStyle = ink("--mark");
  context.setLineDash([3, 4]);
  for (const mark of marks) {
    const x = plot.valToPos(mark, "x", true);
    if (x < left || x > left + width) continue;
    context.beginPath();
    context.moveTo(x, top);
    context.lineTo(x, top + height);
    context.stroke();
  }
  context.restore();
}

/** Show the values under the cursor in a box, largest first. */
function valuesBox(series, xLabel) {
  const box = h("div", { class: "tip", hidden: true });
  const show = (plot) => {
    const { idx, left } = plot.cursor;
    box.hidden = idx === null || idx === undefined || left < 0 || !plot.over.matches(":hover");
    if (box.hidden) return;
    const x = plot.data[0][idx];
    const values = series.map((line) => [line, line.points.findLast(([at]) => at <= x)?.[1]]).filter(([line, value]) => value !== undefined && !line.faint);
    box.classList.toggle("left", left > plot.over.clientWidth / 2);
    replace(box, h("div", { class: "quiet" }, `${xLabel} ${number(x)}`), values.sort(([, one], [, two]) => two - one).slice(0, 12).map(([line, value]) =>
      h("div", {}, swatch(line.colour), `${visible(line.label)} `, h("b", {}, number(value)))));
  };
  return { box, show };
}

/** Return the range of a linear axis. For a constant value, extend it by half the value in both directions. */
function linearRange(_, low, high) {
  if (low === null || low !== high) return low === null ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true);
  const half = Math.abs(low) / 2 || 0.5;
  return [low - half, high + half];
}

export function swatch(stroke) {
  return h("i", { class: "swatch", style: { background: stroke } });
}

/** Draw lines into an element. `series` has {label, points, colour, dots, dash, faint, low, high}. Returns a function that removes the chart. */
export function lineChart(element, series, { title, height = 190, xLabel = "step", marks = [], log = false }) {
  const stroke = ink("--quiet");
  const grid = { stroke: ink("--line"), width: 1 };
  const axis = { stroke, grid, ticks: grid, font: "11px system-ui", labelFont: "11px system-ui", values: (_, ticks) => ticks.map(tickText) };
  const box = h("div", { class: "plot", role: "img", "aria-label": `${title}: ${series.map((line) => `${line.label} ${number(line.points.at(-1)?.[1])}`).join(", ")}` });
  const { box: tip, show } = valuesBox(series, xLabel);
  element.append(box);
  const columns = series.map((line) => line.points);
  const lines = series.map((line) => ({ stroke: line.colour, width: line.faint ? 1 : 1.5, alpha: line.faint ? 0.3 : 1, spanGaps: true, dash: line.dash,
    points: { show: line.dots || line.points.length < 3, size: 5 } }));
  const bands = [];
  for (const line of series.filter(({ low }) => low)) {
    bands.push({ series: [columns.length + 1, columns.length + 2], fill: `${line.colour}2e` });
    columns.push(line.high, line.low);
    lines.push(...[0, 1].map(() => ({ stroke: line.colour, width: 0, spanGaps: true, points: { show: false } })));
  }
  const positive = (points) => (log ? points.filter(([, y]) => y > 0) : points);
  const plot = new uPlot({
    width: Math.max(260, box.clientWidth || element.clientWidth || 400), height,
    scales: { x: { time: false }, y: log ? { distr: 3 } : { range: linearRange } },
    axes: [{ ...axis, label: xLabel, labelSize: 14, size: 30 }, { ...axis, size: 58 }],
    series: [{}, ...lines], bands,
    legend: { show: false }, hooks: { drawAxes: [(drawn) => drawMarks(drawn, marks)], setCursor: [show] }, cursor: { sync: { key: "curves" }, focus: { prox: 20 } },
  }, aligned(columns.map(positive)), box);
  plot.over.addEventListener("mouseleave", () => { tip.hidden = true; });
  plot.root.append(tip);
  const observer = new ResizeObserver(() => {
    const width = Math.floor(element.clientWidth) - 8;
    if (width > 0 && Math.abs(width - plot.width) > 2) plot.setSize({ width, height });
  });
  observer.observe(element);
  return () => { observer.disconnect(); plot.destroy(); box.remove(); };
}

const LABELLED_BARS = 9;

/** Return a histogram as bars, with the count over each bar if there are few, else only over the largest. */
export function histogram(title, data) {
  if (!data) return h("figure", { class: "histogram" }, h("figcaption", {}, title), h("p", { class: "quiet" }, "no values"));
  const largest = Math.max(...data.counts);
  const few = data.counts.length <= LABELLED_BARS;
  const bars = data.counts.map((count, position) => h("div", { class: "bar", title: `${number(data.centers[position])}: ${count} ${count === 1 ? "sample" : "samples"}` },
    few || (count === largest && data.counts.indexOf(largest) === position) ? h("small", {}, count) : null, h("i", { style: { height: `${(75 * count) / largest}%` } })));
  const axis = few ? data.centers.map((center) => h("span", {}, number(center, 2))) : [h("span", {}, number(data.minimum, 3)), h("span", {}, number(data.maximum, 3))];
  return h("figure", { class: "histogram" },
    h("figcaption", {}, title, h("span", { class: "quiet" }, ` mean ${number(data.mean, 3)}, median ${number(data.median, 3)}`)),
    h("div", { class: "bars", role: "img", "aria-label": `${title}: ${data.counts.map((count, at) => `${number(data.centers[at], 3)}: ${count}`).join(", ")}` }, bars),
    h("div", { class: few ? "range few" : "range" }, axis));
}
