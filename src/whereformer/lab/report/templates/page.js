"use strict";

// Tables: a click on a header sorts by its column, a second click reverses the order. Cells without a value stay last.
for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => {
    const header = button.closest("th");
    const table = header.closest("table");
    const was = header.getAttribute("aria-sort");
    const order = was === "ascending" ? "descending" : "ascending";
    for (const other of table.querySelectorAll("thead th")) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", order);
    const key = (row) => row.cells[header.cellIndex].dataset.order;
    const compare = (a, b) => (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b);
    const sorted = [...table.tBodies[0].rows].sort((first, second) => {
      const [a, b] = [key(first), key(second)];
      if (a === "" || b === "") return (a === "") - (b === "");
      return order === "ascending" ? compare(a, b) : compare(b, a);
    });
    table.tBodies[0].append(...sorted);
  });
}
