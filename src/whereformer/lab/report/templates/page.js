"use strict";

// Tables: a click on a header sorts by its column, a second click reverses the order. Cells without a value stay last.
const number = (text) => {
  const plain = text.replace(/,(?=\d{3})/g, "").replace("\u2212", "-").replace(/%$/, "");
  return plain.trim() === "" ? NaN : Number(plain);
};
for (const header of document.querySelectorAll("thead th")) {
  if (!header.textContent.trim()) continue;
  const button = document.createElement("button");
  button.type = "button";
  button.setAttribute("aria-label", `sort by ${header.firstChild.textContent.trim()}`);
  header.insertBefore(button, header.querySelector("small"));
  header.addEventListener("click", () => {
    const table = header.closest("table");
    const was = header.getAttribute("aria-sort");
    const order = was === "ascending" ? "descending" : "ascending";
    for (const other of table.querySelectorAll("thead th")) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", order);
    const key = (row) => {
      const cell = row.cells[header.cellIndex];
      return cell.dataset.order ?? cell.firstChild?.textContent ?? "";
    };
    const compare = (a, b) => {
      const [x, y] = [number(a), number(b)];
      return isNaN(x) || isNaN(y) ? a.localeCompare(b) : x - y;
    };
    const sorted = [...table.tBodies[0].rows].sort((first, second) => {
      const [a, b] = [key(first), key(second)];
      if (a === "" || b === "") return (a === "") - (b === "");
      return order === "ascending" ? compare(a, b) : compare(b, a);
    });
    table.tBodies[0].append(...sorted);
  });
}

// Below a table or figure that is wider than its box, a line says so.
const watch = new ResizeObserver((entries) => {
  for (const { target } of entries) target.nextElementSibling.hidden = target.scrollWidth <= target.clientWidth;
});
for (const box of document.querySelectorAll(".scroll")) {
  const more = document.createElement("p");
  more.className = "more";
  more.hidden = true;
  more.textContent = "There is more to the right: swipe, or use the arrow keys.";
  box.after(more);
  watch.observe(box);
}

// Commands: a line ends at a space, not after a hyphen.
for (const code of document.querySelectorAll(".command code")) {
  const words = code.textContent.split(" ").map((word) => {
    const part = document.createElement("span");
    part.textContent = word;
    return part;
  });
  code.replaceChildren(...words.flatMap((word, at) => (at ? [" ", word] : [word])));
}

// Commands: a button copies them. Without it, or where the browser refuses, the text can be selected.
for (const box of document.querySelectorAll(".command")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  box.prepend(button);
  button.addEventListener("click", async () => {
    const text = box.querySelector("code");
    try {
      await navigator.clipboard.writeText(text.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(text);
      button.textContent = document.execCommand("copy") ? "Copied" : "Selected";
    }
  });
}

// On paper, all details are open.
const closed = [];
addEventListener("beforeprint", () => {
  closed.push(...document.querySelectorAll("details:not([open])"));
  for (const part of closed) part.open = true;
});
addEventListener("afterprint", () => {
  for (const part of closed.splice(0)) part.open = false;
});

// What position adds, seen from one token of a sentence: a line for each head.
for (const box of document.querySelectorAll(".look")) {
  const { tokens, heads } = JSON.parse(box.dataset.look);
  const make = (tag, text, parent) => {
    const element = document.createElement(tag);
    element.textContent = text;
    parent.append(element, " ");
    return element;
  };
  const choices = make("p", "", box);
  const buttons = tokens.map((token) => make("button", token, choices));
  const list = make("div", "", box);
  const lines = heads.map(([name]) => {
    const line = make("p", "", list);
    make("small", name, line);
    return tokens.map((token) => make("span", token, line));
  });
  const look = (from) => {
    buttons.forEach((button, at) => button.setAttribute("aria-pressed", at === from));
    heads.forEach(([, scores], head) => {
      const row = scores[from];
      const highest = Math.max(...row);
      const weights = row.map((score) => Math.exp(score - highest));
      const total = weights.reduce((sum, weight) => sum + weight);
      lines[head].forEach((word, at) => {
        word.style.setProperty("--share", `${(60 * weights[at]) / total}%`);
        word.title = `${row[at] >= 0 ? "+" : "\u2212"}${Math.abs(row[at]).toFixed(2)}`;
      });
    });
  };
  buttons.forEach((button, at) => {
    button.type = "button";
    for (const event of ["pointerenter", "focus", "click"]) button.addEventListener(event, () => look(at));
  });
  look(tokens.length >> 1);
  box.hidden = false;
}
