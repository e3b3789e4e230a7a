// Training view: the list of runs and their curves, polled while the runs progress.

import * as api from "./api.js";
import { Chart, formatValue } from "./chart.js";
import { byId, create, formatPercent, pluralize, reconcile } from "./dom.js";

const POLL_MS = 2000;
const COLORS = 6;
// Every other logged metric gets a chart of its own below these.
const MAIN_CHARTS = [["Loss", "loss"], ["Accuracy", "top1"], ["Learning rate", "lr"]];
const NOT_PLOTTED = new Set(["step", "epoch", ...MAIN_CHARTS.map(([, key]) => key)]);

const logs = new Map(); // name → {records, keys, state, summary, color}
const charts = new Map();
const moreCharts = create("details", { class: "more" }, create("summary", {}, "More curves"));
let runs = [];
let visible = false;
let timer = 0;
let userSelected = false; // the user has selected runs

export function showTraining(on) {
  if (on === visible) return; // returning from the skip link must not poll again
  visible = on;
  clearTimeout(timer);
  if (on) poll();
}

for (const id of ["smooth", "logarithmic"]) byId(id).addEventListener("change", () => plot());
document.addEventListener("visibilitychange", () => { if (visible && !document.hidden) poll(); });

async function poll() {
  clearTimeout(timer);
  let wait = POLL_MS;
  try {
    const response = await api.listRuns();
    runs = response.runs;
    for (const name of logs.keys()) if (!runs.some((run) => run.name === name)) logs.delete(name);
    if (!userSelected && !logs.size && runs.length) {
      selectRun((runs.find((run) => run.state === "running") ?? runs[0]).name, true);
    }
    showNote(describeList(response));
    updateList(response.now);
    await Promise.all([...logs.keys()].map(refresh));
    plot();
  } catch (error) {
    showNote(`${error.message} ${error.hint ?? ""}`);
    wait = error.status === 404 || error.status === 401 ? 0 : 2 * POLL_MS;
  }
  clearTimeout(timer);
  if (wait && visible && !document.hidden) timer = setTimeout(poll, wait);
}

function describeList({ left_out: older }) {
  if (!runs.length) return "There are no runs in this directory yet. A run appears here when it starts.";
  return older ? `Showing the ${runs.length} latest runs; ${older} older ones are not listed.` : "";
}

function showNote(text) {
  byId("training-note").hidden = !text;
  if (byId("training-note").textContent !== text) byId("training-note").textContent = text;
  document.querySelector(".training").hidden = !runs.length;
}

// Load new records of a run; concurrent callers share one request.
async function refresh(name) {
  const log = logs.get(name);
  const current = runs.find((run) => run.name === name);
  if (!log || !current || (log.state === "done" && current.state === "done" && log.complete)) return;
  log.pending ??= loadRecords(name, log).finally(() => { log.pending = null; });
  try {
    await log.pending;
  } catch (error) {
    if (error.status !== 404) throw error; // the run was removed; it is not in the next list
  }
}

// Request new records only, and the last step again, because its evaluation is logged after its loss.
async function loadRecords(name, log) {
  for (;;) {
    const last = log.records.at(-1)?.step ?? 0;
    const response = await api.getRun(name, log.records.length ? last - 1 : -1);
    const previous = log.records.find((record) => record.step === last);
    const current = response.records.find((record) => record.step === last);
    if (previous && JSON.stringify(previous) !== JSON.stringify(current)) { // replaced by another run, or rolled back
      log.records = [];
      log.keys.clear();
      continue;
    }
    log.records = log.records.filter((record) => record.step < last).concat(response.records);
    for (const [key, logged] of response.records.flatMap(Object.entries)) {
      if (Number.isFinite(parseNumber(logged))) log.keys.add(key);
    }
    const { state, summary, steps, damaged, more } = response;
    Object.assign(log, { state, summary, steps, damaged, complete: !more });
    if (!more || response.records.length < 2) return;
  }
}

function selectRun(name, on) {
  if (!on) {
    logs.delete(name);
    return;
  }
  const taken = new Set([...logs.values()].map((log) => log.color));
  const free = Array.from({ length: COLORS }, (_, color) => color).find((color) => !taken.has(color));
  const color = free ?? logs.size % COLORS;
  logs.set(name, { records: [], keys: new Set(), state: "", summary: null, color, pending: null });
}

function formatAge(seconds) {
  if (seconds < 5) return "just now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h ago`;
  return `${pluralize(Math.round(seconds / 86400), "day")} ago`;
}

// Update the list in place, so that the focus is kept.
function updateList(now) {
  const container = byId("runs");
  const rows = new Map([...container.children].map((row) => [row.dataset.name, row]));
  for (const [name, row] of rows) if (!runs.some((run) => run.name === name)) row.remove();
  runs.forEach((run, index) => {
    const row = rows.get(run.name) ?? container.insertBefore(createRow(run.name), container.children[index] ?? null);
    updateRow(row, run.name);
    row.querySelector(".run-state").textContent = run.state;
    row.querySelector(".run-state").dataset.state = run.state;
    const step = run.step.toLocaleString("en");
    const progress = run.steps ? `step ${step} of ${run.steps.toLocaleString("en")}` : `step ${step}`;
    row.querySelector(".step").textContent = `${progress} · ${formatAge(now - run.updated)}`;
    const fraction = run.steps ? Math.min(run.step / run.steps, 1) : 0;
    row.querySelector(".fill").style.width = `${100 * (run.state === "done" ? 1 : fraction)}%`;
  });
}

