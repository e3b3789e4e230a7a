// Series of numbers by step go in; a chart comes out that can be read with the pointer and with the arrow keys.

import { drawn, make, number, percent, say } from "./elements.js";

const MARGIN = { left: 52, right: 14, top: 10, bottom: 26 };

// Round steps of an axis: 1, 2 or 5 times a power of ten.
function stride(low, high, most) {
  const rough = (high - low || 1) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * ([1, 2, 5].find((each) => each * power >= rough * (1 - 1e-9)) ?? 10);
}

function ticks(low, high, most) {
  const step = stride(low, high, most);
  const found = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9; place += 1) {
    found.push(place * step);
  }
  return found;
}

// A running mean over about a fortieth of the curve, which shows where a noisy one goes.
function smoothed(values) {
  const reach = Math.floor(values.length / 80);
  if (reach < 1) return values;
  const sums = [0];
  for (const value of values) sums.push(sums.at(-1) + value);
  return values.map((_, place) => {
    const [from, to] = [Math.max(place - reach, 0), Math.min(place + reach + 1, values.length)];
    return (sums[to] - sums[from]) / (to - from);
  });
}

// At most two points a pixel, the least and the greatest of each: a long log draws as quickly as a short one.
function thinned(points, most) {
  if (points.length <= 2 * most) return points;
  const found = [];
  const share = points.length / most;
  for (let slot = 0; slot < most; slot += 1) {
    const part = points.slice(Math.floor(slot * share), Math.floor((slot + 1) * share));
    const low = part.reduce((a, b) => (b[1] < a[1] ? b : a));
    const high = part.reduce((a, b) => (b[1] > a[1] ? b : a));
    found.push(...(low[0] <= high[0] ? [low, high] : [high, low]));
  }
  return found;
}

