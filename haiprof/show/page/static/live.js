"use strict";
// Follows a job that still runs: brings the page up to date where it stands, with the place, the
// zoom and what is open as the reader left them; and says when the job or the server has ended.

/** Follows the job; `renew(document)` gets the page as it is now, and fetches its numbers. */
function followJob(renew) {
  const EVERY_MS = 5000, AFTER_MS = 30000, CALM_MS = 3000;
  const note = document.getElementById("live"), text = document.getElementById("live-text");
  const pause = document.getElementById("pause");
  let paused = false, touched = 0, timer = 0, shown = "";

  async function ask(address) {
    const answer = await fetch(address, { credentials: "same-origin" });
    if (answer.status === 403) throw new Error("another haiprof report --serve has this address now: open the one that it printed");
    if (!answer.ok) throw new Error((await answer.text()).trim() || String(answer.status));
    return answer;
  }

  /** Whether the reader is about something that a change of the page would disturb. */
  function isBusy() {
    return paused || document.hidden || performance.now() - touched < CALM_MS || !getSelection().isCollapsed;
  }

  function say(now) {
    const running = now.state === "running";
    const held = paused && now.changed ? " · paused, newer data is there" : paused ? " · paused" : "";
    tell(`${now.text} · as of ${now.read}${held}`, false);
    shown = now.read;
    pause.hidden = !running && !paused;
    document.documentElement.dataset.live = now.state;
    return running;
  }

  function tell(words, lost) {
    if (text.textContent !== words) text.textContent = words;
    note.classList.toggle("lost", lost);
  }

  async function look() {
    clearTimeout(timer);
    let again = EVERY_MS;
    try {
      let now = await (await ask("summary.json")).json();
      if (now.due && !isBusy()) {
        await renew(new DOMParser().parseFromString(await (await ask("./")).text(), "text/html"));
        now = await (await ask("summary.json")).json();
      }
      if (!say(now) && !now.changed) again = AFTER_MS;
    } catch (error) {
      const why = error instanceof TypeError ? "has haiprof report --serve ended?" : error.message;
      const stays = shown ? `; what is shown is as of ${shown}` : "";
      tell(`The server does not answer (${why})${stays}`, true);
    }
    timer = setTimeout(look, again);
  }

  pause.addEventListener("click", () => {
    paused = !paused;
    pause.textContent = paused ? "Resume" : "Pause";
    touched = 0;
    look();
  });
  for (const kind of ["pointerdown", "keydown", "wheel", "touchmove"]) {
    addEventListener(kind, (event) => { if (event.target !== pause) touched = performance.now(); }, { passive: true, capture: true });
  }
  document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
  look();
}

// ---- changing the page in its place ----------------------------------------------------------

/** The sections of a page by their id. */
function sectionsOf(page) {
  return new Map([...page.querySelectorAll("main > section")].map((section) => [section.id, section]));
}

const FIGURES = "figure.plot, .panels, .flame-graph";

/** What the reader has opened, sorted, scrolled and chosen in a section. */
function readerState(section) {
  const named = (details) => details.querySelector(":scope > summary :is(h2, h3), :scope > summary").textContent.replace(/\d+/g, "");
  const boxes = [...section.querySelectorAll(".scroll")];
  const active = section.contains(document.activeElement) ? document.activeElement : null;
  return {
    open: new Map([...section.querySelectorAll("details")].map((one) => [named(one), one.open])),
    scrolled: new Map(boxes.map((box) => [box.ariaLabel, [box.scrollLeft, box.scrollTop]])),
    sorted: new Map(boxes.map((box) => {
      const head = box.querySelector("th[aria-sort]");
      return [box.ariaLabel, head && [head.cellIndex, head.ariaSort]];
    })),
    chosen: [...section.querySelectorAll("select[id], input[id]")].map((one) => [one.id, one.type === "checkbox" ? one.checked : one.value]),
    focus: active && (active.id ? `#${CSS.escape(active.id)}` : null),
    summary: active?.matches("summary") ? named(active.parentElement) : null,
    named,
  };
}

function restoreReader(section, state) {
  for (const one of section.querySelectorAll("details")) one.open = state.open.get(state.named(one)) ?? one.open;
  for (const [id, value] of state.chosen) {
    const control = document.getElementById(id);
    if (!control || !section.contains(control)) continue;
    if (control.type === "checkbox") control.checked = value;
    else if (control.tagName !== "SELECT" || [...control.options].some((option) => option.value === value)) control.value = value;
  }
  for (const box of section.querySelectorAll(".scroll")) {
    const sorted = state.sorted.get(box.ariaLabel), table = box.querySelector("table");
    if (sorted && table.tHead) sortTable(table, sorted[0], sorted[1]);
    const [left, top] = state.scrolled.get(box.ariaLabel) || [0, 0];
    box.scrollTo(left, top);
  }
  const focused = state.focus ? section.querySelector(state.focus)
    : [...section.querySelectorAll("summary")].find((one) => state.named(one.parentElement) === state.summary);
  focused?.focus({ preventScroll: true });
}

/** Where the reader is: the part of the page next to the top of the window, and how far away. */
function readerPlace() {
  const parts = [...document.querySelectorAll(`main > section, ${FIGURES}`)];
  const distance = (part) => Math.abs(part.getBoundingClientRect().top);
  const nearest = parts.reduce((best, part) => (distance(part) < distance(best) ? part : best), document.body);
  const before = nearest.getBoundingClientRect().top;
  return () => { if (nearest.isConnected) scrollBy(0, nearest.getBoundingClientRect().top - before); };
}

/** Figures keep their elements, with what is drawn in them; `prepare` makes the rest work. */
function swapSection(old, fresh, prepare) {
  const state = readerState(old);
  const nameOf = ({ dataset }) => `figure ${dataset.figure}, panels ${dataset.panels}`;
  const known = new Map([...old.querySelectorAll(FIGURES)].map((place) => [nameOf(place), place]));
  for (const place of fresh.querySelectorAll(FIGURES)) {
    const same = known.get(nameOf(place));
    if (!same) continue;
    if (place.dataset.height) same.dataset.height = place.dataset.height;
    if (same.previousElementSibling?.matches(".keys")) place.before(same.previousElementSibling);
    place.replaceWith(same);
  }
  old.replaceChildren(...fresh.childNodes);
  prepare(old);
  restoreReader(old, state);
}

/** Brings the sections up to date; `kept` has the HTML of each as the server sent it last. */
function renewSections(page, kept, prepare) {
  const main = document.querySelector("main"), now = sectionsOf(document), next = sectionsOf(page);
  for (const [id, section] of now) if (!next.has(id)) { section.remove(); kept.delete(id); }
  let before = null;
  for (const [id, fresh] of next) {
    const html = fresh.innerHTML;
    let section = now.get(id);
    if (!section) {
      section = document.adoptNode(fresh);
      if (before) before.after(section); else main.prepend(section);
      prepare(section);
    } else if (kept.get(id) !== html) swapSection(section, fresh, prepare);
    kept.set(id, html);
    before = section;
  }
  for (const selector of ["header h1", "header h1 + p", "nav ul"]) {
    const own = document.querySelector(selector), fresh = page.querySelector(selector);
    if (own && fresh && own.innerHTML !== fresh.innerHTML) own.innerHTML = fresh.innerHTML;
  }
  document.title = page.title;
}
