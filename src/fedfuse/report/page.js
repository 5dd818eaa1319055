"use strict";

// Everything is readable without this script: it only sorts tables, chooses columns, and shows one seed at a time.
document.documentElement.classList.add("scripted");

const collator = new Intl.Collator("en", { numeric: true });

function valueOf(row, column) {
  const cell = row.cells[column];
  const text = cell.dataset.value ?? cell.textContent.trim();
  const number = text === "" || text === "–" ? NaN : Number(text);
  return { text, number, missing: text === "" || text === "–" };
}

function compare(a, b, sign) {
  if (a.missing || b.missing) return Number(a.missing) - Number(b.missing); // what is missing stays last
  const numeric = !Number.isNaN(a.number) && !Number.isNaN(b.number);
  return sign * (numeric ? a.number - b.number : collator.compare(a.text, b.text));
}

function sortBy(table, heading) {
  const before = heading.getAttribute("aria-sort");
  const first = heading.dataset.better === "high" ? "descending" : "ascending";
  const other = first === "descending" ? "ascending" : "descending";
  const order = before === first ? other : first;
  const sign = order === "ascending" ? 1 : -1;
  for (const each of heading.parentElement.cells) each.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", order);
  const column = heading.cellIndex;
  const keyed = Array.from(table.tBodies[0].rows, (row) => ({ row, value: valueOf(row, column) }));
  keyed.sort((a, b) => compare(a.value, b.value, sign));
  table.tBodies[0].append(...keyed.map(({ row }) => row));
}

for (const table of document.querySelectorAll("table.sortable")) {
  for (const heading of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    button.addEventListener("click", () => sortBy(table, heading));
    heading.append(button);
  }
}

function showColumn(table, column, shown) {
  for (const row of table.rows) row.cells[column].hidden = !shown;
}

for (const table of document.querySelectorAll("table.choosable")) {
  const headings = Array.from(table.tHead.rows[0].cells).slice(1);
  if (!headings.some((heading) => "extra" in heading.dataset)) continue;
  const chooser = document.createElement("details");
  const boxes = document.createElement("div");
  chooser.className = "chooser";
  chooser.append(Object.assign(document.createElement("summary"), { textContent: "Choose columns" }), boxes);
  for (const heading of headings) {
    const box = Object.assign(document.createElement("input"), { type: "checkbox", checked: !("extra" in heading.dataset) });
    const label = document.createElement("label");
    label.append(box, heading.dataset.name);
    box.addEventListener("change", () => showColumn(table, heading.cellIndex, box.checked));
    showColumn(table, heading.cellIndex, box.checked);
    boxes.append(label);
  }
  table.parentElement.before(chooser);
}

for (const group of document.querySelectorAll(".pick")) {
  const panels = Array.from(group.children);
  if (panels.length < 2) continue;
  const choices = document.createElement("div");
  choices.className = "choices";
  choices.append(group.dataset.legend);
  const show = (chosen) => {
    panels.forEach((panel) => { panel.hidden = panel !== chosen; });
    for (const button of choices.querySelectorAll("button")) {
      button.setAttribute("aria-pressed", String(button.dataset.name === chosen.dataset.name));
    }
  };
  for (const panel of panels) {
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.name = panel.dataset.name;
    button.textContent = panel.dataset.name;
    button.addEventListener("click", () => show(panel));
    choices.append(button);
  }
  group.prepend(choices);
  show(panels[0]);
}

// A closed part prints as nothing, so paper gets all of them open.
addEventListener("beforeprint", () => {
  for (const part of document.querySelectorAll("details")) part.open = true;
});
