// Curves: metrics of the chosen runs over steps, rounds or time, with groups of seeds as mean and band, and the settings that differ.

import { ask } from "./api.js";
import { save } from "./chart_files.js";
import { colour, dash, lineChart, meanAndBand, smooth, swatch } from "./charts.js";
import { drawFindings } from "./findings.js";
import { h, labelText, link, recalled, remember, replace, select, visible } from "./dom.js";

const REWARD = "rollout/raw_reward";
const FIRST = {
  slime: [REWARD, "_accuracy", "rollout/response_len/mean", "rollout/truncated_ratio", "train/entropy_loss", "rollout/entropy", "train/ppo_kl", "train/kl_loss", "train/grad_norm",
    "train/train_rollout_logprob_abs_diff", "perf/total_time"],
  roll: ["critic/score/mean", "val/score/mean", "tokens/response_length/mean", "actor/grad_norm", "actor/entropy_loss"],
};
const SUPERVISED = ["train/loss", "eval/"];
const SHOWN = 9;
const DRAWN = 6;
const DEFAULTS = { runs: "", seeds: true, axis: "step", scale: "linear", smoothing: 0, naming: "slime", search: "", more: false };

/** The metrics of one run, read while they are written. */
class RunCurves {
  constructor(run) {
    this.run = run;
    this.reset("slime");
  }

  reset(naming) {
    this.naming = naming;
    this.offsets = { metrics: 0, perf: 0 };
    this.points = new Map(); // name -> [{step, round, value}]
    this.seconds = new Map(); // step -> seconds since the start
    this.evaluations = new Set();
  }

  /** Read new lines after any pending read, because two reads from the same offset would add the lines twice. */
  read(naming) {
    const next = (this.reading ?? Promise.resolve()).catch(() => {}).then(() => this.readNew(naming));
    this.reading = next;
    return next;
  }

  async readNew(naming) {
    if (naming !== this.naming) this.reset(naming);
    let more = true;
    let changed = false;
    while (more) {
      const answer = await ask("metrics", { run: this.run.id, naming: this.naming === "roll" ? "roll" : "", metrics: this.offsets.metrics || "", perf: this.offsets.perf || "" });
      if (answer.offsets.metrics < this.offsets.metrics || answer.offsets.perf < this.offsets.perf) this.reset(this.naming);
      else {
        for (const line of [...answer.metrics, ...answer.perf]) this.add(line);
        changed ||= answer.metrics.length + answer.perf.length > 0;
        this.offsets = answer.offsets;
      }
      more = answer.more;
    }
    return changed;
  }

  add(line) {
    const warmUp = Object.keys(line.metrics).some((name) => name.startsWith("warmup/"));
    for (const [name, value] of Object.entries(line.metrics)) {
      if (typeof value !== "number") continue;
      if (!this.points.has(name)) this.points.set(name, []);
      this.points.get(name).push({ step: line.step, round: line.rollout_id ?? line.step, value });
      if (name.startsWith("eval/") || name.startsWith("val/")) this.evaluations.add(line.step);
    }
    const duration = (line.metrics["perf/total_time"] ?? 0) + (line.metrics["perf/eval_time"] ?? 0);
    if (!warmUp && duration) this.seconds.set(line.step, (this.seconds.get(line.step) ?? 0) + duration);
  }

  series(name, axis) {
    const points = this.points.get(name) ?? [];
    if (axis !== "time") return points.map((point) => [axis === "round" ? point.round : point.step, point.value]);
    const elapsed = new Map();
    let total = 0;
    for (const step of [...this.seconds.keys()].sort((left, right) => left - right)) {
      total += this.seconds.get(step);
      elapsed.set(step, total);
    }
    return points.filter((point) => elapsed.has(point.step)).map((point) => [elapsed.get(point.step), point.value]);
  }
}

/** Return the name of a legend entry, from its runs that are drawn, or else from all its runs. */
function nameOf({ group, runs }) {
  const shown = runs.filter((run) => run.shown);
  const named = shown.length ? shown : runs;
  return named.length > 1 ? `${group} (${named.length} seeds)` : named[0].run.name;
}

/** Return the lines of a metric, one per legend entry. */
function seriesOf(entries, name, state) {
  return entries.flatMap((entry) => {
    const lines = entry.runs.filter((run) => run.shown).map((run) => run.series(name, state.axis)).filter((points) => points.length);
    if (!lines.length) return [];
    const line = { label: nameOf(entry), colour: colour(entry.position), dash: dash(entry.position), dots: name.startsWith("eval/") };
    const smoothed = (points) => {
      const values = smooth(points.map(([, y]) => y), state.smoothing);
      return points.map(([x], at) => [x, values[at]]);
    };
    const average = lines.length > 1 ? meanAndBand(lines) : { points: lines[0] };
    if (!state.smoothing || average.points.length < 3) return [{ ...line, ...average }];
    if (average.low) return [{ ...line, points: smoothed(average.points), low: smoothed(average.low), high: smoothed(average.high) }];
    return [{ ...line, points: average.points, label: `${line.label} (raw)`, faint: true }, { ...line, points: smoothed(average.points) }];
  });
}

