// Names and contents go in, elements come out. Text is only ever set as text, so names of classes and files stay inert.

const SVG = "http://www.w3.org/2000/svg";

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child || child === ""));
  return element;
}

export const make = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);

export const drawn = (tag, attributes = {}, ...children) =>
  filled(document.createElementNS(SVG, tag), attributes, children);

// Put these in the place of an element's children. What is there already stays as it is, and keeps the focus.
export function mend(place, wanted) {
  wanted.forEach((child, at) => {
    const there = place.children[at];
    if (!there) place.append(child);
    else if (!there.isEqualNode(child)) there.replaceWith(child);
  });
  while (place.children.length > wanted.length) place.lastElementChild.remove();
}

export const find = (id) => document.getElementById(id);

// 0.7431 → "74.3 %"; what is not nothing does not look like nothing.
export function percent(share) {
  if (!Number.isFinite(share)) return "–";
  if (share > 0 && share < 0.001) return "< 0.1 %";
  if (share < 1 && share > 0.999) return "> 99.9 %";
  return `${(100 * share).toFixed(1)} %`;
}

// A difference of shares in points of a hundred, with its sign.
export function points(difference) {
  const rounded = Math.abs(100 * difference).toFixed(1);
  if (rounded === "0.0") return "±0.0";
  return `${difference < 0 ? "−" : "+"}${rounded}`;
}

// Four digits are enough to read.
export function number(value) {
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) {
    return Number(value.toPrecision(3)).toExponential().replace("e-", "e−").replace("e+", "e");
  }
  return String(Number(value.toPrecision(4)));
}

// The probability of each label; of two classes of one name the likelier.
export const byLabel = (predictions) =>
  new Map([...predictions].reverse().map((each) => [each.label, each.probability]));

export const counted = (count, word, several = `${word}s`) =>
  `${count.toLocaleString("en")} ${count === 1 ? word : several}`;

// Tells what changed to those who do not see it; what comes at once is heard one after the other.
export function say(text) {
  const place = find("said");
  place.append(make("p", {}, text));
  while (place.children.length > 8) place.firstElementChild.remove();
}
