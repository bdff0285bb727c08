"use strict";
// Draws the figures of the page. Their numbers stand in the page itself (gzip, base64), or come
// from the server that the page came from; nobody else is ever asked.
(() => {
  const byId = (id) => document.getElementById(id);
  const CONFIG = {
    displaylogo: false, responsive: true, scrollZoom: false, modeBarButtons: [["toImage"]],
  };
  // A finger that is drawn over a figure scrolls the page.
  const TIME_CONFIG = { ...CONFIG, doubleClick: false, showTips: false };
  const TIME_LAYOUT = { dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", hovermode: false };
  // The blue, grey and brown of Okabe and Ito's colours are too dark for a dark ground.
  const ON_DARK = {
    "#0072B2": "#4FA8E0", "#555555": "#AEB6C1", "#8C6D31": "#CBA65C", "#999999": "#A8A8A8",
    "rgba(0, 114, 178, 0.25)": "rgba(79, 168, 224, 0.3)",
  };
  const drawn = new Map(); // element -> function that draws it anew
  let data = null;

  // ---- what came with the page -------------------------------------------------------------

  function bytesOf(base64) {
    const text = atob(base64);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    return bytes;
  }

  function inflated(element) {
    const bytes = bytesOf(element.textContent.trim());
    element.textContent = "";
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  async function loadData() {
    const element = byId("data");
    if (!element.dataset.src) return JSON.parse(await inflated(element));
    const answer = await fetch(element.dataset.src, { credentials: "same-origin" });
    if (!answer.ok) throw new Error(`${element.dataset.src}: ${answer.status}`);
    return answer.json();
  }

  async function loadPlotly() {
    const element = byId("plotly");
    const script = document.createElement("script");
    if (!element.dataset.src) {
      script.textContent = await inflated(element);
      document.head.append(script);
      return;
    }
    await new Promise((resolve, reject) => {
      script.src = element.dataset.src;
      script.onload = resolve;
      script.onerror = () => reject(new Error("plotly.js cannot be loaded"));
      document.head.append(script);
    });
  }

  // ---- packed numbers ----------------------------------------------------------------------

  let halves = null;

  function halfTable() {
    const table = new Float32Array(65536);
    for (let code = 0; code < 65536; code++) {
      const sign = code & 0x8000 ? -1 : 1, exponent = (code >> 10) & 31, part = code & 1023;
      if (exponent === 31) table[code] = part ? NaN : sign * Infinity;
      else if (exponent === 0) table[code] = sign * part * 2 ** -24;
      else table[code] = sign * (1 + part / 1024) * 2 ** (exponent - 15);
    }
    return table;
  }

  function unpacked(packed) {
    if (packed.f4 !== undefined) return new Float32Array(bytesOf(packed.f4).buffer);
    if (packed.u2 !== undefined) {
      const codes = new Uint16Array(bytesOf(packed.u2).buffer);
      return Float64Array.from(codes, (code) => packed.low + code * packed.step);
    }
    halves = halves || halfTable();
    const codes = new Uint16Array(bytesOf(packed.f2).buffer);
    return Float64Array.from(codes, (code) => halves[code] * packed.scale);
  }

  /** A field that is unpacked once, when it is first needed. */
  const kept = new WeakMap();
  function numbers(packed) {
    if (!kept.has(packed)) kept.set(packed, unpacked(packed));
    return kept.get(packed);
  }

  // ---- looks -------------------------------------------------------------------------------

  function color(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  }

  function isDark() {
    return matchMedia("(prefers-color-scheme: dark)").matches && !document.documentElement.matches(".printing");
  }

  /** A colour of Python's, as it is seen on this ground. */
  function tinted(name) { return (isDark() && ON_DARK[name]) || name; }

  function axis(more) {
    const grid = color("grid"), line = color("line");
    return {
      gridcolor: grid, zerolinecolor: grid, linecolor: line, tickcolor: line, ticks: "outside",
      exponentformat: "none", automargin: true, ...more,
    };
  }

  function layout(height, more) {
    return {
      height, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: data.style.font, size: 12, color: color("ink") },
      margin: { l: 52, r: 12, t: 30, b: 34 },
      showlegend: false,
      modebar: { bgcolor: "rgba(0,0,0,0)", color: color("dim"), activecolor: color("ink") },
      hoverlabel: { font: { family: data.style.font, size: 12 } }, ...more,
    };
  }

  /** A figure that Python made, in the colours of this page; where it is narrow, with shorter lines. */
  function themed(figure, height, narrow = false) {
    const own = { ...figure.layout };
    delete own.template; delete own.title; delete own.height; delete own.margin; delete own.legend;
    for (const key of Object.keys(own)) {
      if (/^[xy]axis\d*$/.test(key)) own[key] = { ...own[key], ...axis(), ...(narrow && key[0] === "x" ? { tickangle: 0, nticks: 4, ticklabeloverflow: "hide past div" } : {}) };
    }
    if (narrow) own.annotations = own.annotations?.map((note) => ({ ...note, text: note.text?.replace(": ", ":<br>"), font: { ...note.font, size: 11 } }));
    for (const name of ["paper_bgcolor", "plot_bgcolor", "font", "hoverlabel"]) delete own[name];
    const traces = figure.data.map((trace) => {
      const made = { ...trace };
      if (made.line) made.line = { ...made.line, color: tinted(made.line.color) };
      if (made.fillcolor) made.fillcolor = tinted(made.fillcolor);
      if (typeof made.marker?.color === "string") {
        made.marker = { ...made.marker, color: tinted(made.marker.color) };
      }
      if (Array.isArray(made.marker?.color)) {
        made.marker = { ...made.marker, color: made.marker.color.map(tinted) };
      }
      return made;
    });
    // On the right there is room for half of the last number of the axis.
    return { traces, layout: layout(height, { margin: { l: 52, r: 22, t: 30, b: 34 }, ...own }) };
  }

  /** What the lines and areas of a figure are, above it. */
  function nameTraces(place, traces) {
    let keys = place.previousElementSibling;
    if (!keys?.classList.contains("keys")) {
      keys = element("ul", "", "keys");
      place.before(keys);
    }
    const shown = traces.filter((trace) => trace.name && trace.showlegend !== false);
    keys.replaceChildren(...shown.map((trace) => keyOf({
      name: trace.name, dash: trace.line?.dash,
      color: trace.fillcolor || trace.line?.color || trace.marker?.color,
      wide: Boolean(trace.fillcolor) || trace.type === "bar",
    })));
    return keys;
  }


  /** The time that figures show without a zoom: while the job trained, or the whole run. */
  function wholeTime() {
    const whole = byId("whole")?.checked || !data.window;
    return whole ? [0, data.span_s] : data.window;
  }

  const time = timeGroup({ redraw: (place) => { if (drawn.has(place)) watch(place, drawn.get(place)); }, whole: wholeTime });

  /** The same for all, so that figures stand above each other. */
  function timeAxis(more) {
    return axis({ ticksuffix: " s", range: [...time.range()], ...more });
  }

  /** A vertical axis that a zoom in time leaves as it is. */
  function valueAxis(more) { return axis({ fixedrange: true, ...more }); }

  /** Lines as the cursor reads them, with the places beside their names. */
  function cursorLines(keys, traces, unit) {
    const named = traces.filter((trace) => trace.name && trace.showlegend !== false);
    const places = keys.querySelectorAll(".now");
    return named.map((trace, i) => ({
      x: trace.x, y: trace.y, name: trace.name, unit, holds: trace.line?.shape === "hv", out: places[i],
    }));
  }

  function isTraced(second) { return data.traced.some(([begin, end]) => begin <= second && second <= end); }

  /** Bands of the steps that torch.profiler slowed down. */
  function tracedBands(ends = ["x"]) {
    return ends.flatMap((xref) => data.traced.map(([x0, x1], at) => ({
      type: "rect", layer: "below", xref, yref: "paper", x0, x1, y0: 0, y1: 1,
      fillcolor: color("traced"), line: { width: 0 },
      label: at || xref !== "x" ? {} : { text: "traced", textposition: "top left", font: { size: 10, color: color("dim") } },
    })));
  }

  /** The highest value in the time shown; traced steps do not set a scale. */
  function highest(seconds, values) {
    const [begin, end] = time.range();
    let top = 0;
    for (let i = 0; i < values.length; i++) {
      if (values[i] > top && seconds[i] >= begin && seconds[i] <= end && !isTraced(seconds[i])) top = values[i];
      for (const edge of [begin, end]) {  // where a line leaves the figure
        const part = (edge - seconds[i - 1]) / (seconds[i] - seconds[i - 1]);
        const value = values[i - 1] + part * (values[i] - values[i - 1]);
        if (part > 0 && part < 1 && value > top) top = value;
      }
    }
    return top;
  }

  /** [name, in ms] of the unit in which such a time is easy to read. */
  function unitOf(ms) {
    if (ms >= 2000) return ["s", 1000];
    return ms < 0.5 ? ["µs", 0.001] : ["ms", 1];
  }

  // ---- words for those who do not see a figure ----------------------------------------------

  /** One label for the whole figure; the parts of its drawing are not read one by one. */
  function describe(place, text) {
    [...place.querySelectorAll("svg")].forEach((svg, at) => {
      if (at) { svg.setAttribute("aria-hidden", "true"); return; }
      svg.setAttribute("role", "img");
      svg.setAttribute("aria-label", text);
    });
  }

  /** `rank 0 1.2 to 3.4 cores; rank 1 ...` */
  function rangesOf(traces, unit) {
    return traces.slice(0, 8).map((trace) => {
      const known = [...trace.y].filter((v) => !Number.isNaN(v));
      if (!known.length) return `${trace.name}: no value`;
      const low = known.reduce((a, b) => Math.min(a, b)), high = known.reduce((a, b) => Math.max(a, b));
      return `${trace.name} ${digitsText(low)} to ${digitsText(high)} ${unit}`;
    }).join("; ");
  }

  // ---- figures -----------------------------------------------------------------------------

  function height(place) { return Number(place.dataset.height); }

  function drawMade(place) {
    const figure = data.figures[place.dataset.figure];
    if (!figure) { place.hidden = true; return; }
    const { traces, layout: own } = themed(figure, height(place), place.clientWidth < 600);
    const keys = traces.some((trace) => trace.name) ? nameTraces(place, traces) : null;
    if (place.dataset.figure !== "over-time") Plotly.react(place, traces, own, CONFIG);
    else drawOverTime(place, traces, own, keys);
    describe(place, place.getAttribute("aria-label"));
  }

  function drawOverTime(place, traces, own, keys) {
    for (const key of ["xaxis", "xaxis2"]) own[key].range = [...time.range()];
    for (const key of ["yaxis", "yaxis2"]) own[key].fixedrange = true;
    Plotly.react(place, traces, { ...own, ...TIME_LAYOUT, shapes: tracedBands() }, TIME_CONFIG);
    const unit = /\((.+)\)/.exec(own.annotations[0].text)[1];
    time.join(place, { title: "step time", lines: cursorLines(keys, traces, unit) });
  }

  /** [rank][stretch] of what is chosen, in ms. */
  function cells(part) {
    const map = data.map, count = map.ranks.length * map.columns;
    const names = part === "step" ? data.style.parts.filter((p) => p !== "step") : [part];
    const sum = new Float64Array(count).fill(NaN);
    for (const name of names) {
      const values = numbers(map.phases[name]);
      for (let i = 0; i < count; i++) {
        if (!Number.isNaN(values[i])) sum[i] = (Number.isNaN(sum[i]) ? 0 : sum[i]) + values[i];
      }
    }
    return map.ranks.map((_, row) => sum.subarray(row * map.columns, (row + 1) * map.columns));
  }

  /** The rows to draw: all, or those with the highest mean, the highest first. */
  function rowsOf(values) {
    const all = values.map((_, at) => at), most = Number(byId("rows")?.value);
    if (!most) return all;
    const means = values.map((row) => {
      const known = row.filter((v) => !Number.isNaN(v));
      return known.length ? known.reduce((a, b) => a + b, 0) / known.length : -Infinity;
    });
    return all.sort((a, b) => means[b] - means[a]).slice(0, most);
  }

  /** All ranks by their number. */
  function linearRows(ranks) {
    return { type: "linear", tickformat: "d", tick0: 0, dtick: Math.max(1, Math.ceil(ranks.length / 16)) };
  }

  function drawMap(place) {
    const map = data.map, part = byId("part").value;
    const usual = map.typical_ms[part] ?? 0, step = map.typical_ms.step || 1;
    const values = cells(part);
    const rows = rowsOf(values), few = rows.length < map.ranks.length;
    const width = (map.end_s - map.start_s) / map.columns;
    const scale = data.style.map.colorscale.map(([at, tint]) =>
      [at, tint === "#F2F2F2" ? color("middle") : tint]);
    const trace = {
      ...data.style.map, type: "heatmap", colorscale: scale, x0: map.start_s + width / 2,
      y: rows.map((at) => (few ? String(map.ranks[at]) : map.ranks[at])), dx: width,
      customdata: rows.map((at) => values[at]),
      z: rows.map((at) => values[at].map((v) => ((v - usual) / step) * 100)),
    };
    const narrow = place.clientWidth < 600;
    trace.colorbar = { ...trace.colorbar, thickness: narrow ? 8 : 12, len: 1 };
    Plotly.react(place, [trace], layout(height(place), {
      margin: { l: 52, r: narrow ? 4 : 12, t: 30, b: 36 },
      dragmode: TIME_LAYOUT.dragmode,
      xaxis: timeAxis(),
      shapes: tracedBands(),
      yaxis: valueAxis({
        autorange: "reversed", title: { text: "rank", standoff: 4 },
        ...(few ? { type: "category", dtick: 1, tickfont: { size: 10 } } : linearRows(map.ranks)),
      }),
    }), TIME_CONFIG);
    time.join(place, { title: "ranks", lines: [] });
    const means = rows.map((at) => {
      const known = [...values[at]].filter((v) => !Number.isNaN(v));
      return `rank ${map.ranks[at]} ${known.length ? digitsText(known.reduce((a, b) => a + b, 0) / known.length) : "-"} ms`;
    });
    describe(place, `Ranks over time, ${part}: mean of ${means.slice(0, 16).join(", ")}`);
    if (!place.dataset.listens) {
      place.dataset.listens = "1";
      place.on("plotly_click", (event) => choose(String(event.points[0].y)));
    }
  }

  const MANY_POINTS = 1000;
  const details = new Map(); // rank -> its steps, where the server has more than the page

  /** More of a rank's steps, where the page has few of them and came from a server. */
  async function fetchDetail(rank) {
    const at = data.steps.ranks.indexOf(Number(rank));
    const live = Boolean(document.documentElement.dataset.live);
    if (!live || details.has(rank) || data.steps.counts[at] >= MANY_POINTS) return;
    const answer = await fetch(`rank.json?rank=${rank}`, { credentials: "same-origin" });
    if (!answer.ok) return;
    details.set(rank, await answer.json());
    if (byId("chooser").value === rank) again(document.querySelector('[data-figure="rank"]'));
  }

  function drawRank(place) {
    const rank = chosenRank(), steps = details.get(rank) || data.steps;
    const at = steps.ranks.indexOf(Number(rank));
    const first = steps.counts.slice(0, at).reduce((a, b) => a + b, 0);
    const end = first + steps.counts[at];
    const seconds = numbers(steps.time).subarray(first, end);
    const step = numbers(steps.step).subarray(first, end);
    const traces = [];
    const phases = Object.keys(data.style.phases).map((phase) => numbers(steps.phases[phase]).subarray(first, end));
    const sums = Float64Array.from(seconds, (_, i) => phases.reduce((sum, own) => sum + (own[i] || 0), 0));
    const top = highest(seconds, sums), [unit, unitMs] = unitOf(top);
    byId("rank-unit").textContent = unit;
    for (const [phase, tint] of Object.entries(data.style.phases)) {
      const known = numbers(steps.phases[phase]).subarray(first, end);
      if (known.every(Number.isNaN)) continue;
      const y = known.map((ms) => ms / unitMs);
      traces.push({
        type: "scatter", mode: "lines", name: phase, stackgroup: "step", x: seconds, y,
        line: { width: 0, color: tint, shape: "hv" }, fillcolor: tinted(tint),
      });
    }
    const keys = nameTraces(place, traces);
    Plotly.react(place, traces, layout(height(place), {
      ...TIME_LAYOUT, xaxis: timeAxis(), shapes: tracedBands(),
      yaxis: valueAxis(top ? { range: [0, (1.05 * top) / unitMs] } : { rangemode: "tozero" }),
    }), TIME_CONFIG);
    time.join(place, {
      title: `phases of rank ${rank}`, lines: cursorLines(keys, traces, unit),
      step: { x: seconds, y: step, holds: true },
    });
    describe(place, `Phases of each step of rank ${rank}: ${rangesOf(traces, unit)}`);
  }

  /** Of a run with one rank that one. */
  function chosenRank() { return byId("chooser")?.value ?? String(data.steps.ranks[0]); }

  // ---- accounts of the ledger --------------------------------------------------------------

  /** The time of an account in each step, from what was packed for all of them. */
  function drawAccount(place) {
    const { counts, step, ms } = data.accounts, number = place.dataset.account;
    const keys = Object.keys(counts).map(Number).sort((a, b) => a - b);
    const first = keys.filter((key) => key < number).reduce((sum, key) => sum + counts[key], 0);
    const x = numbers(step).subarray(first, first + counts[number]);
    const times = numbers(ms).subarray(first, first + counts[number]);
    const [unit, unitMs] = unitOf(times.reduce((a, b) => Math.max(a, b), 0));
    const y = times.map((value) => value / unitMs);
    const line = { color: tinted("#0072B2"), width: 1.2 };
    Plotly.react(place, [{ type: "scatter", mode: "lines", x, y, line, hovertemplate: `step %{x}: %{y:.3r} ${unit}<extra></extra>` }], layout(height(place), {
      margin: { l: 52, r: 12, t: 12, b: 30 }, xaxis: axis({ title: { text: "step", standoff: 2 } }),
      yaxis: axis({ rangemode: "tozero", nticks: 4, ticksuffix: ` ${unit}` }),
    }), { ...CONFIG, displayModeBar: false });
    describe(place, `Time in each step: ${rangesOf([{ name: "", y }], unit)}`);
  }

  /** What an account shows once it is opened: its series over steps and its code. */
  function openAccount(details) {
    const place = details.querySelector("[data-account]"), number = place?.dataset.account;
    if (!details.open || !place || place.childElementCount || !data.accounts.counts[number]) return;
    const plot = element("figure", "", "plot"), tree = data.flame.accounts[number];
    Object.assign(plot.dataset, { figure: "account", account: number, height: 120 });
    plot.style.minHeight = `${height(plot)}px`;
    place.append(element("h4", "Its time in each step"), plot);
    watch(plot, () => drawAccount(plot));
    const { frames, places, parents } = data.flame;
    if (!tree?.nodes.some((node) => parents[node] >= 0 && frames[places[node]][2] !== "activity")) return;
    const graph = element("div", "", "flame-graph");
    place.append(element("h4", "Where in the code"), graph);
    drawFlame(graph, { ...data.flame, series: [tree] }, "this account");
  }

  const DRAW = { map: drawMap, rank: drawRank, account: drawAccount };

  // ---- counters ----------------------------------------------------------------------------

  function offsets(lines) {
    let sum = 0;
    return lines.map((line) => { const first = sum; sum += line.count; return first; });
  }

  const PANEL_PX = 150, MANY_KEYS = 8;

  /** What a group of panels is drawn from. */
  function sourceOf(place) { return place.dataset.panels === "memory" ? data.memory : data.counters; }

  function linesFor(place) {
    const all = sourceOf(place).lines;
    if (place.dataset.panels !== "rank") return all.map((_, i) => i).filter((i) => all[i].all);
    const rank = Number(chosenRank());
    // The only host's counters are drawn once, below.
    const host = new Set(Object.values(data.hosts)).size > 1 ? data.hosts[rank] : undefined;
    return all.map((_, i) => i).filter((i) => all[i].own &&
      (all[i].rank === rank || (host !== undefined && all[i].rank === null && all[i].host === host)));
  }

  function element(tag, text, className) {
    const made = document.createElement(tag);
    if (text) made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  const DASHES = { solid: "none", dot: "2 3", dash: "6 3", dashdot: "6 3 2 3" };

  function keyOf(line) {
    const item = element("li");
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("class", "key"); svg.setAttribute("aria-hidden", "true");
    const stroke = document.createElementNS("http://www.w3.org/2000/svg", "line");
    for (const [name, value] of Object.entries({
      x1: 0, x2: 18, y1: 3, y2: 3, stroke: line.color, "stroke-width": line.wide ? 6 : 2,
      "stroke-dasharray": DASHES[line.dash] || "none",
    })) stroke.setAttribute(name, value);
    svg.append(stroke);
    item.append(svg, element("bdi", line.name), element("span", "", "now"));
    return item;
  }

  /** Text from the job inside a figure: plotly reads a little markup, and this is none. */
  function plain(text) {
    return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/%\{/g, "% {");
  }

  /** Whether a point has no neighbour that a line could reach it from. */
  function isAlone(values, i) {
    return !Number.isNaN(values[i]) && !(values[i - 1] >= -Infinity) && !(values[i + 1] >= -Infinity);
  }

  /** The lines of a panel as plotly takes them; samples that stand alone are points. */
  function panelTraces(source, shown) {
    const { lines, time: seconds, value } = source, first = offsets(lines);
    return shown.map((i) => {
      const scale = value.scales[i], from = first[i], to = first[i] + lines[i].count;
      const y = numbers(value).subarray(from, to).map((v) => v * scale);
      const alone = Array.from(y, (_, at) => (isAlone(y, at) ? 4 : 0));
      return {
        type: "scatter", mode: alone.some(Boolean) ? "lines+markers" : "lines", name: plain(lines[i].name),
        x: numbers(seconds).subarray(from, to), y,
        line: { color: tinted(lines[i].color), width: 1.5, dash: lines[i].dash },
        marker: { color: tinted(lines[i].color), size: alone, opacity: 1 },
      };
    });
  }

  /** Where something in a panel is pointed at. */
  function markTrace(marks) {
    return {
      type: "scatter", mode: "markers", x: marks.map((mark) => mark.seconds), y: marks.map((mark) => mark.value),
      cliponaxis: false,
      marker: { symbol: "triangle-down", size: 10, color: marks.map((mark) => tinted(mark.color)), line: { width: 1, color: color("ground") } },
    };
  }

  function drawPanel(plot, panel, shown) {
    const source = sourceOf(plot.closest(".panels"));
    const traces = panelTraces(source, shown);
    const tops = traces.map((trace) => highest(trace.x, trace.y));
    const top = panel.top || 1.05 * Math.max(...tops);
    const marks = panel.marks?.length ? [markTrace(panel.marks)] : [];
    Plotly.react(plot, [...traces, ...marks], layout(PANEL_PX, {
      ...TIME_LAYOUT, margin: { l: 40, r: 6, t: 16, b: 26 },
      xaxis: timeAxis({ nticks: 5 }), shapes: tracedBands().map((band) => ({ ...band, label: {} })),
      yaxis: valueAxis({ rangemode: "tozero", nticks: 5, range: [0, top > 0 ? top : 1] }),
    }), { ...TIME_CONFIG, displayModeBar: false });
    const peaks = marks.length ? `; highest: ${panel.marks.map((mark) => mark.text).join(", ")}` : "";
    describe(plot, `${panel.title}: ${rangesOf(traces, panel.unit)}${peaks}`);
    const keys = plot.previousElementSibling;
    time.join(plot, { title: panel.title, lines: cursorLines(keys, traces, panel.unit) });
  }

  function makePanel(panel, lines) {
    const box = element("div", "", "panel"), plot = element("div", "", "plot");
    const keys = element("ul", "", lines.length > MANY_KEYS ? "keys many" : "keys");
    plot.style.minHeight = `${PANEL_PX}px`;
    keys.append(...lines.map((line) => keyOf({ ...line, color: tinted(line.color) })));
    box.append(element("h4", `${panel.title} (${panel.unit})`), keys, plot);
    return box;
  }

  /** Draws the panels of a group; those that are there stay where they have the same lines. */
  function fillPanels(place) {
    const { panels, lines } = sourceOf(place), chosen = linesFor(place);
    const elsewhere = place.dataset.panels === "all" ? data.memory.panels.map((panel) => panel.title) : [];
    const shown = panels.map((panel, number) => [panel, elsewhere.includes(panel.title) ? [] : chosen.filter((i) => lines[i].panel === number)])
      .filter(([, own]) => own.length);
    const names = JSON.stringify([isDark(), shown.map(([panel, own]) => [panel.title, own.map((i) => lines[i].name)])]);
    if (place.dataset.names !== names) makePanels(place, shown);
    place.dataset.names = names;
    [...place.querySelectorAll(".plot")].forEach((plot, number) => watch(plot, () => drawPanel(plot, ...shown[number])));
  }

  function makePanels(place, shown) {
    const { lines } = sourceOf(place);
    for (const old of place.querySelectorAll(".plot")) forget(old);
    place.replaceChildren();
    for (const [panel, own] of shown) place.append(makePanel(panel, own.map((i) => lines[i])));
  }

  // ---- drawing what is looked at -----------------------------------------------------------

  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      seen.unobserve(entry.target);
      draw(entry.target);
    }
  }, { rootMargin: "400px" });
  const waiting = new Map();

  function watch(place, how) {
    waiting.set(place, how);
    seen.observe(place);
    idle ||= whenIdle(drawNext);
  }

  /** What nobody has looked at yet is drawn while there is nothing else to do: paper does not scroll. */
  const whenIdle = globalThis.requestIdleCallback || ((work) => setTimeout(work, 50));
  let idle = 0;
  function drawNext() {
    idle = 0;
    const next = [...waiting.keys()].find((place) => place.offsetParent);
    if (!next) return;
    draw(next);
    idle ||= whenIdle(drawNext);
  }

  function draw(place) {
    const how = waiting.get(place);
    if (!how) return;
    waiting.delete(place);
    if (!place.isConnected) return;
    drawn.set(place, how);
    how();
    place.dataset.drawn = "1";
  }

  function forget(place) {
    seen.unobserve(place); waiting.delete(place); time.leave(place);
    if (drawn.delete(place)) Plotly.purge(place);
  }

  function drawMapAgain() { again(document.querySelector('[data-figure="map"]')); }

  function again(place) { if (drawn.has(place)) drawn.get(place)(); }

  /** In the colours that hold now. */
  function redraw() {
    for (const [place, how] of drawn) if (place.matches("figure")) how();
    for (const place of document.querySelectorAll(".panels")) fillPanels(place);
  }

  function showWhole() { time.forget(); redraw(); }

  /** Paper has no scrolling: what was not looked at is drawn, too. */
  function drawAll() { for (const place of [...waiting.keys()]) if (place.offsetParent) draw(place); }

  /** Draws all for paper, or for the screen again: what is drawn keeps its width until it is told. */
  function print(begins) {
    document.documentElement.classList.toggle("printing", begins);
    for (const part of document.querySelectorAll(begins ? ".fold:not([open])" : ".fold[data-folded]")) {
      part.open = begins;
      part.toggleAttribute("data-folded", begins);
    }
    redraw();
    drawAll();
    for (const place of drawn.keys()) Plotly.relayout(place, begins ? { width: place.clientWidth } : { width: null, autosize: true });
  }

  // ---- choosing ----------------------------------------------------------------------------

  /** Marks its rows in the table of ranks. */
  function showAbout(rank) {
    for (const row of byId("rank-table")?.tBodies[0].rows ?? []) {
      row.classList.toggle("chosen", row.cells[0].textContent.split(".")[0] === rank);
    }
  }

  function showRank() {
    showAbout(chosenRank());
    again(document.querySelector('[data-figure="rank"]'));
    fillPanels(document.querySelector('[data-panels="rank"]'));
    fetchDetail(byId("chooser").value).catch(() => {}); // the page has enough to show without it
  }

  function choose(rank) {
    const chooser = byId("chooser");
    if (![...chooser.options].some((option) => option.value === rank)) return;
    chooser.value = rank;
    showRank();
    byId("rank").scrollIntoView();
  }

  function step(by) {
    const chooser = byId("chooser");
    const next = chooser.selectedIndex + by;
    if (next < 0 || next >= chooser.options.length) return;
    chooser.selectedIndex = next;
    showRank();
  }

  // ---- listening ---------------------------------------------------------------------------

  function listen() {
    const changed = { whole: showWhole, part: drawMapAgain, rows: drawMapAgain, chooser: showRank };
    addEventListener("change", (event) => changed[event.target.id]?.());
    addEventListener("click", (event) => {
      if (event.target.id === "previous") step(-1);
      if (event.target.id === "next") step(1);
      const fold = document.querySelector(`${event.target.closest("nav a")?.hash ?? "none"} > .fold`);
      if (fold) fold.open = true;
      const row = event.target.closest("#rank-table tbody tr");
      if (row && byId("chooser")) choose(row.cells[0].textContent.split(".")[0]);
    });
    addEventListener("toggle", ({ target }) => { if (target.querySelector?.(":scope > [data-account]")) openAccount(target); }, true);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    addEventListener("beforeprint", () => print(true));
    addEventListener("afterprint", () => print(false));
  }

  // ---- while the job runs ------------------------------------------------------------------

  const sent = new Map([...sectionsOf(document)].map(([id, section]) => [id, section.innerHTML]));

  /** Makes what stands in a section work, and draws its figures once they are looked at. */
  function prepare(section) {
    section.querySelectorAll("table").forEach(makeSortable);
    section.querySelectorAll(".scroll").forEach(sayWide);
    for (const place of section.querySelectorAll("[data-flame]")) showFlames(place);
    for (const details of section.querySelectorAll(".accounts details")) openAccount(details);
    for (const place of section.querySelectorAll("figure.plot")) {
      place.style.minHeight = `${height(place)}px`;
      const how = DRAW[place.dataset.figure] || drawMade;
      watch(place, () => how(place));
    }
  }

  const flames = new WeakMap(); // place -> [its numbers as text, graph]

  function showFlames(place) {
    const text = JSON.stringify(data.flame), [known, graph] = flames.get(place) || [];
    if (known === text) return;
    const state = graph?.state();
    const made = drawFlame(place, data.flame);
    if (state) made.restore(state);
    flames.set(place, [text, made]);
  }

  function drawPanelGroups() {
    if (byId("chooser")) showRank();
    for (const place of document.querySelectorAll(".panels:not([data-panels=rank])")) fillPanels(place);
  }

  /** Takes over a newer page, with its numbers. */
  async function renew(page) {
    data = await loadData();
    details.clear();
    const stay = readerPlace();
    renewSections(page, sent, () => {});
    for (const place of [...drawn.keys()]) if (!place.isConnected) forget(place);
    for (const section of sectionsOf(document).values()) prepare(section);
    if (!byId("problem").hidden) byId("problem").hidden = true;
    drawPanelGroups();
    stay();
    requestAnimationFrame(() => requestAnimationFrame(stay)); // figures above were drawn anew
  }

  async function start() {
    try {
      if (!globalThis.DecompressionStream) throw new Error("figures need a browser of 2023 or newer");
      data = await loadData();
      if (byId("plotly")) await loadPlotly();
      listen();
      for (const section of document.querySelectorAll("main > section")) prepare(section);
      drawPanelGroups();
      document.documentElement.dataset.ready = "1";
    } catch (error) {
      byId("problem").hidden = false;
      byId("problem").textContent = `No figures: ${error.message}`;
    }
    if (document.documentElement.dataset.live) followJob(renew);
  }

  start();
})();
