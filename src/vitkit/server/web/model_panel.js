// Panel of one model on an image card: predictions, nearest classes and attention.

import * as api from "./api.js";
import { draw, meanOfHeads, patchAt, summarizeMap, visibleRegion } from "./attention_map.js";
import { announce, create, formatPercent, formatPoints, probabilityByLabel } from "./dom.js";
import { view } from "./view.js";

const TOP = 5;
const MAX_CLASSES = 1000; // enough to compare the probabilities of two models
const MAX_CACHED_MAPS = 6;

export class ModelPanel {
  constructor(card, model) {
    this.card = card;
    this.model = model;
    this.result = null;
    this.maps = null;
    this.patch = null;
    this.patchMaps = new Map(); // "layer/head" → attention of every patch
    this.canvas = create("canvas", { width: 1, height: 1 });
    this.stage = create("div", { class: "stage", hidden: true }, this.canvas);
    this.caption = create("p", { class: "caption" });
    this.state = create("div", { class: "state" });
    this.labels = create("div", { class: "labels" });
    this.nearest = create("div", { class: "nearest" });
    this.title = create("h3", { class: "panel-title" }, model.name);
    this.element = create("div", { class: "model-panel" },
      this.title, this.stage, this.caption, this.state, this.labels, this.nearest);
    this.addListeners();
  }

  // Request the prediction, then the attention. An error is shown in this panel only.
  async start() {
    this.failure = null;
    this.showState("queued");
    const options = {
      model: this.model.name, signal: this.card.signal, onRetry: (error, seconds) => this.onRetry(error, seconds),
    };
    try {
      if (this.model.classes && !this.result) {
        const top = Math.min(this.model.classes, MAX_CLASSES);
        const nearest = Math.min(this.model.classes, TOP);
        this.result = await api.predict(this.card.file, { ...options, top, nearest });
        this.showPredictions();
        this.card.onPrediction(this);
      }
      if (this.model.attention && !this.maps) {
        this.showState("computing attention");
        this.maps = await api.attention(this.card.file, options);
      }
      if (!this.model.classes) this.showState("This model has no classes, only features.", "idle");
      else this.showState("");
    } catch (error) {
      if (this.card.signal.aborted) return;
      this.showFailure(error);
    }
    this.show();
  }

  showState(text, kind = "working") {
    this.state.className = text ? `state ${kind}` : "state";
    this.state.replaceChildren(...(text ? [text] : []));
    this.element.setAttribute("aria-busy", String(Boolean(text) && kind !== "idle"));
  }

  onRetry(error, seconds) {
    this.showState(`${error.message} Retrying in ${Math.max(Math.round(seconds), 1)} s.`, "busy");
  }

  showFailure(cause) {
    const error = cause instanceof api.ApiError
      ? cause
      : new api.ApiError("The page failed on this image.", { hint: String(cause.message) });
    this.failure = error;
    this.state.className = "state failed";
    this.element.setAttribute("aria-busy", "false");
    const retry = create("button", { type: "button", on: { click: () => this.start() } }, "Retry");
    this.state.replaceChildren(...[
      create("p", {}, create("strong", {}, error.message)),
      error.hint && create("p", {}, error.hint),
      error.retryable && retry,
    ].filter(Boolean));
    announce(`${this.card.file.name}: ${error.message} ${error.hint}`);
    this.card.onFailure(this, error);
  }

  // List the most probable classes; with another model's result, also the difference from it.
  showPredictions(other = null, same = null) {
    if (!this.result) return;
    const otherProbability = other && probabilityByLabel(other.predictions);
    const top = this.result.predictions.slice(0, TOP);
    const rows = top.map(({ label, probability }, index) => {
      const isFirst = top.findIndex((prediction) => prediction.label === label) === index; // labels may repeat
      const bar = create("span", { class: "fill" });
      bar.style.width = `${100 * probability}%`;
      const reference = otherProbability?.get(label);
      const change = otherProbability && create("span",
        { class: "change", title: "difference from the first model, in percentage points" },
        reference === undefined || !isFirst ? "–" : formatPoints(probability - reference));
      return create("li", { class: index === 0 && same !== null ? (same ? "agrees" : "differs") : null },
        create("span", { class: "label" }, label),
        create("span", { class: "numbers" }, change || "", create("span", { class: "value" }, formatPercent(probability))),
        create("span", { class: "track", "aria-hidden": "true" }, bar));
    });
    this.labels.replaceChildren(create("ol", { "aria-label": `Predictions of ${this.model.name}` }, rows));
    const nearest = (this.result.nearest ?? []).map(({ label, similarity }) =>
      create("li", {}, create("bdi", {}, label), " ", create("span", { class: "value" }, similarity.toFixed(2))));
    const title = "cosine similarity of the image's features and each class's row of the head";
    this.nearest.replaceChildren(...(nearest.length
      ? [create("h4", { title }, "Nearest classes"), create("ul", {}, nearest)]
      : []));
  }

  get region() { return visibleRegion(this.model.preprocessing, this.card.picture ?? {}); }

