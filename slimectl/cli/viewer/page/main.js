// Navigation: pages by address, tabs, keys, theme, and the catalogue, which is refreshed while runs are active.

import { ask, Failure, offline } from "./api.js";
import { h, replace, error } from "./dom.js";
import { curvesPage } from "./curves.js";
import { roundPage } from "./round.js";
import { groupPage } from "./group.js";
import { samplePage } from "./sample.js";
import { promptPage } from "./prompt.js";
import { comparePage } from "./compare.js";
import { runsPage } from "./runs.js";
import { timelinePage } from "./timeline.js";

const PAGES = { runs: runsPage, curves: curvesPage, timeline: timelinePage, round: roundPage, group: groupPage, sample: samplePage, prompt: promptPage, compare: comparePage };
const LIVE_MS = 2000;
const IDLE_MS = 15000;
const KEYS = [["j, k", "next, previous item"], ["Enter", "open item"], ["Backspace, u", "back"], ["← →", "previous, next round, group or sample"],
  ["/", "search"], ["f", "filter"], ["1 … 9", "colour tokens by a value"], ["l c r p m", "list of runs, curves, rounds, compare, timeline"], ["+ − 0, a d", "timeline: zoom, show all, move"], ["t", "light or dark theme"], ["?", "show these keys"]];

const content = document.getElementById("content");
const context = { catalogue: null, listeners: new Set(), selection: [], go: (address) => { location.hash = address; } };
let close = () => {};
let page = {};
let visits = 0;

/** Return all files of the catalogue: rounds and evaluations of runs, then files given by path. */
context.files = () => [...context.catalogue.runs.flatMap((run) => run.files), ...context.catalogue.files];
context.file = (id) => context.files().find((file) => file.id === id);
context.run = (id) => context.catalogue.runs.find((run) => run.id === id);
/** Return the key of a run in addresses: its name, or its identifier if several runs have the name. */
context.keyOf = (run) => (context.catalogue.runs.filter(({ name }) => name === run.name).length > 1 ? run.id : run.name);
context.runOf = (key) => context.catalogue.runs.find((run) => context.keyOf(run) === key);
context.fileTitle = (file) => {
  const run = file.run && context.catalogue.runs.length > 1 ? `${context.run(file.run).name} · ` : "";
  return run + file.title;
};

function firstPage() {
  if (context.catalogue.runs.length) return context.catalogue.runs.length > 1 ? "#/runs" : "#/curves";
  const [file] = context.files();
  return file ? `#/round/${file.id}` : "#/curves";
}

async function show() {
  close();
  context.listeners.clear();
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...parts] = path.split("/").map(decodeURIComponent);
  if (!(name in PAGES)) {
    history.replaceState(null, "", firstPage());
    return show();
  }
  showTabs(name);
  replace(content, h("p", { class: "quiet" }, "Loading…"));
  close = () => {};
  const visit = ++visits;
  document.title = `${name} – slimectl view`;
  try {
    const next = await PAGES[name](context, parts, new URLSearchParams(query));
    if (visit !== visits) return next.close?.();
    page = next;
    replace(content, page.element);
    if (page.next) page.element.querySelector("h2").append(h("span", { class: "steps" }, [["previous", "← previous"], ["next", "next →"]].map(([way, title]) =>
      h("button", { type: "button", class: "small", "aria-label": way, onclick: () => page[way]() }, title))));
    page.shown?.();
    close = page.close ?? (() => {});
    document.title = `${page.title ?? name} – slimectl view`;
  } catch (failure) {
    if (!(failure instanceof Failure)) throw failure;
    if (visit === visits) replace(content, error(failure.message));
  }
  scrollTo(0, 0);
  return undefined;
}

