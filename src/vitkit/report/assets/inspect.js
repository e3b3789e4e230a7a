"use strict";
// Highlight the patches whose features are similar to the patch under the pointer or chosen with the arrow keys.
for (const box of document.querySelectorAll(".patch-map")) {
  const rows = Number(box.dataset.rows);
  const columns = Number(box.dataset.columns);
  const cells = rows * columns;
  const similarity = Uint8Array.from(atob(box.dataset.similarity), (letter) => letter.charCodeAt(0));
  const canvas = box.querySelector("canvas");
  canvas.width = columns;
  canvas.height = rows;
  const drawing = canvas.getContext("2d");
  const mark = box.querySelector(".selected-patch");
  const label = box.querySelector(".label");
  let row = Math.floor(rows / 2);
  let column = Math.floor(columns / 2);
  const draw = () => {
    const shades = drawing.createImageData(columns, rows);
    const first = (row * columns + column) * cells;
    for (let cell = 0; cell < cells; cell += 1) {
      const fraction = similarity[first + cell] / 255;
      shades.data.set([8, 6, 30, Math.round(205 * (1 - fraction))], cell * 4);
    }
    drawing.putImageData(shades, 0, 0);
    mark.style.left = `${(100 * column) / columns}%`;
    mark.style.top = `${(100 * row) / rows}%`;
    mark.style.width = `${100 / columns}%`;
    mark.style.height = `${100 / rows}%`;
    label.textContent = `row ${row + 1}, column ${column + 1}`;
  };
  box.addEventListener("pointermove", (event) => {
    const bounds = canvas.getBoundingClientRect();
    column = Math.min(columns - 1, Math.max(0, Math.floor(((event.clientX - bounds.left) / bounds.width) * columns)));
    row = Math.min(rows - 1, Math.max(0, Math.floor(((event.clientY - bounds.top) / bounds.height) * rows)));
    draw();
  });
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  box.addEventListener("keydown", (event) => {
    if (!(event.key in steps)) return;
    event.preventDefault();
    row = Math.min(rows - 1, Math.max(0, row + steps[event.key][0]));
    column = Math.min(columns - 1, Math.max(0, column + steps[event.key][1]));
    draw();
  });
  draw();
}
