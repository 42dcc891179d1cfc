// Sample: its tokens, coloured by a value, or its messages, and its branches, record and commands.

import { ask, Failure } from "./api.js";
import { chat, copyButton, h, labelText, link, number, recalled, remember, replace, rewardText, textBlock, toolsBlock, visible } from "./dom.js";
import { branchLink, branchTree, rowsOf } from "./tree.js";

const NO_COLOUR = { name: "none", title: "none", tone: "none", strengths: [], marks: [], ends: [0, 0] };
const DEFAULTS = { as: "tokens", colour: "" };
const NAMES = { rollout_log_probs: "engine log-prob", old_log_probs: "trainer log-prob", log_probs: "log-prob at its step", ratios: "ratio", clipped: "clipped",
  advantages: "advantage", returns: "return", values: "value", ref_log_probs: "reference log-prob", teacher_log_probs: "teacher log-prob",
  loss_weights: "loss weight", loss_mask: "loss mask", weight_version: "weight version" };
const MEANINGS = { logprob: "log-probability of each token in the engine", trainer_minus_engine: "trainer's log-probability minus the engine's",
  ratio: "probability under the updated weights divided by that under the old ones. Wavy lines mark clipped tokens", advantage: "how much better than its group",
  reference: "engine's log-probability minus the reference model's", teacher: "teacher's log-probability minus the engine's",
  mask: "trained on", weight_version: "weights that wrote each token, oldest to newest" };

function diff(left, right) {
  return left === null || left === undefined || right === null || right === undefined ? null : left - right;
}

