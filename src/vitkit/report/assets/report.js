"use strict";
// Sort a table by a click on the head of a column. The page works without this.
for (const table of document.querySelectorAll("table.sorts")) {
  const heads = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  const value = (row, column) => {
    const cell = row.cells[column];
    return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
  };
  heads.forEach((head, column) => {
    if (!("sort" in head.dataset)) return;
    const sort = () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      const sign = down ? -1 : 1;
      const order = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true }));
      const rows = [...body.rows].sort((a, b) => sign * order(value(a, column), value(b, column)));
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      body.append(...rows);
    };
    head.classList.add("sortable");
    head.tabIndex = 0;
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        sort();
      }
    });
  });
}
