// A picture, what the model saw of it and a map over its patches go in; the picture with the map over it comes out.

// What is not looked at lies in the dark, as in the paper's Figure 6; what is looked at glows, on a black picture too.
const NIGHT = [10, 7, 38];
const GLOW = [255, 176, 40];

const sides = (size) => (Array.isArray(size) ? size : [size, size]);

// Which part of a picture the model is shown, in shares of its width and height: the preprocessing's resize and crop.
export function seen(stored, { width, height }) {
  const whole = { left: 0, top: 0, width: 1, height: 1 };
  const preprocessing = stored?.vitkit ?? stored; // the other keys are for other libraries
  if (!preprocessing || !width || !height) return whole;
  const [rows, columns] = sides(preprocessing.image_size);
  const share = preprocessing.crop_share ?? 1;
  if (preprocessing.resize === "squash_crop") return centred(share, share);
  if (preprocessing.resize !== "crop") return whole;
  const scale = Math.max(Math.floor(rows / share) / height, Math.floor(columns / share) / width);
  return centred(Math.min(columns / scale / width, 1), Math.min(rows / scale / height, 1));
}

const centred = (width, height) => ({ left: (1 - width) / 2, top: (1 - height) / 2, width, height });

export function meanOfHeads(heads) {
  return heads[0].map((row, y) => row.map((_, x) => heads.reduce((sum, head) => sum + head[y][x], 0) / heads.length));
}

// The strongest patch of a map, and how much all patches have together.
export function summary(map) {
  let best = { row: 0, column: 0, share: -Infinity };
  let total = 0;
  map.forEach((line, row) => line.forEach((share, column) => {
    total += share;
    if (share > best.share) best = { row, column, share };
  }));
  return { ...best, total };
}

// Each patch's share of 0…1. What is above 95 % of the patches is as bright as can be, as in the reports: a few
// patches often draw most of it.
export function shares(map) {
  const values = map.flat();
  const sorted = [...values].sort((a, b) => a - b);
  const low = sorted[0];
  const span = sorted[Math.floor(0.95 * (sorted.length - 1))] - low || sorted.at(-1) - low;
  return values.map((value) => (span > 0 ? Math.min((value - low) / span, 1) : 0));
}

// One pixel a patch, of one colour and as dense as `density` says of its share.
function painted(map, colour, density) {
  const canvas = new OffscreenCanvas(map[0].length, map.length);
  const brush = canvas.getContext("2d");
  const image = brush.createImageData(canvas.width, canvas.height);
  shares(map).forEach((share, place) => image.data.set([...colour, 255 * density(share)], 4 * place));
  brush.putImageData(image, 0, 0);
  return canvas;
}

// Draw on a canvas of the picture's own proportions. `patch` is {row, column}; without a map only the picture is drawn.
export function draw(canvas, { picture, region, map, strength, patch, grid }) {
  const brush = canvas.getContext("2d");
  const { width, height } = canvas;
  brush.clearRect(0, 0, width, height);
  brush.drawImage(picture, 0, 0, width, height);
  if (!grid) return;
  const box = [region.left * width, region.top * height, region.width * width, region.height * height];
  if (map) {
    brush.imageSmoothingEnabled = grid[0] >= 10 && !patch;
    brush.drawImage(painted(map, NIGHT, (share) => strength * (1 - share)), ...box);
    brush.globalCompositeOperation = "screen";
    brush.drawImage(painted(map, GLOW, (share) => 0.45 * strength * share ** 2), ...box);
    brush.globalCompositeOperation = "source-over";
    unseen(brush, box, width, height);
  }
  if (patch) outline(brush, box, grid, patch);
}

// What the model is not shown fades.
function unseen(brush, [left, top, across, down], width, height) {
  if (across > width - 1 && down > height - 1) return;
  brush.beginPath();
  brush.rect(0, 0, width, height);
  brush.rect(left, top, across, down);
  brush.fillStyle = "rgba(120, 126, 140, 0.62)";
  brush.fill("evenodd");
}

function outline(brush, [left, top, across, down], [rows, columns], { row, column }) {
  const box = [left + (column * across) / columns, top + (row * down) / rows, across / columns, down / rows];
  const unit = Math.max(brush.canvas.width / 240, 1);
  brush.lineWidth = 4 * unit;
  brush.strokeStyle = "#000";
  brush.strokeRect(...box);
  brush.lineWidth = 2 * unit;
  brush.strokeStyle = "#fff";
  brush.strokeRect(...box);
}

// The patch under a point of the element; none outside of what the model is shown.
export function patchAt(element, region, [rows, columns], { clientX, clientY }) {
  const box = element.getBoundingClientRect();
  const across = ((clientX - box.left) / box.width - region.left) / region.width;
  const down = ((clientY - box.top) / box.height - region.top) / region.height;
  if (across < 0 || across >= 1 || down < 0 || down >= 1) return null;
  return { row: Math.floor(down * rows), column: Math.floor(across * columns) };
}
