// Group: a prompt and its answers side by side, why each was graded as it was, and the difference of two.

import { ask, Failure, offline } from "./api.js";
import { difference } from "./difference.js";
import { appendText, error, h, link, number, promptBlock, replace, rewardClass, rewardText, textBlock, toolsBlock, visible } from "./dom.js";

export async function groupPage(context, [id, group]) {
  const file = context.file(id);
  if (!file) throw new Failure("That samples file is not in this view any more.");
  const answer = await ask("group", { file: id, group });
  if (!answer.samples.length) throw new Failure(`Group ${group} has no samples in ${file.path}.`);
  const chosen = new Set();
  const panel = h("section", { "aria-label": "Difference" });
  const rewards = answer.samples.map((sample) => sample.score);

  function choose(sample, checked) {
    checked ? chosen.add(sample) : chosen.delete(sample);
    if (chosen.size > 2) chosen.delete([...chosen][0]);
    for (const box of cards.querySelectorAll("input[type=checkbox]")) box.checked = [...chosen].some((other) => String(other.row) === box.value);
    const [left, right] = [...chosen];
    replace(panel, right ? [h("h3", {}, `sample ${left.index} and sample ${right.index}`), difference(left.response, right.response)] : null);
  }

  const cards = h("div", { class: "answers" }, answer.samples.map((sample) => answerCard(file, sample, rewards, choose)));
  const groups = (await ask("groups", { file: id }).catch(() => ({ groups: [] }))).groups.map((line) => line.group);
  const step = (distance) => { const next = groups[groups.indexOf(Number(group)) + distance]; if (next !== undefined) context.go(`#/group/${id}/${next}`); };
  return {
    title: `group ${group}`,
    element: h("div", {},
      h("h2", {}, link(`#/round/${id}`, visible(context.fileTitle(file))), ` · group ${group}`),
      h("p", {}, answer.hash === null ? null : link(`#/prompt/${file.run ?? ""}/${answer.hash}`, "this prompt over time")),
      h("section", { "aria-label": "Prompt" }, promptBlock(answer.prompt), toolsBlock(answer.tools ?? answer.metadata?.tools)),
      h("p", {}, "label: ", h("b", {}, answer.label === null ? "none" : visible(typeof answer.label === "object" ? JSON.stringify(answer.label) : answer.label))),
      panel, cards),
    next: () => step(1), previous: () => step(-1),
  };
}

export function answerCard(file, sample, rewards, choose = null) {
  const why = h("div", { class: "why" });
  const body = h("div");
  const show = (explanation) => {
    replace(body, answerText(sample, explanation));
    replace(why, explanation ? explanationText(explanation) : askWhy(file, sample, show));
  };
  show(sample.explanation);
  return h("article", { class: "answer", "data-item": true, "aria-label": `sample ${sample.index}` },
    h("header", {},
      choose ? h("input", { type: "checkbox", value: String(sample.row), "aria-label": `compare sample ${sample.index}`, onchange: (event) => choose(sample, event.target.checked) }) : null,
      link(`#/sample/${file.id}/${sample.row}`, `sample ${sample.index}`),
      h("b", { class: `cell ${rewardClass(sample.score, rewards)}` }, rewardText(sample.reward)),
      h("span", { class: "quiet" }, ` ${sample.length} tokens · ${sample.status}${sample.removed ? " · removed" : ""}`
        + `${sample.advantage === null ? "" : ` · advantage ${number(sample.advantage, 3)}`}${sample.versions.length ? ` · weights ${visible(sample.versions.join(", "))}` : ""}`)),
    sample.error ? error(sample.error) : null, why, body);
}

function askWhy(file, sample, show) {
  if (offline || sample.score === null) return null;
  const button = h("button", { type: "button", class: "small", onclick: async () => {
    button.disabled = true;
    button.textContent = "grading…";
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

/** Return the text of an answer with the extracted span marked. Positions count characters, not UTF-16 units. */
function answerText(sample, explanation) {
  const span = explanation?.span;
  if (!span) return textBlock(sample.response + (sample.cut ? "…" : ""));
  const letters = [...sample.response];
  const [start, end] = span;
  const block = h("div", { class: "text" }, visible(letters.slice(0, start).join("")), h("mark", {}, visible(letters.slice(start, end).join(""))));
  return appendText(block, letters.slice(end).join("") + (sample.cut ? "…" : ""));
}
