"use strict";

const key = (row, column) => {
  const cell = row.cells[column];
  return "key" in cell.dataset ? Number(cell.dataset.key) : cell.textContent;
};

// Texts in a column of numbers stand for what was not measured, and come last either way.
const compare = (a, b, sign) => {
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return sign * (typeof a === "number" ? a - b : a.localeCompare(b));
};

document.querySelectorAll("th button").forEach((button) => {
  button.addEventListener("click", () => {
    const head = button.parentElement;
    const body = head.closest("table").tBodies[0];
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const column = head.cellIndex;
    const sign = down ? -1 : 1;
    body.append(...[...body.rows].sort((a, b) => compare(key(a, column), key(b, column), sign)));
  });
});

// Passages are in the page once; a sample gets its own when it is opened.
const passages = JSON.parse(document.getElementById("passages").textContent);

document.querySelectorAll("details[data-passages]").forEach((sample) => {
  sample.addEventListener("toggle", () => {
    if (!sample.open || sample.querySelector(".passages")) return;
    const names = JSON.parse(sample.dataset.passages);
    const box = document.createElement("details");
    box.className = "passages";
    const head = document.createElement("summary");
    head.textContent = `${names.length} passages, in the order of the prompt`;
    box.append(head);
    for (const name of names) {
      const text = document.createElement("div");
      text.className = "passage";
      text.textContent = passages[name];
      box.append(text);
    }
    sample.append(box);
  });
});

document.querySelectorAll("select[data-filter]").forEach((choice) => {
  choice.addEventListener("change", () => {
    for (const sample of document.getElementById(choice.dataset.filter).children) {
      const arms = JSON.parse(sample.dataset.arms);
      sample.hidden = choice.value !== "" && !arms.includes(choice.value);
    }
  });
});
