// Runs: a table of their state and latest values, which can be sorted and filtered. Its checkboxes select runs for the other pages.

import { ask } from "./api.js";
import { h, labelText, link, number, recalled, remember, replace, visible } from "./dom.js";

const DEFAULTS = { runs: "", sort: "-changed", search: "", seeds: false, settings: "" };
const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
const TERM = /^([\w./:]+?)(<=|>=|!=|=|<|>)(.+)$/;
const TESTS = { "<": (one, two) => one < two, ">": (one, two) => one > two, "<=": (one, two) => one <= two, ">=": (one, two) => one >= two,
  "=": (one, two) => one === two, "!=": (one, two) => one !== two };

function age(changed) {
  const seconds = Math.max(0, Date.now() / 1000 - changed);
  const [size, unit] = UNITS.find(([seconds_]) => seconds >= seconds_) ?? UNITS.at(-1);
  return `${Math.round(seconds / size)} ${unit} ago`;
}

function shortPath(path) {
  return path ? visible(path).split("/").filter(Boolean).slice(-3).join("/") : "–";
}

function accuracyName(name) {
  return name.replace(/^eval\//, "").replace(/_accuracy$/, "");
}

/** Return the columns {id, title, hint, value, text} for which some run has a value. */
function columnsOf(rows, settings, chosen) {
  const seedNames = [...new Set(rows.flatMap((row) => Object.keys(row.seeds)))].sort().reverse(); // run.seed first
  const differing = seedNames.filter((name) => new Set(rows.map((row) => row.seeds[name])).size > 1);
  const seeds = differing.length ? differing : ["run.seed"];
  const hasReward = rows.some((row) => row.reward !== null);
  const evaluations = [...new Set(rows.flatMap((row) => Object.keys(row.best)))].sort().slice(0, 4);
  const columns = [
    { id: "name", title: "run", value: (row) => row.name },
    { id: "state", title: "state", value: (row) => row.state },
    { id: "rounds", title: "rounds", hint: "Rounds done, and planned", value: (row) => row.rounds, text: (row) => (row.planned === null ? number(row.rounds) : `${row.rounds} / ${row.planned}`) },
    hasReward ? { id: "reward", title: "final reward", hint: "Mean reward of the last round", value: (row) => row.reward, figure: true } : { id: "loss", title: "final loss", hint: "Loss of the last step", value: (row) => row.loss, figure: true },
    ...evaluations.map((name) => ({ id: `best:${accuracyName(name)}`, title: `best ${accuracyName(name)}`, hint: `Highest ${name}, and the round after which it was measured`, figure: true,
      value: (row) => row.best[name]?.[0] ?? null, more: (row) => (row.best[name] ? ` (round ${row.best[name][1]})` : "") })),
    { id: "algorithm", title: "algorithm", value: (row) => row.algorithm },
    { id: "lr", title: "lr", hint: "train.lr", value: (row) => row.lr, text: (row) => labelText(row.lr, "–") },
    { id: "seed", title: "seed", hint: seeds.join(", "), value: (row) => [...new Set(seeds.map((name) => row.seeds[name]))].join("/") },
    { id: "model", title: "model", value: (row) => row.model, text: (row) => h("span", { title: row.model }, shortPath(row.model)) },
    { id: "changed", title: "last change", value: (row) => row.changed, text: (row) => age(row.changed) },
    ...chosen.map((name) => ({ id: name, title: name, value: (row) => settings.get(name)?.get(row.id) ?? null, text: (row) => labelText(settings.get(name)?.get(row.id), "–") })),
  ];
  return columns.filter(({ id, value }) => chosen.includes(id) || rows.some((row) => value(row) !== null && value(row) !== undefined));
}

/** Return whether a row matches every term of a search: a text in one of its cells, or a comparison such as lr<1e-4. */
function matches(row, columns, search) {
  return search.trim().split(/\s+/).every((term) => {
    const [, name, operator, text] = TERM.exec(term) ?? [];
    const column = columns.find(({ id, title }) => name && (id === name || title === name));
    if (!column) return columns.some(({ value }) => String(value(row) ?? "").toLowerCase().includes(term.toLowerCase()));
    const value = column.value(row);
    if (value === null || value === undefined) return false;
    return typeof value === "number" ? TESTS[operator](value, Number(text)) : TESTS[operator](String(value), text);
  });
}

/** Return one line per group of seeds, and one per other run. A line has a list of rows. */
function grouped(rows, groups) {
  const members = new Map(groups.flatMap((group) => group.runs.map((id) => [id, group])));
  const lines = new Map();
  for (const row of rows) {
    const group = members.get(row.id);
    const key = group?.name ?? row.id;
    if (!lines.has(key)) lines.set(key, { name: group?.name, rows: [] });
    lines.get(key).rows.push(row);
  }
  return [...lines.values()];
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

/** Return the value of a column by which a line of one or several runs is sorted. */
function lineValue(column, line) {
  const values = line.rows.map(column.value).filter((value) => value !== null && value !== undefined);
  if (!values.length) return null;
  return typeof values[0] === "number" ? (column.id === "changed" ? Math.max(...values) : mean(values)) : values.join(", ");
}

function cell(column, line) {
  const [first] = line.rows;
  const { text = (row) => labelText(number(column.value(row)), "–"), more = () => "" } = column;
  if (line.rows.length === 1) return [text(first), more(first)];
  if (column.id === "name") return `${visible(line.name)} (${line.rows.length} seeds)`;
  if (column.id === "changed") return text(line.rows.reduce((last, row) => (row.changed > last.changed ? row : last)));
  const values = line.rows.map(column.value).filter((value) => typeof value === "number");
  if (column.figure && values.length) {
    const deviation = Math.sqrt(values.reduce((sum, value) => sum + (value - mean(values)) ** 2, 0) / Math.max(1, values.length - 1));
    return `${number(mean(values), 3)} ± ${number(deviation, 2)}`;
  }
  const texts = line.rows.map((row) => h("span", {}, text(row)).textContent);
  return texts.every((one) => one === texts[0]) ? text(first) : texts.join(", ");
}

export async function runsPage(context, _, query) {
  const state = recalled(query, { ...DEFAULTS, runs: context.selection.join(",") });
  const ticked = new Set(state.runs.split(",").filter(Boolean).map(context.runOf).filter(Boolean).map((run) => run.id));
  let [answer, table] = await Promise.all([ask("runs"), ask("settings")]);
  const settings = () => new Map(table.rows.map((row) => [row.name, new Map(row.values.map((value, at) => [context.catalogue.runs[at]?.id, value]))]));
  const head = h("thead");
  const body = h("tbody");
  const actions = h("span", { class: "bar-tools", role: "status" });

  function store() {
    context.selection = context.catalogue.runs.filter((run) => ticked.has(run.id)).map(context.keyOf);
    state.runs = context.selection.join(",");
    remember("runs", state, DEFAULTS);
    const files = [...ticked].map((id) => context.run(id)?.files.at(-1)).filter(Boolean);
    replace(actions, ticked.size ? [
      link(`#/curves?runs=${state.runs.split(",").map(encodeURIComponent).join(",")}`, `Curves of ${ticked.size === 1 ? "this run" : `these ${ticked.size} runs`}`),
      ticked.size === 2 && files.length === 2 ? link(`#/compare?before=${files[0].id}&after=${files[1].id}`, "Compare their last samples") : null,
      h("button", { type: "button", class: "small", onclick: () => { ticked.clear(); draw(); } }, "clear")] : h("span", { class: "quiet" }, "Select runs to compare their curves and samples."));
  }

  function sorted(lines, columns) {
    const column = columns.find(({ id }) => id === state.sort.replace(/^-/, "")) ?? columns[0];
    const sign = state.sort.startsWith("-") ? -1 : 1;
    const key = (line) => lineValue(column, line);
    return lines.sort((one, two) => {
      const [left, right] = [key(one), key(two)];
      if (left === null || right === null) return (left === null) - (right === null);
      return sign * (left < right ? -1 : left > right ? 1 : 0);
    });
  }

  function row(line, columns) {
    const ids = line.rows.map(({ id }) => id);
    const box = h("input", { type: "checkbox", checked: ids.every((id) => ticked.has(id)), "aria-label": `select ${line.name ?? line.rows[0].name}`,
      onchange: (event) => { for (const id of ids) event.target.checked ? ticked.add(id) : ticked.delete(id); store(); } });
    const address = `#/curves?runs=${ids.map((id) => encodeURIComponent(context.keyOf(context.run(id)))).join(",")}`;
    return h("tr", { "data-item": true }, h("td", {}, box), columns.map((column) => h("td", { class: column.id === "name" ? "run" : null },
      column.id === "name" ? link(address, cell(column, line)) : column.id === "state" ? line.rows.map(({ state: one }) => h("span", { class: `state ${one}` }, one)) : cell(column, line))));
  }

  function draw() {
    const chosen = state.settings.split(",").filter(Boolean);
    const columns = columnsOf(answer.runs, settings(), chosen);
    const rows = answer.runs.filter((one) => context.run(one.id) && matches(one, columns, state.search));
    const lines = sorted(state.seeds ? grouped(rows, answer.groups) : rows.map((one) => ({ rows: [one] })), columns);
    const name = state.sort.replace(/^-/, "");
    const by = (id) => { state.sort = id === state.sort ? `-${id}` : id; draw(); };
    replace(head, h("tr", {}, h("th", { scope: "col" }, h("span", { class: "hidden" }, "chosen")), columns.map(({ id, title, hint }) =>
      h("th", { scope: "col", title: hint, "aria-sort": id === name ? (state.sort.startsWith("-") ? "descending" : "ascending") : null },
        h("button", { type: "button", class: "plain", onclick: () => by(id) }, visible(title), id === name ? (state.sort.startsWith("-") ? " ↓" : " ↑") : "")))));
    replace(body, lines.map((line) => row(line, columns)), lines.length ? null : h("tr", {}, h("td", { colspan: columns.length + 1, class: "quiet" }, "no run matches")));
    store();
  }

  const search = h("input", { type: "search", value: state.search, placeholder: "text, or reward>0.5 lr<1e-4", "aria-label": "Search runs", "data-search": true, "data-filter": true,
    oninput: (event) => { state.search = event.target.value; draw(); } });
  const seeds = answer.groups.length ? h("label", {}, h("input", { type: "checkbox", checked: state.seeds, onchange: (event) => { state.seeds = event.target.checked; draw(); } }),
    h("span", { title: "Runs whose settings differ only in seeds and names: mean ± standard deviation" }, " one row per group of seeds")) : null;
  const more = table.runs.length > 1 ? h("select", { "aria-label": "Show a setting", onchange: (event) => {
    const names = new Set(state.settings.split(",").filter(Boolean));
    names.has(event.target.value) ? names.delete(event.target.value) : names.add(event.target.value);
    event.target.value = "";
    state.settings = [...names].join(",");
    draw();
  } }, h("option", { value: "" }, "show a setting…"), table.rows.map(({ name }) => h("option", { value: name }, name))) : null;
  context.listeners.add(async () => { [answer, table] = await Promise.all([ask("runs"), ask("settings")]); draw(); });
  return {
    title: "Runs",
    element: h("div", {}, h("h2", {}, "Runs"), h("div", { class: "bar-tools" }, search, seeds, more, actions), h("div", { class: "wide" }, h("table", { class: "runs" }, head, body))),
    shown: draw,
  };
}
