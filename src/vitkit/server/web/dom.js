// DOM helpers. Text is only ever set as text nodes, so class and file names cannot inject markup.

const SVG = "http://www.w3.org/2000/svg";

function populate(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child || child === ""));
  return element;
}

export const create = (tag, attributes = {}, ...children) => populate(document.createElement(tag), attributes, children);

export const createSvg = (tag, attributes = {}, ...children) =>
  populate(document.createElementNS(SVG, tag), attributes, children);

// Replace the children of a container, leaving equal ones untouched so that they keep the focus.
export function reconcile(container, children) {
  children.forEach((child, index) => {
    const current = container.children[index];
    if (!current) container.append(child);
    else if (!current.isEqualNode(child)) current.replaceWith(child);
  });
  while (container.children.length > children.length) container.lastElementChild.remove();
}

export const byId = (id) => document.getElementById(id);

// 0.7431 → "74.3 %". Small values never print as 0 %, nor large ones as 100 %.
export function formatPercent(fraction) {
  if (!Number.isFinite(fraction)) return "–";
  if (fraction > 0 && fraction < 0.001) return "< 0.1 %";
  if (fraction < 1 && fraction > 0.999) return "> 99.9 %";
  return `${(100 * fraction).toFixed(1)} %`;
}

// A difference of two fractions in percentage points, with its sign.
export function formatPoints(difference) {
  const rounded = Math.abs(100 * difference).toFixed(1);
  if (rounded === "0.0") return "±0.0";
  return `${difference < 0 ? "−" : "+"}${rounded}`;
}

// Format with four significant digits.
export function formatNumber(value) {
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) {
    return Number(value.toPrecision(3)).toExponential().replace("e-", "e−").replace("e+", "e");
  }
  return String(Number(value.toPrecision(4)));
}

// Map labels to probabilities; of two classes with the same name, the more probable one counts.
export const probabilityByLabel = (predictions) =>
  new Map([...predictions].reverse().map((prediction) => [prediction.label, prediction.probability]));

export const pluralize = (count, word, plural = `${word}s`) =>
  `${count.toLocaleString("en")} ${count === 1 ? word : plural}`;

// Announce a change to screen readers through the live region.
export function announce(text) {
  const region = byId("announcements");
  region.append(create("p", {}, text));
  while (region.children.length > 8) region.firstElementChild.remove();
}
