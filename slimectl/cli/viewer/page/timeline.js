// Timeline: what every part of a run did at what time, in lanes that are zoomed and moved.

import { ask } from "./api.js";
import { swatch } from "./charts.js";
import { h, number, recalled, remember, replace, select, visible } from "./dom.js";
import { kindOf, PARTS, Spans } from "./spans.js";

const DEFAULTS = { run: "", from: "", to: "" };
const FIRST_ROUNDS = 5;
const LABELS = 108;
const AXIS = 34;
const GAP = 6;
const LANE = 18;
const MOST_LANE = 240;
const SHORTEST_S = 1e-4;
const STEPS = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400];

function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Return a duration with its unit. */
function duration(seconds) {
  if (seconds < 1e-3) return `${number(seconds * 1e6, 3)} µs`;
  if (seconds < 1) return `${number(seconds * 1e3, 3)} ms`;
  return seconds < 120 ? `${number(seconds, 4)} s` : clock(seconds);
}

/** Return seconds since the start of the run as a time: 7, 1:05 or 2:03:04, with decimals if the step has them. */
function clock(seconds, step = 1) {
  const digits = step < 1 ? Math.ceil(-Math.log10(step) - 1e-9) : 0;
  const [hours, minutes] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60];
  const rest = (seconds % 60).toFixed(digits);
  if (!hours && !minutes) return `${rest} s`;
  const padded = rest.padStart(digits ? digits + 3 : 2, "0");
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${padded}` : `${minutes}:${padded}`;
}

function tickStep(perTick) {
  if (perTick >= 1) return STEPS.find((step) => step >= perTick) ?? 86400 * Math.ceil(perTick / 86400);
  const power = 10 ** Math.floor(Math.log10(perTick));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= perTick * 0.999);
}

/** Return the lines of a box about a span. */
function facts(span, start) {
  const seconds = span.end - span.start;
  const parts = PARTS.filter(({ name }) => typeof span[name] === "number").map(({ name }) => `${name} ${duration(span[name])}`).join(" · ");
  const rate = span.name === "request" && seconds > 0 ? `${span.prompt_tokens} prompt tokens, ${span.tokens} response tokens, ${number(span.tokens / seconds, 3)} per second` : null;
  return [h("b", {}, visible(span.dataset ? `${span.name} (${span.dataset})` : span.name), " ", duration(seconds)),
    h("div", { class: "quiet" }, `${visible(span.lane)} · ${typeof span.round === "number" ? `round ${span.round} · ` : ""}at ${clock(span.start - start, 0.001)}`),
    parts ? h("div", {}, parts) : null, rate ? h("div", {}, rate) : null,
    typeof span.group === "number" ? h("div", { class: "quiet" }, `group ${span.group}, sample ${span.index}, turn ${span.turn ?? "–"}`) : null,
    typeof span.busy === "number" ? h("div", { class: "quiet" }, `busy ${duration(span.busy)} (${Math.round((100 * span.busy) / (seconds || 1))} %)`) : null];
}

export async function timelinePage(context, _, query) {
  const state = recalled(query, DEFAULTS);
  const runs = context.catalogue.runs.filter((run) => run.timeline_bytes);
  const run = context.runOf(state.run) ?? runs.find((one) => context.selection.includes(context.keyOf(one))) ?? runs.at(-1);
  if (!run?.timeline_bytes) {
    return { title: "Timeline", element: h("div", {}, h("h2", {}, "Timeline"), h("p", { class: "quiet" },
      "No timeline yet. A run writes one from its first round on, unless track.timeline is false.")) };
  }
  state.run = context.keyOf(run);
  const spans = new Spans();
  let offset = 0;

  /** Read new spans. Return whether there were any. A file that became shorter is read again from its start. */
  async function read() {
    const news = [];
    for (let more = true; more;) {
      const answer = await ask("timeline", { run: run.id, offset: offset || "" });
      if (answer.offset < offset) Object.assign(spans, new Spans());
      news.push(...answer.spans);
      ({ offset, more } = answer);
    }
    spans.add(news);
    return news.length > 0;
  }

  await read();
  const view = { start: 0, end: 1 };
  const canvas = h("canvas", { tabindex: 0, role: "img", "aria-label": "Timeline" });
  const tip = h("div", { class: "tip", hidden: true });
  const share = h("p", { class: "legend", role: "status" });
  const message = h("p", { class: "token-details", role: "status" });
  const legend = h("div", { class: "legend" }, spans.kinds().map(([kind, colour]) => h("span", {}, swatch(colour), kind)));
  const box = h("div", { class: "timeline" }, canvas, tip);
  let lanes = []; // {name, top, height, rows} of the drawing
  let pending = 0;
  let pointed = null;

  let width = 80; // of the lanes, in pixels
  let scale = 1; // pixels per second
  const toX = (moment) => LABELS + (moment - view.start) * scale;
  const toMoment = (x) => view.start + (x - LABELS) / scale;

  function show(start, end) {
    const whole = Math.max(spans.end - spans.start, SHORTEST_S);
    const length = Math.min(Math.max(end - start, SHORTEST_S), 1.1 * whole);
    const low = spans.start - 0.05 * whole;
    view.start = Math.min(Math.max(start, low), spans.end + 0.05 * whole - length);
    view.start = Math.max(view.start, low);
    view.end = view.start + length;
    plan();
  }

  /** Show all, or the rounds at some positions of the list. */
  function showRounds(first, last) {
    const [one, two] = [spans.rounds[first], spans.rounds[last]];
    if (!one) return show(spans.start, spans.end);
    const margin = 0.02 * (two.end - one.start);
    return show(one.start - margin, two.end + margin);
  }

  function zoom(factor, moment = (view.start + view.end) / 2) {
    show(moment - (moment - view.start) * factor, moment + (view.end - moment) * factor);
  }

  function move(part) {
    const distance = part * (view.end - view.start);
    show(view.start + distance, view.end + distance);
  }

  function plan() {
    pending ||= requestAnimationFrame(() => { pending = 0; draw(); });
  }

  function layOut() {
    let top = AXIS;
    const most = Math.max(MOST_LANE / 4, Math.min(MOST_LANE, (2 * MOST_LANE) / spans.lanes.filter(({ rows }) => rows.length > 1).length));
    lanes = spans.lanes.map(({ name, rows }) => {
      const row = rows.length === 1 ? LANE : Math.max(1, Math.min(LANE, most / rows.length));
      const lane = { name, rows, row, top, height: row * rows.length };
      top += lane.height + GAP;
      return lane;
    });
    return top;
  }

  function draw() {
    const height = layOut();
    width = Math.max(80, box.clientWidth - LABELS);
    scale = width / (view.end - view.start);
    const ratio = window.devicePixelRatio || 1;
    const [w, hgt] = [box.clientWidth, height];
    if (canvas.width !== Math.round(w * ratio) || canvas.height !== Math.round(hgt * ratio)) {
      canvas.width = Math.round(w * ratio);
      canvas.height = Math.round(hgt * ratio);
      canvas.style.height = `${hgt}px`;
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, w, hgt);
    pen.font = "11px system-ui";
    pen.textBaseline = "middle";
    drawAxis(pen, hgt);
    for (const lane of lanes) drawLane(pen, lane);
    drawRounds(pen, hgt);
    drawShares();
    const seconds = (moment) => (moment - spans.start).toFixed(4);
    state.from = seconds(view.start);
    state.to = seconds(view.end);
    clearTimeout(draw.timer);
    draw.timer = setTimeout(() => location.hash.startsWith("#/timeline") && remember("timeline", state, DEFAULTS), 300);
  }

  function drawAxis(pen, height) {
    const step = tickStep(90 / scale);
    pen.strokeStyle = ink("--line");
    pen.fillStyle = ink("--quiet");
    pen.textAlign = "left";
    for (let tick = Math.ceil((view.start - spans.start) / step) * step; tick < view.end - spans.start; tick += step) {
      const x = toX(spans.start + tick);
      if (tick < -1e-9 || x < LABELS) continue;
      pen.beginPath();
      pen.moveTo(x, AXIS - 6);
      pen.lineTo(x, height);
      pen.stroke();
      pen.fillText(clock(Math.abs(tick), step), x + 3, AXIS - 10);
    }
  }

  function drawRounds(pen, height) {
    let free = LABELS;
    pen.textAlign = "left";
    for (const round of spans.rounds) {
      const x = toX(round.start);
      if (x > LABELS + width || toX(round.end) < LABELS) continue;
      const text = round.number ? `round ${round.number}` : "start";
      const at = Math.max(x, LABELS);
      if (at < free) continue;
      free = at + pen.measureText(text).width + 10;
      pen.fillStyle = pen.strokeStyle = ink("--mark");
      pen.fillText(text, at + 3, 9);
      if (x < LABELS) continue;
      pen.setLineDash([3, 4]);
      pen.beginPath();
      pen.moveTo(x, 2);
      pen.lineTo(x, height);
      pen.stroke();
      pen.setLineDash([]);
    }
  }

  function drawLane(pen, lane) {
    pen.fillStyle = ink("--panel");
    pen.fillRect(LABELS, lane.top, width, lane.height);
    pen.fillStyle = ink("--ink");
    pen.textAlign = "right";
    pen.fillText(visible(lane.name).slice(0, 16), LABELS - 8, lane.top + Math.min(lane.height / 2, 20));
    pen.save();
    pen.beginPath();
    pen.rect(LABELS, lane.top, width, lane.height);
    pen.clip();
    pen.textAlign = "left";
    for (const [position, row] of lane.rows.entries()) {
      const top = lane.top + position * lane.row;
      const thick = lane.row > 3 ? lane.row - 1 : lane.row;
      Spans.inWindow(row, view.start, view.end, 1 / scale, (span) => drawSpan(pen, span, top, thick));
    }
    pen.restore();
  }

  function drawSpan(pen, span, top, thick) {
    const [left, right] = [toX(span.start), toX(span.end)];
    const wide = Math.max(1, right - left);
    pen.globalAlpha = pointed === span ? 1 : 0.88;
    pen.fillStyle = kindOf(span).colour;
    if (typeof span.prefill === "number" && wide > 3) {
      let moment = span.start;
      for (const { name, colour } of PARTS) {
        pen.fillStyle = colour;
        pen.fillRect(toX(moment), top, Math.max(0.5, toX(moment + span[name]) - toX(moment)), thick);
        moment += span[name];
      }
    } else pen.fillRect(left, top, wide > 3 ? wide - 0.5 : wide, thick);
    if (wide > 30 && thick > 11) {
      const text = span.name === "request" ? `${span.group}` : span.name;
      const from = Math.max(left, LABELS) + 4;
      if (pen.measureText(text).width < right - from - 3) {
        pen.globalAlpha = 1;
        pen.fillStyle = "#ffffff";
        pen.fillText(text, from, top + thick / 2);
      }
    }
    if (pointed === span) {
      pen.strokeStyle = ink("--ink");
      pen.strokeRect(left + 0.5, top + 0.5, Math.max(1, wide - 1), Math.max(1, thick - 1));
    }
    pen.globalAlpha = 1;
  }

  function drawShares() {
    const shares = spans.shares(view.start, view.end);
    const length = Math.min(view.end, spans.end) - Math.max(view.start, spans.start);
    replace(share, h("span", { class: "quiet" }, `Trainer in these ${duration(length)}:`), shares.slice(0, 6).map(([kind, colour, seconds]) =>
      h("span", {}, swatch(colour), `${kind} ${Math.round((100 * seconds) / length)} %`)));
    canvas.setAttribute("aria-label", `Timeline of ${run.name}, ${duration(length)}: ${shares.map(([kind, , seconds]) => `${kind} ${duration(seconds)}`).join(", ")}`);
  }

  function point(event) {
    const { left, top } = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - left, event.clientY - top];
    const lane = x >= LABELS ? lanes.find((one) => y >= one.top && y < one.top + one.height) : null;
    const row = lane?.rows[Math.floor((y - lane.top) / lane.row)];
    const span = row ? Spans.at(row, toMoment(x), 3 / scale) : null;
    if (span !== pointed) {
      pointed = span;
      plan();
    }
    tip.hidden = !span;
    canvas.style.cursor = span && groupOf(span) ? "pointer" : "grab";
    if (!span) return;
    replace(tip, facts(span, spans.start), groupOf(span) ? h("div", { class: "quiet" }, "click: the group of this sample") : null);
    const low = y > canvas.clientHeight / 2;
    tip.style.left = `${Math.min(x + 12, box.clientWidth - 300)}px`;
    tip.style.top = low ? "auto" : `${y + 14}px`;
    tip.style.bottom = low ? `${box.clientHeight - y + 14}px` : "auto";
  }

  /** Return the address of the group of a request, if the run kept its samples. */
  function groupOf(span) {
    if (typeof span.group !== "number") return null;
    const files = context.run(run.id)?.files ?? [];
    const file = files.find((one) => one.round === span.round && (span.dataset ? one.dataset === span.dataset : one.kind === "round"));
    return file ? `#/group/${file.id}/${span.group}` : null;
  }

  function open(span) {
    if (!span) return;
    const address = groupOf(span);
    if (address) context.go(address);
    else if (typeof span.group === "number") replace(message, `The run kept no samples of ${span.dataset ? `${visible(span.dataset)} after ` : ""}round ${span.round}. Set run.keep_samples = true to keep them.`);
  }

  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, start: view.start, end: view.end, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return point(event);
    drag.moved ||= Math.abs(event.clientX - drag.x) > 3;
    if (!drag.moved) return undefined;
    tip.hidden = true;
    const distance = (drag.x - event.clientX) / scale;
    return show(drag.start + distance, drag.end + distance);
  });
  canvas.addEventListener("pointerup", () => {
    if (drag && !drag.moved) open(pointed);
    drag = null;
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; pointed = null; plan(); });
  canvas.addEventListener("dblclick", (event) => zoom(0.25, toMoment(event.offsetX)));
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) move((event.deltaX || event.deltaY) / 1000);
    else zoom(1.0015 ** event.deltaY, toMoment(event.offsetX));
  }, { passive: false });

  /** Show the round before or after the middle of the view. */
  function step(distance) {
    const middle = (view.start + view.end) / 2;
    const current = spans.rounds.findLastIndex((round) => round.start <= middle);
    const next = Math.max(0, Math.min(spans.rounds.length - 1, current + distance));
    showRounds(next, next);
  }

  let reading = false;
  context.listeners.add(async () => {
    if (reading || context.run(run.id)?.timeline_bytes === offset) return;
    reading = true;
    const follows = view.end >= spans.end;
    const length = view.end - view.start;
    if (await read().catch(() => false)) {
      replace(legend, spans.kinds().map(([kind, colour]) => h("span", {}, swatch(colour), kind)));
      follows ? show(spans.end + 0.02 * length - length, spans.end + 0.02 * length) : plan();
    }
    reading = false;
  });
  const resized = new ResizeObserver(plan);
  const button = (title, label, action) => h("button", { type: "button", class: "small", "aria-label": label, onclick: action }, title);
  const tools = h("div", { class: "bar-tools" },
    runs.length > 1 ? h("label", {}, "run ", select("run", runs.map((one) => [context.keyOf(one), visible(one.name)]), state.run, (key) => context.go(`#/timeline?run=${encodeURIComponent(key)}`))) : null,
    button("+", "zoom in", () => zoom(0.5)), button("−", "zoom out", () => zoom(2)), button("all", "show all rounds", () => show(spans.start, spans.end)),
    h("span", { class: "quiet" }, "wheel: zoom · drag: move · ← → rounds · click a request: its group"));
  return {
    title: "Timeline",
    element: h("div", {}, h("h2", {}, "Timeline", h("small", { class: "quiet" }, ` ${visible(run.name)}`)), tools, legend, share, box, message),
    shown: () => {
      if (state.to !== "" && Number(state.to) > Number(state.from)) show(spans.start + Number(state.from), spans.start + Number(state.to));
      else showRounds(Math.max(0, spans.rounds.length - FIRST_ROUNDS), spans.rounds.length - 1);
      resized.observe(box);
    },
    next: () => step(1), previous: () => step(-1),
    keys: { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => show(spans.start, spans.end), a: () => move(-0.25), d: () => move(0.25), w: () => zoom(0.7), s: () => zoom(1.4) },
    close: () => { resized.disconnect(); clearTimeout(draw.timer); cancelAnimationFrame(pending); },
  };
}
