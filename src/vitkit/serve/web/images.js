// Models and images go in; cards come out, one for each image, and a verdict where two models are compared.

import { Card } from "./card.js";
import { counted, find, make, percent, say } from "./elements.js";
import { startIntake } from "./intake.js";
import * as server from "./server.js";
import { fitView, onView, startView } from "./view.js";

const MOST = 100;
const AGAIN = 3000;

const cards = new Set();
const known = new Map(); // name → model with its labels and preprocessing
let listed = [];
let asked = [];
let lost = false;
let timer = 0;
let turn = 0; // of choosing: what a later choice has overtaken counts no more

export async function startImages() {
  startView();
  onView(() => { for (const card of cards) card.look(); });
  startIntake(take, (text) => { comeForward(); complain(text); });
  find("clear").addEventListener("click", () => {
    for (const card of [...cards]) {
      card.stop.abort();
      remove(card);
    }
  });
  for (const id of ["model", "second"]) find(id).addEventListener("change", choose);
  await begin();
}

// The list of models, however long the server takes to have one; anew when it was gone, for it may have others now.
async function begin() {
  try {
    listed = await server.models({ waiting: () => tellHealth("asking", "loading its models …") });
  } catch (error) {
    const closed = error.status === 401;
    tellHealth("gone", closed ? "a token is needed: load the page again to give it" : error.message);
    if (!closed) later(begin);
    return;
  }
  if (lost) complain("");
  lost = false;
  known.clear();
  offer();
  await choose();
  for (const card of cards) card.retry();
  if (!lost) watch();
}

function later(what, after = AGAIN) {
  clearTimeout(timer);
  timer = setTimeout(what, after);
}

// The names to choose from; what was chosen stays chosen while there is one of that name.
function offer() {
  const boxes = ["model", "second"].map((id) => [find(id), find(id).value]);
  const options = () => listed.map((model) => make("option", { value: model.name }, model.name));
  find("model").replaceChildren(...options());
  find("second").replaceChildren(make("option", { value: "" }, "no other"), ...options());
  for (const [box, before] of boxes) {
    if (listed.some((model) => model.name === before)) box.value = before;
    box.disabled = listed.length < 2;
  }
  find("second").closest("label").hidden = listed.length < 2;
  const none = !listed.length;
  find("no-models").hidden = !none;
  for (const part of [find("drop"), find("model").closest(".panel")]) part.hidden = none;
  if (none && !location.hash && !cards.size) location.replace("#training"); // there is nothing else to see
}

async function choose() {
  const names = [find("model").value, find("second").value].filter(Boolean);
  for (const option of find("second").options) option.disabled = option.value === names[0];
  if (names[1] === names[0]) { find("second").value = ""; names.pop(); }
  turn += 1;
  const own = turn;
  try {
    const found = await Promise.all(names.map(details));
    if (own !== turn) return;
    asked = found;
  } catch (error) {
    if (own !== turn) return;
    complain(`${error.message} ${error.hint ?? ""}`);
    miss(error);
    return;
  }
  find("facts").replaceChildren(...asked.map(facts));
  document.body.classList.toggle("comparing", asked.length > 1);
  fitView(asked);
  for (const card of cards) card.ask(asked);
  judge();
}

async function details(name) {
  if (!known.has(name)) {
    const basic = listed.find((model) => model.name === name);
    known.set(name, { ...basic, ...(await server.model(name)) });
  }
  return known.get(name);
}

function facts(model) {
  const millions = model.parameters / 1e6;
  const told = [
    model.model, `${model.image_size[1]} × ${model.image_size[0]} pixels`,
    model.classes ? counted(model.classes, "class", "classes") : "features alone",
    model.parameters && `${millions.toFixed(millions < 10 ? 1 : 0)} M parameters`, model.precision, model.engine,
  ].filter(Boolean);
  return make("p", {}, make("b", {}, model.name), " ", told.join(" · "), agreement(model));
}

