// Prompt over time: one prompt in every round and evaluation that has it.

import { ask } from "./api.js";
import { lineChart, colour, swatch } from "./charts.js";
import { h, labelText, link, number, promptBlock, replace, rewardClass, textBlock, visible } from "./dom.js";

const AGAIN_MS = 700;

export async function promptPage(context, [run, hash]) {
  const chart = h("div");
  const legend = h("p", { class: "legend" });
  const list = h("div");
  const status = h("p", { class: "quiet", role: "status" });
  let answer = null;
  let timer = null;
  let closeChart = () => {};

  async function load() {
    clearTimeout(timer);
    answer = await ask("prompt", { run, hash });
    replace(status, answer.complete ? `in ${answer.appearances.length} rounds and evaluations` : "reading files…");
    replace(list, answer.appearances.map((appearance) => appearanceRow(appearance)));
    if (!answer.complete) timer = setTimeout(() => load().then(draw), AGAIN_MS);
  }

  function draw() {
    closeChart();
    const points = (kind) => answer.appearances.filter((one) => one.file.kind === kind && one.mean !== null).map((one, at) => [one.file.round ?? at, one.mean]);
    const series = ["evaluation", "round", "samples"].map((kind, at) => ({ label: kind, points: points(kind), colour: colour(at), dots: true })).filter((line) => line.points.length);
    replace(legend, series.map((line) => h("span", {}, swatch(line.colour), line.label)));
    if (series.some((line) => line.points.length > 1)) closeChart = lineChart(chart, series, { title: "mean reward of this prompt", xLabel: "round" });
  }

  context.listeners.add(() => load().then(draw));
  await load();
  return {
    title: "prompt over time",
    element: h("div", {}, h("h2", {}, "Prompt over time"), promptBlock(answer.prompt ?? ""), h("p", {}, "label: ", h("b", {}, labelText(answer.label))), status, h("h3", {}, "Mean reward of this prompt"), legend, chart, list),
    shown: draw,
    close: () => { clearTimeout(timer); closeChart(); },
  };
}

function appearanceRow(appearance) {
  const { file } = appearance;
  return h("article", { class: "answer", "data-item": true }, h("header", {}, link(`#/group/${file.id}/${appearance.group}`, visible(file.title)), " ",
    appearance.rewards.map((reward, at) => h("a", { class: `cell ${rewardClass(reward, appearance.rewards)}`, href: `#/sample/${file.id}/${appearance.rows[at]}`, "aria-label": `reward ${number(reward)}` }, number(reward, 2))),
    h("span", { class: "quiet" }, ` mean ${number(appearance.mean, 3)} · ${number(appearance.length, 3)} tokens`)),
    h("div", { class: "row" }, appearance.answers.slice(0, 4).map((answer) => textBlock(answer.response.slice(0, 2000)))));
}