  // Return the map to show with its title, or an empty object.
  overlay() {
    if (!this.maps || view.mode === "image") return {};
    const layer = Math.min(view.layer, this.maps.layers);
    const head = Math.min(view.head, this.maps.heads);
    const precision = this.model.precision === "fp32" ? "" : " (in fp32)"; // attention is computed in fp32 only
    if (view.mode === "rollout") return { map: this.maps.rollout, title: `Rollout${precision}`, layer, head };
    const title = `Layer ${layer}, ${head ? `head ${head}` : "mean of heads"}${precision}`;
    const entry = this.patch && this.patchMaps.get(`${layer}/${head}`);
    if (entry?.patches) {
      const columns = this.maps.grid[1];
      const weights = entry.patches[this.patch.row * columns + this.patch.column];
      const map = Array.from({ length: this.maps.grid[0] }, (_, y) => weights.slice(y * columns, (y + 1) * columns));
      return { map, title, layer, head, ofPatch: true };
    }
    const heads = this.maps.maps[layer - 1];
    return { map: head ? heads[head - 1] : meanOfHeads(heads), title, layer, head };
  }

  show() {
    const picture = this.card.picture;
    this.stage.hidden = !picture;
    const overlay = this.overlay();
    if (picture) {
      if (this.canvas.width !== picture.canvas.width || this.canvas.height !== picture.canvas.height) {
        this.canvas.width = picture.canvas.width;
        this.canvas.height = picture.canvas.height;
        this.canvas.classList.toggle("tall", picture.height > 0.75 * picture.width);
      }
      this.stage.classList.toggle("tiny", picture.tiny);
      draw(this.canvas, {
        picture: picture.canvas, region: this.region, grid: this.maps?.grid, map: overlay.map,
        strength: view.strength, patch: this.patch,
      });
    }
    this.showCaption(overlay);
    const interactive = Boolean(this.maps && picture);
    const label = `${this.card.file.name}, ${this.model.name}. ${this.caption.textContent}`;
    this.stage.tabIndex = interactive ? 0 : -1;
    this.stage.setAttribute("role", interactive ? "application" : "img");
    this.stage.toggleAttribute("aria-roledescription", false);
    if (interactive) this.stage.setAttribute("aria-roledescription", "picture in patches");
    this.stage.setAttribute("aria-label", interactive ? `${label} Arrow keys select a patch.` : this.card.file.name);
  }

  showCaption({ map, title, ofPatch }) {
    if (!map) {
      this.caption.textContent = "";
      return;
    }
    const { row, column, weight, total } = summarizeMap(map);
    const name = (patch) => `row ${patch.row + 1}, column ${patch.column + 1}`;
    let text = `strongest patch: ${name({ row, column })}`;
    if (this.patch && ofPatch) {
      text = `${name(this.patch)} attends most to ${name({ row, column })}, ${formatPercent(weight)}`;
    } else if (this.patch && this.patchError) {
      text = `the attention of ${name(this.patch)} could not be loaded. ${this.patchError}`;
    } else if (this.patch) {
      text = `${name(this.patch)} has ${formatPercent(map[this.patch.row][this.patch.column] / (total || 1))}`;
    }
    this.caption.textContent = `${title}: ${text}`.replace(/\.?$/, ".");
  }

  addListeners() {
    const { stage } = this;
    stage.addEventListener("pointermove", (event) => {
      if (event.pointerType === "mouse") this.selectPatch(this.patchUnder(event));
    });
    stage.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse" && document.activeElement !== stage) this.selectPatch(null);
    });
    stage.addEventListener("click", (event) => this.selectPatch(this.patchUnder(event)));
    stage.addEventListener("blur", () => this.selectPatch(null));
    stage.addEventListener("focus", () => {
      if (stage.matches(":focus-visible") && !this.patch) this.moveSelection(0, 0);
    });
    stage.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
      if (event.key in steps && this.maps) {
        event.preventDefault();
        this.moveSelection(...steps[event.key]);
      } else if (event.key === "Escape") {
        this.selectPatch(null);
        announce("No patch selected.");
      }
    });
  }

  patchUnder(event) { return this.maps ? patchAt(this.canvas, this.region, this.maps.grid, event) : null; }

  moveSelection(down, right) {
    if (!this.maps) return;
    const [rows, columns] = this.maps.grid;
    const from = this.patch ?? { row: Math.floor(rows / 2), column: Math.floor(columns / 2) };
    const clamp = (value, count) => Math.min(Math.max(value, 0), count - 1);
    this.selectPatch({ row: clamp(from.row + down, rows), column: clamp(from.column + right, columns) });
    this.loadPatchAttention().then(() => announce(this.caption.textContent));
  }

  selectPatch(patch) {
    if (patch?.row === this.patch?.row && patch?.column === this.patch?.column) return;
    this.patch = patch;
    this.show();
    if (patch) this.loadPatchAttention();
  }

  // Fetch the attention of all patches for the selected layer and head, once a patch is selected.
  async loadPatchAttention() {
    if (!this.patch || !this.maps || view.mode !== "layers") return;
    const { layer, head } = this.overlay();
    const key = `${layer}/${head}`;
    if (this.patchMaps.has(key)) {
      await this.patchMaps.get(key).promise;
      return;
    }
    const entry = {};
    entry.promise = api.patchAttention(this.card.file, {
      model: this.model.name, layer: layer - 1, head: head ? head - 1 : "mean", signal: this.card.signal,
    }).then((body) => {
      entry.patches = body.patches;
      this.patchError = "";
    }, (error) => {
      this.patchMaps.delete(key); // the next selection tries again
      this.patchError = error.message;
    });
    this.patchMaps.set(key, entry);
    while (this.patchMaps.size > MAX_CACHED_MAPS) this.patchMaps.delete(this.patchMaps.keys().next().value);
    await entry.promise;
    if (!this.card.signal.aborted) this.show();
  }
}