// What was measured at the start, on the calibration images of whoever started the server.
function agreement({ agreement: measured, agreed }) {
  if (!measured) return "";
  const words = agreed ?? `same top-1 class for ${percent(measured.same_top1)} of ${counted(measured.images, "image")}`;
  return make("span", { class: "measured" }, ` · against fp32: ${words}`);
}

// What is given in the other view, by a drop or the clipboard, is seen in this one.
function comeForward() {
  if (find("images-view").hidden) location.hash = "#images";
}

function take(files) {
  comeForward();
  if (!find("no-models").hidden) {
    say(find("no-models").textContent);
    return;
  }
  const room = MOST - cards.size;
  const many = `This page shows ${MOST} images at a time, so ${files.length - room} were left out.`;
  complain(files.length > room ? `${many} For more there is vitkit predict.` : "");
  const added = files.slice(0, Math.max(room, 0)).map((file) => new Card(file, { changed, removed: remove }));
  for (const card of added) {
    cards.add(card);
    find("cards").append(card.element);
    card.ask(asked);
  }
  arrange();
  if (added.length) say(`${counted(added.length, "image")} added.`);
  decodeInTurn(added);
}

// One after the other: a large photo takes much memory while it is decoded.
async function decodeInTurn(added) {
  for (const card of added) await card.decode();
}

function remove(card) {
  const next = card.element.nextElementSibling ?? card.element.previousElementSibling;
  cards.delete(card);
  card.element.remove();
  (next?.querySelector(".remove") ?? find("pick")).focus();
  arrange();
  judge();
}

function arrange() {
  document.body.classList.toggle("filled", cards.size > 0);
  find("clear").hidden = cards.size < 2;
}

const complain = (text) => {
  const note = find("intake-note");
  note.textContent = text || "They go to this server alone, as they are, and are not kept.";
  note.classList.toggle("warning", Boolean(text));
  if (text) say(text);
};

function changed(card, refusal) {
  if (refusal) miss(refusal);
  judge();
}

// The server is gone, or does not know a model of its own list, for it was started anew: look out for it.
function miss({ gone, status }) {
  if (lost || !(gone || status === 404)) return;
  lost = true;
  if (gone) tellHealth("gone", "the server does not answer");
  later(watch);
}

// What the second model, or another precision of the same, changes over all images.
function judge() {
  const verdicts = [...cards].map((card) => card.verdict).filter(Boolean);
  find("verdict").hidden = asked.length < 2 || !verdicts.length;
  if (find("verdict").hidden) return;
  const [first, second] = asked;
  const same = verdicts.filter((verdict) => verdict.same).length;
  const largest = Math.max(...verdicts.map((verdict) => verdict.largest));
  const twin = second.name === `${first.name}-${second.precision}` ? second.precision : second.name;
  find("verdict").replaceChildren(
    make("h2", {}, `What ${twin} changes`),
    make("p", {}, make("b", {}, `The same answer on ${same} of ${counted(verdicts.length, "image")}. `),
      verdicts.some((verdict) => verdict.comparable)
        ? `No probability differs by more than ${(100 * largest).toFixed(1)} points.`
        : "They know no class in common."));
}

// Is the server there? While it is not, ask again and again, and then go on where it stopped.
async function watch() {
  clearTimeout(timer);
  const there = await server.ready();
  if (there && lost) {
    begin();
  } else if (there) {
    tellHealth("ready", listed.length ? "ready" : "ready, without models");
    later(watch, 10 * AGAIN);
  } else {
    lost = true;
    const alive = await server.live();
    tellHealth(alive ? "asking" : "gone", alive ? "loading its models …" : "the server does not answer");
    later(watch);
  }
}

function tellHealth(state, text) {
  const place = find("health");
  if (place.dataset.state !== state) place.dataset.state = state;
  if (place.textContent !== text) place.textContent = text;
}
