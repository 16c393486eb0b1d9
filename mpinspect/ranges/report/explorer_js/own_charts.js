// The charts of a layer's own view: its histogram against the format, and its history over the run.
// @ts-check

import { svg } from "./dom.js";
import { clamp, flushed, nonzero, share } from "./histogram.js";
import { number, percent, power, spanInWords } from "./words.js";

/** Pixels around a chart, and its height. */
const PAD = { left: 40, right: 6, top: 8, bottom: 18 };
const [HISTOGRAM, HISTORY, SMALL] = [150, 84, 30];
/** Powers of ten of the shares that have a height. */
const TENS = 5;

/** The height of a share, 0 to 1. @param {number} part */
const heightOf = (part) => (part ? clamp(1 + Math.log10(part) / TENS, 0.03, 1) : 0);

/** Powers of two below an axis. @param {[number, number]} ends @param {(exponent: number) => number} x @param {number} bottom */
function powers(ends, x, bottom) {
  const step = [2, 4, 8, 16, 32, 64].find((each) => x(ends[0] + each) - x(ends[0]) > 34) ?? 64;
  const found = [];
  for (let exponent = Math.ceil(ends[0] / step) * step; exponent <= ends[1]; exponent += step) {
    found.push(svg("text", { x: x(exponent), y: bottom + 14, "text-anchor": "middle" }, power(exponent)));
  }
  return found;
}

/** The counts of a layer, with the format's regions behind them. @param {import("./view.js").View} view @param {any} found the layer's figures @param {number} wide in pixels */
export function histogramChart(view, { h, all }, wide) {
  const [k, f] = [view.log2Scale, view.state.format];
  const low = Math.max(Math.min(h.min, f.flush - k), h.min - 24) - 2;
  const high = Math.min(Math.max(h.min + h.counts.length, f.top + 1 - k), h.min + h.counts.length + 24) + 2;
  const [right, bottom] = [wide - PAD.right, HISTOGRAM - PAD.bottom];
  const x = across([low, high], wide);
  const picture = svg("svg", { width: wide, height: HISTOGRAM, viewBox: `0 0 ${wide} ${HISTOGRAM}`, role: "img",
    "aria-label": `Histogram of the powers of two of ${number(all)} elements; ${f.label} flushes below ${power(f.flush - k)} and ends at ${power(f.top + 1 - k)}.` });
  picture.append(...regionsOf(view, [low, high], k, x, PAD.top, bottom),
    ...[1, 1e-2, 1e-4].map((part) => svg("text", { x: PAD.left - 5, y: bottom - heightOf(part) * (bottom - PAD.top) + 4, "text-anchor": "end" }, percent(part))),
    ...bars(view, { h, all }, k, x, bottom, bottom - PAD.top));
  picture.append(svg("path", { d: `M${PAD.left} ${bottom}H${right}`, class: "axis" }), ...powers([low, high], x, bottom));
  return picture;
}

/** Where an exponent lies on an axis. @param {[number, number]} ends @param {number} wide in pixels */
const across = (ends, wide) => (/** @type {number} */ exponent) => PAD.left + ((clamp(exponent, ...ends) - ends[0]) / (ends[1] - ends[0])) * (wide - PAD.right - PAD.left);

/** The bars of a histogram. @param {import("./view.js").View} view @param {any} found figures @param {number | null} k the power of two that multiplies it; null where the format decides nothing @param {(exponent: number) => number} x @param {number} bottom @param {number} height in pixels, of a share of 1 */
function bars(view, { h, all }, k, x, bottom, height) {
  const f = view.state.format;
  return h.counts.flatMap((/** @type {number} */ count, /** @type {number} */ index) => {
    if (!count) return [];
    const exponent = h.min + index;
    const name = k === null ? "fill" : exponent < f.flush - k ? "flushed" : exponent > f.top - k ? "overflow" : "fill";
    const tall = heightOf(count / all) * height;
    return [svg("rect", { x: x(exponent), width: Math.max(x(exponent + 1) - x(exponent) - 0.5, 0.5), y: bottom - tall, height: tall, class: `bar-${name}` }, svg("title", {}, `${power(exponent)}: ${number(count)}, ${percent(count / all)}`))];
  });
}

/** The regions of a format between two exponents. @param {import("./view.js").View} view @param {[number, number]} ends @param {number} k @param {(exponent: number) => number} x @param {number} top @param {number} bottom */
function regionsOf({ state }, ends, k, x, top, bottom) {
  const f = state.format;
  /** @type {[number, number, string][]} */
  const regions = [[ends[0], f.flush - k, "flushed"], [f.flush - k, f.normal - k, "subnormal"], [f.top + 1 - k, ends[1], "overflow"]];
  return regions.filter(([from, to]) => x(to) > x(from)).map(([from, to, name]) => svg("rect", { x: x(from), width: x(to) - x(from), y: top, height: bottom - top, class: `region ${name}` }, svg("title", {}, name)));
}