/** Return the names of metrics that match the search, or without a search all of them, most important first. */
function metricNames(runs, state) {
  const all = [...new Set(runs.flatMap((run) => [...run.points.keys()]))].filter((name) => !name.endsWith("/step"));
  if (state.search) return all.filter((name) => name.toLowerCase().includes(state.search.toLowerCase())).sort();
  const first = all.includes(REWARD) || state.naming === "roll" ? FIRST[state.naming] : SUPERVISED;
  const rank = (name) => { const at = first.findIndex((part) => name === part || (part.startsWith("_") && name.endsWith(part))); return at < 0 ? 99 : at; };
  return all.sort((left, right) => rank(left) - rank(right) || (left < right ? -1 : 1));
}

/** Return the legend entries {group, position, runs}: groups of seeds and other runs, or every run. */
function entriesOf(runs, groups, bySeeds) {
  const group = new Map(bySeeds ? groups.flatMap((one) => one.runs.map((id) => [id, one])) : []);
  const entries = new Map();
  for (const run of runs) {
    const seeds = group.get(run.run.id);
    const key = seeds ?? run;
    if (!entries.has(key)) entries.set(key, { group: seeds?.name, position: entries.size, runs: [] });
    entries.get(key).runs.push(run);
  }
  return [...entries.values()];
}

