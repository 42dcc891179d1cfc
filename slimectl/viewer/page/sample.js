// Sample: its tokens, coloured by a number of each, its turns, branches, record and commands.

import { ask, Failure } from "./api.js";
import { copyButton, h, link, number, replace, rewardText, textBlock, toolsBlock, visible } from "./dom.js";

const NO_COLOUR = { name: "none", title: "none", tone: "cold", strengths: [], marks: [] };
const NAMES = { rollout_log_probs: "engine log-prob", old_log_probs: "trainer log-prob", log_probs: "at its step", ratios: "ratio", clipped: "clipped",
  advantages: "advantage", returns: "return", values: "value", ref_log_probs: "reference log-prob", teacher_log_probs: "teacher log-prob",
  loss_weights: "loss weight", loss_mask: "loss mask", weight_version: "weight version" };

function diff(left, right) {
  return left === null || left === undefined || right === null || right === undefined ? null : left - right;
}

export async function samplePage(context, [id, row]) {
  const file = context.file(id);
  if (!file) throw new Failure("That samples file is not in this view any more.");
  const first = await ask("sample", { file: id, row });
  const available = [...first.colours, NO_COLOUR].map(({ name, title }) => ({ name, title }));
  let mode = available[0];
  const tokens = h("div", { class: "tokens text", "aria-label": "Tokens" });
  const details = h("p", { class: "token-details", role: "status" }, "Point at a token for its numbers.");
  const cells = [];

  let turn = null; // of the block that is being filled
  let block = tokens;

  function beginBlock(label, author, role = "") {
    block = h("div", { class: `block ${author}`, "data-item": true }, label ? h("span", { class: `author ${author}`, "aria-hidden": true }, label) : null, role ? h("span", { class: "role", "aria-hidden": true }, visible(role)) : null);
    tokens.append(block);
  }

  function add(view) {
    const parts = new Map(view.parts.map((part) => [part.start, part]));
    let tool = null; // the tool call or result that is being filled
    for (const [at, token] of view.ids.entries()) {
      const position = view.start + at;
      const part = parts.get(position);
      if (!turn || position >= turn.end) {
        turn = view.turns.find((candidate) => candidate.start <= position && position < candidate.end) ?? { author: "", end: view.total };
        const untaught = turn.author === "policy" && !turn.taught ? " (taught elsewhere or not at all)" : "";
        beginBlock(turn.author + untaught, turn.author, part?.role);
        tool = null;
      } else if (part?.kind === "message") beginBlock("", turn.author, part.role);
      if (part && part.kind !== "message") {
        tool = { end: part.end, element: h("span", { class: "tool-call", "aria-label": part.kind === "call" ? "tool call" : "result of a tool" }, h("b", { "aria-hidden": true }, part.kind === "call" ? "tool call" : "result")) };
        block.append(tool.element);
      } else if (tool && position >= tool.end) tool = null;
      const values = { id: token, position };
      for (const [name, column] of Object.entries(view.columns)) values[name] = column[at];
      const text = view.texts ? view.texts[at] : `${token} `;
      const span = h("span", { class: `token ${turn.author}` }, tokenText(text, token));
      cells.push([span, values, view.colours, at]);
      (tool?.element ?? block).append(span);
    }
    const end = view.start + view.ids.length;
    if (end < view.total) {
      const more = h("button", { type: "button", onclick: async () => { more.disabled = true; const next = await ask("sample", { file: id, row, start: end }); more.remove(); add(next); paint(); } }, `${view.total - end} more tokens`);
      tokens.append(more);
    }
  }

  function paint() {
    for (const [span, values, colours, at] of cells) {
      const colour = colours.find((candidate) => candidate.name === mode.name) ?? NO_COLOUR;
      const strength = colour.strengths[at] ?? 0;
      span.classList.toggle("marked", Boolean(colour.marks[at]));
      span.style.setProperty("--heat", `${Math.round(Math.abs(strength) * 100)}%`);
      span.dataset.tone = colour.tone === "both" ? (strength < 0 ? "low" : "high") : colour.tone;
      span.title = tokenTitle(values);
    }
    for (const button of modes.children) button.setAttribute("aria-pressed", String(button.dataset.mode === mode.name));
  }

  const modes = h("div", { class: "modes", role: "group", "aria-label": "Colour tokens by" }, available.map((candidate, at) =>
    h("button", { type: "button", "data-mode": candidate.name, onclick: () => { mode = candidate; paint(); } }, `${at + 1} ${candidate.title}`)));
  tokens.addEventListener("pointerover", (event) => {
    const entry = cells.find(([span]) => span === event.target);
    if (entry) replace(details, tokenTitle(entry[1]));
  });
  add(first);
  paint();
  const record = first.record;
  const raw = h("details", {}, h("summary", {}, "Record"), h("div"));
  raw.addEventListener("toggle", async () => { if (raw.open && !raw.lastChild.children.length) raw.lastChild.append(textBlock(JSON.stringify(await ask("raw", { file: id, row }), null, 1))); });
  const pictures = h("div", { class: "pictures" });
  if (record.multimodal_inputs) ask("images", { file: id, row }).then((images) => replace(pictures, images.map(picture)), (error) => replace(pictures, h("p", {}, visible(error.message))));
  return {
    title: `sample ${record.index ?? row}`,
    element: h("div", {},
      h("h2", {}, link(`#/round/${id}`, visible(context.fileTitle(file))), " · ", link(`#/group/${id}/${first.group}`, `group ${first.group}`), ` · sample ${record.index ?? row}`),
      h("p", {}, "reward ", h("b", {}, rewardText(record.reward)), ` · label ${visible(typeof record.label === "object" ? JSON.stringify(record.label) : record.label)} · ${visible(record.status)} · `
        + `${first.prompt_length} + ${first.total - first.prompt_length} tokens · `, link(`#/prompt/${file.run ?? ""}/${first.hash}`, "this prompt over time")),
      record.metadata?.error ? h("p", { class: "error" }, visible(record.metadata.error)) : null,
      record.metadata?.explanation ? h("p", {}, visible(`${record.metadata.explanation.extracted ?? "nothing"} from ${record.metadata.explanation.from}: ${record.metadata.explanation.why}`)) : null,
      toolsBlock(record.tools ?? record.metadata?.tools), pictures, modes, details, first.total ? tokens : textBlock(record.response ?? ""),
      first.branches ? h("section", { "aria-label": "Branches" }, h("h3", {}, "Branches of this attempt"), branchTree(id, first.branches, Number(row))) : null,
      h("h3", {}, "Commands"), h("ul", { class: "commands" }, first.commands.map(({ title, command }) => h("li", {}, `${title} `, copyButton(command), h("code", {}, visible(command))))),
      raw),
    next: () => context.go(`#/sample/${id}/${Number(row) + 1}`), previous: () => Number(row) > 0 && context.go(`#/sample/${id}/${Number(row) - 1}`),
    mode: (position) => { if (available[position]) { mode = available[position]; paint(); } },
  };
}

