// A file goes in; its card comes out: the picture, and a side for each model that is asked about it.

import { byLabel, make, mend, percent, say } from "./elements.js";
import { Side } from "./side.js";

const LONGEST = 640; // of a shown picture; the server gets the file as it is
const TINY = 96;

export class Card {
  constructor(file, { changed, removed }) {
    this.file = file;
    this.changed = changed;
    this.picture = null;
    this.sides = new Map();
    this.shown = [];
    this.stop = new AbortController();
    this.badge = make("p", { class: "badge", hidden: true });
    this.note = make("p", { class: "small", hidden: true },
      "This browser cannot show the picture. The server may know the format.");
    this.body = make("div", { class: "sides" });
    this.element = make("li", { class: "card" },
      make("div", { class: "card-head" },
        make("h2", { title: file.name }, file.name),
        make("button", {
          type: "button", class: "remove", "aria-label": `Remove ${file.name}`,
          on: { click: () => { this.stop.abort(); removed(this); } },
        }, "×")),
      this.badge, this.note, this.body);
  }

  get signal() { return this.stop.signal; }

  // Show what these models say; a side that was there before is kept with its answer.
  ask(models) {
    this.shown = models.map((model) => {
      const side = this.sides.get(model.name) ?? new Side(this, model);
      if (!side.answer) side.model = model; // a server that came back may know it in another size
      if (!this.sides.has(model.name)) {
        this.sides.set(model.name, side);
        side.start();
      }
      return side;
    });
    mend(this.body, models.length
      ? this.shown.map((side) => side.element)
      : [make("p", { class: "state working" }, "waiting for the models")]);
    this.element.classList.toggle("two", models.length > 1);
    this.compare();
    this.show();
  }

  // The picture as the browser decodes it; a format that it does not know still gets the server's answer.
  async decode() {
    let bitmap;
    try {
      bitmap = await createImageBitmap(this.file);
    } catch {
      this.note.hidden = this.shown.some((side) => side.failure?.status === 422); // then nobody can read it
      return;
    }
    const { width, height } = bitmap;
    const tiny = Math.max(width, height) < TINY;
    const scale = tiny ? 1 : Math.min(LONGEST / Math.max(width, height), 1);
    const enlarged = tiny ? Math.ceil(320 / Math.max(width, height)) : 1; // lines over it stay thin
    const side = (length) => Math.max(Math.round(length * scale * enlarged), 1);
    const canvas = make("canvas", { width: side(width), height: side(height) });
    const brush = canvas.getContext("2d");
    brush.imageSmoothingEnabled = !tiny;
    brush.imageSmoothingQuality = "high";
    brush.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    bitmap.close();
    this.picture = { width, height, canvas, tiny };
    this.show();
  }

  show() { for (const side of this.shown) side.show(); }

  look() { for (const side of this.shown) { side.show(); side.look(); } }

  answered(side) {
    const [first] = side.answer.predictions;
    say(`${this.file.name}: ${side.model.name} says ${first.label}, ${percent(first.probability)}.`);
    this.compare();
  }

  failed(side, refusal) {
    if (refusal.status === 422) this.note.hidden = true;
    this.changed(this, refusal);
  }

  retry() { for (const side of this.shown) if (side.failure?.gone) side.start(); }

  // Two answers beside each other: whether they name the same class, and by how much each probability differs.
  compare() {
    const [first, second] = this.shown;
    const both = Boolean(second && first.answer && second.answer);
    this.badge.hidden = !both;
    this.verdict = null;
    if (both) {
      const [one, two] = [first, second].map((side) => side.answer.predictions);
      const same = one[0].label === two[0].label;
      const theirs = byLabel(two);
      const differences = [...byLabel(one)].filter(([label]) => theirs.has(label))
        .map(([label, probability]) => Math.abs(probability - theirs.get(label)));
      this.verdict = { same, largest: Math.max(0, ...differences), comparable: differences.length > 0 };
      this.badge.className = `badge ${same ? "agrees" : "differs"}`;
      this.badge.replaceChildren(same ? "Both say " : "They differ: ", make("b", {}, one[0].label),
        ...(same ? [] : [" or ", make("b", {}, two[0].label)]));
      first.list(null, same);
      second.list(first.answer, same);
    } else {
      for (const side of this.shown) side.list();
    }
    this.changed(this);
  }
}
