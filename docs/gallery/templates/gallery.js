"use strict";

// Add search, sorting and cards in a window. Without JavaScript, the page shows everything at once.
const table = document.getElementById("catalogue");
const body = table.tBodies[0];
const rows = [...body.rows];
const heads = [...table.tHead.rows[0].cells];
const search = document.getElementById("search");
const family = document.getElementById("family");
const kind = document.getElementById("kind");
const measured = document.getElementById("measured");
const by = document.getElementById("by");
const count = document.getElementById("count");
const frame = document.getElementById("window");
const cards = document.getElementById("cards");
let opener = null; // the link whose card is open
const ACCURACY = heads.findIndex((head) => head.dataset.first === "descending");

const keyOf = (row, column) => row.cells[column].dataset.key;

function filter() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const row of rows) {
    const fits = words.every((word) => row.dataset.words.includes(word));
    const isFamily = !family.value || row.dataset.family === family.value;
    const isKind = !kind.value || row.dataset.kind === kind.value;
    const isMeasured = !measured.checked || keyOf(row, ACCURACY) !== "";
    row.hidden = !(fits && isFamily && isKind && isMeasured);
    shown += row.hidden ? 0 : 1;
    for (const dot of document.querySelectorAll(`.dot[href="#${CSS.escape(row.dataset.for)}"]`)) {
      dot.classList.toggle("faded", row.hidden);
    }
  }
  const all = shown === rows.length;
  count.textContent = shown ? (all ? `${shown} files` : `${shown} of ${rows.length} files`) : "No file fits the search.";
}

function sort(column, descending) {
  const sign = descending ? -1 : 1;
  // Unknown values come last in either order; equal ones stay in the order of the catalogue.
  const compare = (one, other) => {
    const [a, b] = [keyOf(one, column), keyOf(other, column)];
    return (a === "") - (b === "") || sign * (a - b);
  };
  body.append(...[...rows].sort(compare));
  heads.forEach((head) => head.removeAttribute("aria-sort"));
  heads[column].setAttribute("aria-sort", descending ? "descending" : "ascending");
  by.value = column;
}

function nextOrder(column) {
  const now = heads[column].getAttribute("aria-sort");
  const first = heads[column].dataset.first === "descending";
  sort(column, now ? now === "ascending" : first);
}

// Move the card in the window back to the others.
function returnCard() {
  const card = frame.querySelector("article");
  if (card) cards.append(card);
}

// Open the card that the address names. Links to cards can be shared, and the browser's Back closes a card.
function showTarget() {
  const target = document.getElementById(location.hash.slice(1));
  const card = target && target.closest("article.card");
  if (!card) {
    frame.close();
    return;
  }
  if (card.parentElement !== frame) {
    returnCard();
    frame.append(card);
  }
  frame.setAttribute("aria-labelledby", card.getAttribute("aria-labelledby"));
  if (!frame.open) frame.showModal();
  frame.scrollTop = 0;
  if (target !== card) target.scrollIntoView({ block: "start" });
}

function closed() {
  if (frame.open) return; // another card is open by now
  returnCard();
  // Following a link to a fragment moves the focus, so the dialog cannot return it to the link itself.
  opener?.focus();
  if (location.hash) history.replaceState(null, "", location.pathname + location.search);
}

async function copy(button, text) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    // Without permission to copy, select the line for the user to copy.
    getSelection().selectAllChildren(button.previousElementSibling);
    button.textContent = "Selected";
  }
  setTimeout(() => (button.textContent = "Copy"), 2000);
}

heads.forEach((head, column) => {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...head.childNodes);
  button.addEventListener("click", () => nextOrder(column));
  head.append(button);
});
for (const line of document.querySelectorAll(".load")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.setAttribute("aria-live", "polite");
  button.addEventListener("click", () => copy(button, line.querySelector("code").textContent));
  line.append(button);
}
document.getElementById("controls").addEventListener("submit", (event) => event.preventDefault());
[search, family, kind, measured].forEach((control) => control.addEventListener("input", filter));
by.addEventListener("input", () => sort(Number(by.value), heads[by.value].dataset.first === "descending"));
document.getElementById("close").addEventListener("click", () => frame.close());
frame.addEventListener("click", ({ target, clientX: x, clientY: y }) => {
  const box = frame.getBoundingClientRect(); // a click on the backdrop or the padding has the same target
  const inside = box.left <= x && x <= box.right && box.top <= y && y <= box.bottom;
  if (target === frame && !inside) frame.close();
});
frame.addEventListener("close", closed);
document.addEventListener("click", (event) => {
  opener = event.target.closest('a[href^="#"]') ?? opener;
});
addEventListener("hashchange", showTarget);

document.getElementById("controls").hidden = false;
document.documentElement.classList.add("scripted");
sort(0, false);
filter();
showTarget();
