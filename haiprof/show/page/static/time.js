"use strict";
// One cursor and one zoom for all figures whose horizontal axis is time.
//
// The values under the cursor stand beside the names of the lines, the time at the cursor itself.
// A range input for each figure (for the eye only its focus ring) makes it a slider for the
// keyboard and for screen readers.

/** The group; `redraw(place)` draws a figure anew, `whole()` is the time shown without a zoom. */
function timeGroup({ redraw, whole }) {
  const figures = new Map(); // element -> { title, lines, step, line, slider }
  const bar = document.createElement("div");
  const shown = document.createElement("span");
  let zoomed = null, cursor = null, waiting = 0;

  const range = () => zoomed || whole();
  const missing = "–";

  function decimals() {
    const [begin, end] = range();
    return Math.min(6, Math.max(0, 1 - Math.floor(Math.log10(Math.max(end - begin, 1e-6) / 10))));
  }

  const secondsText = (second) => `${second.toFixed(decimals())} s`;

  // ---- values at a time ----------------------------------------------------------------------

  /** Place of the last time that is not after `second`; -1 before the first. */
  function placeOf(times, second) {
    let low = 0, high = times.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (times[middle] <= second) low = middle + 1; else high = middle;
    }
    return low - 1;
  }

  /** Which point of a line stands for a time: the step under way, or the nearest sample. */
  function pointAt({ x, holds }, second) {
    const before = placeOf(x, second);
    if (holds) return before;
    const after = before + 1;
    if (before < 0) return after < x.length && x[after] - second < (x[x.length - 1] - x[0]) / 50 ? after : -1;
    if (after >= x.length) return second - x[before] < (x[x.length - 1] - x[0]) / 50 ? before : -1;
    return second - x[before] <= x[after] - second ? before : after;
  }

  function textAt(line, second) {
    const at = pointAt(line, second), value = at < 0 ? NaN : line.y[at];
    if (value === null || value === undefined || Number.isNaN(value)) return missing;
    return digitsText(value);
  }

  // ---- the cursor ----------------------------------------------------------------------------

  function move(second) {
    cursor = second;
    waiting ||= requestAnimationFrame(() => { waiting = 0; for (const place of figures.keys()) point(place); });
  }

  /** Draws the cursor of one figure, with the values of its lines. */
  function point(place) {
    const figure = figures.get(place), size = place._fullLayout?._size;
    const [begin, end] = range();
    const inside = cursor !== null && cursor >= begin && cursor <= end && size;
    figure.line.hidden = !inside;
    const read = figure.lines.map((line) => (inside ? textAt(line, cursor) : ""));
    figure.lines.forEach((line, i) => { line.out.textContent = read[i]; });
    const step = inside && figure.step ? `, step ${textAt(figure.step, cursor)}` : "";
    if (!inside) return;
    const part = (cursor - begin) / (end - begin);
    figure.line.dataset.time = secondsText(cursor) + step;
    figure.line.classList.toggle("late", part > 0.5);
    Object.assign(figure.line.style, {
      left: `${size.l + part * size.w}px`, top: `${size.t}px`, height: `${size.h}px`,
    });
    figure.slider.value = cursor;
    const values = figure.lines.map((line, i) => `${line.name} ${read[i]} ${line.unit}`);
    figure.slider.setAttribute("aria-valuetext", [secondsText(cursor) + step, ...values].join(", "));
  }

  /** The time under a pointer; null beside the drawing. */
  function timeAt(place, event) {
    const size = place._fullLayout?._size;
    if (!size) return null;
    const part = (event.clientX - place.getBoundingClientRect().left - size.l) / size.w;
    const [begin, end] = range();
    return part < 0 || part > 1 ? null : begin + part * (end - begin);
  }

  // ---- the zoom ------------------------------------------------------------------------------

  function zoom(begin, end) {
    const [first, last] = whole();
    const from = Math.max(first, Math.min(begin, end)), to = Math.min(last, Math.max(begin, end));
    if (to - from < (last - first) * 1e-5) return;
    zoomed = to - from > (last - first) * 0.999 ? null : [from, to];
    apply();
  }

  function reset() {
    if (!zoomed) return;
    zoomed = null;
    apply();
  }

  function apply() {
    bar.hidden = !zoomed;
    if (zoomed) shown.textContent = `${secondsText(zoomed[0])} to ${secondsText(zoomed[1])}`;
    for (const place of figures.keys()) redraw(place);
  }

  function zoomAround(factor) {
    const [begin, end] = range(), middle = cursor ?? (begin + end) / 2;
    zoom(middle - (middle - begin) * factor, middle + (end - middle) * factor);
  }

  // ---- what the reader does ------------------------------------------------------------------

  function makeSlider(place, figure) {
    const { slider } = figure;
    slider.type = "range";
    slider.className = "time-slider";
    slider.addEventListener("input", () => move(Number(slider.value)));
    slider.addEventListener("focus", () => { if (cursor === null) move((range()[0] + range()[1]) / 2); });
    slider.addEventListener("keydown", (event) => {
      if (event.key === "+" || event.key === "=") zoomAround(0.5);
      else if (event.key === "-") zoomAround(2);
      else return;
      event.preventDefault();
    });
  }

  function listen(place, figure) {
    place.addEventListener("pointermove", (event) => move(timeAt(place, event)));
    place.addEventListener("pointerdown", (event) => move(timeAt(place, event)));
    place.addEventListener("pointerleave", () => { if (!figure.slider.matches(":focus")) move(null); });
    place.on("plotly_relayout", (change) => {
      const begin = change["xaxis.range[0]"] ?? change["xaxis2.range[0]"];
      const end = change["xaxis.range[1]"] ?? change["xaxis2.range[1]"];
      if (begin !== undefined && end !== undefined) zoom(Number(begin), Number(end));
    });
    place.on("plotly_doubleclick", reset);
  }

  /** Adds a figure that plotly has drawn, or what it shows now; `lines` have `x`, `y`, `name`,
   *  `unit`, `out` (where their value is written) and `holds` (until the next point). */
  function join(place, { title, lines, step = null }) {
    const known = figures.get(place);
    const figure = known || { line: document.createElement("div"), slider: document.createElement("input") };
    Object.assign(figure, { title, lines, step });
    figures.set(place, figure);
    if (!known) {
      figure.line.className = "time-cursor";
      makeSlider(place, figure);
      listen(place, figure);
      place.append(figure.line);
      place.append(figure.slider);
    }
    const [begin, end] = range();
    Object.assign(figure.slider, { min: begin, max: end, step: (end - begin) / 200 });
    figure.slider.setAttribute("aria-label", `Cursor in time, ${title}`);
    const first = place.closest(".panels")?.querySelector(".time-slider");
    figure.slider.tabIndex = !first || first === figure.slider ? 0 : -1; // one stop for all panels
    point(place);
  }

  function makeBar() {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Reset zoom";
    button.addEventListener("click", reset);
    bar.className = "zoom-bar";
    bar.setAttribute("role", "status");
    bar.hidden = true;
    bar.append(shown, button);
    document.body.append(bar);
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") reset(); });
  }

  makeBar();
  return { join, leave: (place) => figures.delete(place), range, reset, forget: () => { zoomed = null; bar.hidden = true; } };
}
