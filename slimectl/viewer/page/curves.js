// Curves: metrics of the runs over steps, rounds or time; evaluations marked; settings that differ beside them.

import { ask } from "./api.js";
import { colour, lineChart, smooth } from "./charts.js";
import { h, replace, visible } from "./dom.js";

const FIRST = {
  slime: ["rollout/raw_reward", "_accuracy", "train/loss", "train/grad_norm", "rollout/response_len/mean", "train/entropy", "train/train_rollout_logprob_abs_diff", "rollout/truncated_ratio", "perf/total_time"],
  roll: ["critic/score/mean", "val/score/mean", "actor/pg_loss", "actor/grad_norm", "tokens/response_length/mean"],
};
const SHOWN = 8;

/** The lines of one run, read as they are written. */
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

  async read() {
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

export async function curvesPage(context) {
  const state = { naming: "slime", axis: "step", smoothing: 0, pattern: "", more: false };
  const runs = context.catalogue.runs.map((run) => new RunCurves(run));
  const hidden = new Set();
  const charts = h("div", { class: "charts" });
  const settings = h("section", { "aria-label": "Settings" });
  const definitions = await ask("definitions").catch(() => ({}));
  let closers = [];

  const legend = h("div", { class: "legend" }, runs.map((run, position) => h("label", {},
    h("input", { type: "checkbox", checked: true, onchange: (event) => { event.target.checked ? hidden.delete(run) : hidden.add(run); draw(); } }),
    h("i", { class: "swatch", style: { background: colour(position) } }), visible(run.run.name), h("span", { class: "quiet" }, ` ${run.run.state}`))));
  const names = h("input", { type: "search", placeholder: "metric, e.g. reward or eval/", "aria-label": "Search metrics", "data-search": true, "data-filter": true,
    oninput: (event) => { state.pattern = event.target.value.trim(); draw(); } });
  const select = (label, name, options, changed) => h("label", {}, `${label} `, h("select", { "aria-label": label, onchange: async (event) => { state[name] = event.target.value; await changed?.(); draw(); } },
    options.map(([value, title]) => h("option", { value }, title))));
  const bar = h("div", { class: "bar-tools" }, names,
    select("over", "axis", [["step", "steps"], ["round", "rounds"], ["time", "seconds"]]),
    select("names", "naming", [["slime", "slime"], ["roll", "ROLL"]], async () => { for (const run of runs) { run.reset(state.naming); await run.read(); } }),
    h("label", {}, "smoothing ", h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0, "aria-label": "Smoothing", oninput: (event) => { state.smoothing = Number(event.target.value); draw(); } })));

  function chosen() {
    const all = [...new Set(runs.flatMap((run) => [...run.points.keys()]))].filter((name) => !name.endsWith("/step"));
    if (state.pattern) return all.filter((name) => name.toLowerCase().includes(state.pattern.toLowerCase())).sort();
    const rank = (name) => { const at = FIRST[state.naming].findIndex((part) => name === part || (part.startsWith("_") && name.endsWith(part))); return at < 0 ? 99 : at; };
    return all.sort((left, right) => rank(left) - rank(right) || (left < right ? -1 : 1));
  }

  function draw() {
    for (const closer of closers) closer();
    closers = [];
    const all = chosen();
    const shown = state.more ? all.slice(0, 200) : all.slice(0, SHOWN);
    replace(charts, shown.map((name) => h("section", { class: "chart", title: (definitions[name] ?? []).filter(Boolean).reverse().join(" – "), "data-metric": name })),
      all.length > shown.length ? h("button", { type: "button", onclick: () => { state.more = true; draw(); } }, `${all.length - shown.length} more metrics`) : null,
      all.length ? null : h("p", { class: "quiet" }, runs.some((run) => run.points.size) ? "no metric has that name" : "no metrics yet"));
    for (const [position, name] of shown.entries()) {
      const element = charts.children[position];
      const series = runs.flatMap((run, number) => {
        const points = hidden.has(run) ? [] : run.series(name, state.axis);
        if (!points.length) return [];
        const line = { label: run.run.name, points, colour: colour(number), dots: name.startsWith("eval/") };
        if (!state.smoothing || points.length < 3) return [line];
        const values = smooth(points.map(([, y]) => y), state.smoothing);
        return [{ ...line, label: `${line.label} (raw)`, faint: true }, { ...line, points: points.map(([x], at) => [x, values[at]]) }];
      });
      if (!series.length) continue;
      const marks = state.axis === "time" || name.startsWith("eval/") ? [] : [...new Set(runs.flatMap((run) => [...run.evaluations]))];
      closers.push(lineChart(element, series, { title: name, xLabel: state.axis, marks: state.axis === "step" ? marks : [] }));
    }
  }

  async function showSettings() {
    const table = await ask("settings");
    const single = table.runs.length < 2;
    const rows = (pattern) => table.rows.filter((row) => row.name.includes(pattern)).map((row) => h("tr", {}, h("th", { scope: "row" }, row.name),
      row.values.map((value) => h("td", {}, value === null ? "–" : visible(typeof value === "object" ? JSON.stringify(value) : value)))));
    const body = h("tbody", {}, rows(""));
    replace(settings, h("details", { open: !single }, h("summary", {}, single ? "Settings" : `Settings that differ (${table.rows.length})`),
      h("input", { type: "search", placeholder: "setting", "aria-label": "Search settings", oninput: (event) => replace(body, rows(event.target.value)) }),
      h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "setting"), table.runs.map((name) => h("th", { scope: "col" }, visible(name))))), body))));
  }

  await Promise.all(runs.map((run) => run.read()));
  await showSettings();
  let reading = false;
  const update = async () => {
    if (reading) return;
    reading = true;
    const changes = await Promise.all(runs.map((run) => { run.run = context.run(run.run.id) ?? run.run; return run.read().catch(() => false); }));
    reading = false;
    if (changes.some(Boolean)) draw();
  };
  context.listeners.add(update);
  return {
    title: "Curves",
    element: h("div", {}, h("h2", {}, "Curves"), runs.length > 1 || runs[0]?.run.state === "running" ? legend : h("p", { class: "quiet" }, runs.map((run) => `${visible(run.run.path)}, ${run.run.state}`)), bar, charts, settings),
    shown: draw,
    close: () => { for (const closer of closers) closer(); },
  };
}

