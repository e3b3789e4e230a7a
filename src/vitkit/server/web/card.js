// Card of one image: the picture, and one panel per selected model.

import { announce, create, formatPercent, probabilityByLabel, reconcile } from "./dom.js";
import { ModelPanel } from "./model_panel.js";

const MAX_PREVIEW = 640; // longest side of the preview; the server receives the original file
const TINY = 96;

export class Card {
  constructor(file, { onChange, onRemove }) {
    this.file = file;
    this.onChange = onChange;
    this.picture = null;
    this.panelsByModel = new Map();
    this.panels = [];
    this.abortController = new AbortController();
    this.badge = create("p", { class: "badge", hidden: true });
    this.note = create("p", { class: "small", hidden: true },
      "This browser cannot display the image. The server may still be able to read it.");
    this.body = create("div", { class: "panels" });
    this.element = create("li", { class: "card" },
      create("div", { class: "card-head" },
        create("h2", { title: file.name }, file.name),
        create("button", {
          type: "button", class: "remove", "aria-label": `Remove ${file.name}`,
          on: { click: () => { this.abort(); onRemove(this); } },
        }, "×")),
      this.badge, this.note, this.body);
  }

  get signal() { return this.abortController.signal; }

  abort() { this.abortController.abort(); }

  // Show the results of these models; panels that exist already keep their results.
  setModels(models) {
    this.panels = models.map((model) => {
      const panel = this.panelsByModel.get(model.name) ?? new ModelPanel(this, model);
      if (!panel.result) panel.model = model; // a restarted server may have loaded another model of this name
      if (!this.panelsByModel.has(model.name)) {
        this.panelsByModel.set(model.name, panel);
        panel.start();
      }
      return panel;
    });
    reconcile(this.body, models.length
      ? this.panels.map((panel) => panel.element)
      : [create("p", { class: "state working" }, "waiting for the models")]);
    this.element.classList.toggle("two", models.length > 1);
    this.compare();
    this.show();
  }

  // Decode a preview in the browser. Formats that the browser cannot decode still get predictions from the server.
  async decode() {
    let bitmap;
    try {
      bitmap = await createImageBitmap(this.file);
    } catch {
      this.note.hidden = this.panels.some((panel) => panel.failure?.status === 422); // the server could not read it either
      return;
    }
    const { width, height } = bitmap;
    const tiny = Math.max(width, height) < TINY;
    const scale = tiny ? 1 : Math.min(MAX_PREVIEW / Math.max(width, height), 1);
    const enlargement = tiny ? Math.ceil(320 / Math.max(width, height)) : 1; // keeps overlay lines thin
    const side = (length) => Math.max(Math.round(length * scale * enlargement), 1);
    const canvas = create("canvas", { width: side(width), height: side(height) });
    const context = canvas.getContext("2d");
    context.imageSmoothingEnabled = !tiny;
    context.imageSmoothingQuality = "high";
    context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    bitmap.close();
    this.picture = { width, height, canvas, tiny };
    this.show();
  }

  show() { for (const panel of this.panels) panel.show(); }

  onViewChange() { for (const panel of this.panels) { panel.show(); panel.loadPatchAttention(); } }

  onPrediction(panel) {
    const [first] = panel.result.predictions;
    announce(`${this.file.name}: ${panel.model.name} predicts ${first.label}, ${formatPercent(first.probability)}.`);
    this.compare();
  }

  onFailure(panel, error) {
    if (error.status === 422) this.note.hidden = true;
    this.onChange(this, error);
  }

  retry() { for (const panel of this.panels) if (panel.failure?.unreachable) panel.start(); }

  // Compare the two panels: same top-1 class or not, and the difference of each probability.
  compare() {
    const [first, second] = this.panels;
    const both = Boolean(second && first.result && second.result);
    this.badge.hidden = !both;
    this.comparison = null;
    if (both) {
      const [predictions, others] = [first, second].map((panel) => panel.result.predictions);
      const same = predictions[0].label === others[0].label;
      const otherProbability = probabilityByLabel(others);
      const differences = [...probabilityByLabel(predictions)].filter(([label]) => otherProbability.has(label))
        .map(([label, probability]) => Math.abs(probability - otherProbability.get(label)));
      this.comparison = { same, largest: Math.max(0, ...differences), comparable: differences.length > 0 };
      this.badge.className = `badge ${same ? "agrees" : "differs"}`;
      this.badge.replaceChildren(same ? "Both predict " : "Predictions differ: ", create("b", {}, predictions[0].label),
        ...(same ? [] : [" or ", create("b", {}, others[0].label)]));
      first.showPredictions(null, same);
      second.showPredictions(first.result, same);
    } else {
      for (const panel of this.panels) panel.showPredictions();
    }
    this.onChange(this);
  }
}
