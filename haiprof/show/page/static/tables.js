"use strict";
// Tables that are sorted by a click on the head of a column.

/** What a cell is sorted by: its number in its unit, or its text; what is missing is last. */
function sortKey(cell) {
  const SIZES = {
    ns: 1, "µs": 1e3, ms: 1e6, s: 1e9, min: 6e10, h: 3.6e12, B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40,
  };
  const text = cell.textContent.trim();
  const found = /^([+−-]?\d+(?:\.\d+)?)\s*([^\s/]*)/.exec(text);
  if (!found) return [/^(–|-|)$/.test(text) ? 2 : 1, text];
  return [0, Number(found[1].replace("−", "-")) * (SIZES[found[2]] || 1)];
}

function compareKeys([kind, value], [otherKind, other], sign) {
  if (kind !== otherKind) return kind === 2 || otherKind === 2 ? kind - otherKind : sign * (kind - otherKind);
  return sign * (kind === 0 ? value - other : value.localeCompare(other, undefined, { numeric: true }));
}

/** Sorts by a column, `ascending` or `descending`. */
function sortTable(table, column, order) {
  const head = table.tHead.rows[0].cells;
  if (!head[column] || table.tBodies[0].rows.length < 2) return;
  for (const each of head) each.removeAttribute("aria-sort");
  head[column].setAttribute("aria-sort", order);
  const rows = [...table.tBodies[0].rows].map((row) => [sortKey(row.cells[column]), row]);
  rows.sort(([a], [b]) => compareKeys(a, b, order === "ascending" ? 1 : -1));
  table.tBodies[0].append(...rows.map(([, row]) => row));
}

const widths = new ResizeObserver((entries) => {
  for (const { target } of entries) target.classList.toggle("wide", target.scrollWidth > target.clientWidth + 1);
});

/** Says of a table that it is wider than the page, as long as it is. */
function sayWide(scroll) { widths.observe(scroll); }

function makeSortable(table) {
  if (!table.tHead || table.tBodies[0].rows.length < 2) return;
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    if (!head.textContent.trim() || head.querySelector("button")) return;
    const button = document.createElement("button");
    button.textContent = head.textContent;
    button.className = "sort";
    button.type = "button";
    button.addEventListener("click", () => {
      sortTable(table, column, head.ariaSort === "descending" ? "ascending" : "descending");
    });
    head.replaceChildren(button);
  });
}
