// Compare: two rounds, evaluations, runs or models on the prompts that they share, largest changes first.

import { ask, Failure } from "./api.js";
import { difference } from "./difference.js";
import { fileOptions, h, labelText, link, number, previewText, remember, replace, select } from "./dom.js";

const AGAIN_MS = 700;

/** Return the initial two files: the last evaluations of two chosen runs on the same data, else the first and last evaluation of one run, else the first and last file. */
function firstPair(context, files) {
  const evaluations = files.filter((file) => file.kind === "evaluation");
  const lastOf = (run, dataset) => evaluations.findLast((file) => file.run === run.id && (dataset === undefined || file.dataset === dataset));
  const [one, ...more] = context.selection.map(context.runOf).filter((run) => run && lastOf(run));
  const second = more.find((run) => lastOf(run, lastOf(one).dataset));
  if (second) return [lastOf(one), lastOf(second, lastOf(one).dataset)];
  const last = one ? lastOf(one) : evaluations.at(-1);
  const before = evaluations.find((file) => file.dataset === last?.dataset && file.run === last.run && file.id !== last.id);
  return before ? [before, last] : [files[0], files.at(-1)];
}

export async function comparePage(context, _, query) {
  const files = context.files();
  if (files.length < 2) throw new Failure("A comparison needs two samples files: slimectl view A.jsonl B.jsonl");
  const [first, second] = firstPair(context, files);
  const state = { before: query.get("before") ?? first.id, after: query.get("after") ?? second.id, only: query.get("only") ?? "", threshold: query.get("threshold") ?? "" };
  const summary = h("p", { role: "status" });
  const list = h("tbody");
  const more = h("button", { type: "button", onclick: () => load(list.querySelectorAll("tr[data-item]").length) }, "more prompts");
  let timer = null;

  async function load(offset = 0) {
    clearTimeout(timer);
    remember("compare", state);
    const answer = await ask("compare", { ...state, offset: offset || "" });
    const rows = answer.prompts.flatMap((prompt) => promptRow(state, prompt));
    if (offset) list.append(...rows);
    else replace(list, rows);
    more.hidden = list.querySelectorAll("tr[data-item]").length >= answer.total;
    replace(summary, `${answer.shared} prompts in both${answer.complete ? "" : " so far, still reading…"} · mean reward ${number(answer.before_mean)} → ${number(answer.after_mean)} · `
      + `${answer.became_right} became right, ${answer.became_wrong} became wrong`);
    if (!answer.complete && !offset) timer = setTimeout(load, AGAIN_MS);
  }

  const choose = (name) => h("select", { "aria-label": name, onchange: (event) => { state[name] = event.target.value; load(); } }, fileOptions(context, state[name]));
  const only = select("Show", [["", "all changes"], ["right", "became right"], ["wrong", "became wrong"]], state.only, (value) => { state.only = value; load(); });
  const threshold = h("input", { type: "number", step: "any", value: state.threshold || 1, "aria-label": "Minimum mean reward of a right prompt", onchange: (event) => { state.threshold = event.target.value; load(); } });
  await load();
  return {
    title: "Compare",
    element: h("div", {}, h("h2", {}, "Compare"), h("div", { class: "bar-tools" }, choose("before"), " → ", choose("after"), only, h("label", {}, "a prompt is right if its mean reward is at least ", threshold)), summary,
      h("div", { class: "wide" }, h("table", { class: "groups" }, h("thead", {}, h("tr", {}, [["prompt"], ["label"], ["before", "Mean reward in the first samples"], ["after", "Mean reward in the second samples"], ["change"]].map(([title, hint]) => h("th", { scope: "col", title: hint }, title)))), list)), more),
    close: () => clearTimeout(timer),
  };
}

function promptRow(state, prompt) {
  const change = prompt.after - prompt.before;
  const detail = h("tr", { hidden: true }, h("td", { colspan: 5 }, difference(prompt.before_answer, prompt.after_answer)));
  const toggle = h("button", { type: "button", class: "small", "aria-expanded": "false", "aria-label": "Show both responses", onclick: () => { detail.hidden = !detail.hidden; toggle.setAttribute("aria-expanded", String(!detail.hidden)); } }, "±");
  return [h("tr", { "data-item": true }, h("td", { class: "preview" }, toggle, " ", link(`#/sample/${state.after}/${prompt.after_row}`, previewText(prompt.prompt) || "(empty prompt)")),
    h("td", { class: "preview short" }, previewText(labelText(prompt.label, "–"))),
    h("td", {}, link(`#/sample/${state.before}/${prompt.before_row}`, number(prompt.before, 3))), h("td", {}, link(`#/sample/${state.after}/${prompt.after_row}`, number(prompt.after, 3))),
    h("td", { class: change > 0 ? "better" : change < 0 ? "worse" : "" }, `${change > 0 ? "+" : ""}${number(change, 3)}`)), detail];
}