export async function curvesPage(context, _, query) {
  const state = recalled(query, { ...DEFAULTS, runs: context.selection.join(",") });
  const runs = context.catalogue.runs.map((run) => new RunCurves(run));
  const { groups, runs: rows } = await ask("runs");
  const changed = new Map(rows.map((row) => [row.id, row.changed]));
  const charts = h("div", { class: "charts" });
  const legend = h("div", { class: "legend" });
  const findings = h("div", { class: "findings" });
  const definitions = await ask("definitions").catch(() => ({}));
  let closers = [];
  let entries = [];

  function choose() {
    const named = new Set(state.runs.split(",").map(context.runOf).filter(Boolean).map((run) => run.id));
    entries = entriesOf(runs, groups, state.seeds);
    const last = (entry) => Math.max(...entry.runs.map((run) => changed.get(run.run.id) ?? 0));
    const latest = new Set(named.size ? [] : [...entries].sort((one, two) => last(two) - last(one)).slice(0, DRAWN));
    for (const entry of entries) for (const run of entry.runs) run.shown = named.has(run.run.id) || latest.has(entry);
  }

  async function ticked(entry, checked) {
    for (const run of entry.runs) run.shown = checked;
    state.runs = runs.filter((run) => run.shown).map((run) => context.keyOf(run.run)).join(",");
    context.selection = state.runs.split(",").filter(Boolean);
    await readAll();
    draw();
    await showFindings();
  }

  /** Draw the legend: the runs that are drawn, then the others, collapsed. */
  function drawLegend() {
    const line = (entry) => {
      const states = [...new Set(entry.runs.map(({ run }) => run.state))].join(", ");
      return h("label", {}, h("input", { type: "checkbox", checked: entry.runs.some((run) => run.shown), onchange: (event) => ticked(entry, event.target.checked) }),
        swatch(colour(entry.position)), visible(nameOf(entry)), h("span", { class: "quiet" }, ` ${states}`));
    };
    const split = entries.map((entry) => [entry, entry.runs.some((run) => run.shown)]);
    const folded = split.filter(([, shown]) => !shown);
    const open = legend.querySelector("details")?.open;
    replace(legend, split.filter(([, shown]) => shown).map(([entry]) => line(entry)),
      folded.length ? h("details", { open }, h("summary", {}, `${folded.length} more, not shown`), h("div", { class: "folded" }, folded.map(([entry]) => line(entry)))) : null,
      runs.length > 1 ? link("#/runs", "select in the table") : null);
  }

  function draw() {
    remember("curves", state, DEFAULTS);
    drawLegend();
    drawSettings();
    for (const closer of closers) closer();
    closers = [];
    const shownRuns = runs.filter((run) => run.shown);
    const all = metricNames(shownRuns, state);
    const names = state.more ? all.slice(0, 200) : all.slice(0, SHOWN);
    replace(charts, names.map((name) => h("section", { class: "chart", "data-metric": name }, h("h3", { title: (definitions[name] ?? []).filter(Boolean).reverse().join(" – ") }, name))),
      all.length > names.length ? h("button", { type: "button", onclick: () => { state.more = true; draw(); } }, `${all.length - names.length} more metrics`) : null,
      all.length ? null : h("p", { class: "quiet" }, shownRuns.some((run) => run.points.size) ? "no metric matches" : shownRuns.length ? "no metrics yet" : "no run is selected"));
    for (const [at, name] of names.entries()) {
      const element = charts.children[at];
      const series = seriesOf(entries, name, state);
      if (!series.length) continue;
      const marks = state.axis === "step" && !name.startsWith("eval/") && shownRuns.length === 1 ? [...shownRuns[0].evaluations] : [];
      const xLabel = state.axis === "time" ? "seconds" : state.axis;
      const chart = { title: name, xLabel, series, log: state.scale === "log" };
      element.firstChild.append(h("span", { class: "save" }, ["png", "svg", "csv"].map((kind) =>
        h("button", { type: "button", class: "plain", "aria-label": `save ${name} as ${kind.toUpperCase()}`, onclick: () => save(kind, chart) }, kind))));
      closers.push(lineChart(element, series, { ...chart, marks }));
    }
  }

  const readAll = () => Promise.all(runs.filter((run) => run.shown).map((run) => run.read(state.naming)));
  const bar = h("div", { class: "bar-tools" },
    h("input", { type: "search", value: state.search, placeholder: "metric, e.g. reward or eval/", "aria-label": "Search metrics", "data-search": true, "data-filter": true,
      oninput: (event) => { state.search = event.target.value.trim(); draw(); } }),
    h("label", {}, "over ", select("over", [["step", "steps"], ["round", "rounds"], ["time", "seconds"]], state.axis, (value) => { state.axis = value; draw(); })),
    h("label", {}, "scale ", select("scale", [["linear", "linear"], ["log", "logarithmic"]], state.scale, (value) => { state.scale = value; draw(); })),
    h("label", {}, "names ", select("names", [["slime", "slime"], ["roll", "ROLL"]], state.naming, async (value) => { state.naming = value; await readAll(); draw(); })),
    h("label", {}, "smoothing ", h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: state.smoothing, "aria-label": "Smoothing", oninput: (event) => { state.smoothing = Number(event.target.value); draw(); } })),
    groups.length ? h("label", {}, h("input", { type: "checkbox", checked: state.seeds, onchange: (event) => { state.seeds = event.target.checked; choose(); readAll().then(draw); } }),
      h("span", { title: "Runs whose settings differ only in seeds and names: their mean, and a band of one standard deviation" }, " mean and band of seeds")) : null);

  const table = await ask("settings");
  const settingsHead = h("thead");
  const settingsBody = h("tbody");
  const settingsTitle = h("summary");
  const pattern = h("input", { type: "search", placeholder: "setting", "aria-label": "Search settings", oninput: () => drawSettings() });
  const settings = h("details", { open: runs.length > 1 && runs.length < 4 }, settingsTitle, pattern, h("div", { class: "wide" }, h("table", {}, settingsHead, settingsBody)));

  /** Draw the settings that differ between the drawn runs. */
  function drawSettings() {
    const columns = runs.flatMap((run, at) => (run.shown ? [at] : []));
    const rows_ = table.rows.filter((row) => columns.length < 2 || new Set(columns.map((at) => JSON.stringify(row.values[at]))).size > 1);
    replace(settingsTitle, columns.length < 2 ? "Settings" : `Settings that differ (${rows_.length})`);
    replace(settingsHead, h("tr", {}, h("th", { scope: "col" }, "setting"), columns.map((at) => h("th", { scope: "col" }, visible(table.runs[at])))));
    replace(settingsBody, rows_.filter((row) => row.name.includes(pattern.value)).map((row) =>
      h("tr", {}, h("th", { scope: "row" }, row.name), columns.map((at) => h("td", {}, labelText(row.values[at], "–"))))));
  }

  const showFindings = () => drawFindings(findings, runs.filter((run) => run.shown).map(({ run }) => run));
  choose();
  await readAll();
  await showFindings();
  let reading = false;
  context.listeners.add(async () => {
    if (reading) return;
    reading = true;
    for (const run of runs) run.run = context.run(run.run.id) ?? run.run;
    const changes = await readAll().catch(() => []);
    reading = false;
    changes.some(Boolean) ? draw() : drawLegend();
    if (changes.some(Boolean)) await showFindings();
  });
  return {
    title: "Curves",
    element: h("div", {}, h("h2", {}, "Curves", runs.length === 1 ? h("small", { class: "quiet" }, ` ${visible(runs[0].run.path)}`) : null), legend, findings, bar, charts, settings),
    shown: draw,
    close: () => { for (const closer of closers) closer(); },
  };
}
