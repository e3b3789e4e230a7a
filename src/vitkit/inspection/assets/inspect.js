"use strict";
// Under the pointer, or where the arrow keys lead, a patch is chosen, and those that mean the same to the model light up.
for (const box of document.querySelectorAll(".alike")) {
  const rows = Number(box.dataset.rows);
  const columns = Number(box.dataset.columns);
  const cells = rows * columns;
  const likeness = Uint8Array.from(atob(box.dataset.likeness), (letter) => letter.charCodeAt(0));
  const canvas = box.querySelector("canvas");
  canvas.width = columns;
  canvas.height = rows;
  const brush = canvas.getContext("2d");
  const mark = box.querySelector(".here");
  const said = box.querySelector(".said");
  let row = Math.floor(rows / 2);
  let column = Math.floor(columns / 2);
  const draw = () => {
    const shades = brush.createImageData(columns, rows);
    const first = (row * columns + column) * cells;
    for (let cell = 0; cell < cells; cell += 1) {
      const share = likeness[first + cell] / 255;
      shades.data.set([8, 6, 30, Math.round(205 * (1 - share))], cell * 4);
    }
    brush.putImageData(shades, 0, 0);
    mark.style.left = `${(100 * column) / columns}%`;
    mark.style.top = `${(100 * row) / rows}%`;
    mark.style.width = `${100 / columns}%`;
    mark.style.height = `${100 / rows}%`;
    said.textContent = `row ${row + 1}, column ${column + 1}`;
  };
  box.addEventListener("pointermove", (event) => {
    const place = canvas.getBoundingClientRect();
    column = Math.min(columns - 1, Math.max(0, Math.floor(((event.clientX - place.left) / place.width) * columns)));
    row = Math.min(rows - 1, Math.max(0, Math.floor(((event.clientY - place.top) / place.height) * rows)));
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