/** The counts of one of a module's tensors, on an axis of all of them. @param {import("./view.js").View} view @param {any} tensor @param {any} found its figures @param {any} ends @param {number} wide in pixels */
export function smallChart(view, tensor, found, ends, wide) {
  // Whether an update is lost depends on its weight.
  const k = tensor.kind === "update" ? null : view.isScaled(tensor.kind) ? view.state.scale : 0;
  const x = across(ends, wide);
  const picture = svg("svg", { width: wide, height: SMALL, viewBox: `0 0 ${wide} ${SMALL}`, role: "img",
    "aria-label": `From ${power(found.h.min)} to ${power(found.h.min + found.h.counts.length - 1)}.` });
  picture.append(...(k === null ? [] : regionsOf(view, ends, k, x, 0, SMALL)), ...bars(view, found, k, x, SMALL, SMALL - 2),
    svg("path", { d: `M${PAD.left} ${SMALL - 0.5}H${wide - PAD.right}`, class: "axis" }));
  return picture;
}

/** The axis below charts of several tensors. @param {[number, number]} ends @param {number} wide in pixels */
export function sharedAxis(ends, wide) {
  const picture = svg("svg", { width: wide, height: PAD.bottom, "aria-hidden": "true" });
  picture.append(...powers(ends, across(ends, wide), 0));
  return picture;
}

/** The share flushed and the largest magnitude of a layer in each block of the run. @param {import("./view.js").View} view @param {any} layer @param {number} wide in pixels */
export function historyChart(view, layer, wide) {
  const [k, f] = [view.isScaled(layer.kind) ? view.state.scale : 0, view.state.format];
  const { blocks } = view.data;
  const counted = layer.blocks.map((/** @type {any} */ h) => (h && nonzero(h) ? h : null));
  const tops = counted.map((/** @type {any} */ h) => h && h.min + h.counts.length - 1);
  const seen = tops.filter((/** @type {number | null} */ top) => top !== null);
  const [least, most] = [Math.min(...seen), Math.max(...seen)];
  const [right, bottom] = [wide - PAD.right, HISTORY - PAD.bottom];
  const x = (/** @type {number} */ step) => PAD.left + (step / Math.max(view.lastStep, 1)) * (right - PAD.left);
  const path = (/** @type {(h: any) => number} */ part) => {
    let isBroken = true;
    return counted.map((/** @type {any} */ h, /** @type {number} */ block) => {
      if (!h) {
        isBroken = true;
        return "";
      }
      const at = (bottom - part(h) * (bottom - PAD.top)).toFixed(1);
      const made = `${isBroken ? "M" : "L"}${x(blocks[block].first).toFixed(1)} ${at}H${Math.max(x(blocks[block].last), x(blocks[block].first) + 2).toFixed(1)}`;
      isBroken = false;
      return made;
    }).join("");
  };
  const largest = path((h) => (h.min + h.counts.length - 1 - least + 0.5) / (most - least + 1));
  const picture = svg("svg", { width: wide, height: HISTORY, viewBox: `0 0 ${wide} ${HISTORY}`, role: "img",
    "aria-label": `Over the steps the largest magnitude lay between ${power(least)} and ${power(most)}.` });
  const marks = layer.blocks.flatMap((/** @type {any} */ h, /** @type {number} */ block) => (h && h.infs + h.nans
    ? [svg("text", { x: x(blocks[block].first), y: PAD.top + 8, "text-anchor": "middle", class: "bad" }, h.nans ? "○" : "✕", svg("title", {}, `${spanInWords(blocks[block])}: ${number(h.infs)} infinities, ${number(h.nans)} NaNs`))] : []));
  picture.append(svg("path", { d: `M${PAD.left} ${PAD.top}V${bottom}H${right}`, class: "axis" }),
    svg("path", { d: largest, class: "curve largest" }), svg("path", { d: path((h) => share(flushed(h, f, k), nonzero(h))), class: "curve lost-share" }), ...marks,
    svg("text", { x: PAD.left - 5, y: PAD.top + 8, "text-anchor": "end" }, power(most)), svg("text", { x: PAD.left - 5, y: bottom, "text-anchor": "end" }, power(least)),
    ...[0, view.lastStep].map((step) => svg("text", { x: x(step), y: HISTORY - 4, "text-anchor": step ? "end" : "start" }, `step ${number(step)}`)));
  return picture;
}
