// Findings: what goes wrong in the runs that are drawn, as `slimectl diagnose` reports it.

import { ask } from "./api.js";
import { h, number, replace, visible } from "./dom.js";

function roundsOf({ first_round: first, last_round: last }) {
  if (last === null) return `since round ${first}`;
  return first === last ? `round ${first}` : `rounds ${first} to ${last}`;
}

function list(title, texts, item = visible) {
  return texts.length ? [h("dt", {}, title), texts.map((text) => h("dd", {}, item(text)))] : [];
}

function evidence({ metric, rounds, values }) {
  return [h("b", {}, visible(metric)), ` in rounds ${rounds[0]} to ${rounds.at(-1)}: ${values.map((value) => number(value, 3)).join(", ")}`];
}

function panel(finding) {
  const command = (text) => h("code", {}, visible(text));
  return h("details", { class: `finding ${finding.severity}`, "data-finding": finding.kind },
    h("summary", {}, h("span", { class: "severity" }, finding.severity), visible(finding.title), h("span", { class: "quiet" }, ` ${roundsOf(finding)}`)),
    h("dl", {}, list("evidence", finding.evidence, evidence), list("causes", finding.causes), list("try", finding.remedies), list("look", finding.commands, command), list("read", [finding.link], command)));
}

/** Draw the findings of runs into an element. Findings that the reader has opened stay open. */
export async function drawFindings(element, runs) {
  const answers = await Promise.all(runs.map((run) => ask("findings", { run: run.id }).catch(() => [])));
  const panels = (run, findings) => findings.map((finding) => {
    const one = panel(finding);
    one.dataset.key = `${run.id} ${finding.kind} ${finding.first_round}`;
    one.open = open.has(one.dataset.key);
    return one;
  });
  const open = new Set([...element.querySelectorAll("details[open]")].map((one) => one.dataset.key));
  replace(element, runs.map((run, at) => {
    if (!answers[at].length) return null;
    const ended = answers[at].filter((finding) => finding.last_round !== null);
    const key = `${run.id} ended`;
    return h("section", {}, runs.length > 1 ? h("h3", {}, visible(run.name)) : null, panels(run, answers[at].filter((finding) => !ended.includes(finding))),
      ended.length ? h("details", { "data-key": key, open: open.has(key) }, h("summary", { class: "quiet" }, `${ended.length} ${ended.length === 1 ? "finding that has" : "findings that have"} ended`), panels(run, ended)) : null);
  }));
}