function picture({ name, address, error }, at) {
  const caption = `image ${at + 1}: ${visible(name.split("/").at(-1))}`;
  return address ? h("figure", {}, h("img", { src: address, alt: caption }), h("figcaption", {}, caption)) : h("p", { class: "error" }, visible(error));
}

function tokenText(text, token) {
  if (text === "") return "·";
  return visible(text).replaceAll("\n", "↵\n") || `⟨${token}⟩`;
}

function tokenTitle(values) {
  const numbers = Object.entries(NAMES).filter(([name]) => values[name] !== null && values[name] !== undefined).map(([name, title]) => `${title} ${number(values[name])}`);
  const mismatch = diff(values.old_log_probs, values.rollout_log_probs);
  return [`token ${values.position}: id ${values.id}`, ...numbers, mismatch === null ? null : `trainer − engine ${number(mismatch)}`].filter(Boolean).join(" · ");
}

function branchTree(id, node, row) {
  return h("ul", { class: "tree" }, h("li", {}, `tokens ${node.start}–${node.end} `,
    node.rows.map((ending) => [link(`#/sample/${id}/${ending}`, ending === row ? h("b", {}, `row ${ending} (this)`) : `row ${ending}`), " "]),
    node.children.map((child) => branchTree(id, child, row))));
}