export async function samplePage(context, [id, row], query) {
  const state = recalled(query, { ...DEFAULTS, ...context.sampleState });
  const file = context.file(id);
  if (!file) throw new Failure("That samples file is no longer in this view.");
  const first = await ask("sample", { file: id, row });
  const available = [...first.colours, NO_COLOUR];
  let mode = available.find(({ name }) => name === state.colour) ?? available[0];
  const tokens = h("div", { class: "tokens text", "aria-label": "Tokens" });
  const details = h("p", { class: "token-details", role: "status" }, "Point at a token to see its values.");
  const cells = [];

  let turn = null; // turn of the current block
  let block = tokens;

  function beginBlock(label, author) {
    block = h("div", { class: `block ${author}`, "data-item": true }, label ? h("span", { class: `author ${author}`, "aria-hidden": true }, label) : null);
    tokens.append(block);
  }

  function add(view) {
    const parts = new Map(view.parts.map((part) => [part.start, part]));
    let headerEnd = 0; // end of a message header, which has the role
    let tool = null; // current tool call or result
    for (const [at, token] of view.ids.entries()) {
      const position = view.start + at;
      const part = parts.get(position);
      if (!turn || position >= turn.end) {
        turn = view.turns.find((candidate) => candidate.start <= position && position < candidate.end) ?? { author: "", end: view.total };
        const untaught = turn.author === "policy" && !turn.taught ? " (not trained on here)" : "";
        const reward = turn.reward === undefined ? "" : `, reward ${number(turn.reward)}`;
        beginBlock(turn.author + untaught + reward, turn.author);
        tool = null;
      } else if (part?.kind === "message") beginBlock("", turn.author);
      if (part?.kind === "message") headerEnd = part.end;
      if (part && part.kind !== "message") {
        tool = { end: part.end, element: h("span", { class: "tool-call", "aria-label": part.kind === "call" ? "tool call" : "tool result" }, h("b", { "aria-hidden": true }, part.kind === "call" ? "tool call" : "result")) };
        block.append(tool.element);
      } else if (tool && position >= tool.end) tool = null;
      const values = { id: token, position };
      for (const [name, column] of Object.entries(view.columns)) values[name] = column[at];
      const text = view.texts ? view.texts[at] : `${token} `;
      const span = h("span", { class: `token ${turn.author}${position < headerEnd ? " header" : ""}` }, tokenText(text, token));
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
    replace(scale, scaleOf(mode));
  }

  /** Show tokens or messages. The address and the next samples keep the view and its colours. */
  function show() {
    const asChat = state.as === "chat";
    for (const element of [modes, scale, details, tokens]) element.hidden = asChat;
    messages.hidden = !asChat;
    for (const button of views.children) button.setAttribute("aria-pressed", String(button.dataset.view === state.as));
    context.sampleState = { ...state };
    remember(`sample/${id}/${row}`, state, DEFAULTS);
  }

  function colourBy(chosen) {
    mode = chosen;
    state.colour = chosen === available[0] ? "" : chosen.name;
    paint();
    show();
  }

  const scale = h("p", { class: "scale" });
  const messages = h("div", { class: "messages" }, chat(first.messages));
  const views = h("div", { class: "modes", role: "group", "aria-label": "Show as" }, [["tokens", "Tokens"], ["chat", "Messages"]].map(([view, title]) =>
    h("button", { type: "button", "data-view": view, onclick: () => { state.as = view; show(); } }, title)));
  const modes = h("div", { class: "modes", role: "group", "aria-label": "Colour tokens by" }, available.map((candidate, at) =>
    h("button", { type: "button", "data-mode": candidate.name, onclick: () => colourBy(candidate) }, `${at + 1} ${candidate.title}`)));
  tokens.addEventListener("pointerover", (event) => {
    const entry = cells.find(([span]) => span === event.target);
    if (entry) replace(details, tokenTitle(entry[1]));
  });
  add(first);
  paint();
  show();
  const record = first.record;
  const raw = h("details", {}, h("summary", {}, "Record"), h("div"));
  raw.addEventListener("toggle", async () => { if (raw.open && !raw.lastChild.children.length) raw.lastChild.append(textBlock(JSON.stringify(await ask("raw", { file: id, row }), null, 1))); });
  const pictures = h("div", { class: "pictures" });
  if (record.multimodal_inputs) ask("images", { file: id, row }).then((images) => replace(pictures, images.map(picture)), (error) => replace(pictures, h("p", {}, visible(error.message))));
  const branch = first.tree ? `attempt ${record.index ?? row} · branch ${rowsOf(first.tree).indexOf(Number(row)) + 1}` : `sample ${record.index ?? row}`;
  const step = (distance) => { const next = Number(row) + distance; if (next >= 0 && next < first.samples) context.go(`#/sample/${id}/${next}`); };
  return {
    title: branch,
    element: h("div", {},
      h("h2", {}, link(`#/round/${id}`, visible(context.fileTitle(file))), " · ", link(`#/group/${id}/${first.group}`, `group ${first.group}`), ` · ${branch}`),
      h("p", {}, "reward ", h("b", {}, rewardText(record.reward)), ` · label ${labelText(record.label)} · ${visible(record.status)} · `
        + `${first.prompt_length} prompt tokens, ${first.total - first.prompt_length} response tokens · `, link(`#/prompt/${file.run ?? ""}/${first.hash}`, "follow this prompt over rounds and evaluations")),
      record.metadata?.error ? h("p", { class: "error" }, visible(record.metadata.error)) : null,
      record.metadata?.explanation ? h("p", {}, visible(`${record.metadata.explanation.extracted ?? "nothing"} from ${record.metadata.explanation.from}: ${record.metadata.explanation.why}`)) : null,
      toolsBlock(record.tools ?? record.metadata?.tools), pictures, views, modes, scale, details, first.total ? tokens : textBlock(record.response ?? ""), messages,
      first.tree ? h("section", { "aria-label": "Branches" }, h("h3", {}, "Branches of this attempt"), branchTree(first.tree, (leaf, at) => branchLink(id, leaf, at, Number(row)))) : null,
      h("h3", {}, "Commands"), h("ul", { class: "commands" }, first.commands.map(({ title, command }) => h("li", {}, `${title} `, copyButton(command), h("code", {}, visible(command))))),
      raw),
    next: () => step(1), previous: () => step(-1),
    mode: (position) => { if (available[position]) colourBy(available[position]); },
  };
}

/** Return the scale of a colour with its values and its meaning. */
function scaleOf({ name, tone, ends: [low, high] }) {
  const bar = (kind) => h("i", { class: `bar-${kind}` });
  const meaning = MEANINGS[name] ? h("span", { class: "quiet" }, ` ${MEANINGS[name]}`) : null;
  if (tone === "both") return [number(low, 3), bar("low"), name === "ratio" ? "1" : name === "weight_version" ? "" : "0", name === "weight_version" ? null : bar("high"), number(high, 3), meaning];
  if (tone === "cold") return [number(low), bar("cold"), `${number(high)} or less`, meaning];
  if (tone === "taught") return [bar("taught"), meaning];
  if (tone === "author") return [bar("policy"), "policy ", bar("environment"), "environment"];
  return [];
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
