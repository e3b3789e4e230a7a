// A server that shows runs goes in; their list and their curves come out, and grow while the runs do.

import { Chart, written } from "./curves.js";
import { counted, find, make, mend, percent } from "./elements.js";
import * as server from "./server.js";

const EVERY = 2000;
const COLOURS = 6;
// What is known of the usual numbers; each other one gets a chart of its own below.
const USUAL = [["Loss", "loss"], ["Accuracy", "top1"], ["Learning rate", "lr"]];
const NO_CURVES = new Set(["step", "epoch", ...USUAL.map(([, key]) => key)]);

const logs = new Map(); // name → {records, keys, state, summary, colour}
const charts = new Map();
const rest = make("details", { class: "more" }, make("summary", {}, "More curves"));
let listed = [];
let showing = false;
let timer = 0;
let touched = false; // the user has chosen which runs to see

export function showTraining(on) {
  if (on === showing) return; // the way back from the skip link leads to what is shown already
  showing = on;
  clearTimeout(timer);
  if (on) poll();
}

for (const id of ["smooth", "logarithmic"]) find(id).addEventListener("change", () => plot());
document.addEventListener("visibilitychange", () => { if (showing && !document.hidden) poll(); });

async function poll() {
  clearTimeout(timer);
  let wait = EVERY;
  try {
    const answer = await server.runs();
    listed = answer.runs;
    for (const name of logs.keys()) if (!listed.some((run) => run.name === name)) logs.delete(name);
    if (!touched && !logs.size && listed.length) {
      choose((listed.find((run) => run.state === "running") ?? listed[0]).name, true);
    }
    note(remark(answer));
    list(answer.now);
    await Promise.all([...logs.keys()].map(follow));
    plot();
  } catch (error) {
    note(`${error.message} ${error.hint ?? ""}`);
    wait = error.status === 404 || error.status === 401 ? 0 : 2 * EVERY;
  }
  clearTimeout(timer);
  if (wait && showing && !document.hidden) timer = setTimeout(poll, wait);
}

function remark({ left_out: older }) {
  if (!listed.length) return "There are no runs in this folder yet. One appears here as soon as it begins.";
  return older ? `These are the ${listed.length} latest runs; ${older} older ones are left out.` : "";
}

function note(text) {
  find("training-note").hidden = !text;
  if (find("training-note").textContent !== text) find("training-note").textContent = text;
  document.querySelector(".training").hidden = !listed.length;
}

// What a run has logged since; whoever asks while that is on its way waits for the same answer.
async function follow(name) {
  const log = logs.get(name);
  const current = listed.find((run) => run.name === name);
  if (!log || !current || (log.state === "done" && current.state === "done" && log.whole)) return;
  log.coming ??= grow(name, log).finally(() => { log.coming = null; });
  try {
    await log.coming;
  } catch (error) {
    if (error.status !== 404) throw error; // a run that was removed just now is no longer in the next list
  }
}

// Ask only for what is new. The last step is asked for again, because its evaluation is logged later than its loss.
async function grow(name, log) {
  for (;;) {
    const last = log.records.at(-1)?.step ?? 0;
    const answer = await server.run(name, log.records.length ? last - 1 : -1);
    const had = log.records.find((record) => record.step === last);
    const has = answer.records.find((record) => record.step === last);
    if (had && JSON.stringify(had) !== JSON.stringify(has)) { // another run, or one that went back
      log.records = [];
      log.keys.clear();
      continue;
    }
    log.records = log.records.filter((record) => record.step < last).concat(answer.records);
    for (const [key, found] of answer.records.flatMap(Object.entries)) {
      if (Number.isFinite(value(found))) log.keys.add(key);
    }
    const { state, summary, steps, damaged, more } = answer;
    Object.assign(log, { state, summary, steps, damaged, whole: !more });
    if (!more || answer.records.length < 2) return;
  }
}

function choose(name, on) {
  if (!on) {
    logs.delete(name);
    return;
  }
  const taken = new Set([...logs.values()].map((log) => log.colour));
  const free = Array.from({ length: COLOURS }, (_, colour) => colour).find((colour) => !taken.has(colour));
  const colour = free ?? logs.size % COLOURS;
  logs.set(name, { records: [], keys: new Set(), state: "", summary: null, colour, coming: null });
}

function ago(seconds) {
  if (seconds < 5) return "just now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h ago`;
  return `${counted(Math.round(seconds / 86400), "day")} ago`;
}

// The list is mended rather than made anew, so that the focus stays where it is. A new run comes in at its place.
function list(now) {
  const place = find("runs");
  const rows = new Map([...place.children].map((row) => [row.dataset.name, row]));
  for (const [name, row] of rows) if (!listed.some((run) => run.name === name)) row.remove();
  listed.forEach((run, at) => {
    const row = rows.get(run.name) ?? place.insertBefore(entry(run.name), place.children[at] ?? null);
    mark(row, run.name);
    row.querySelector(".run-state").textContent = run.state;
    row.querySelector(".run-state").dataset.state = run.state;
    const step = run.step.toLocaleString("en");
    const far = run.steps ? `step ${step} of ${run.steps.toLocaleString("en")}` : `step ${step}`;
    row.querySelector(".step").textContent = `${far} · ${ago(now - run.updated)}`;
    const share = run.steps ? Math.min(run.step / run.steps, 1) : 0;
    row.querySelector(".fill").style.width = `${100 * (run.state === "done" ? 1 : share)}%`;
  });
}

