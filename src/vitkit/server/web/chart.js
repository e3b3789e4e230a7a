// Line chart of metrics over steps, readable with the pointer and with the arrow keys.

import { announce, create, createSvg, formatNumber, formatPercent } from "./dom.js";

const MARGIN = { left: 52, right: 14, top: 10, bottom: 26 };

// Return a tick distance of 1, 2 or 5 times a power of ten.
function tickStep(low, high, max) {
  const target = (high - low || 1) / max;
  const power = 10 ** Math.floor(Math.log10(target));
  return power * ([1, 2, 5].find((each) => each * power >= target * (1 - 1e-9)) ?? 10);
}

function ticks(low, high, max) {
  const step = tickStep(low, high, max);
  const result = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1) {
    result.push(index * step);
  }
  return result;
}

// Centered moving average over about 1/40 of the curve.
function movingAverage(values) {
  const radius = Math.floor(values.length / 80);
  if (radius < 1) return values;
  const sums = [0];
  for (const value of values) sums.push(sums.at(-1) + value);
  return values.map((_, index) => {
    const [from, to] = [Math.max(index - radius, 0), Math.min(index + radius + 1, values.length)];
    return (sums[to] - sums[from]) / (to - from);
  });
}

// Keep at most two points per pixel, minimum and maximum, so that long logs draw quickly.
function decimate(points, max) {
  if (points.length <= 2 * max) return points;
  const result = [];
  const size = points.length / max;
  for (let slot = 0; slot < max; slot += 1) {
    const part = points.slice(Math.floor(slot * size), Math.floor((slot + 1) * size));
    const low = part.reduce((a, b) => (b[1] < a[1] ? b : a));
    const high = part.reduce((a, b) => (b[1] > a[1] ? b : a));
    result.push(...(low[0] <= high[0] ? [low, high] : [high, low]));
  }
  return result;
}

// Return the index of the step nearest to a position.
function nearestIndex(steps, position) {
  let [low, high] = [0, steps.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < position) low = middle + 1;
    else high = middle;
  }
  return low > 0 && position - steps[low - 1] < steps[low] - position ? low - 1 : low;
}

export const formatValue = (value, { fraction }) => (fraction ? formatPercent(value) : formatNumber(value));

const seriesTitle = ({ name, validation }) => `${name}${validation ? ", validation" : ""}`;

export class Chart {
  constructor(title, { fraction = false } = {}) {
    this.title = title;
    this.fraction = fraction;
    this.series = [];
    this.step = null;
    this.readout = create("span", { class: "readout" });
    // Role application: for a plain image, screen readers would intercept the arrow keys.
    this.box = create("div", {
      class: "plot", tabindex: "0", role: "application", "aria-roledescription": "chart", "aria-label": title,
    });
    const caption = create("figcaption", {}, create("b", {}, title), this.readout);
    this.element = create("figure", { class: "chart" }, caption, this.box);
    this.box.addEventListener("pointermove", (event) => this.read(this.stepAt(event)));
    this.box.addEventListener("pointerleave", () => this.read(null));
    this.box.addEventListener("blur", () => this.read(null));
    this.box.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  // Set the series ({name, color, validation, steps, values}); `last` is the step at the right edge.
  set(series, { last, logarithmic = false, smooth = false }) {
    const drawable = (value) => Number.isFinite(value) && (!logarithmic || value > 0);
    this.series = series.map((each) => {
      const points = each.values.map((value, index) => [each.steps[index], value]).filter(([, value]) => drawable(value));
      return { ...each, steps: points.map(([step]) => step), values: points.map(([, value]) => value) };
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
      { ...each, line: this.smooth && !each.validation ? movingAverage(each.values) : each.values }
    ));
    const scale = (value) => (this.logarithmic ? Math.log10(value) : value);
    const [low, high] = this.bounds(lines.flatMap((each) => each.line.map(scale)));
    const first = Math.min(...this.series.map((each) => each.steps[0]), this.last);
    const across = (width - MARGIN.left - MARGIN.right) / (this.last - first || 1);
    const down = (height - MARGIN.top - MARGIN.bottom) / (high - low);
    this.size = { width, height };
    this.range = [first, this.last];
    this.x = (step) => MARGIN.left + (step - first) * across;
    // Values above the range are drawn at its edge.
    this.y = (value) => Math.max(height - MARGIN.bottom - (scale(value) - low) * down, MARGIN.top - 6);
    this.cursor = createSvg("g");
    this.box.replaceChildren(createSvg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" },
      this.axes(low, high), lines.flatMap((each) => this.curve(each)), this.cursor));
    this.read(this.step, false);
  }

