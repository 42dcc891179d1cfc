// Elements, numbers and texts. Texts of samples reach the page only through `visible` and text nodes.

/** Create an element: attributes, listeners (onclick: …), style properties (style: {…}), children. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [property, text] of Object.entries(value)) element.style.setProperty(property, text);
    else if (name === "value" || name === "checked" || name === "disabled" || name === "selected") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function replace(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const BIDI = { "\u200e": "LRM", "\u200f": "RLM", "\u061c": "ALM", "\u202a": "LRE", "\u202b": "RLE", "\u202c": "PDF", "\u202d": "LRO",
  "\u202e": "RLO", "\u2066": "LRI", "\u2067": "RLI", "\u2068": "FSI", "\u2069": "PDI", "\ufeff": "BOM" };

/** Make every character of a text visible: control characters, direction marks and halves of surrogate pairs too. */
export function visible(text) {
  return String(text).toWellFormed()
    .replace(/[\u0000-\u0008\u000b-\u001f]/g, (letter) => String.fromCharCode(0x2400 + letter.charCodeAt(0)))
    .replace(/[\u007f-\u009f]/g, (letter) => (letter === "\u007f" ? "\u2421" : `⟨${letter.charCodeAt(0).toString(16)}⟩`))
    .replace(/[\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069\ufeff]/g, (letter) => `⟨${BIDI[letter]}⟩`);
}

const SHOWN = 20000;

/** Append a text to a block. For a long text, append a part and a button that shows more. */
export function appendText(block, text) {
  let shown = 0;
  const more = h("button", { type: "button", onclick: () => extend() });
  function extend() {
    more.remove();
    block.append(visible(text.slice(shown, shown + SHOWN)));
    shown += SHOWN;
    if (shown < text.length) {
      more.textContent = `${(text.length - shown).toLocaleString("en")} more characters`;
      block.append(more);
    }
  }
  extend();
  return block;
}

/** Return a text, or any other value as JSON, in a block that preserves whitespace. */
export function textBlock(value, attributes = {}) {
  const text = typeof value === "string" ? value : JSON.stringify(value, null, 1) ?? "";
  return appendText(h("div", { ...attributes, class: `text ${attributes.class ?? ""}` }), text);
}

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return visible(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  const size = Math.abs(value);
  return size >= 1e6 || (size < 1e-3 && size > 0) ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
}

/** Return a reward as text: a number, or each component of an object with its name. */
export function rewardText(reward) {
  if (reward === null || typeof reward !== "object") return number(reward);
  return Object.entries(reward).map(([name, value]) => `${visible(name)} ${typeof value === "number" ? number(value) : visible(JSON.stringify(value))}`).join(" · ");
}

/** Return the CSS class of a reward, by its position between the smallest and the largest reward of a list. */
export function rewardClass(value, rewards) {
  const numbers = rewards.filter((reward) => typeof reward === "number");
  if (typeof value !== "number" || !numbers.length) return "r-none";
  const [low, high] = [Math.min(0, ...numbers), Math.max(1, ...numbers)];
  return `r${Math.round(((value - low) / (high - low || 1)) * 4)}`;
}

/** Return messages {role, content or text, author} as a list, with the role above each text. */
export function chat(messages) {
  return h("ol", { class: "chat" }, messages.map((message) => h("li", { class: `turn ${message?.author ?? ""}` },
    h("b", {}, visible(message?.role ?? "message")),
    textBlock(message?.text ?? message?.content ?? ""),
    message?.tool_calls ? h("div", { class: "tool" }, h("b", {}, "tool calls"), textBlock(message.tool_calls)) : null)));
}

export function promptBlock(prompt) {
  return Array.isArray(prompt) ? chat(prompt) : textBlock(prompt);
}

/** Return a label as text: a string unchanged, any other value as JSON. */
export function labelText(label, none = "none") {
  return label === null || label === undefined ? none : visible(typeof label === "object" ? JSON.stringify(label) : label);
}

/** Return the tools that a prompt declares in a collapsed block, or null if there are none. */
export function toolsBlock(tools) {
  if (!Array.isArray(tools) || !tools.length) return null;
  const names = tools.map((tool) => tool?.function?.name ?? tool?.name ?? "?").join(", ");
  return h("details", { class: "tools" }, h("summary", {}, `${tools.length === 1 ? "1 tool" : `${tools.length} tools`}: ${visible(names).slice(0, 200)}`), textBlock(tools));
}

export function previewText(prompt) {
  if (Array.isArray(prompt)) prompt = prompt.at(-1)?.content ?? "";
  return visible(String(prompt)).replace(/\s+/g, " ").slice(0, 160);
}

/** Store the state of a page in its address, except for default values. */
export function remember(path, state, defaults = {}) {
  const values = Object.entries(state).filter(([name, value]) => value !== "" && value !== null && value !== undefined && String(value) !== String(defaults[name] ?? ""));
  const query = values.map(([name, value]) => `${name}=${encodeURIComponent(value).replaceAll("%2C", ",")}`).join("&");
  history.replaceState(null, "", `#/${path}${query ? `?${query}` : ""}`);
}

/** Return the state of a page from its address, with the types of the defaults. */
export function recalled(query, defaults) {
  return Object.fromEntries(Object.entries(defaults).map(([name, value]) => {
    const text = query.get(name);
    if (text === null) return [name, value];
    return [name, typeof value === "number" ? Number(text) || 0 : typeof value === "boolean" ? text === "true" : text];
  }));
}

export function select(label, options, value, changed, attributes = {}) {
  return h("select", { "aria-label": label, ...attributes, onchange: (event) => changed(event.target.value) },
    options.map(([option, title]) => h("option", { value: option, selected: option === value }, title)));
}

/** Return the options of a menu of samples files, under the name of their run if there are several. */
export function fileOptions(context, chosen) {
  const option = (file) => h("option", { value: file.id, selected: file.id === chosen }, visible(context.fileTitle(file)));
  const { runs, files } = context.catalogue;
  return [runs.map((run) => (runs.length > 1 ? h("optgroup", { label: visible(run.name) }, run.files.map(option)) : run.files.map(option))), files.map(option)];
}

export function link(address, ...children) {
  return h("a", { href: address }, ...children);
}

export function copyButton(text, label = "copy") {
  const button = h("button", { type: "button", class: "small", "aria-label": `copy: ${text}`, onclick: async () => {
    await navigator.clipboard.writeText(text).catch(() => {
      const area = h("textarea", { value: text });
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    });
    button.textContent = "copied";
    setTimeout(() => { button.textContent = label; }, 1500);
  } }, label);
  return button;
}

export function error(message) {
  return h("p", { class: "error", role: "alert" }, visible(message));
}
