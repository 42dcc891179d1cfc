// Round: histograms of a samples file, and its groups, which can be searched, filtered and sorted.

import { ask, Failure, offline } from "./api.js";
import { histogram } from "./charts.js";
import { error, fileOptions, h, labelText, link, number, previewText, recalled, remember, replace, rewardClass, select, visible } from "./dom.js";

const SORTS = [["group", "order"], ["reward", "mean reward"], ["best", "best reward"], ["worst", "worst reward"], ["spread", "spread of rewards"],
  ["length", "mean length"], ["longest", "longest response"], ["size", "number of samples"], ["mismatch", "trainer − engine"], ["version", "oldest weights"]];
const DEFAULTS = { where: "", search: "", sort: "group", order: "up" };
const TITLES = { reward: "reward", length: "response length (tokens)", staleness: "staleness (weight versions)", mismatch: "|trainer − engine| log-prob" };
const COLUMNS = [["group"], ["prompt"], ["label"], ["rewards", "One chip per attempt. Click it to see the sample"], ["mean reward"], ["mean tokens", "Mean length of the responses"],
  ["trainer − engine", "Mean |trainer − engine| log-probability per token"]];
const AGAIN_MS = 700;

export async function roundPage(context, [id], query) {
  const files = context.files();
  const latest = [...files].reverse().find((candidate) => candidate.kind === "round") ?? files.at(-1);
  const file = context.file(id) ?? latest;
  if (!file) throw new Failure("There are no samples yet. A run keeps the samples of its rounds with run.keep_samples = true.");
  if (!id) history.replaceState(null, "", `#/round/${file.id}`);
  const state = recalled(query, DEFAULTS);
  const charts = h("div", { class: "histograms" });
  const counts = h("p", { class: "quiet", role: "status" });
  const list = h("tbody");
  const more = h("button", { type: "button", onclick: () => load(list.children.length) }, "more groups");
  const drops = h("div");
  const dropped = h("div");
  let droppedAt = 0; // where the lines of this round begin in the metrics of its run
  let metricsBytes = context.run(file.run)?.metrics_bytes;
  let closed = false;
  let timer = null;
  let asked = 0;

  const address = () => remember(`round/${file.id}`, state, DEFAULTS);

  async function load(offset = 0) {
    const number_ = ++asked;
    clearTimeout(timer);
    let answer;
    try {
      answer = await ask("groups", { file: file.id, ...state, order: state.order === "down" ? "down" : "", sort: state.sort === "group" ? "" : state.sort, offset: offset || "" });
    } catch (failure) {
      if (!(failure instanceof Failure)) throw failure;
      if (number_ === asked) replace(counts, error(failure.message));
      return;
    }
    if (closed || number_ !== asked) return;
    const rows = answer.groups.map((group) => groupRow(file, group));
    if (offset) list.append(...rows);
    else replace(list, rows);
    more.hidden = list.children.length >= answer.total;
    const filtered = state.where || state.search ? ` · ${answer.matches} match, in ${answer.total} groups` : "";
    const bad = answer.bad_lines ? ` · ${answer.bad_lines} invalid lines, e.g. ${visible(answer.errors[0])}` : "";
    replace(counts, `${answer.samples.toLocaleString("en")} samples${answer.complete ? "" : " so far, still reading…"}${filtered}${bad}`);
    if (!answer.complete && !offset) timer = setTimeout(() => { load(); overview(); }, AGAIN_MS);
  }

  async function overview() {
    const answer = await ask("histograms", { file: file.id });
    if (closed) return;
    const fresh = answer.histograms.staleness?.maximum === 0;
    const shown = Object.entries(answer.histograms).filter(([name, data]) => (data || name === "reward") && !(fresh && name === "staleness"));
    replace(charts, shown.map(([name, data]) => histogram(TITLES[name], data)));
    const statuses = Object.entries(answer.statuses).map(([name, count]) => `${count} ${name}`).join(", ");
    replace(drops, h("p", {}, `${answer.groups.toLocaleString("en")} groups: ${statuses}. `
      + `${answer.flat_groups === 1 ? "1 group has" : `${answer.flat_groups} groups have`} equal rewards and no learning signal.${fresh ? " All samples were generated with the weights that were trained (staleness 0)." : ""}`
      + (answer.statuses.truncated ? " Dashed chips are truncated responses." : "")));
  }

  async function showDropped() {
    if (!file.run || file.kind !== "round") return;
    const answer = await ask("dropped", { file: file.id, offset: droppedAt || "" });
    if (closed) return;
    droppedAt = offline ? 0 : answer.offset;
    const open = dropped.firstChild?.open;
    replace(dropped, droppedBlock(file, answer));
    if (open && dropped.firstChild) dropped.firstChild.open = true;
  }

  const input = (name, placeholder, label, marker) => h("input", { type: "search", value: state[name], placeholder, "aria-label": label, [marker]: true,
    onchange: (event) => { state[name] = event.target.value; address(); load(); } });
  const choice = h("select", { "aria-label": "Samples", onchange: (event) => context.go(`#/round/${event.target.value}`) });
  const listFiles = () => replace(choice, fileOptions(context, file.id));
  listFiles();
  const tools = h("div", { class: "bar-tools" },
    h("label", {}, "samples ", choice),
    offline ? null : input("search", "text in a sample", "Search text", "data-search"),
    offline ? null : input("where", "reward < 0.5 and 'x' in response", "Filter expression", "data-filter"),
    h("label", {}, "sort by ", select("Sort by", SORTS, state.sort, (value) => { state.sort = value; address(); load(); }, { disabled: offline })),
    h("button", { type: "button", disabled: offline, "aria-label": "Reverse the order", onclick: (event) => { state.order = state.order === "up" ? "down" : "up"; event.target.textContent = state.order === "up" ? "↑" : "↓"; address(); load(); } }, state.order === "up" ? "↑" : "↓"));
  const table = h("table", { class: "groups" }, h("thead", {}, h("tr", {}, COLUMNS.map(([title, hint]) => h("th", { scope: "col", title: hint }, title)))), list);
  const step = (distance) => { // among the present files
    const present = context.files();
    const next = present[present.findIndex((candidate) => candidate.id === file.id) + distance];
    if (next) context.go(`#/round/${next.id}`);
  };
  const grows = () => { if (choice.options.length !== context.files().length) listFiles(); const now = context.file(file.id); if (now && now.bytes !== file.bytes) { file.bytes = now.bytes; load(); overview(); }
    const bytes = context.run(file.run)?.metrics_bytes; // a round is written before its steps are counted
    if (bytes !== metricsBytes) { metricsBytes = bytes; showDropped(); } };
  context.listeners.add(grows);
  await Promise.all([load(), overview(), showDropped()]);
  return {
    title: file.title,
    element: h("div", {}, h("h2", {}, visible(context.fileTitle(file)), h("small", { class: "quiet" }, ` ${visible(file.path)}`)), charts, drops, dropped, tools, counts, h("div", { class: "wide" }, table), more),
    next: () => step(1), previous: () => step(-1),
    close: () => { closed = true; clearTimeout(timer); },
  };
}