  // Return the range of the y axis, ignoring the largest 0.5 % so that early outliers do not flatten the curve.
  bounds(values) {
    const sorted = values.sort((a, b) => a - b);
    let [low, high] = [sorted[0], sorted[Math.min(Math.ceil(sorted.length * 0.995), sorted.length - 1)]];
    if (this.fraction) return [0, high > 0.5 ? 1 : Math.max(high * 1.05, 0.1)];
    if (high - low < 1e-12) [low, high] = [low - Math.abs(low) * 0.1 - 1e-6, high + Math.abs(high) * 0.1 + 1e-6];
    if (this.logarithmic) return [low, high];
    const step = tickStep(low, high, 4);
    return [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
  }

  axes(low, high) {
    const { width, height } = this.size;
    const level = (tick) => (this.logarithmic ? 10 ** tick : tick);
    const label = (tick) => (this.fraction ? `${Math.round(100 * tick)} %` : formatNumber(level(tick)));
    const levels = ticks(low, high, 4).flatMap((tick) => {
      const y = this.y(level(tick));
      return [
        createSvg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y }),
        createSvg("text", { class: "tick", x: MARGIN.left - 8, y: y + 4, "text-anchor": "end" }, label(tick)),
      ];
    });
    const steps = ticks(...this.range, Math.max(Math.floor(width / 130), 2)).map((tick) => {
      const x = this.x(tick);
      const anchor = x > width - 40 ? "end" : "middle";
      return createSvg("text", { class: "tick", x, y: height - 7, "text-anchor": anchor }, tick.toLocaleString("en"));
    });
    return [...levels, ...steps];
  }

  curve({ steps, values, line, color, validation }) {
    const path = (numbers, kind) => {
      const points = decimate(numbers.map((value, index) => [steps[index], value]), this.size.width);
      const coordinates = points.map(([step, value]) => `${this.x(step).toFixed(1)},${this.y(value).toFixed(1)}`);
      return createSvg("polyline", { class: `line ${kind} s${color}`, points: coordinates.join(" ") });
    };
    if (!validation) return [line !== values && path(values, "raw"), path(line, "trained")];
    const dots = steps.length > 60 ? [] : steps.map((step, index) => this.dot(step, values[index], color));
    return [path(values, "validation"), ...dots];
  }

  dot(step, value, color) {
    return createSvg("circle", { class: `dot s${color}`, cx: this.x(step), cy: this.y(value), r: 3.2 });
  }

  stepAt(event) {
    const box = this.box.getBoundingClientRect();
    const [first, last] = this.range ?? [0, 1];
    const fraction = (event.clientX - box.left - MARGIN.left) / (box.width - MARGIN.left - MARGIN.right);
    return first + Math.min(Math.max(fraction, 0), 1) * (last - first);
  }

  onKey(event) {
    const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const steps = [...this.series].sort((a, b) => b.steps.length - a.steps.length)[0]?.steps;
    if (!direction || !steps) return;
    event.preventDefault();
    const outside = direction > 0 ? -1 : steps.length;
    const index = (this.step === null ? outside : nearestIndex(steps, this.step)) + direction * (event.shiftKey ? 10 : 1);
    this.read(steps[Math.min(Math.max(index, 0), steps.length - 1)]);
    announce(this.box.getAttribute("aria-label"));
  }

  // Show the values at a step; `onRead` is notified so that all charts show the same step.
  read(step, notify = true) {
    this.step = step;
    if (notify) this.onRead?.(step);
    if (!this.cursor) return;
    this.cursor.replaceChildren();
    this.readout.replaceChildren();
    const result = step === null ? [] : this.series.map((each) => {
      const index = nearestIndex(each.steps, step);
      return { ...each, at: each.steps[index], value: each.values[index] };
    });
    this.box.setAttribute("aria-label", result.length ? this.describe(result) : this.summary());
    if (!result.length) return;
    const x = this.x(result[0].at);
    const bottom = this.size.height - MARGIN.bottom;
    this.cursor.append(createSvg("line", { class: "hair", x1: x, x2: x, y1: MARGIN.top, y2: bottom }),
      ...result.map((each) => this.dot(each.at, each.value, each.color)));
    this.readout.append(`step ${Math.round(result[0].at).toLocaleString("en")} `, ...result.map((each) =>
      create("span", { class: "value" }, create("i", { class: `s${each.color}` }),
        `${each.validation ? "validation " : ""}${formatValue(each.value, this)}`)));
  }

  // Describe the values at a step for screen readers; a curve without a value there names its nearest step.
  describe(result) {
    const [{ at }] = result;
    const parts = result.map((each) =>
      `${seriesTitle(each)}: ${formatValue(each.value, this)}${each.at === at ? "" : ` at step ${each.at}`}`);
    return `${this.title}, step ${at}. ${parts.join("; ")}.`;
  }

  summary() {
    const parts = this.series.map((each) => {
      const ends = [0, -1].map((index) => `${formatValue(each.values.at(index), this)} at step ${each.steps.at(index)}`);
      return `${seriesTitle(each)}: from ${ends[0]} to ${ends[1]}`;
    });
    return `${this.title}. ${parts.join("; ")}. Arrow keys move along the steps.`;
  }
}
