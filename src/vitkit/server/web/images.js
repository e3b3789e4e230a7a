// Image view: model selection, image cards, comparison of two models, and the connection to the server.

import * as api from "./api.js";
import { Card } from "./card.js";
import { announce, byId, create, formatPercent, pluralize } from "./dom.js";
import { startUpload } from "./upload.js";
import { onViewChange, setModels, startView } from "./view.js";

const MAX_IMAGES = 100;
const RETRY_MS = 3000;
const UPLOAD_NOTE = "Images are sent to this server only and are not stored.";

const cards = new Set();
const detailsByName = new Map(); // name → model with labels and preprocessing
let models = [];
let selected = [];
let disconnected = false;
let timer = 0;
let selectionId = 0; // results of an outdated selection are dropped

export async function startImages() {
  startView();
  onViewChange(() => { for (const card of cards) card.onViewChange(); });
  startUpload(addFiles, (text) => { showImagesView(); showError(text); });
  byId("clear").addEventListener("click", () => {
    for (const card of [...cards]) {
      card.abort();
      removeCard(card);
    }
  });
  for (const id of ["model", "second"]) byId(id).addEventListener("change", updateSelection);
  await connect();
}

// Load the list of models. After a reconnect it is loaded again, because the server may have other models now.
async function connect() {
  try {
    models = await api.listModels({ onRetry: () => setHealth("pending", "loading models …") });
  } catch (error) {
    const unauthorized = error.status === 401;
    setHealth("down", unauthorized ? "token required: reload the page to enter it" : error.message);
    if (!unauthorized) schedule(connect);
    return;
  }
  if (disconnected) showError("");
  disconnected = false;
  detailsByName.clear();
  updateSelectors();
  await updateSelection();
  for (const card of cards) card.retry();
  if (!disconnected) pollHealth();
}

function schedule(callback, delay = RETRY_MS) {
  clearTimeout(timer);
  timer = setTimeout(callback, delay);
}

// Fill the selectors; the current selection is kept while models of these names exist.
function updateSelectors() {
  const boxes = ["model", "second"].map((id) => [byId(id), byId(id).value]);
  const options = () => models.map((model) => create("option", { value: model.name }, model.name));
  byId("model").replaceChildren(...options());
  byId("second").replaceChildren(create("option", { value: "" }, "none"), ...options());
  for (const [box, previous] of boxes) {
    if (models.some((model) => model.name === previous)) box.value = previous;
    box.disabled = models.length < 2;
  }
  byId("second").closest("label").hidden = models.length < 2;
  const isEmpty = !models.length;
  byId("no-models").hidden = !isEmpty;
  for (const section of [byId("drop"), byId("model").closest(".panel")]) section.hidden = isEmpty;
  if (isEmpty && !location.hash && !cards.size) location.replace("#training"); // runs are all there is to see
}

async function updateSelection() {
  const names = [byId("model").value, byId("second").value].filter(Boolean);
  for (const option of byId("second").options) option.disabled = option.value === names[0];
  if (names[1] === names[0]) { byId("second").value = ""; names.pop(); }
  selectionId += 1;
  const id = selectionId;
  try {
    const details = await Promise.all(names.map(loadDetails));
    if (id !== selectionId) return;
    selected = details;
  } catch (error) {
    if (id !== selectionId) return;
    showError(`${error.message} ${error.hint ?? ""}`);
    onServerError(error);
    return;
  }
  byId("facts").replaceChildren(...selected.map(describeModel));
  document.body.classList.toggle("comparing", selected.length > 1);
  setModels(selected);
  for (const card of cards) card.setModels(selected);
  updateComparison();
}

async function loadDetails(name) {
  if (!detailsByName.has(name)) {
    const summary = models.find((model) => model.name === name);
    detailsByName.set(name, { ...summary, ...(await api.getModel(name)) });
  }
  return detailsByName.get(name);
}

function describeModel(model) {
  const millions = model.parameters / 1e6;
  const facts = [
    model.model, `${model.image_size[1]} × ${model.image_size[0]} pixels`,
    model.classes ? pluralize(model.classes, "class", "classes") : "features only",
    model.parameters && `${millions.toFixed(millions < 10 ? 1 : 0)} M parameters`, model.precision, model.engine,
  ].filter(Boolean);
  return create("p", {}, create("b", {}, model.name), " ", facts.join(" · "), describeAgreement(model));
}