// The place of the step nearest to the wanted one.
function nearest(steps, wanted) {
  let [low, high] = [0, steps.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low > 0 && wanted - steps[low - 1] < steps[low] - wanted ? low - 1 : low;
}

export const written = (value, { share }) => (share ? percent(value) : number(value));

const titled = ({ name, held }) => `${name}${held ? ", held out" : ""}`;

export class Chart {
  constructor(title, { share = false } = {}) {
    this.title = title;
    this.share = share;
    this.series = [];
    this.step = null;
    this.readout = make("span", { class: "readout" });
    // An application: a screen reader keeps the arrow keys of a mere picture to itself.
    this.box = make("div", {
      class: "plot", tabindex: "0", role: "application", "aria-roledescription": "chart", "aria-label": title,
    });
    const caption = make("figcaption", {}, make("b", {}, title), this.readout);
    this.element = make("figure", { class: "chart" }, caption, this.box);
    this.box.addEventListener("pointermove", (event) => this.read(this.stepAt(event)));
    this.box.addEventListener("pointerleave", () => this.read(null));
    this.box.addEventListener("blur", () => this.read(null));
    this.box.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  // Each series is {name, colour, held, steps, values}; `last` is the step at the right edge.
  set(series, { last, logarithmic = false, smooth = false }) {
    const drawable = (value) => Number.isFinite(value) && (!logarithmic || value > 0);
    this.series = series.map((each) => {
      const kept = each.values.map((value, place) => [each.steps[place], value]).filter(([, value]) => drawable(value));
      return { ...each, steps: kept.map(([step]) => step), values: kept.map(([, value]) => value) };
    }).filter((each) => each.values.length);
    Object.assign(this, { last, logarithmic, smooth });
    this.element.hidden = this.series.length === 0;
    this.draw();
  }

  draw() {
    const width = Math.round(this.box.clientWidth);
    if (!width || !this.series.length) return;
    const height = Math.round(Math.min(Math.max(width * 0.4, 170), 240));
    const lines = this.series.map((each) => (
      { ...each, line: this.smooth && !each.held ? smoothed(each.values) : each.values }
    ));
    const scale = (value) => (this.logarithmic ? Math.log10(value) : value);
    const [low, high] = this.bounds(lines.flatMap((each) => each.line.map(scale)));
    const first = Math.min(...this.series.map((each) => each.steps[0]), this.last);
    const across = (width - MARGIN.left - MARGIN.right) / (this.last - first || 1);
    const down = (height - MARGIN.top - MARGIN.bottom) / (high - low);
    this.size = { width, height };
    this.range = [first, this.last];
    this.x = (step) => MARGIN.left + (step - first) * across;
    // What is above the range stays at its edge.
    this.y = (value) => Math.max(height - MARGIN.bottom - (scale(value) - low) * down, MARGIN.top - 6);
    this.cursor = drawn("g");
    this.box.replaceChildren(drawn("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" },
      this.axes(low, high), lines.flatMap((each) => this.curve(each)), this.cursor));
    this.read(this.step, false);
  }

  // The range of the vertical axis. A few wild values at a curve's start must not press the rest of it flat.
  bounds(values) {
    const sorted = values.sort((a, b) => a - b);
    let [low, high] = [sorted[0], sorted[Math.min(Math.ceil(sorted.length * 0.995), sorted.length - 1)]];
    if (this.share) return [0, high > 0.5 ? 1 : Math.max(high * 1.05, 0.1)];
    if (high - low < 1e-12) [low, high] = [low - Math.abs(low) * 0.1 - 1e-6, high + Math.abs(high) * 0.1 + 1e-6];
    if (this.logarithmic) return [low, high];
    const step = stride(low, high, 4);
    return [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
  }

  axes(low, high) {
    const { width, height } = this.size;
    const level = (tick) => (this.logarithmic ? 10 ** tick : tick);
    const label = (tick) => (this.share ? `${Math.round(100 * tick)} %` : number(level(tick)));
    const levels = ticks(low, high, 4).flatMap((tick) => {
      const y = this.y(level(tick));
      return [
        drawn("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y }),
        drawn("text", { class: "tick", x: MARGIN.left - 8, y: y + 4, "text-anchor": "end" }, label(tick)),
      ];
    });
    const steps = ticks(...this.range, Math.max(Math.floor(width / 130), 2)).map((tick) => {
      const x = this.x(tick);
      const anchor = x > width - 40 ? "end" : "middle";
      return drawn("text", { class: "tick", x, y: height - 7, "text-anchor": anchor }, tick.toLocaleString("en"));
    });
    return [...levels, ...steps];
  }

  curve({ steps, values, line, colour, held }) {
    const path = (numbers, kind) => {
      const points = thinned(numbers.map((value, place) => [steps[place], value]), this.size.width);
      const places = points.map(([step, value]) => `${this.x(step).toFixed(1)},${this.y(value).toFixed(1)}`);
      return drawn("polyline", { class: `line ${kind} s${colour}`, points: places.join(" ") });
    };
    if (!held) return [line !== values && path(values, "raw"), path(line, "trained")];
    const dots = steps.length > 60 ? [] : steps.map((step, place) => this.dot(step, values[place], colour));
    return [path(values, "held"), ...dots];
  }

  dot(step, value, colour) {
    return drawn("circle", { class: `dot s${colour}`, cx: this.x(step), cy: this.y(value), r: 3.2 });
  }

  stepAt(event) {
    const box = this.box.getBoundingClientRect();
    const [first, last] = this.range ?? [0, 1];
    const share = (event.clientX - box.left - MARGIN.left) / (box.width - MARGIN.left - MARGIN.right);
    return first + Math.min(Math.max(share, 0), 1) * (last - first);
  }

  key(event) {
    const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const steps = [...this.series].sort((a, b) => b.steps.length - a.steps.length)[0]?.steps;
    if (!direction || !steps) return;
    event.preventDefault();
    const outside = direction > 0 ? -1 : steps.length;
    const place = (this.step === null ? outside : nearest(steps, this.step)) + direction * (event.shiftKey ? 10 : 1);
    this.read(steps[Math.min(Math.max(place, 0), steps.length - 1)]);
    say(this.box.getAttribute("aria-label"));
  }

  // Say what every curve has at a step; whoever listens is told the step, so that all charts show the same one.
  read(step, telling = true) {
    this.step = step;
    if (telling) this.told?.(step);
    if (!this.cursor) return;
    this.cursor.replaceChildren();
    this.readout.replaceChildren();
    const found = step === null ? [] : this.series.map((each) => {
      const place = nearest(each.steps, step);
      return { ...each, at: each.steps[place], value: each.values[place] };
    });
    this.box.setAttribute("aria-label", found.length ? this.sentence(found) : this.summary());
    if (!found.length) return;
    const x = this.x(found[0].at);
    const bottom = this.size.height - MARGIN.bottom;
    this.cursor.append(drawn("line", { class: "hair", x1: x, x2: x, y1: MARGIN.top, y2: bottom }),
      ...found.map((each) => this.dot(each.at, each.value, each.colour)));
    this.readout.append(`step ${Math.round(found[0].at).toLocaleString("en")} `, ...found.map((each) =>
      make("span", { class: "value" }, make("i", { class: `s${each.colour}` }),
        `${each.held ? "held out " : ""}${written(each.value, this)}`)));
  }

  // What is read at a step, for those who do not see it. A curve that has no value there tells its nearest step.
  sentence(found) {
    const [{ at }] = found;
    const told = found.map((each) =>
      `${titled(each)}: ${written(each.value, this)}${each.at === at ? "" : ` at step ${each.at}`}`);
    return `${this.title}, step ${at}. ${told.join("; ")}.`;
  }

  summary() {
    const told = this.series.map((each) => {
      const ends = [0, -1].map((place) => `${written(each.values.at(place), this)} at step ${each.steps.at(place)}`);
      return `${titled(each)}: from ${ends[0]} to ${ends[1]}`;
    });
    return `${this.title}. ${told.join("; ")}. Arrow keys read it step by step.`;
  }
}
