// Round: histograms of a samples file, and its groups, searched, filtered and sorted.

import { ask, Failure, offline } from "./api.js";
import { histogram } from "./charts.js";
import { error, h, link, number, previewText, replace, rewardClass, visible } from "./dom.js";

const SORTS = [["group", "order"], ["reward", "mean reward"], ["best", "best reward"], ["worst", "worst reward"], ["spread", "spread of rewards"],
  ["length", "mean length"], ["longest", "longest answer"], ["size", "answers"], ["mismatch", "trainer − engine"], ["version", "oldest weights"]];
const PAGE = 50;
const AGAIN_MS = 700;

export async function roundPage(context, [id], query) {
  const files = context.files();
  const latest = [...files].reverse().find((candidate) => candidate.kind === "round") ?? files.at(-1);
  const file = context.file(id) ?? latest;
  if (!file) throw new Failure("There are no samples yet. A run keeps those of its rounds with run.keep_samples = true.");
  if (!id) history.replaceState(null, "", `#/round/${file.id}`);
  const state = { where: query.get("where") ?? "", search: query.get("search") ?? "", sort: query.get("sort") ?? "group", order: query.get("order") ?? "up" };
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

  function address() {
    const parameters = Object.entries(state).filter(([name, value]) => value && value !== { sort: "group", order: "up" }[name]);
    const text = parameters.map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&");
    history.replaceState(null, "", `#/round/${file.id}${text ? `?${text}` : ""}`);
  }

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
    const filtered = state.where || state.search ? ` · ${answer.matches} of them match, in ${answer.total} groups` : "";
    const bad = answer.bad_lines ? ` · ${answer.bad_lines} bad lines, e.g. ${visible(answer.errors[0])}` : "";
    replace(counts, `${answer.samples.toLocaleString("en")} samples${answer.complete ? "" : " so far, reading on…"}${filtered}${bad}`);
    if (!answer.complete && !offset) timer = setTimeout(() => { load(); overview(); }, AGAIN_MS);
  }

  async function overview() {
    const answer = await ask("histograms", { file: file.id });
    if (closed) return;
    const shown = Object.entries(answer.histograms).filter(([name, data]) => data || name === "reward");
    const titles = { reward: "reward", length: "tokens of an answer", staleness: "staleness (versions)", mismatch: "|trainer − engine| log-prob" };
    replace(charts, shown.map(([name, data]) => histogram(titles[name], data)));
    const statuses = Object.entries(answer.statuses).map(([name, count]) => `${count} ${name}`).join(", ");
    replace(drops, h("p", {}, `${answer.groups.toLocaleString("en")} groups: ${statuses}; ${answer.flat_groups} groups with equal rewards, which teach nothing`));
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
  const listFiles = () => replace(choice, context.files().map((candidate) =>
    h("option", { value: candidate.id, selected: candidate.id === file.id }, visible(context.fileTitle(candidate)))));
  listFiles();
  const tools = h("div", { class: "bar-tools" },
    h("label", {}, "samples ", choice),
    offline ? null : input("search", "text in a sample", "Search text", "data-search"),
    offline ? null : input("where", "reward < 0.5 and 'x' in response", "Filter expression", "data-filter"),
    h("label", {}, "sort by ", h("select", { "aria-label": "Sort by", disabled: offline, onchange: (event) => { state.sort = event.target.value; address(); load(); } },
      SORTS.map(([value, title]) => h("option", { value, selected: value === state.sort }, title)))),
    h("button", { type: "button", disabled: offline, "aria-label": "Reverse the order", onclick: (event) => { state.order = state.order === "up" ? "down" : "up"; event.target.textContent = state.order === "up" ? "↑" : "↓"; address(); load(); } }, state.order === "up" ? "↑" : "↓"));
  const table = h("table", { class: "groups" }, h("thead", {}, h("tr", {}, ["group", "prompt", "label", "rewards", "mean", "length", "diff"].map((title) => h("th", { scope: "col" }, title)))), list);
  const step = (distance) => { // among the files that a run has by now
    const present = context.files();
    const next = present[present.findIndex((candidate) => candidate.id === file.id) + distance];
    if (next) context.go(`#/round/${next.id}`);
  };
  const grows = () => { if (choice.children.length !== context.files().length) listFiles(); const now = context.file(file.id); if (now && now.bytes !== file.bytes) { file.bytes = now.bytes; load(); overview(); }
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
  const cells = group.rows.map((row, at) => h("a", { href: `#/sample/${file.id}/${row}`, class: `cell ${rewardClass(group.rewards[at], group.rewards)} ${matches.has(row) ? "" : "other"} ${group.statuses[at] === "truncated" ? "cut" : ""}`,
    title: `reward ${number(group.rewards[at])}, ${group.lengths[at]} tokens, ${group.statuses[at]}`, "aria-label": `sample ${row}: reward ${number(group.rewards[at])}, ${group.statuses[at]}` }, number(group.rewards[at], 2)));
  return h("tr", { "data-item": true, class: group.flat ? "flat" : "" },
    h("td", {}, link(`#/group/${file.id}/${group.group}`, group.group)),
    h("td", { class: "preview" }, link(`#/group/${file.id}/${group.group}`, previewText(group.prompt) || "(empty prompt)")),
    h("td", { class: "preview short" }, group.label === null ? "–" : previewText(typeof group.label === "object" ? JSON.stringify(group.label) : group.label)),
    h("td", { class: "cells" }, cells, group.size > group.rows.length ? `+${group.size - group.rows.length}` : null),
    h("td", {}, number(group.mean, 3)), h("td", {}, number(group.length, 3)), h("td", {}, number(group.mismatch, 2)));
}

/** Return what a round dropped and why: counts of each of its steps, and the samples that no step trained on. */
function droppedBlock(file, answer) {
  const counts = Object.entries(answer.counts);
  const rows = answer.untrained ?? [];
  if (!counts.length && !rows.length) return null;
  const steps = answer.steps > 1 ? ` in each of ${answer.steps} steps` : "";
  const more = answer.untrained_total - rows.length;
  return h("details", { class: "dropped" }, h("summary", {}, `dropped and marked${steps}`),
    h("dl", { class: "metrics" }, counts.map(([name, values]) => [h("dt", {}, name), h("dd", {}, values.map((value) => number(value)).join(" · "))])),
    rows.length ? h("p", {}, `${answer.untrained_total} samples that no step trained on: `, rows.map((row) => [link(`#/sample/${file.id}/${row}`, row), " "]), more ? `and ${more} more` : "") : null);
}
