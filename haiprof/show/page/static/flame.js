"use strict";
// Draws flame graphs of sampled stacks: what is called stands below its caller, its width is its
// time. Plain elements, no library: they can be read aloud, printed and reached by keyboard.
const drawFlame = (() => {
  const ROW_PX = 21, LEAST_RATIO = 0.0015, CHANCE = 2.58; // 99 % of a normal distribution
  const TITLES = {
    worker: "DataLoader workers, loading",
    worker_waiting: "DataLoader workers, waiting", other_threads: "other Python threads",
    prepare: "before forward", gradients: "before optimizer", after_step: "after optimizer",
  };
  const STEP = "a training step";
  const titleOf = (position) => TITLES[position] || position.replace("_", " ");

  function element(tag, text, className) {
    const made = document.createElement(tag);
    if (text) made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  function percent(part, whole) {
    return whole ? ratioText(part / whole) : "";
  }

  /** A frame that is shown; a, b: time in both series, with their variances. */
  function made(name, place, kind, parent) {
    return { name, place, kind, parent, below: new Map(), self: [0, 0], strays: [0, 0], wide: 0 };
  }

  /** The tree of one part of the step, with or without what libraries call inside. */
  function treeOf(data, part, chosen, inner) {
    const { frames, parents, places } = data;
    const below = parents.map(() => []);
    const tops = [];
    parents.forEach((parent, node) => (parent < 0 ? tops : below[parent]).push(node));
    const self = chosen.map((one) => {
      const times = new Float64Array(parents.length);
      one?.nodes.forEach((node, at) => { times[node] = one.self_ns[at]; });
      return times;
    });
    const nameOf = (node) => frames[places[node]][0];
    const shown = tops.filter((node) => (part === STEP ? data.in_step.includes(nameOf(node)) : nameOf(node) === part));
    shown.sort((a, b) => data.in_step.indexOf(nameOf(a)) - data.in_step.indexOf(nameOf(b)));
    const root = made(part === STEP ? STEP : titleOf(part), "", "root", null);

    function add(node, into, phase) {
      chosen.forEach((one, which) => {
        into.self[which] += self[which][node];
        into.strays[which] += self[which][node] * (one?.sample_ns[phase] ?? 0);
      });
      for (const child of below[node]) {
        const [name, place, kind] = frames[places[child]];
        const hidden = !inner && kind === "library" && into.kind === "library";
        let next = into;
        if (!hidden) {
          const key = places[child];
          if (!into.below.has(key)) into.below.set(key, made(name, place, kind, into));
          next = into.below.get(key);
        }
        add(child, next, phase);
      }
    }

    for (const node of shown) {
      const name = nameOf(node);
      let into = root;
      if (part === STEP) {
        into = made(titleOf(name), "", "phase", root);
        into.phase = name;
        root.below.set(`phase ${name}`, into);
      }
      add(node, into, name);
    }
    finish(root, Boolean(chosen[1]));
    return root;
  }

  /** Times with all below; the widest first, phases in their order. */
  function finish(frame, both) {
    frame.all = [...frame.self];
    frame.allStrays = [...frame.strays];
    frame.wide = both ? Math.max(...frame.self) : frame.self[0];
    for (const child of frame.below.values()) {
      finish(child, both);
      for (const which of [0, 1]) {
        frame.all[which] += child.all[which];
        frame.allStrays[which] += child.allStrays[which];
      }
      frame.wide += child.wide;
    }
    frame.children = [...frame.below.values()].filter((child) => child.wide > 0);
    if (frame.kind !== "root" || !frame.children.some((child) => child.phase)) {
      frame.children.sort((x, y) => y.wide - x.wide || (x.name < y.name ? -1 : 1));
    }
  }

  /** Of phases nothing is claimed here: their spans are timed, not sampled. */
  function isTimed(frame) { return frame.kind === "root" || frame.kind === "phase"; }

  /** Whether a difference is more than the spread of counts explains. */
  function isSure(frame) {
    if (isTimed(frame)) return false;
    const [a, b] = frame.all;
    return Math.abs(a - b) > CHANCE * Math.sqrt(frame.allStrays[0] + frame.allStrays[1]);
  }

  function nameOfSeries(one, data) {
    const ranks = data.series.filter((each) => each.run === one.run && each.rank !== null).length;
    const who = one.rank === null ? (ranks > 1 ? `mean of ${ranks} ranks` : "") : `rank ${one.rank}`;
    return [one.run, who].filter(Boolean).join(", ");
  }

  function seriesOf(data) {
    const found = data.series.map((one, number) => ({ one, number, name: nameOfSeries(one, data) }));
    return found.filter(({ one, name }) => name && !(one.rank === null && one.run === "" && name === ""));
  }

  class Graph {
    constructor(place, data, title) {
      this.data = data;
      this.title = title;
      this.place = place;
      this.bar = element("div", "", "flame-bar");
      this.keys = element("ul", "", "keys flame-keys");
      this.tree = element("div", "", "flame-tree");
      this.tree.setAttribute("role", "tree");
      this.about = element("p", "", "flame-about dim");
      this.about.setAttribute("aria-hidden", "true");
      this.found = element("p", "", "flame-found");
      this.found.setAttribute("role", "status");
      place.replaceChildren(this.bar, this.keys, this.found, this.tree, this.about);
      this.makeBar();
      this.bar.hidden = this.keys.hidden = Boolean(title);
      this.tree.addEventListener("click", (event) => this.clicked(event));
      this.tree.addEventListener("keydown", (event) => this.pressed(event));
      this.tree.addEventListener("mouseover", (event) => this.tell(this.frameAt(event.target)));
      this.tree.addEventListener("focusin", (event) => this.tell(this.frameAt(event.target)));
      this.rebuild();
    }

    // ---- what is chosen --------------------------------------------------------------------

    makeBar() {
      const tops = this.data.parents.map((p, node) => (p < 0 ? this.data.frames[this.data.places[node]][0] : null));
      const phases = [...this.data.in_step, "worker", "worker_waiting", "other_threads"];
      const parts = [[STEP, STEP], ...phases.filter((phase) => tops.includes(phase)).map((phase) => [phase, titleOf(phase)])];
      this.part = this.select("Time in", parts);
      const series = seriesOf(this.data);
      const names = series.map(({ number, name }) => [String(number), name]);
      this.of = names.length > 1 ? this.select("of", names) : null;
      this.than = names.length > 1 ? this.select("compared with", [["", "nothing"], ...names]) : null;
      const first = this.data.series.findIndex((one) => one.run !== "");
      if (first >= 0) this.than.value = String(first);
      this.search = element("input");
      this.search.type = "search";
      this.search.placeholder = "file or function";
      this.search.addEventListener("input", () => this.mark());
      this.labelled("Search", this.search);
      this.inner = element("input");
      this.inner.type = "checkbox";
      this.inner.addEventListener("change", () => this.rebuild());
      this.labelled("inside libraries", this.inner);
      this.whole = element("button", "Whole");
      this.whole.type = "button";
      this.whole.addEventListener("click", () => this.zoomTo(this.root, true));
      this.bar.append(this.whole);
    }

    /** What the reader has chosen, to be restored in a graph of newer numbers. */
    state() {
      const path = [];
      for (let at = this.zoom; at.parent; at = at.parent) path.unshift(`${at.name}\n${at.place}`);
      const text = (select) => select?.selectedOptions[0]?.text;
      return {
        path, chosen: ["part", "of", "than"].map((name) => [name, text(this[name])]),
        search: this.search.value, inner: this.inner.checked,
      };
    }

    restore({ path, chosen, search, inner }) {
      for (const [name, text] of chosen) {
        const option = [...(this[name]?.options || [])].find((one) => one.text === text);
        if (option) this[name].value = option.value;
      }
      this.search.value = search;
      this.inner.checked = inner;
      this.rebuild();
      let frame = this.root;
      for (const key of path) frame = frame.children.find((one) => `${one.name}\n${one.code_place}` === key) || frame;
      if (frame !== this.root) this.zoomTo(frame, false);
    }

    labelled(text, control) {
      const label = element("label", `${text} `);
      label.append(control);
      this.bar.append(label);
    }

    select(text, options) {
      const made = element("select");
      for (const [value, name] of options) {
        const option = element("option", name);
        option.value = value;
        made.append(option);
      }
      made.addEventListener("change", () => this.rebuild());
      this.labelled(text, made);
      return made;
    }

    rebuild() {
      const { series } = this.data;
      const than = this.than?.value ? series[Number(this.than.value)] : null;
      const of = series[Number(this.of?.value ?? 0)];
      this.both = Boolean(than) && than !== of;
      this.root = treeOf(this.data, this.part.value, [of, this.both ? than : null], this.inner.checked);
      if (this.title) this.root.name = this.title;
      this.zoom = this.root;
      this.makeKeys();
      this.render();
    }

    makeKeys() {
      const names = this.both
        ? [["more", "longer"], ["less", "shorter"], ["same", "not beyond chance"]]
        : [["user", "your code"], ["library", "libraries"]];
      this.keys.replaceChildren(...names.map(([kind, name]) => {
        const item = element("li");
        item.append(element("span", "", `flame-key ${kind}`), document.createTextNode(name));
        return item;
      }));
      this.tree.setAttribute("aria-label", `Flame graph: ${this.root.name}, ${this.text(this.root)}`);
    }

    // ---- drawing ---------------------------------------------------------------------------

    render(focus) {
      const rows = [];
      const above = [];
      for (let at = this.zoom.parent; at; at = at.parent) above.unshift(at);
      above.forEach((frame, depth) => rows.push(this.box(frame, depth, 0, 1, "above")));
      let deepest = above.length;
      const draw = (frame, depth, left, width) => {
        deepest = Math.max(deepest, depth);
        rows.push(this.box(frame, depth, left, width, ""));
        for (const child of frame.children) {
          const own = (width * child.wide) / (frame.wide || 1);
          if (own >= LEAST_RATIO) draw(child, depth + 1, left, own);
          left += own;
        }
      };
      if (this.zoom.wide > 0) draw(this.zoom, above.length, 0, 1);
      this.tree.replaceChildren(...rows);
      this.tree.style.height = `${(deepest + 1) * ROW_PX}px`;
      this.whole.disabled = this.zoom === this.root;
      this.found.textContent = this.zoom.wide > 0 ? "" : "No sample fell into this.";
      this.mark();
      const chosen = (focus && this.zoom.box) || rows[0];
      if (chosen) chosen.tabIndex = 0;
      if (focus) chosen?.focus();
      this.tell(this.zoom);
    }

    box(frame, depth, left, width, state) {
      const box = element("div", "", `flame ${this.kind(frame)} ${state}`);
      box.setAttribute("role", "treeitem");
      box.setAttribute("aria-level", String(depth + 1));
      box.setAttribute("aria-label", `${frame.name}${frame.place ? `, ${frame.place}` : ""}: ${this.text(frame)}`);
      box.tabIndex = -1;
      box.style.left = `${left * 100}%`;
      box.style.width = `${width * 100}%`;
      box.style.top = `${depth * ROW_PX}px`;
      if (this.both) box.style.setProperty("--strength", `${this.strength(frame)}%`);
      box.append(element("bdi", frame.name));
      if (this.both && isSure(frame)) box.append(element("span", this.change(frame), "flame-change"));
      if (frame.place) box.append(element("bdi", frame.place, "flame-place"));
      box.frame = frame;
      frame.box = box;
      return box;
    }

    kind(frame) {
      if (!this.both) return frame.kind === "phase" ? `phase ${frame.phase}` : frame.kind;
      if (!isSure(frame)) return "same";
      return frame.all[0] > frame.all[1] ? "more" : "less";
    }

    /** How strongly a difference is coloured: fully from a tenth of the whole on. */
    strength(frame) {
      const whole = Math.max(...this.root.all) || 1;
      return Math.round(25 + 75 * Math.min(1, (10 * Math.abs(frame.all[0] - frame.all[1])) / whole));
    }

    change(frame) {
      const difference = frame.all[0] - frame.all[1];
      return `${difference > 0 ? "+" : "−"}${durationText(Math.abs(difference))}`;
    }

    text(frame) {
      const [a, b] = frame.all;
      const whole = this.root.all[0];
      if (!this.both) {
        const own = !isTimed(frame) ? `, ${durationText(frame.self[0])} of it itself` : "";
        return `${durationText(a)} per step, ${percent(a, whole)}${own}`;
      }
      const both = `${durationText(a)} per step against ${durationText(b)}`;
      if (isTimed(frame)) return both;
      return `${both}, ${isSure(frame) ? this.change(frame) : "no difference beyond chance"}`;
    }

    tell(frame) {
      if (!frame) return;
      const kinds = { user: "your code", library: "library" };
      const what = [frame.name, frame.place, kinds[frame.kind]].filter(Boolean).join(" · ");
      this.about.textContent = `${what}: ${this.text(frame)}`;
    }

    // ---- searching and moving --------------------------------------------------------------

    mark() {
      const wanted = this.search.value.trim().toLowerCase();
      const fits = (frame) => !isTimed(frame) && `${frame.name} ${frame.place}`.toLowerCase().includes(wanted);
      let total = 0, count = 0;
      const look = (frame, inside) => {
        const hit = Boolean(wanted) && fits(frame);
        if (hit) { count += 1; if (!inside) total += frame.all[0]; }
        for (const child of frame.children) look(child, inside || hit);
      };
      look(this.root, false);
      for (const box of this.tree.children) {
        box.classList.toggle("match", Boolean(wanted) && fits(box.frame));
        box.classList.toggle("dimmed", Boolean(wanted) && !fits(box.frame));
      }
      if (wanted) {
        const share = `${durationText(total)} per step, ${percent(total, this.root.all[0])}`;
        this.found.textContent = count ? `${count} found: ${share}` : "nothing found";
      } else if (this.zoom.wide > 0) this.found.textContent = "";
    }

    frameAt(target) { return target.closest?.(".flame")?.frame; }

    clicked(event) {
      const frame = this.frameAt(event.target);
      if (frame) this.zoomTo(frame, true);
    }

    zoomTo(frame, focus) { this.zoom = frame; this.render(focus); }

    focus(frame) {
      if (!frame?.box?.isConnected) return;
      for (const box of this.tree.children) box.tabIndex = -1;
      frame.box.tabIndex = 0;
      frame.box.focus();
    }

    beside(frame, by) {
      const row = [...this.tree.children].filter((box) => box.style.top === frame.box.style.top);
      return row[row.indexOf(frame.box) + by]?.frame;
    }

    pressed(event) {
      const frame = this.frameAt(event.target);
      if (!frame) return;
      const moves = {
        ArrowDown: () => this.focus(frame.children.find((child) => child.box?.isConnected)),
        ArrowUp: () => this.focus(frame.parent),
        ArrowLeft: () => this.focus(this.beside(frame, -1)),
        ArrowRight: () => this.focus(this.beside(frame, 1)),
        Enter: () => this.zoomTo(frame, true),
        " ": () => this.zoomTo(frame, true),
        Escape: () => this.zoomTo(this.zoom.parent || this.root, true),
        Backspace: () => this.zoomTo(this.zoom.parent || this.root, true),
        Home: () => this.zoomTo(this.root, true),
      };
      if (!moves[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      moves[event.key]();
    }
  }

  /** With a title it is of one thing, and there is nothing to choose. */
  return (place, data, title = "") => new Graph(place, data, title);
})();
