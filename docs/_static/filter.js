// Adds to each table of the class "filterable" a field to search its rows, and a menu with the values of its second column.
function makeFilterable(table) {
  const rows = [...table.tBodies[0].rows];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const outcomes = rows.map((row) => row.cells[1].textContent.trim());

  const search = document.createElement("input");
  search.type = "search";
  search.placeholder = "Search";
  search.setAttribute("aria-label", "Search the table");

  const menu = document.createElement("select");
  menu.setAttribute("aria-label", table.tHead.rows[0].cells[1].textContent.trim());
  menu.add(new Option("all", ""));
  for (const outcome of new Set(outcomes)) menu.add(new Option(outcome, outcome));

  const count = document.createElement("output");

  function update() {
    const words = search.value.toLowerCase().split(/\s+/);
    let shown = 0;
    rows.forEach((row, i) => {
      const matches = words.every((word) => texts[i].includes(word)) && ["", outcomes[i]].includes(menu.value);
      row.hidden = !matches;
      shown += matches;
    });
    count.textContent = `${shown} of ${rows.length}`;
  }

  const controls = document.createElement("div");
  controls.className = "filter";
  controls.append(search, menu, count);
  // The theme puts wide tables into a wrapper that scrolls. The controls stay outside of it.
  (table.closest(".table-wrapper") ?? table).before(controls);
  search.addEventListener("input", update);
  menu.addEventListener("change", update);
  update();
}

document.addEventListener("DOMContentLoaded", () => document.querySelectorAll("table.filterable").forEach(makeFilterable));