// A selected run has the color of its curves.
function updateRow(row, name) {
  row.querySelector("input").checked = logs.has(name);
  row.className = logs.has(name) ? `s${logs.get(name).color}` : "";
}

function createRow(name) {
  const box = create("input", { type: "checkbox" });
  const row = create("li", { "data-name": name },
    create("label", {}, box, create("span", { class: "run-name" }, name)),
    create("p", { class: "progress" }, create("span", { class: "run-state" }), " · ", create("span", { class: "step" })),
    create("span", { class: "track", "aria-hidden": "true" }, create("span", { class: "fill" })));
  box.addEventListener("change", async () => {
    userSelected = true;
    selectRun(name, box.checked);
    updateRow(row, name);
    try {
      await refresh(name);
    } catch (error) {
      showNote(`${error.message} ${error.hint ?? ""}`);
    }
    plot();
  });
  return row;
}

// Parse a logged value: non-finite numbers are logged as strings.
const parseNumber = (logged) => (typeof logged === "string" ? Number(logged.replace("inf", "Infinity")) : logged);

function getSeries(key) {
  const result = [];
  for (const [name, { records, color }] of logs) {
    for (const validation of [false, true]) {
      const field = validation ? `val_${key}` : key;
      const points = records.filter((record) => field in record).map((record) => [record.step, parseNumber(record[field])]);
      if (!points.length) continue;
      const [steps, values] = [0, 1].map((axis) => points.map((point) => point[axis]));
      result.push({ name, validation, color, steps, values });
    }
  }
  return result;
}

// Return the names of all other logged metrics.
function otherKeys() {
  const keys = [...logs.values()].flatMap((log) => [...log.keys]).map((key) => key.replace(/^val_/, ""));
  return [...new Set(keys)].filter((key) => !NOT_PLOTTED.has(key)).sort();
}

// The x axis extends to the last planned step of running runs.
function lastStep() {
  const ends = [...logs.values()].map(({ records, state, steps }) =>
    Math.max(records.at(-1)?.step ?? 0, state === "running" ? steps ?? 0 : 0));
  return Math.max(1, ...ends);
}

function getChart(title, key, container) {
  if (!charts.has(key)) {
    const created = new Chart(title, { fraction: /^top\d+$/.test(key) });
    created.onRead = (step) => { for (const other of charts.values()) if (other !== created) other.read(step, false); };
    charts.set(key, created);
    container.append(created.element);
  }
  return charts.get(key);
}

function plot() {
  const [smooth, logarithmic, last] = [byId("smooth").checked, byId("logarithmic").checked, lastStep()];
  const more = otherKeys();
  const shown = [...MAIN_CHARTS, ...more.map((key) => [key.replaceAll("_", " "), key])];
  for (const [title, key] of shown) {
    const options = { last, smooth: smooth && key !== "lr", logarithmic: logarithmic && key.endsWith("loss") };
    getChart(title, key, more.includes(key) ? moreCharts : byId("charts")).set(getSeries(key), options);
  }
  for (const [key, unused] of charts) if (!shown.some(([, each]) => each === key)) unused.set([], { last });
  if (!moreCharts.isConnected) byId("charts").after(moreCharts);
  moreCharts.hidden = !more.length;
  byId("charts").parentElement.classList.toggle("several", logs.size > 1);
  updateTable();
}

// Table of the latest values: accessible alternative to the curves, with the final result. It is updated in place, so
// that focus, scroll position and the screen reader's cursor are kept.
const HEADERS = ["Run", "Loss", "validation", "Accuracy", "validation", "Final"];
const tableBody = create("tbody");
const table = create("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Latest values" },
  create("table", {},
    create("thead", {}, create("tr", {}, HEADERS.map((text) => create("th", { scope: "col" }, text)))), tableBody));
const emptyNote = create("p", { class: "small", hidden: true }, "Select a run to see its curves.");
const damagedNote = create("p", { class: "small warning", hidden: true });

function updateTable() {
  if (!table.isConnected) byId("latest").append(emptyNote, table, damagedNote);
  while (tableBody.children.length < logs.size) tableBody.append(create("tr"));
  while (tableBody.children.length > logs.size) tableBody.lastElementChild.remove();
  [...logs].forEach(([name, log], index) => reconcile(tableBody.children[index], createCells(name, log)));
  table.hidden = !logs.size;
  emptyNote.hidden = Boolean(logs.size);
  const damaged = [...logs.values()].reduce((sum, log) => sum + (log.damaged ?? 0), 0);
  damagedNote.hidden = !damaged;
  damagedNote.textContent = `${pluralize(damaged, "line")} of the logs could not be parsed.`;
}

function createCells(name, { records, summary, color }) {
  const last = (field, fraction) => {
    const latest = parseNumber(records.findLast((record) => field in record)?.[field]);
    return latest === undefined ? "–" : formatValue(latest, { fraction });
  };
  const top1 = summary?.result?.top1;
  const texts = [last("loss"), last("val_loss"), last("top1", true), last("val_top1", true),
    typeof top1 === "number" ? formatPercent(top1) : "–"];
  return [create("th", { scope: "row" }, create("i", { class: `s${color}` }), name),
    ...texts.map((text) => create("td", {}, text))];
}