function groupRow(file, group) {
  const matches = new Set(group.matches);
  const cells = group.rows.map((row, at) => {
    if (group.attempts.indexOf(group.attempts[at]) < at) return null; // a branch of an attempt that already has a chip
    const branches = group.attempts.filter((attempt) => attempt === group.attempts[at]).length;
    const facts = `reward ${number(group.rewards[at])}, ${branches > 1 ? `${branches} branches` : `${group.lengths[at]} tokens`}, ${group.statuses[at]}`;
    return h("a", { href: `#/sample/${file.id}/${row}`, class: `cell ${rewardClass(group.rewards[at], group.rewards)} ${matches.has(row) ? "" : "other"} ${group.statuses[at] === "truncated" ? "cut" : ""}`,
      title: facts, "aria-label": `sample ${row}: ${facts}` }, number(group.rewards[at], 2));
  });
  return h("tr", { "data-item": true },
    h("td", {}, link(`#/group/${file.id}/${group.group}`, group.group)),
    h("td", { class: "preview" }, link(`#/group/${file.id}/${group.group}`, previewText(group.prompt) || "(empty prompt)")),
    h("td", { class: "preview short" }, previewText(labelText(group.label, "–"))),
    h("td", { class: "cells" }, cells, group.size > group.rows.length ? `+${group.size - group.rows.length}` : null, group.flat ? h("span", { class: "quiet" }, " equal rewards") : null),
    h("td", {}, number(group.mean, 3)), h("td", {}, number(group.length, 3)), h("td", {}, number(group.mismatch, 2)));
}

/** Return what a round dropped and why: counts per step, and the samples that no step trained on. */
function droppedBlock(file, answer) {
  const counts = Object.entries(answer.counts);
  const rows = answer.untrained ?? [];
  if (!counts.length && !rows.length) return null;
  const steps = answer.steps > 1 ? ` in each of ${answer.steps} steps` : "";
  const more = answer.untrained_total - rows.length;
  return h("details", { class: "dropped" }, h("summary", {}, `Dropped, filtered or marked by training${steps}`),
    h("dl", { class: "metrics" }, counts.map(([name, values]) => [h("dt", {}, name), h("dd", {}, values.map((value) => number(value)).join(" · "))])),
    rows.length ? h("p", {}, `${answer.untrained_total === 1 ? "1 sample" : `${answer.untrained_total} samples`} that no step trained on: `, rows.map((row) => [link(`#/sample/${file.id}/${row}`, row), " "]), more ? `and ${more} more` : "") : null);
}
