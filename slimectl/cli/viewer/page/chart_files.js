// A chart as a file: SVG, PNG (drawn from the SVG) and CSV.

import { number } from "./dom.js";

const [WIDTH, HEIGHT] = [760, 420];
const BOX = { left: 70, right: 16, top: 34, bottom: 46 };

function escaped(text) {
  return String(text).toWellFormed().replace(/[\u0000-\u001f]/g, " ").replace(/[&<>"]/g, (letter) => `&#${letter.charCodeAt(0)};`);
}

/** Return about five round numbers from low to high, or powers of ten on a logarithmic axis. */
export function ticks(low, high, log = false) {
  if (log) {
    const [first, last] = [Math.ceil(Math.log10(low)), Math.floor(Math.log10(high))];
    if (last > first) return Array.from({ length: last - first + 1 }, (_, at) => 10 ** (first + at));
  }
  const rough = (high - low) / 5 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, at) => Number(((first + at) * step).toPrecision(12)));
}

/** Return a chart as SVG text. `series` is the same as for lineChart. */
export function svgOf({ title, xLabel, series, log }) {
  const lines = series.filter((line) => line.points.length);
  const xs = lines.flatMap((line) => line.points.map(([x]) => x));
  const ys = lines.flatMap((line) => [line.points, line.low ?? [], line.high ?? []].flat().map(([, y]) => y)).filter((y) => Number.isFinite(y) && (!log || y > 0));
  const extent = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
  const [left, right] = extent(xs);
  let [low, high] = extent(ys);
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
  const rows = Math.ceil(lines.length / 3);
  const bottom = HEIGHT - BOX.bottom;
  const scale = log ? Math.log10 : (value) => value;
  const place = (value, from, to, start, end) => (start + ((value - from) / (to - from || 1)) * (end - start)).toFixed(1);
  const x = (value) => place(value, left, right, BOX.left, WIDTH - BOX.right);
  const y = (value) => place(scale(value), scale(low), scale(high), bottom, BOX.top);
  const path = (points) => points.filter(([, value]) => Number.isFinite(value) && (!log || value > 0)).map(([at, value]) => `${x(at)},${y(value)}`).join(" ");
  const text = (at, from, content, anchor = "middle", more = "") => `<text x="${at}" y="${from}" text-anchor="${anchor}"${more}>${escaped(content)}</text>`;
  const grid = [
    ...ticks(low, high, log).map((tick) => `<path d="M${BOX.left} ${y(tick)}H${WIDTH - BOX.right}" stroke="#ddd"/>${text(BOX.left - 6, Number(y(tick)) + 4, number(tick), "end")}`),
    ...ticks(left, right).map((tick) => `<path d="M${x(tick)} ${BOX.top}V${bottom}" stroke="#eee"/>${text(x(tick), bottom + 16, number(tick))}`)];
  const drawn = lines.map((line) => [
    line.low ? `<polygon points="${path(line.high)} ${path([...line.low].reverse())}" fill="${line.colour}" opacity="0.18"/>` : "",
    `<polyline points="${path(line.points)}" fill="none" stroke="${line.colour}" stroke-width="1.6" opacity="${line.faint ? 0.35 : 1}"${line.dash ? ` stroke-dasharray="${line.dash.join(" ")}"` : ""}/>`,
    line.dots ? line.points.filter(([, value]) => !log || value > 0).map(([at, value]) => `<circle cx="${x(at)}" cy="${y(value)}" r="2.5" fill="${line.colour}"/>`).join("") : ""].join(""));
  const legend = lines.map((line, at) => {
    const [from, down] = [BOX.left + (at % 3) * 225, HEIGHT + 4 + Math.floor(at / 3) * 18];
    return `<rect x="${from}" y="${down - 9}" width="10" height="10" fill="${line.colour}"/>${text(from + 15, down, line.label, "start")}`;
  });
  const whole = HEIGHT + 10 + rows * 18;
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${WIDTH}" height="${whole}" viewBox="0 0 ${WIDTH} ${whole}" font-family="sans-serif" font-size="12">`
    + `<rect width="100%" height="100%" fill="#fff"/>${text(WIDTH / 2, 20, title, "middle", ' font-size="15" font-weight="bold"')}${grid.join("")}`
    + `<path d="M${BOX.left} ${BOX.top}V${bottom}H${WIDTH - BOX.right}" fill="none" stroke="#666"/>${text((BOX.left + WIDTH - BOX.right) / 2, bottom + 34, xLabel)}${drawn.join("")}${legend.join("")}</svg>`;
}

/** Return a chart as CSV, with a row per x and a column per line. A group of seeds has columns for its mean and bounds. */
export function csvOf({ xLabel, series }) {
  const columns = series.flatMap((line) => (line.low ? [[`${line.label} mean`, line.points], [`${line.label} low`, line.low], [`${line.label} high`, line.high]] : [[line.label, line.points]]));
  const tables = columns.map(([, points]) => new Map(points));
  const xs = [...new Set(tables.flatMap((table) => [...table.keys()]))].sort((left, right) => left - right);
  const quoted = (value) => (/[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value);
  return [[xLabel, ...columns.map(([name]) => name)], ...xs.map((x) => [x, ...tables.map((table) => table.get(x) ?? "")])]
    .map((row) => `${row.map(quoted).join(",")}\n`).join("");
}

async function pngOf(svg) {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.width * 2, image.height * 2];
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => { canvas.toBlob(resolve, "image/png"); });
}

/** Save a chart as a png, svg or csv file. */
export async function save(kind, chart) {
  const blob = kind === "csv" ? new Blob([csvOf(chart)], { type: "text/csv" })
    : kind === "svg" ? new Blob([svgOf(chart)], { type: "image/svg+xml" }) : await pngOf(svgOf(chart));
  const anchor = document.createElement("a");
  anchor.href = URL.createObjectURL(blob);
  anchor.download = `${chart.title.replace(/[^\w.-]+/g, "-")}.${kind}`;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(anchor.href), 10_000);
}
