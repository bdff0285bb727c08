"use strict";
// Numbers as text, by the rules of haiprof/base/units.py.

/** Three significant digits: `412`, `37.0`, `0.0811`. */
function digitsText(value) {
  const exponent = Number(value.toExponential(2).split("e")[1]);
  return value ? value.toFixed(Math.min(6, Math.max(0, 2 - exponent))) : "0";
}

/** A duration in ns: `12.3 ms`. */
function durationText(ns) {
  if (!ns) return "0 s";
  for (const [limit, scale, unit] of [[1e3, 1, "ns"], [1e6, 1e3, "µs"], [1e9, 1e6, "ms"], [6e11, 1e9, "s"]]) {
    if (Math.abs(ns) < limit * (unit === "s" ? 1 : 0.9995)) return `${digitsText(ns / scale)} ${unit}`;
  }
  return ns < 3.6e13 ? `${(ns / 6e10).toFixed(0)} min` : `${(ns / 3.6e12).toFixed(1)} h`;
}

/** A ratio as percent: `37 %`, `0.4 %`. */
function ratioText(ratio) {
  const percent = 100 * ratio;
  return `${percent.toFixed(Math.abs(percent) < 9.95 ? 1 : 0)} %`;
}
