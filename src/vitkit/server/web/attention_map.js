// Attention maps as canvas overlays: the region that the model sees, and the map over its patches.

// Patches with little attention are darkened, as in the paper's Figure 6; strong ones also glow, so that they show on
// dark pictures.
const SHADOW = [10, 7, 38];
const HIGHLIGHT = [255, 176, 40];

const toPair = (size) => (Array.isArray(size) ? size : [size, size]);

// Return the part of a picture that the preprocessing keeps, as fractions of its width and height.
export function visibleRegion(stored, { width, height }) {
  const whole = { left: 0, top: 0, width: 1, height: 1 };
  const preprocessing = stored?.vitkit ?? stored; // the other keys are for other libraries
  if (!preprocessing || !width || !height) return whole;
  const [rows, columns] = toPair(preprocessing.image_size);
  const fraction = preprocessing.crop_fraction ?? 1;
  if (preprocessing.resize === "squash_crop") return centered(fraction, fraction);
  if (preprocessing.resize !== "crop") return whole;
  const scale = Math.max(Math.floor(rows / fraction) / height, Math.floor(columns / fraction) / width);
  return centered(Math.min(columns / scale / width, 1), Math.min(rows / scale / height, 1));
}

const centered = (width, height) => ({ left: (1 - width) / 2, top: (1 - height) / 2, width, height });

export function meanOfHeads(heads) {
  return heads[0].map((row, y) => row.map((_, x) => heads.reduce((sum, head) => sum + head[y][x], 0) / heads.length));
}

// Return the patch with the largest weight, and the sum of all weights.
export function summarizeMap(map) {
  let strongest = { row: 0, column: 0, weight: -Infinity };
  let total = 0;
  map.forEach((weights, row) => weights.forEach((weight, column) => {
    total += weight;
    if (weight > strongest.weight) strongest = { row, column, weight };
  }));
  return { ...strongest, total };
}

// Scale weights to 0…1. The 95th percentile maps to 1, as in the reports, because few patches often have most weight.
export function normalizeMap(map) {
  const values = map.flat();
  const sorted = [...values].sort((a, b) => a - b);
  const low = sorted[0];
  const span = sorted[Math.floor(0.95 * (sorted.length - 1))] - low || sorted.at(-1) - low;
  return values.map((value) => (span > 0 ? Math.min((value - low) / span, 1) : 0));
}

// Paint one pixel per patch in one color, with the opacity that `alpha` gives for its normalized weight.
function paintMap(map, color, alpha) {
  const canvas = new OffscreenCanvas(map[0].length, map.length);
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  normalizeMap(map).forEach((weight, index) => image.data.set([...color, 255 * alpha(weight)], 4 * index));
  context.putImageData(image, 0, 0);
  return canvas;
}

// Draw a picture with an optional map and an optional outlined patch ({row, column}) on a canvas of the same aspect.
export function draw(canvas, { picture, region, map, strength, patch, grid }) {
  const context = canvas.getContext("2d");
  const { width, height } = canvas;
  context.clearRect(0, 0, width, height);
  context.drawImage(picture, 0, 0, width, height);
  if (!grid) return;
  const box = [region.left * width, region.top * height, region.width * width, region.height * height];
  if (map) {
    context.imageSmoothingEnabled = grid[0] >= 10 && !patch;
    context.drawImage(paintMap(map, SHADOW, (weight) => strength * (1 - weight)), ...box);
    context.globalCompositeOperation = "screen";
    context.drawImage(paintMap(map, HIGHLIGHT, (weight) => 0.45 * strength * weight ** 2), ...box);
    context.globalCompositeOperation = "source-over";
    fadeOutside(context, box, width, height);
  }
  if (patch) outlinePatch(context, box, grid, patch);
}

// Gray out what the preprocessing cuts off.
function fadeOutside(context, [left, top, boxWidth, boxHeight], width, height) {
  if (boxWidth > width - 1 && boxHeight > height - 1) return;
  context.beginPath();
  context.rect(0, 0, width, height);
  context.rect(left, top, boxWidth, boxHeight);
  context.fillStyle = "rgba(120, 126, 140, 0.62)";
  context.fill("evenodd");
}

function outlinePatch(context, [left, top, width, height], [rows, columns], { row, column }) {
  const box = [left + (column * width) / columns, top + (row * height) / rows, width / columns, height / rows];
  const unit = Math.max(context.canvas.width / 240, 1);
  context.lineWidth = 4 * unit;
  context.strokeStyle = "#000";
  context.strokeRect(...box);
  context.lineWidth = 2 * unit;
  context.strokeStyle = "#fff";
  context.strokeRect(...box);
}

// Return the patch under a pointer event, or null outside of the visible region.
export function patchAt(element, region, [rows, columns], { clientX, clientY }) {
  const box = element.getBoundingClientRect();
  const x = ((clientX - box.left) / box.width - region.left) / region.width;
  const y = ((clientY - box.top) / box.height - region.top) / region.height;
  if (x < 0 || x >= 1 || y < 0 || y >= 1) return null;
  return { row: Math.floor(y * rows), column: Math.floor(x * columns) };
}
