// Spans of a timeline: lanes in order, rows without overlap, and what is at a point or in a window of time.

const ORDER = ["trainer", "rank", "weights", "checkpoints", "generation", "grading", "engine", "tools", "evaluation"];
const KINDS = [
  ["waiting", "#9aa4b1", ["wait", "queue", "pause"]],
  ["generation", "#4c7fe0", ["generate", "request", "decode"]],
  ["prefill", "#8fb0f2", ["prefill"]],
  ["grading, tools", "#e0952b", ["reward", "tool"]],
  ["training", "#3f9d57", ["actor_train", "critic_train", "forward_backward", "optim_step"]],
  ["log-probabilities, values", "#3aa6a6", ["log_probs", "ref_log_probs", "teacher_log_probs", "top_log_probs", "values"]],
  ["data", "#b5a36a", ["data_preprocess", "advantages", "train_data"]],
  ["weights", "#9a5fd0", ["update_weights", "transfer", "resume", "weights", "consume_weights", "consume_adapter"]],
  ["loading, moving", "#7d6b9e", ["load", "engine_onload", "engine_offload", "sleep"]],
  ["checkpoints", "#a0694b", ["save_model", "save", "save_in_background"]],
];
const BY_NAME = new Map(KINDS.flatMap(([kind, colour, names]) => names.map((name) => [name, { kind, colour }])));
const EVALUATION = { kind: "evaluation", colour: "#d65a9b" };
const OTHER = { kind: "other", colour: "#6b7785" };

/** Return the kind and the colour of a span, by its name. The names in the lane of evaluations are datasets. */
export function kindOf(span) {
  if (span.lane === "evaluation" || span.name === "eval") return EVALUATION;
  return BY_NAME.get(span.name) ?? OTHER;
}

export const PARTS = ["queue", "prefill", "decode"].map((name) => ({ name, ...BY_NAME.get(name) }));

function rank(lane) {
  const [name, number] = lane.split("/");
  const at = ORDER.indexOf(name);
  return (at < 0 ? ORDER.length : at) * 1e6 + (Number(number) || 0);
}

/** Return the position of the first span of a row whose end is after a moment. */
function firstAfter(row, moment, low = 0) {
  let high = row.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (row[middle].end > moment) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** The spans of a run by lane. Spans of a lane that overlap are in different rows. */
export class Spans {
  constructor() {
    this.all = [];
    this.lanes = []; // {name, rows: [[span, …], …]}
    this.rounds = []; // {number, start, end}: from the first span of the trainer in a round to the last
  }

  get start() { return this.all.length ? this.first : 0; }

  add(spans) {
    if (!spans.length) return;
    this.all.push(...spans.map((span) => ({ ...span, end: Math.max(span.start, span.end) })));
    this.all.sort((one, two) => one.start - two.start);
    this.first = this.all[0].start;
    this.end = this.all.reduce((last, span) => Math.max(last, span.end), 0);
    const lanes = new Map();
    const rounds = new Map();
    for (const span of this.all) {
      if (!lanes.has(span.lane)) lanes.set(span.lane, { name: span.lane, rows: [] });
      const { rows } = lanes.get(span.lane);
      const row = rows.find((candidates) => candidates.at(-1).end <= span.start + 2e-6); // times are rounded to microseconds
      row ? row.push(span) : rows.push([span]);
      if (span.lane !== "trainer" || span.name === "load" || typeof span.round !== "number") continue;
      const round = rounds.get(span.round);
      round ? round.end = Math.max(round.end, span.end) : rounds.set(span.round, { number: span.round, start: span.start, end: span.end });
    }
    this.lanes = [...lanes.values()].sort((one, two) => rank(one.name) - rank(two.name));
    this.rounds = [...rounds.values()].sort((one, two) => one.start - two.start);
  }

  /** Call `draw` with the spans of a row in a window of time. Of spans closer together than `width` seconds, only one is drawn. */
  static inWindow(row, start, end, width, draw) {
    for (let at = firstAfter(row, start); at < row.length && row[at].start < end;) {
      draw(row[at]);
      at = row[at].end - row[at].start < width ? firstAfter(row, row[at].end + width, at + 1) : at + 1;
    }
  }

  /** Return the span of a row at a moment, or the nearest one within `reach` seconds. */
  static at(row, moment, reach) {
    const at = firstAfter(row, moment - reach);
    const near = [row[at], row[at + 1]].filter((span) => span && span.start - reach <= moment);
    const distance = (span) => Math.max(span.start - moment, moment - span.end, 0);
    return near.sort((one, two) => distance(one) - distance(two))[0] ?? null;
  }

  /** Return [kind, colour, seconds] of the trainer in a window of time, the longest first. */
  shares(start, end) {
    const seconds = new Map();
    const row = this.lanes.find(({ name }) => name === "trainer")?.rows[0] ?? [];
    for (let at = firstAfter(row, start); at < row.length && row[at].start < end; at += 1) {
      const { kind, colour } = kindOf(row[at]);
      const before = seconds.get(kind)?.[2] ?? 0;
      seconds.set(kind, [kind, colour, before + Math.min(end, row[at].end) - Math.max(start, row[at].start)]);
    }
    return [...seconds.values()].sort((one, two) => two[2] - one[2]);
  }

  /** Return the kinds of all spans as [kind, colour], in the order of the legend. */
  kinds() {
    const present = new Map(this.all.map((span) => { const { kind, colour } = kindOf(span); return [kind, colour]; }));
    if (this.all.some((span) => "prefill" in span)) for (const part of PARTS) present.set(part.kind, part.colour);
    return [...KINDS, [EVALUATION.kind, EVALUATION.colour], [OTHER.kind, OTHER.colour]].filter(([kind]) => present.has(kind));
  }
}
