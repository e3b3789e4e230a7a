// An image and a model go in; what the model says of it, and looks at, comes out as one side of a card.

import { draw, meanOfHeads, patchAt, seen, summary } from "./attention.js";
import { byLabel, make, percent, points, say } from "./elements.js";
import * as server from "./server.js";
import { view } from "./view.js";

const SHOWN = 5;
const MOST_CLASSES = 1000; // enough to set two models' answers side by side
const MAPS_KEPT = 6;

export class Side {
  constructor(card, model) {
    this.card = card;
    this.model = model;
    this.answer = null;
    this.maps = null;
    this.patch = null;
    this.rows = new Map(); // layer and head → what each patch looks at
    this.canvas = make("canvas", { width: 1, height: 1 });
    this.stage = make("div", { class: "stage", hidden: true }, this.canvas);
    this.caption = make("p", { class: "caption" });
    this.state = make("div", { class: "state" });
    this.labels = make("div", { class: "labels" });
    this.nearest = make("div", { class: "nearest" });
    this.title = make("h3", { class: "side-title" }, model.name);
    this.element = make("div", { class: "side" },
      this.title, this.stage, this.caption, this.state, this.labels, this.nearest);
    this.listen();
  }

  get bytes() { return this.card.file; }

  // Ask for the answer, then for what it was drawn from. A refusal is shown here and stops nothing else.
  async start() {
    this.failure = null;
    this.progress("waiting for its turn");
    const how = { model: this.model.name, signal: this.card.signal, waiting: (...told) => this.busy(...told) };
    try {
      if (this.model.classes && !this.answer) {
        const top = Math.min(this.model.classes, MOST_CLASSES);
        this.answer = await server.predict(this.bytes, { ...how, top, nearest: Math.min(this.model.classes, SHOWN) });
        this.list();
        this.card.answered(this);
      }
      if (this.model.attention && !this.maps) {
        this.progress("looking at the attention");
        this.maps = await server.attention(this.bytes, how);
      }
      if (!this.model.classes) this.progress("This model has no classes to name.", "idle");
      else this.progress("");
    } catch (error) {
      if (this.card.signal.aborted) return;
      this.fail(error);
    }
    this.show();
  }

  progress(text, kind = "working") {
    this.state.className = text ? `state ${kind}` : "state";
    this.state.replaceChildren(...(text ? [text] : []));
    this.element.setAttribute("aria-busy", String(Boolean(text) && kind !== "idle"));
  }

  busy(refusal, seconds) {
    this.progress(`${refusal.message} Trying again in ${Math.max(Math.round(seconds), 1)} s.`, "busy");
  }

  fail(error) {
    const refusal = error instanceof server.Refusal
      ? error
      : new server.Refusal("This page failed on the image.", { hint: String(error.message) });
    this.failure = refusal;
    this.state.className = "state failed";
    this.element.setAttribute("aria-busy", "false");
    const again = make("button", { type: "button", on: { click: () => this.start() } }, "Try again");
    this.state.replaceChildren(...[
      make("p", {}, make("strong", {}, refusal.message)),
      refusal.hint && make("p", {}, refusal.hint),
      refusal.again && again,
    ].filter(Boolean));
    say(`${this.card.file.name}: ${refusal.message} ${refusal.hint}`);
    this.card.failed(this, refusal);
  }

  // The likeliest classes; beside another model's, with the difference from it.
  list(other = null, shared = null) {
    if (!this.answer) return;
    const theirs = other && byLabel(other.predictions);
    const shown = this.answer.predictions.slice(0, SHOWN);
    const rows = shown.map(({ label, probability }, place) => {
      const first = shown.findIndex((each) => each.label === label) === place; // of two classes of one name
      const bar = make("span", { class: "fill" });
      bar.style.width = `${100 * probability}%`;
      const before = theirs?.get(label);
      const change = theirs && make("span", { class: "change", title: "points of a hundred, against the first model" },
        before === undefined || !first ? "–" : points(probability - before));
      return make("li", { class: place === 0 && shared !== null ? (shared ? "agrees" : "differs") : null },
        make("span", { class: "label" }, label),
        make("span", { class: "numbers" }, change || "", make("span", { class: "share" }, percent(probability))),
        make("span", { class: "rail", "aria-hidden": "true" }, bar));
    });
    this.labels.replaceChildren(make("ol", { "aria-label": `What ${this.model.name} says` }, rows));
    const near = (this.answer.nearest ?? []).map(({ label, similarity }) =>
      make("li", {}, make("bdi", {}, label), " ", make("span", { class: "share" }, similarity.toFixed(2))));
    const how = "by the cosine between the image's features and each class's row of the head";
    this.nearest.replaceChildren(...(near.length
      ? [make("h4", { title: how }, "Nearest classes"), make("ul", {}, near)]
      : []));
  }

  get region() { return seen(this.model.preprocessing, this.card.picture ?? {}); }

