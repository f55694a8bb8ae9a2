"use strict";

// Tables: a click on a header sorts by its column, a second click reverses the order. Cells without a value stay last.
for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => {
    const header = button.closest("th");
    const table = header.closest("table");
    const was = header.getAttribute("aria-sort");
    const order = was === null ? header.dataset.first : was === "ascending" ? "descending" : "ascending";
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

// Legends: a click hides a series in the figures of the same section, a second click shows it again.
for (const button of document.querySelectorAll("[data-group]")) {
  button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", on);
    for (const group of button.closest("section").querySelectorAll("." + button.dataset.group)) {
      group.classList.toggle("off", !on);
    }
  });
}

// "Open all" opens all parts of a section, or closes them if all are open.
for (const button of document.querySelectorAll("[data-open-all]")) {
  button.addEventListener("click", () => {
    const parts = [...button.closest("section").querySelectorAll("details")];
    const open = parts.some((part) => !part.open);
    for (const part of parts) part.open = open;
    button.textContent = open ? "close all" : "open all";
  });
}

// Heads: a link to a large picture opens it, and the arrow keys move to the next. Closing returns the focus.
const open = (dialog) => {
  for (let part = dialog; (part = part.parentElement?.closest("details")); ) part.open = true;
  dialog.showModal();
};
const step = (dialog, by) => {
  const heads = [...dialog.closest(".heads").querySelectorAll(".head:not(.off)")];
  const next = heads[heads.indexOf(dialog.parentElement) + by];
  if (!next) return;
  dialog.close();
  next.querySelector("a").focus();
  open(next.querySelector("dialog"));
};
document.addEventListener("click", (event) => {
  const dialog = event.target.closest("dialog");
  const link = event.target.closest('a[href^="#"]');
  if (link?.dataset.step) step(dialog, Number(link.dataset.step));
  else if (link ? "close" in link.dataset : event.target === dialog) dialog.close();
  else if (link && document.getElementById(link.hash.slice(1))?.matches("dialog")) open(document.getElementById(link.hash.slice(1)));
  else return;
  event.preventDefault();
});
document.addEventListener("keydown", (event) => {
  const dialog = document.querySelector("dialog[open]");
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (dialog && by && !event.altKey && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    step(dialog, by);
  }
});
const linked = document.getElementById(location.hash.slice(1));
if (linked?.matches("dialog")) open(linked);