function showTabs(name) {
  const rounds = context.files();
  const tabs = [["runs", "Runs", context.catalogue.runs.length > 1], ["curves", "Curves", context.catalogue.runs.length], ["round", "Rounds", rounds.length],
    ["timeline", "Timeline", context.catalogue.runs.some((run) => run.timeline_bytes)], ["compare", "Compare", rounds.length > 1]];
  const active = { group: "round", sample: "round", prompt: "round" }[name] ?? name;
  replace(document.getElementById("tabs"), tabs.filter(([, , there]) => there).map(([tab, title]) =>
    h("a", { href: `#/${tab}`, "aria-current": tab === active ? "page" : null }, title)));
}

function showState() {
  const running = context.catalogue.runs.filter((run) => run.state === "running");
  const text = running.length ? `live: ${running.map((run) => run.name).join(", ")}` : offline ? "saved copy" : "";
  replace(document.getElementById("state"), running.length ? h("i", { class: "dot" }) : null, text);
}

async function refresh() {
  let live = false;
  if (!document.hidden) {
    try {
      const before = JSON.stringify(context.catalogue);
      context.catalogue = await ask("catalogue");
      live = context.catalogue.runs.some((run) => run.state === "running");
      showState();
      if (JSON.stringify(context.catalogue) !== before) for (const listener of context.listeners) listener();
    } catch (failure) {
      replace(document.getElementById("state"), h("i", { class: "dot lost" }), "the server has stopped");
    }
  }
  setTimeout(refresh, live ? LIVE_MS : IDLE_MS);
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  try { localStorage.setItem("theme", name); } catch { /* without storage, the theme is not kept */ }
}

function switchTheme() {
  const dark = document.documentElement.dataset.theme === "dark"
    || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  theme(dark ? "light" : "dark");
  show();
}

/** Move the selection among the elements with data-item. */
function move(distance) {
  const items = [...content.querySelectorAll("[data-item]")];
  if (!items.length) return;
  const current = items.findIndex((item) => item.classList.contains("selected"));
  const next = Math.max(0, Math.min(items.length - 1, current + distance));
  items[current]?.classList.remove("selected");
  items[next].classList.add("selected");
  items[next].scrollIntoView({ block: "nearest" });
  (items[next].querySelector("a") ?? items[next]).focus({ preventScroll: true });
}

function key(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.matches?.("input, select, textarea");
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const actions = {
    j: () => move(1), ArrowDown: () => move(1), k: () => move(-1), ArrowUp: () => move(-1),
    Backspace: () => history.back(), u: () => history.back(), Escape: () => history.back(),
    "/": () => content.querySelector("[data-search]")?.focus(), f: () => content.querySelector("[data-filter]")?.focus(),
    l: () => context.go("#/runs"), c: () => context.go("#/curves"), r: () => context.go("#/round"), p: () => context.go("#/compare"), m: () => context.go("#/timeline"), t: switchTheme, "?": showKeys,
    ArrowRight: () => page.next?.(), ArrowLeft: () => page.previous?.(),
  };
  const action = page.keys?.[event.key] ?? actions[event.key] ?? (/^[1-9]$/.test(event.key) && page.mode ? () => page.mode(Number(event.key) - 1) : null);
  if (action && !document.getElementById("keys").open) {
    event.preventDefault();
    action();
  }
}

function showKeys() {
  const dialog = document.getElementById("keys");
  replace(dialog, h("h2", {}, "Keyboard shortcuts"), h("dl", {}, KEYS.map(([name, meaning]) => [h("dt", {}, name), h("dd", {}, meaning)])),
    h("button", { type: "button", onclick: () => dialog.close() }, "close"));
  dialog.showModal();
}

async function start() {
  try { if (localStorage.getItem("theme")) theme(localStorage.getItem("theme")); } catch { /* no storage */ }
  document.getElementById("theme").addEventListener("click", switchTheme);
  document.getElementById("help").addEventListener("click", showKeys);
  document.addEventListener("keydown", key);
  window.addEventListener("hashchange", show);
  try {
    context.catalogue = await ask("catalogue");
  } catch (failure) {
    replace(content, error(failure.message));
    return;
  }
  showState();
  await show();
  if (!offline) setTimeout(refresh, LIVE_MS);
}

start();