// A run that is shown has the colour of its curves.
function mark(row, name) {
  row.querySelector("input").checked = logs.has(name);
  row.className = logs.has(name) ? `s${logs.get(name).colour}` : "";
}

function entry(name) {
  const box = make("input", { type: "checkbox" });
  const row = make("li", { "data-name": name },
    make("label", {}, box, make("span", { class: "run-name" }, name)),
    make("p", { class: "far" }, make("span", { class: "run-state" }), " · ", make("span", { class: "step" })),
    make("span", { class: "rail", "aria-hidden": "true" }, make("span", { class: "fill" })));
  box.addEventListener("change", async () => {
    touched = true;
    choose(name, box.checked);
    mark(row, name);
    try {
      await follow(name);
    } catch (error) {
      note(`${error.message} ${error.hint ?? ""}`);
    }
    plot();
  });
  return row;
}

// What is no number in JSON is logged as a text.
const value = (found) => (typeof found === "string" ? Number(found.replace("inf", "Infinity")) : found);

function series(key) {
  const found = [];
  for (const [name, { records, colour }] of logs) {
    for (const held of [false, true]) {
      const field = held ? `val_${key}` : key;
      const points = records.filter((record) => field in record).map((record) => [record.step, value(record[field])]);
      if (!points.length) continue;
      const [steps, values] = [0, 1].map((place) => points.map((point) => point[place]));
      found.push({ name, held, colour, steps, values });
    }
  }
  return found;
}

// The names of all other numbers that were logged.
function others() {
  const keys = [...logs.values()].flatMap((log) => [...log.keys]).map((key) => key.replace(/^val_/, ""));
  return [...new Set(keys)].filter((key) => !NO_CURVES.has(key)).sort();
}

// A run that goes on is drawn as far as it will go.
function lastStep() {
  const ends = [...logs.values()].map(({ records, state, steps }) =>
    Math.max(records.at(-1)?.step ?? 0, state === "running" ? steps ?? 0 : 0));
  return Math.max(1, ...ends);
}

function chart(title, key, place) {
  if (!charts.has(key)) {
    const made = new Chart(title, { share: /^top\d+$/.test(key) });
    made.told = (step) => { for (const other of charts.values()) if (other !== made) other.read(step, false); };
    charts.set(key, made);
    place.append(made.element);
  }
  return charts.get(key);
}

function plot() {
  const [smooth, logarithmic, last] = [find("smooth").checked, find("logarithmic").checked, lastStep()];
  const more = others();
  const wanted = [...USUAL, ...more.map((key) => [key.replaceAll("_", " "), key])];
  for (const [title, key] of wanted) {
    const how = { last, smooth: smooth && key !== "lr", logarithmic: logarithmic && key.endsWith("loss") };
    chart(title, key, more.includes(key) ? rest : find("charts")).set(series(key), how);
  }
  for (const [key, gone] of charts) if (!wanted.some(([, each]) => each === key)) gone.set([], { last });
  if (!rest.isConnected) find("charts").after(rest);
  rest.hidden = !more.length;
  find("charts").parentElement.classList.toggle("several", logs.size > 1);
  latest();
}

// The last numbers as a table: the curves for those who do not see them, and the result where there is one. It stays
// where it is while the numbers change, and with it the focus, how far it is scrolled, and a screen reader's place.
const HEADS = ["Run", "Loss", "held out", "Accuracy", "held out", "Judged"];
const numbers = make("tbody");
const table = make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "The last numbers" },
  make("table", {},
    make("thead", {}, make("tr", {}, HEADS.map((text) => make("th", { scope: "col" }, text)))), numbers));
const none = make("p", { class: "small", hidden: true }, "Choose a run to see its curves.");
const unread = make("p", { class: "small warning", hidden: true });

function latest() {
  if (!table.isConnected) find("latest").append(none, table, unread);
  while (numbers.children.length < logs.size) numbers.append(make("tr"));
  while (numbers.children.length > logs.size) numbers.lastElementChild.remove();
  [...logs].forEach(([name, log], at) => mend(numbers.children[at], cells(name, log)));
  table.hidden = !logs.size;
  none.hidden = Boolean(logs.size);
  const damaged = [...logs.values()].reduce((sum, log) => sum + (log.damaged ?? 0), 0);
  unread.hidden = !damaged;
  unread.textContent = `${counted(damaged, "line")} of the logs could not be read.`;
}

function cells(name, { records, summary, colour }) {
  const last = (field, share) => {
    const found = value(records.findLast((record) => field in record)?.[field]);
    return found === undefined ? "–" : written(found, { share });
  };
  const judged = summary?.result?.top1;
  const texts = [last("loss"), last("val_loss"), last("top1", true), last("val_top1", true),
    typeof judged === "number" ? percent(judged) : "–"];
  return [make("th", { scope: "row" }, make("i", { class: `s${colour}` }), name),
    ...texts.map((text) => make("td", {}, text))];
}