// The agreement with fp32 was measured on the calibration images when the server started.
function describeAgreement({ agreement, agreed }) {
  if (!agreement) return "";
  const text = agreed
    ?? `same top-1 class for ${formatPercent(agreement.same_top1)} of ${pluralize(agreement.images, "image")}`;
  return create("span", { class: "measured" }, ` · compared with fp32: ${text}`);
}

// Files dropped or pasted in the training view open the image view.
function showImagesView() {
  if (byId("images-view").hidden) location.hash = "#images";
}

function addFiles(files) {
  showImagesView();
  if (!byId("no-models").hidden) {
    announce(byId("no-models").textContent);
    return;
  }
  const room = MAX_IMAGES - cards.size;
  const text = `This page shows at most ${MAX_IMAGES} images; ${files.length - room} were left out.`;
  showError(files.length > room ? `${text} Use vitkit predict for more.` : "");
  const added = files.slice(0, Math.max(room, 0)).map((file) => new Card(file, { onChange, onRemove: removeCard }));
  for (const card of added) {
    cards.add(card);
    byId("cards").append(card.element);
    card.setModels(selected);
  }
  updateLayout();
  if (added.length) announce(`${pluralize(added.length, "image")} added.`);
  decodeSequentially(added);
}

// One at a time: decoding a large photo takes much memory.
async function decodeSequentially(added) {
  for (const card of added) await card.decode();
}

function removeCard(card) {
  const next = card.element.nextElementSibling ?? card.element.previousElementSibling;
  cards.delete(card);
  card.element.remove();
  (next?.querySelector(".remove") ?? byId("pick")).focus();
  updateLayout();
  updateComparison();
}

function updateLayout() {
  document.body.classList.toggle("filled", cards.size > 0);
  byId("clear").hidden = cards.size < 2;
}

const showError = (text) => {
  const note = byId("upload-note");
  note.textContent = text || UPLOAD_NOTE;
  note.classList.toggle("warning", Boolean(text));
  if (text) announce(text);
};

function onChange(card, error) {
  if (error) onServerError(error);
  updateComparison();
}

// The server is unreachable, or was restarted and no longer has a model of its list: poll until it is ready.
function onServerError({ unreachable, status }) {
  if (disconnected || !(unreachable || status === 404)) return;
  disconnected = true;
  if (unreachable) setHealth("down", "server not reachable");
  schedule(pollHealth);
}

// Summarize over all images what the second model, or another precision of the same model, changes.
function updateComparison() {
  const comparisons = [...cards].map((card) => card.comparison).filter(Boolean);
  byId("comparison").hidden = selected.length < 2 || !comparisons.length;
  if (byId("comparison").hidden) return;
  const [first, second] = selected;
  const same = comparisons.filter((comparison) => comparison.same).length;
  const largest = Math.max(...comparisons.map((comparison) => comparison.largest));
  const name = second.name === `${first.name}-${second.precision}` ? second.precision : second.name;
  byId("comparison").replaceChildren(
    create("h2", {}, `Effect of ${name}`),
    create("p", {}, create("b", {}, `Same top-1 class on ${same} of ${pluralize(comparisons.length, "image")}. `),
      comparisons.some((comparison) => comparison.comparable)
        ? `Largest difference of a probability: ${(100 * largest).toFixed(1)} points.`
        : "The models have no class in common."));
}

// Poll the server's health; after an interruption, reconnect and resume.
async function pollHealth() {
  clearTimeout(timer);
  const ready = await api.isReady();
  if (ready && disconnected) {
    connect();
  } else if (ready) {
    setHealth("ready", models.length ? "ready" : "ready, no models");
    schedule(pollHealth, 10 * RETRY_MS);
  } else {
    disconnected = true;
    const live = await api.isLive();
    setHealth(live ? "pending" : "down", live ? "loading models …" : "server not reachable");
    schedule(pollHealth);
  }
}

function setHealth(state, text) {
  const element = byId("health");
  if (element.dataset.state !== state) element.dataset.state = state;
  if (element.textContent !== text) element.textContent = text;
}
