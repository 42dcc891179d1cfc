// Group: a prompt and its attempts side by side, branches as a tree, reasons for rewards, and the difference of two responses.

import { ask, Failure, offline } from "./api.js";
import { difference } from "./difference.js";
import { appendText, chat, error, h, labelText, link, number, promptBlock, replace, rewardClass, rewardText, textBlock, toolsBlock, visible } from "./dom.js";
import { branchLink, branchTree, rowsOf } from "./tree.js";

export async function groupPage(context, [id, group]) {
  const file = context.file(id);
  if (!file) throw new Failure("That samples file is no longer in this view.");
  const answer = await ask("group", { file: id, group });
  if (!answer.samples.length) throw new Failure(`Group ${group} has no samples in ${file.path}.`);
  const chosen = new Set();
  const panel = h("section", { "aria-label": "Difference" });
  const rewards = answer.samples.map((sample) => sample.score);

  function titleOf(sample) {
    const tree = answer.trees[sample.trajectory];
    return tree ? `attempt ${sample.index}, branch ${rowsOf(tree).indexOf(sample.row) + 1}` : `sample ${sample.index}`;
  }

  function choose(sample, checked) {
    checked ? chosen.add(sample) : chosen.delete(sample);
    if (chosen.size > 2) chosen.delete([...chosen][0]);
    for (const box of cards.querySelectorAll("input[type=checkbox]")) box.checked = [...chosen].some((other) => String(other.row) === box.value);
    const [left, right] = [...chosen];
    replace(panel, right ? [h("h3", {}, `${titleOf(left)} and ${titleOf(right)}`), difference(left.response, right.response)] : null);
  }

  const attempts = Map.groupBy(answer.samples, (sample) => sample.trajectory);
  const cards = h("div", { class: "answers" }, [...attempts].map(([number_, samples]) => (answer.trees[number_]
    ? attemptCard(file, samples, answer.trees[number_], rewards, choose) : samples.map((sample) => answerCard(file, sample, rewards, choose)))));
  const groups = (await ask("groups", { file: id }).catch(() => ({ groups: [] }))).groups.map((line) => line.group);
  const step = (distance) => { const next = groups[groups.indexOf(Number(group)) + distance]; if (next !== undefined) context.go(`#/group/${id}/${next}`); };
  return {
    title: `group ${group}`,
    element: h("div", {},
      h("h2", {}, link(`#/round/${id}`, visible(context.fileTitle(file))), ` · group ${group}`),
      h("section", { "aria-label": "Prompt" }, promptBlock(answer.prompt), toolsBlock(answer.tools ?? answer.metadata?.tools)),
      h("p", {}, "label: ", h("b", {}, labelText(answer.label)), answer.hash === null ? null : [" · ", link(`#/prompt/${file.run ?? ""}/${answer.hash}`, "follow this prompt over rounds and evaluations")]),
      answer.samples.length > 1 ? h("p", { class: "quiet" }, "Select two responses to see their difference.") : null, panel, cards),
    next: () => step(1), previous: () => step(-1),
  };
}

function compareBox(sample, choose) {
  return choose ? h("input", { type: "checkbox", value: String(sample.row), "aria-label": `compare sample ${sample.index}, row ${sample.row}`, onchange: (event) => choose(sample, event.target.checked) }) : null;
}

function rewardChip(sample, rewards) {
  return h("b", { class: `cell ${rewardClass(sample.score, rewards)}`, title: "reward" }, rewardText(sample.reward));
}

/** Return the facts of a sample: length, status, advantage and weight versions. */
function facts(sample) {
  const versions = [...new Set(sample.versions)];
  return h("span", { class: "quiet" }, [`${sample.length} tokens`, sample.status, sample.removed ? "removed from training" : null,
    sample.advantage === null ? null : `advantage ${number(sample.advantage, 3)}`,
    versions.length ? `weight version ${visible(versions.length > 2 ? `${versions[0]} to ${versions.at(-1)}` : versions.join(", "))}` : null].filter(Boolean).join(" · "));
}

/** Return the card of an attempt that has branches. */
function attemptCard(file, samples, tree, rewards, choose) {
  const [first] = samples;
  const byRow = new Map(samples.map((sample) => [sample.row, sample]));
  const leaf = (row, branch) => {
    const sample = byRow.get(row);
    return [compareBox(sample, choose), branchLink(file.id, row, branch), " ", sample.score === first.score ? null : rewardChip(sample, rewards), " ", facts(sample)];
  };
  return h("article", { class: "answer", "data-item": true, "aria-label": `attempt ${first.index}` },
    h("header", {}, `attempt ${first.index} `, rewardChip(first, rewards), h("span", { class: "quiet" }, ` ${samples.length} branches`)),
    first.error ? error(first.error) : null, branchTree(tree, leaf));
}

function answerCard(file, sample, rewards, choose = null) {
  const why = h("div", { class: "why" });
  const body = h("div");
  const show = (explanation) => {
    replace(body, sample.messages && !explanation?.span ? chat(sample.messages) : answerText(sample, explanation));
    replace(why, explanation ? explanationText(explanation) : askWhy(file, sample, show));
  };
  show(sample.explanation);
  return h("article", { class: "answer", "data-item": true, "aria-label": `sample ${sample.index}` },
    h("header", {}, compareBox(sample, choose), link(`#/sample/${file.id}/${sample.row}`, `sample ${sample.index}`), " ", rewardChip(sample, rewards), " ", facts(sample)),
    sample.error ? error(sample.error) : null, why, body);
}

function askWhy(file, sample, show) {
  if (offline || sample.score === null) return null;
  const button = h("button", { type: "button", class: "small", title: "Grade it again, with an explanation", onclick: async () => {
    button.disabled = true;
    button.textContent = "starting the verifier… (takes a few seconds the first time)";
    try {
      const answer = await ask("explain", { file: file.id, row: sample.row });
      show(answer.explanation ?? { why: "the verifier gives no explanation" });
    } catch (failure) {
      if (!(failure instanceof Failure)) throw failure;
      button.replaceWith(error(failure.message));
    }
  } }, "why?");
  return button;
}

function explanationText(explanation) {
  const extracted = explanation.extracted === null || explanation.extracted === undefined ? "" : `“${explanation.extracted}” from ${explanation.from}: `;
  return h("p", {}, visible(extracted + (explanation.why ?? "")));
}

/** Return the text of a response with the extracted span marked. Positions count characters, not UTF-16 units. */
function answerText(sample, explanation) {
  const span = explanation?.span;
  if (!span) return textBlock(sample.response + (sample.cut ? "…" : ""));
  const letters = [...sample.response];
  const [start, end] = span;
  const block = h("div", { class: "text" }, visible(letters.slice(0, start).join("")), h("mark", {}, visible(letters.slice(start, end).join(""))));
  return appendText(block, letters.slice(end).join("") + (sample.cut ? "…" : ""));
}
