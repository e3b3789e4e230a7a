// HTTP client of the server: retries when it is busy, asks for a token, turns error responses into ApiError.

import { promptToken, token } from "./token.js";

const MAX_CONCURRENT = 3;
const MAX_ATTEMPTS = 30;
const MAX_RETRY_SECONDS = 30;

// A failed request. `retryable`: trying again may help; `unreachable`: there was no response at all.
export class ApiError extends Error {
  constructor(message, { status = 0, hint = "", retryable = false, unreachable = false } = {}) {
    super(message);
    this.status = status;
    this.hint = hint;
    this.retryable = retryable;
    this.unreachable = unreachable;
  }
}

const STATUS_MESSAGES = {
  400: "The server could not parse the request.",
  401: "The server requires a token.",
  403: "The server refused the request.",
  404: "Not found on this server.",
  408: "The upload took too long.",
  413: "The file is larger than the server accepts.",
  415: "The server does not accept this file type.",
  422: "The server cannot read this image.",
  429: "The server is busy.",
  500: "The server failed on this image.",
  502: "The proxy cannot reach the server.",
  503: "The server is not ready.",
  504: "The server did not respond in time.",
};

async function toApiError(response) {
  const body = await response.json().catch(() => ({}));
  const details = [body.error, body.hint].filter((text) => typeof text === "string" && text);
  return new ApiError(STATUS_MESSAGES[response.status] ?? `The server responded with error ${response.status}.`, {
    status: response.status,
    hint: details.map(toSentence).join(" "),
    retryable: response.status >= 500 || [401, 408, 429].includes(response.status),
  });
}

function toSentence(text) {
  const capitalized = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?…]$/.test(capitalized) ? capitalized : `${capitalized}.`;
}

const sleep = (seconds, signal) => new Promise((resolve, reject) => {
  const timer = setTimeout(resolve, 1000 * seconds);
  signal?.addEventListener("abort", () => { clearTimeout(timer); reject(signal.reason); }, { once: true });
});

async function send(path, { body, signal }) {
  const headers = {};
  if (body) headers["Content-Type"] = "application/octet-stream";
  if (token()) headers.Authorization = `Bearer ${token()}`;
  try {
    return await fetch(path, { method: body ? "POST" : "GET", body, headers, signal, cache: "no-store" });
  } catch (error) {
    if (signal?.aborted) throw error;
    if (body && await isLive()) {
      throw new ApiError("The server closed the connection during the upload.", {
        hint: "The file may be too large for this server, or it changed after it was selected.", retryable: true,
      });
    }
    throw new ApiError("The server is not reachable.", {
      hint: "It may have been stopped. The page reconnects when it is back.", retryable: true, unreachable: true,
    });
  }
}

// Send a request and return its JSON. Waits and retries on 429 and 503; `onRetry(error, seconds)` is called before.
export async function request(path, { body = null, signal, onRetry = () => {} } = {}) {
  for (let attempt = 1; ; attempt += 1) {
    const tokenUsed = token();
    const response = await send(path, { body, signal });
    if (response.ok) {
      try {
        return await response.json();
      } catch (error) {
        if (signal?.aborted) throw error;
        throw new ApiError("The response was cut off.", { retryable: true });
      }
    }
    const error = await toApiError(response);
    if (response.status === 401) {
      // Another request may have obtained the token meanwhile.
      if (token() === tokenUsed && !(await promptToken(tokenUsed !== null))) throw error;
      continue;
    }
    const retryAfter = Number(response.headers.get("Retry-After"));
    if (!(response.status === 429 || response.status === 503) || attempt >= MAX_ATTEMPTS) throw error;
    // The random part spreads the retries of clients that were rejected together.
    const delay = Math.min(Math.max(Number.isFinite(retryAfter) ? retryAfter : 1, 0.5), MAX_RETRY_SECONDS);
    const seconds = delay + Math.random() / 2;
    onRetry(error, seconds);
    await sleep(seconds, signal);
  }
}

// Limit concurrent inference requests: the server's queue is shared with other clients.
let running = 0;
const waiters = [];

async function withSlot(work, signal) {
  if (running < MAX_CONCURRENT) running += 1;
  else await new Promise((resolve) => waiters.push(resolve)); // a finished request passes on its slot
  try {
    signal?.throwIfAborted();
    return await work();
  } finally {
    if (waiters.length) waiters.shift()();
    else running -= 1;
  }
}

const query = (parameters) => new URLSearchParams(parameters).toString();

export const isLive = () => fetch("v2/health/live", { cache: "no-store" }).then((response) => response.ok, () => false);
export const isReady = () => fetch("v2/health/ready", { cache: "no-store" }).then((response) => response.ok, () => false);
export const listModels = (options) => request("v1/models", options).then((body) => body.models);
export const getModel = (name) => request(`v1/models/${encodeURIComponent(name)}`);
export const listRuns = (options) => request("v1/runs", options);
export const getRun = (name, after, options) =>
  request(`v1/runs/${encodeURIComponent(name)}?${query({ after })}`, options);

export const predict = (body, { model, top, nearest, ...options }) =>
  withSlot(() => request(`v1/predict?${query({ model, top, nearest })}`, { body, ...options }), options.signal);

export const attention = (body, { model, ...options }) =>
  withSlot(() => request(`v1/attention?${query({ model })}`, { body, ...options }), options.signal);

export const patchAttention = (body, { model, layer, head, ...options }) =>
  withSlot(() => request(`v1/attention?${query({ model, layer, head })}`, { body, ...options }), options.signal);
