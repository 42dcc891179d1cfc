// Charts: lines by uPlot, histograms as bars.

import uPlot from "./uplot.js";
import { h, number } from "./dom.js";

const HUES = ["#2f6fde", "#d9480f", "#2b8a3e", "#9c36b5", "#c92a2a", "#0b7285", "#846a00", "#5f3dc4"];

export function colour(position) {
  return HUES[position % HUES.length];
}

function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Exponential moving average with a weight of the past in [0, 1); missing values stay missing. */
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

/** Join series of (x, y) points into the aligned columns that uPlot takes. */
export function aligned(series) {
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
  return tick && Math.abs(tick) < 1e-3 ? tick.toExponential(1) : number(tick);
}

/** Draw lines into an element; `series` are {label, points, colour, dots}. Returns a function that removes the chart. */
export function lineChart(element, series, { title, height = 190, xLabel = "step", marks = [] }) {
  const stroke = ink("--quiet");
  const grid = { stroke: ink("--line"), width: 1 };
  const axis = { stroke, grid, ticks: grid, font: "11px system-ui", labelFont: "11px system-ui", values: (_, ticks) => ticks.map(tickText) };
  const drawMarks = (plot) => {
    const context = plot.ctx;
    context.save();
    context.strokeStyle = ink("--mark");
    context.setLineDash([3, 4]);
    for (const mark of marks) {
      const x = plot.valToPos(mark, "x", true);
      if (x < plot.bbox.left || x > plot.bbox.left + plot.bbox.width) continue;
      context.beginPath();
      context.moveTo(x, plot.bbox.top);
      context.lineTo(x, plot.bbox.top + plot.bbox.height);
      context.stroke();
    }
    context.restore();
  };
  const box = h("div", { class: "plot", role: "img", "aria-label": `${title}: ${series.map((line) => `${line.label} ${number(line.points.at(-1)?.[1])}`).join(", ")}` });
  element.append(box);
  const options = {
    width: Math.max(260, box.clientWidth || element.clientWidth || 400), height, title,
    scales: { x: { time: false } },
    axes: [{ ...axis, label: xLabel, labelSize: 14, size: 30 }, { ...axis, size: 58 }],
    series: [{ label: xLabel, value: (plot, value, at, position) => number(position === null ? plot.data[0].at(-1) : value) }, ...series.map((line) => ({
      label: line.label, stroke: line.colour, width: line.faint ? 1 : 1.5, alpha: line.faint ? 0.3 : 1, spanGaps: true,
      points: { show: line.dots || line.points.length < 3, size: 5 }, value: (plot, value, at, position) => number(position === null ? line.points.at(-1)[1] : value) }))],
    legend: { live: true }, hooks: { drawAxes: [drawMarks] }, cursor: { sync: { key: "curves" }, focus: { prox: 20 } },
  };
  const plot = new uPlot(options, aligned(series.map((line) => line.points)), box);
  const observer = new ResizeObserver(() => {
    const width = Math.floor(element.clientWidth);
    if (width > 0 && Math.abs(width - plot.width) > 2) plot.setSize({ width, height });
  });
  observer.observe(element);
  return () => { observer.disconnect(); plot.destroy(); box.remove(); };
}

/** Return a histogram as bars with a table of its numbers for those who do not see them. */
export function histogram(title, data) {
  if (!data) return h("figure", { class: "histogram" }, h("figcaption", {}, title), h("p", { class: "quiet" }, "no values"));
  const largest = Math.max(...data.counts);
  const bars = data.counts.map((count, position) => h("div", { class: "bar", title: `${number(data.centers[position])}: ${count}` },
    h("div", { style: { height: `${(100 * count) / largest}%` } })));
  return h("figure", { class: "histogram" },
    h("figcaption", {}, title),
    h("div", { class: "bars", role: "img", "aria-label": `${title}: mean ${number(data.mean)}, median ${number(data.median)}` }, bars),
    h("div", { class: "range" }, h("span", {}, number(data.minimum)), h("span", {}, `mean ${number(data.mean)} · median ${number(data.median)}`), h("span", {}, number(data.maximum))));
}
