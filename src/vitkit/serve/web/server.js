// A question to the server goes in; its answer comes out, or a refusal in plain words.

import { askToken, token } from "./token.js";

const AT_ONCE = 3;
const MOST_TRIES = 30;
const LONGEST_WAIT = 30;

// What went wrong, what to do, whether asking again may help, and whether there was nobody to ask.
export class Refusal extends Error {
  constructor(message, { status = 0, hint = "", again = false, gone = false } = {}) {
    super(message);
    this.status = status;
    this.hint = hint;
    this.again = again;
    this.gone = gone;
  }
}

const WORDS = {
  400: "The server did not understand the question.",
  401: "The server asks for a token.",
  403: "The server refuses to answer.",
  404: "The server does not know this.",
  408: "The image took too long to arrive.",
  413: "The file is larger than this server takes.",
  415: "The server does not take this kind of file.",
  422: "The server cannot take this image.",
  429: "The server is busy.",
  500: "The server failed on this image.",
  502: "The server cannot be reached through its proxy.",
  503: "The server is not ready.",
  504: "The server did not get to this in time.",
};

async function refused(answer) {
  const said = await answer.json().catch(() => ({}));
  const message = typeof said.error === "string" ? said.error : "";
  const words = WORDS[answer.status] ?? `The server answered with error ${answer.status}.`;
  return new Refusal(words, {
    status: answer.status,
    hint: [message, typeof said.hint === "string" ? said.hint : ""].filter(Boolean).map(sentence).join(" "),
    again: answer.status >= 500 || [401, 408, 429].includes(answer.status),
  });
}

function sentence(text) {
  const begun = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?…]$/.test(begun) ? begun : `${begun}.`;
}

const pause = (seconds, signal) => new Promise((resolve, reject) => {
  const timer = setTimeout(resolve, 1000 * seconds);
  signal?.addEventListener("abort", () => { clearTimeout(timer); reject(signal.reason); }, { once: true });
});

async function sent(path, { body, signal }) {
  const headers = {};
  if (body) headers["Content-Type"] = "application/octet-stream";
  if (token()) headers.Authorization = `Bearer ${token()}`;
  try {
    return await fetch(path, { method: body ? "POST" : "GET", body, headers, signal, cache: "no-store" });
  } catch (error) {
    if (signal?.aborted) throw error;
    if (body && await live()) {
      throw new Refusal("The server broke off while it received this file.", {
        hint: "It may be too large for this server, or it has changed since it was chosen.", again: true,
      });
    }
    throw new Refusal("The server does not answer.", {
      hint: "It may have been stopped. This goes on once it is back.", again: true, gone: true,
    });
  }
}

// Ask until there is an answer: a busy server says when to come back, and `waiting` is told of it.
export async function ask(path, { body = null, signal, waiting = () => {} } = {}) {
  for (let tries = 1; ; tries += 1) {
    const before = token();
    const answer = await sent(path, { body, signal });
    if (answer.ok) {
      try {
        return await answer.json();
      } catch (error) {
        if (signal?.aborted) throw error;
        throw new Refusal("The server's answer was cut off.", { again: true });
      }
    }
    const refusal = await refused(answer);
    if (answer.status === 401) {
      // Another request may have learnt the token meanwhile.
      if (token() === before && !(await askToken(before !== null))) throw refusal;
      continue;
    }
    const wait = Number(answer.headers.get("Retry-After"));
    if (!(answer.status === 429 || answer.status === 503) || tries >= MOST_TRIES) throw refusal;
    // A little more for each, so that those who were sent away together do not come back together.
    const seconds = Math.min(Math.max(Number.isFinite(wait) ? wait : 1, 0.5), LONGEST_WAIT) + Math.random() / 2;
    waiting(refusal, seconds);
    await pause(seconds, signal);
  }
}

// Few images at once: the server's queue is for everyone.
let running = 0;
const line = [];

async function inTurn(work, signal) {
  if (running < AT_ONCE) running += 1;
  else await new Promise((resolve) => line.push(resolve)); // whoever leaves hands over the place
  try {
    signal?.throwIfAborted();
    return await work();
  } finally {
    if (line.length) line.shift()();
    else running -= 1;
  }
}

const query = (parameters) => new URLSearchParams(parameters).toString();

export const live = () => fetch("v2/health/live", { cache: "no-store" }).then((answer) => answer.ok, () => false);
export const ready = () => fetch("v2/health/ready", { cache: "no-store" }).then((answer) => answer.ok, () => false);
export const models = (how) => ask("v1/models", how).then((answer) => answer.models);
export const model = (name) => ask(`v1/models/${encodeURIComponent(name)}`);
export const runs = (options) => ask("v1/runs", options);
export const run = (name, after, options) => ask(`v1/runs/${encodeURIComponent(name)}?${query({ after })}`, options);

export const predict = (body, { model, top, nearest, ...how }) =>
  inTurn(() => ask(`v1/predict?${query({ model, top, nearest })}`, { body, ...how }), how.signal);

export const attention = (body, { model, ...how }) =>
  inTurn(() => ask(`v1/attention?${query({ model })}`, { body, ...how }), how.signal);

export const patches = (body, { model, layer, head, ...how }) =>
  inTurn(() => ask(`v1/attention?${query({ model, layer, head })}`, { body, ...how }), how.signal);