  // What is over the picture now: a map and the words for it.
  overlay() {
    if (!this.maps || view.mode === "picture") return {};
    const layer = Math.min(view.layer, this.maps.layers);
    const head = Math.min(view.head, this.maps.heads);
    const rounded = this.model.precision === "fp32" ? "" : " (in fp32)"; // the server looks inside in fp32 alone
    if (view.mode === "rollout") return { map: this.maps.rollout, words: `Rollout${rounded}`, layer, head };
    const words = `Layer ${layer}, ${head ? `head ${head}` : "mean of heads"}${rounded}`;
    const rows = this.patch && this.rows.get(`${layer}/${head}`);
    if (rows?.patches) {
      const columns = this.maps.grid[1];
      const row = rows.patches[this.patch.row * columns + this.patch.column];
      const map = Array.from({ length: this.maps.grid[0] }, (_, y) => row.slice(y * columns, (y + 1) * columns));
      return { map, words, layer, head, own: true };
    }
    const heads = this.maps.maps[layer - 1];
    return { map: head ? heads[head - 1] : meanOfHeads(heads), words, layer, head };
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
    this.describe(overlay);
    const looking = Boolean(this.maps && picture);
    const about = `${this.card.file.name} through ${this.model.name}. ${this.caption.textContent}`;
    this.stage.tabIndex = looking ? 0 : -1;
    this.stage.setAttribute("role", looking ? "application" : "img");
    this.stage.toggleAttribute("aria-roledescription", false);
    if (looking) this.stage.setAttribute("aria-roledescription", "picture in patches");
    this.stage.setAttribute("aria-label", looking ? `${about} Arrow keys move over the patches.` : this.card.file.name);
  }

  describe({ map, words, own }) {
    if (!map) {
      this.caption.textContent = "";
      return;
    }
    const { row, column, share, total } = summary(map);
    const place = (at) => `row ${at.row + 1}, column ${at.column + 1}`;
    let told = `most at ${place({ row, column })}`;
    if (this.patch && own) {
      told = `${place(this.patch)} looks most at ${place({ row, column })}, ${percent(share)}`;
    } else if (this.patch && this.unlooked) {
      told = `what ${place(this.patch)} looks at did not come. ${this.unlooked}`;
    } else if (this.patch) {
      told = `${place(this.patch)} has ${percent(map[this.patch.row][this.patch.column] / (total || 1))}`;
    }
    this.caption.textContent = `${words}: ${told}`.replace(/\.?$/, ".");
  }

  listen() {
    const { stage } = this;
    stage.addEventListener("pointermove", (event) => {
      if (event.pointerType === "mouse") this.point(this.under(event));
    });
    stage.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse" && document.activeElement !== stage) this.point(null);
    });
    stage.addEventListener("click", (event) => this.point(this.under(event)));
    stage.addEventListener("blur", () => this.point(null));
    stage.addEventListener("focus", () => { if (stage.matches(":focus-visible") && !this.patch) this.move(0, 0); });
    stage.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
      if (event.key in steps && this.maps) {
        event.preventDefault();
        this.move(...steps[event.key]);
      } else if (event.key === "Escape") {
        this.point(null);
        say("No patch is chosen.");
      }
    });
  }

  under(event) { return this.maps ? patchAt(this.canvas, this.region, this.maps.grid, event) : null; }

  move(down, across) {
    if (!this.maps) return;
    const [rows, columns] = this.maps.grid;
    const from = this.patch ?? { row: Math.floor(rows / 2), column: Math.floor(columns / 2) };
    const within = (value, most) => Math.min(Math.max(value, 0), most - 1);
    this.point({ row: within(from.row + down, rows), column: within(from.column + across, columns) });
    this.look().then(() => say(this.caption.textContent));
  }

  point(patch) {
    if (patch?.row === this.patch?.row && patch?.column === this.patch?.column) return;
    this.patch = patch;
    this.show();
    if (patch) this.look();
  }

  // Fetch what each patch of the chosen layer and head looks at, once it is wanted.
  async look() {
    if (!this.patch || !this.maps || view.mode !== "layers") return;
    const { layer, head } = this.overlay();
    const key = `${layer}/${head}`;
    if (this.rows.has(key)) {
      await this.rows.get(key).promise;
      return;
    }
    const kept = {};
    kept.promise = server.patches(this.bytes, {
      model: this.model.name, layer: layer - 1, head: head ? head - 1 : "mean", signal: this.card.signal,
    }).then((found) => {
      kept.patches = found.patches;
      this.unlooked = "";
    }, (error) => {
      this.rows.delete(key); // the next patch asks again
      this.unlooked = error.message;
    });
    this.rows.set(key, kept);
    while (this.rows.size > MAPS_KEPT) this.rows.delete(this.rows.keys().next().value);
    await kept.promise;
    if (!this.card.signal.aborted) this.show();
  }
}
