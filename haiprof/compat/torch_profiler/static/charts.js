/* Part of haiprof (Apache-2.0). Stands in for https://www.gstatic.com/charts/loader.js, so that
 * torch-tb-profiler's pages need no network: the parts of Google Charts' interface that they call,
 * drawn as SVG and tables. Whatever comes from a trace is set as text, never as HTML. */
(function () {
  "use strict";
  const COLORS = ["#3366cc", "#dc3912", "#ff9900", "#109618", "#990099", "#0099c6", "#dd4477",
    "#66aa00", "#b82e2e", "#316395", "#994499", "#22aa99", "#aaaa11", "#6633cc", "#e67300"];
  const SVG = "http://www.w3.org/2000/svg";

  function raw(cell) {
    return cell !== null && typeof cell === "object" && "v" in cell ? cell.v : cell;
  }

  function shown(cell) {
    if (cell !== null && typeof cell === "object" && "f" in cell) return String(cell.f);
    const value = raw(cell);
    if (value === null || value === undefined) return "";
    if (typeof value !== "number") return String(value);
    return value.toLocaleString("en-US", { maximumFractionDigits: 3 });
  }

  function node(parent, tag, attributes, text) {
    const found = document.createElementNS(SVG, tag);
    for (const key of Object.keys(attributes || {})) found.setAttribute(key, attributes[key]);
    if (text !== undefined) found.textContent = text;
    if (parent) parent.appendChild(found);
    return found;
  }

  function withTitle(element, text) {
    node(element, "title", {}, text);
    return element;
  }

  function stripped(html) {
    return String(html).replace(/<[^>]*>/g, " ").replace(/\s+/g, " ").trim();
  }

  class DataTable {
    constructor() {
      this.columns = [];
      this.rows = [];
      this.properties = {};
    }
    addColumn(type, label) {
      this.columns.push(typeof type === "object" ? type : { type: type, label: label });
    }
    addRow(row) { this.rows.push(row.slice()); }
    addRows(rows) { rows.forEach((row) => this.addRow(row)); }
    setProperty(row, column, name, value) {
      this.properties[row + "," + column] = Object.assign(
        this.properties[row + "," + column] || {}, { [name]: value });
    }
    series() {
      const found = [];
      this.columns.forEach((column, at) => {
        if (at && !column.role) found.push({ at: at, label: column.label || "" });
      });
      return found;
    }
    tooltip(row, after) {
      const next = this.columns[after + 1];
      return next && next.role === "tooltip" ? stripped(row[after + 1]) : null;
    }
  }

  function arrayToDataTable(rows) {
    const table = new DataTable();
    rows[0].forEach((label, at) => table.addColumn(at ? "number" : "string", label));
    table.addRows(rows.slice(1));
    return table;
  }

  class Chart {
    constructor(element) {
      this.element = element;
      this.listeners = {};
      this.selection = [];
    }
    on(name, callback) { (this.listeners[name] = this.listeners[name] || []).push(callback); }
    fire(name, event) { (this.listeners[name] || []).forEach((callback) => callback(event || {})); }
    setSelection(selection) { this.selection = selection || []; }
    getSelection() { return this.selection; }
    clearChart() { this.element.textContent = ""; }
    begin(options, kind) {
      this.clearChart();
      this.width = Math.max(200, this.element.clientWidth || 400);
      this.height = options.height || this.element.clientHeight || 300;
      const found = node(null, "svg", {
        viewBox: "0 0 " + this.width + " " + this.height, "data-chart": kind, role: "img",
        preserveAspectRatio: "xMinYMin meet", "font-family": "sans-serif", "font-size": 11,
      });
      // In per cent, or the chart would keep its container from shrinking again.
      found.style.cssText = "display:block;width:100%;height:" + this.height + "px";
      if (options.title) node(found, "text", { x: 8, y: 14, "font-weight": "bold" }, options.title);
      this.element.appendChild(found);
      return found;
    }
  }

  class Table extends Chart {
    draw(data, options) {
      this.data = data;
      this.size = options.pageSize || 30;
      this.page = 0;
      this.order = data.rows.map((_, at) => at);
      if (options.sortColumn !== undefined && options.sortColumn >= 0) {
        this.sort(options.sortColumn, Boolean(options.sortAscending));
      }
      this.show();
      this.fire("ready");
    }
    sort(column, ascending) {
      this.sorted = { column: column, ascending: ascending };
      const rows = this.data.rows, sign = ascending ? 1 : -1;
      this.order.sort((a, b) => {
        const x = raw(rows[a][column]), y = raw(rows[b][column]);
        return x === y ? a - b : (x < y ? -sign : sign);
      });
    }
    show() {
      this.clearChart();
      const table = document.createElement("table");
      table.className = "google-visualization-table-table";
      table.style.cssText = "width:100%;border-collapse:collapse;font-size:12px";
      this.head(table.createTHead().insertRow());
      const body = table.createTBody(), first = this.page * this.size;
      this.order.slice(first, first + this.size).forEach((at) => this.row(body.insertRow(), at));
      this.element.appendChild(table);
      if (this.order.length > this.size) this.pages();
    }
    head(row) {
      this.data.columns.forEach((column, at) => {
        if (column.role) return;
        const cell = document.createElement("th");
        cell.style.cssText = "cursor:pointer;border:1px solid #ddd;padding:3px;background:#f5f5f5";
        const own = this.sorted && this.sorted.column === at;
        cell.textContent = (column.label || "") + (own ? (this.sorted.ascending ? " ▲" : " ▼") : "");
        cell.addEventListener("click", () => {
          this.sort(at, own ? !this.sorted.ascending : column.type === "string");
          this.show();
        });
        row.appendChild(cell);
      });
    }
    row(row, at) {
      this.data.columns.forEach((column, place) => {
        if (column.role) return;
        const cell = row.insertCell();
        cell.style.cssText = "border:1px solid #eee;padding:3px;word-break:break-word;text-align:"
          + (column.type === "number" ? "right" : "left");
        cell.textContent = shown(this.data.rows[at][place]);
        const style = (this.data.properties[at + "," + place] || {}).style || "";
        const color = /^background: (#[0-9a-f]{6})$/.exec(style);
        if (color) cell.style.background = color[1];
      });
    }
    pages() {
      const last = Math.ceil(this.order.length / this.size) - 1;
      const bar = document.createElement("div");
      bar.append("rows " + (this.page * this.size + 1) + " to "
        + Math.min(this.order.length, (this.page + 1) * this.size) + " of " + this.order.length + " ");
      [["previous", -1], ["next", 1]].forEach(([name, step]) => {
        const button = document.createElement("button");
        button.textContent = name;
        button.disabled = this.page + step < 0 || this.page + step > last;
        button.addEventListener("click", () => { this.page += step; this.show(); });
        bar.appendChild(button);
      });
      this.element.appendChild(bar);
    }
  }

  class PieChart extends Chart {
    draw(data, options) {
      const svg = this.begin(options, "PieChart"), colors = options.colors || COLORS;
      const values = data.rows.map((row) => Math.max(0, Number(raw(row[1])) || 0));
      const total = values.reduce((sum, value) => sum + value, 0);
      const legend = options.legend !== "none", radius = Math.max(10,
        Math.min(this.height / 2 - 22, this.width / (legend ? 4 : 2.2)));
      const x = radius + 12, y = this.height / 2 + 6;
      let turn = 0;
      values.forEach((value, at) => {
        const share = total ? value / total : 0;
        const label = shown(data.rows[at][0]) + ": " + shown(data.rows[at][1])
          + " (" + (100 * share).toFixed(1) + "%)";
        const color = colors[at % colors.length];
        if (share > 0) {
          const slice = this.slice(svg, x, y, radius, turn, turn + share, color);
          withTitle(slice, data.tooltip(data.rows[at], 1) || label);
          slice.addEventListener("mouseover", () => this.fire("onmouseover", { row: at }));
          slice.addEventListener("mouseout", () => this.fire("onmouseout", { row: at }));
        }
        turn += share;
        const line = 30 + 15 * at;
        if (legend && line < this.height - 6) {
          node(svg, "rect", { x: 2 * x + 8, y: line - 9, width: 10, height: 10, fill: color });
          const room = Math.max(8, Math.floor((this.width - 2 * x - 28) / 6.8));
          const text = label.length > room ? label.slice(0, room - 1) + "…" : label;
          withTitle(node(svg, "text", { x: 2 * x + 22, y: line }, text), label);
        }
      });
      this.fire("ready");
    }
    slice(svg, x, y, radius, from, to, color) {
      if (to - from > 0.9999) return node(svg, "circle", { cx: x, cy: y, r: radius, fill: color });
      const at = (turn) => [x + radius * Math.sin(2 * Math.PI * turn),
        y - radius * Math.cos(2 * Math.PI * turn)].map((each) => each.toFixed(2)).join(" ");
      const path = "M" + x + " " + y + " L" + at(from) + " A" + radius + " " + radius + " 0 "
        + (to - from > 0.5 ? 1 : 0) + " 1 " + at(to) + " Z";
      return node(svg, "path", { d: path, fill: color, stroke: "#fff" });
    }
  }

  class AxisChart extends Chart {
    frame(data, options, kind, highest) {
      const svg = this.begin(options, kind);
      this.box = { left: 70, top: options.title ? 44 : 30, width: this.width - 90 };
      this.box.height = this.height - 60 - this.box.top;
      const box = this.box, top = highest > 0 ? highest : 1;
      this.y = (value) => box.top + box.height * (1 - value / top);
      for (let line = 0; line <= 4; line++) {
        const value = (top * line) / 4, y = this.y(value);
        node(svg, "line", { x1: box.left, x2: box.left + box.width, y1: y, y2: y, stroke: "#ddd" });
        node(svg, "text", { x: box.left - 6, y: y + 4, "text-anchor": "end" }, shown(value));
      }
      const axis = (options.vAxis || {}).title;
      if (axis) node(svg, "text", { x: 8, y: options.title ? 30 : 20, fill: "#666" }, axis);
      const below = (options.hAxis || {}).title;
      if (below) {
        node(svg, "text", { x: box.left + box.width / 2, y: this.height - 28, fill: "#666",
          "text-anchor": "middle" }, below);
      }
      this.legend(svg, data.series(), options.colors || COLORS);
      return svg;
    }
    legend(svg, series, colors) {
      let x = this.box.left;
      series.forEach((one, at) => {
        const y = this.height - 8;
        node(svg, "rect", { x: x, y: y - 9, width: 10, height: 10, fill: colors[at % colors.length] });
        node(svg, "text", { x: x + 14, y: y }, one.label);
        x += 30 + 6.5 * one.label.length;
      });
    }
    names(svg, data, middle) {
      const every = Math.ceil(data.rows.length / Math.max(1, Math.floor(this.box.width / 90)));
      data.rows.forEach((row, at) => {
        if (at % every) return;
        node(svg, "text", { x: middle(at), y: this.box.top + this.box.height + 16,
          "text-anchor": "middle" }, shown(row[0]).slice(0, 24));
      });
    }
  }

  class ColumnChart extends AxisChart {
    draw(data, options) {
      const series = data.series(), colors = options.colors || COLORS;
      const stacked = options.isStacked !== undefined ? options.isStacked : false;
      const value = (row, one) => Math.max(0, Number(raw(row[one.at])) || 0);
      const heights = data.rows.map((row) => series.map((one) => value(row, one)));
      const highest = Math.max(0, ...heights.map((all) => (stacked
        ? all.reduce((sum, one) => sum + one, 0) : Math.max(...all))));
      const svg = this.frame(data, options, this.kind || "ColumnChart", highest);
      const slot = this.box.width / Math.max(1, data.rows.length), wide = this.gap ? 0.7 : 1;
      this.names(svg, data, (at) => this.box.left + slot * (at + 0.5));
      data.rows.forEach((row, at) => {
        let base = 0;
        series.forEach((one, number) => {
          const size = heights[at][number], part = stacked ? 1 : series.length;
          const bar = node(svg, "rect", {
            x: this.box.left + slot * (at + (1 - wide) / 2) + (stacked ? 0 : slot * wide * number / part),
            y: this.y(base + size), width: Math.max(0.5, (slot * wide) / part),
            height: Math.max(0, this.y(base) - this.y(base + size)), fill: colors[number % colors.length],
          });
          withTitle(bar, data.tooltip(row, one.at)
            || shown(row[0]) + ", " + one.label + ": " + shown(row[one.at]));
          bar.addEventListener("click", () => {
            this.setSelection([{ row: at, column: one.at }]);
            this.fire("select");
          });
          if (stacked) base += size;
        });
      });
      this.fire("ready");
    }
  }
  ColumnChart.prototype.gap = true;

  class SteppedAreaChart extends ColumnChart {}
  SteppedAreaChart.prototype.gap = false;
  SteppedAreaChart.prototype.kind = "SteppedAreaChart";

  class ComboChart extends ColumnChart {}
  ComboChart.prototype.kind = "ComboChart";

  class LineChart extends AxisChart {
    draw(data, options) {
      this.data = data;
      this.options = options;
      const times = data.rows.map((row) => Number(raw(row[0])));
      const first = times.length ? times[0] : 0, last = times.length ? times[times.length - 1] : 1;
      this.all = [first, last > first ? last : first + 1];
      this.show(this.all);
    }
    show(range) {
      this.range = range;
      const series = this.data.series(), colors = this.options.colors || COLORS;
      let highest = 0;
      this.data.rows.forEach((row) => series.forEach((one) => {
        highest = Math.max(highest, Number(raw(row[one.at])) || 0);
      }));
      const svg = this.frame(this.data, this.options, "LineChart", highest * 1.05), box = this.box;
      this.x = (time) => box.left + (box.width * (time - range[0])) / (range[1] - range[0]);
      series.forEach((one, number) => {
        const points = this.data.rows
          .filter((row) => raw(row[0]) >= range[0] && raw(row[0]) <= range[1])
          .map((row) => this.x(raw(row[0])).toFixed(1) + "," + this.y(Number(raw(row[one.at])) || 0).toFixed(1));
        node(svg, "polyline", { points: points.join(" "), fill: "none",
          stroke: colors[number % colors.length], "stroke-width": 1.5 });
      });
      for (let mark = 0; mark <= 4; mark++) {
        const time = range[0] + ((range[1] - range[0]) * mark) / 4;
        node(svg, "text", { x: this.x(time), y: box.top + box.height + 16,
          "text-anchor": "middle" }, shown(time));
      }
      this.marks = node(svg, "g");
      if (this.options.explorer) this.explore(svg);
      this.setSelection(this.selection);
      this.fire("ready");
    }
    explore(svg) {
      const box = this.box;
      const timeAt = (event) => {
        const place = svg.getBoundingClientRect(), scale = this.width / (place.width || this.width);
        const at = (event.clientX - place.left) * scale;
        const x = Math.min(Math.max(at, box.left), box.left + box.width);
        return this.range[0] + ((this.range[1] - this.range[0]) * (x - box.left)) / box.width;
      };
      let from = null;
      svg.addEventListener("mousedown", (event) => { if (event.button === 0) from = timeAt(event); });
      svg.addEventListener("mouseup", (event) => {
        if (from === null) return;
        const ends = [from, timeAt(event)].sort((a, b) => a - b);
        from = null;
        if (ends[1] - ends[0] > (this.range[1] - this.range[0]) / 200) this.show(ends);
      });
      svg.addEventListener("contextmenu", (event) => {
        event.preventDefault();
        this.show(this.all);
      });
    }
    setSelection(selection) {
      super.setSelection(selection);
      if (!this.marks) return;
      this.marks.textContent = "";
      this.selection.forEach((one) => {
        const row = this.data.rows[one.row];
        if (!row) return;
        const value = Number(raw(row[one.column])) || 0;
        node(this.marks, "circle", { cx: this.x(raw(row[0])), cy: this.y(value), r: 4, fill: "#333" });
      });
    }
    getChartLayoutInterface() {
      return {
        getChartAreaBoundingBox: () => this.box,
        getHAxisValue: (x) => this.range[0]
          + ((this.range[1] - this.range[0]) * (x - this.box.left)) / this.box.width,
      };
    }
  }

  class Timeline extends Chart {
    draw(data, options) {
      const svg = this.begin(options, "Timeline"), rows = data.rows;
      const first = Math.min(...rows.map((row) => row[3])), last = Math.max(...rows.map((row) => row[4]));
      const layers = [];
      rows.forEach((row) => { if (!layers.includes(row[0])) layers.push(row[0]); });
      const high = this.height / Math.max(1, layers.length), scale = this.width / (last - first || 1);
      rows.forEach((row, at) => {
        const x = (row[3] - first) * scale, width = Math.max(0.5, (row[4] - row[3]) * scale);
        const y = layers.indexOf(row[0]) * high;
        const bar = node(svg, "rect", { x: x, y: y, width: width, height: high - 2,
          fill: COLORS[at % COLORS.length] });
        withTitle(bar, stripped(row[2]));
        const room = Math.floor(width / 6);
        if (room > 3) node(svg, "text", { x: x + 3, y: y + high / 2, fill: "#fff", "pointer-events": "none" }, row[1].slice(0, room));
      });
      this.fire("ready");
    }
  }

  window.google = {
    charts: { load: () => Promise.resolve() },
    visualization: {
      DataTable, arrayToDataTable, Table, PieChart, ColumnChart, LineChart, SteppedAreaChart,
      ComboChart, Timeline,
      events: { addListener: (chart, name, callback) => chart.on(name, callback) },
    },
  };
})();
