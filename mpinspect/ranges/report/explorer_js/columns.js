// The columns of figures beside the strips.
// @ts-check

import { clamp, nonFinite, share } from "./histogram.js";
import { percent, power } from "./words.js";

/**
 * @typedef {object} ColumnOf
 * @property {string} name        by what a click sorts
 * @property {string} words       the heading
 * @property {string} meaning
 * @property {number} width       in pixels; 0 for those that share what is left
 * @property {boolean} [isWide]   whether a wide page alone has room for it
 */

/** Columns of every model. @type {ColumnOf[]} */
const COLUMNS = [
  { name: "model", words: "layer", meaning: "", width: 0 },
  { name: "", words: "map", meaning: "", width: 0 },
  { name: "flushed", words: "flushed", meaning: "share of the non-zero elements that round to zero in this format; ≤: with all zeros, which may have been values", width: 82 },
  { name: "subnormal", words: "subnormal", meaning: "survives with fewer bits", width: 90, isWide: true },
  { name: "overflow", words: "overflow", meaning: "share of the finite non-zero elements beyond the format's largest value; - with infinities, which are in the next column", width: 74 },
  { name: "broken", words: "inf, NaN", meaning: "share of all elements that are infinities (✕) and NaNs (○)", width: 92 },
  { name: "largest", words: "largest", meaning: "magnitude, rounded down to a power of two", width: 66, isWide: true },
];

/** @param {import("./view.js").View} view @returns {ColumnOf[]} */
export function columnsOf({ storages, data }) {
  const lost = storages.slice(0, 1).map((each) => ({ name: "lost", words: "updates lost", meaning: `share of the updates that rounding undoes where the weights are stored in ${each.label}`, width: 106 }));
  const notes = data.notes.columns.map((/** @type {string[]} */ [words, meaning], /** @type {number} */ place) => ({ name: `note${place}`, words, meaning, width: clamp(words.length * 7 + 16, 84, 108) }));
  return [...COLUMNS, ...lost, ...notes];
}

/** The cells of what the format does to a layer, each with its tone. @param {any} found @param {string} over the tone of an overflow @param {string} broken that of infinities and NaNs @param {number} lost the share flushed @param {boolean} isBound whether it is a bound @returns {[string, string][]} */
export function figureCells(found, over, broken, lost, isBound) {
  const unknown = /** @type {[string, string]} */ (["-", ""]);
  if (!found) return Array(5).fill(unknown);
  const { h, all, low, high } = found;
  const part = nonFinite(h);
  const marks = /** @type {[string, string]} */ (part ? [`${"✕".repeat(Number(h.infs > 0))}${"○".repeat(Number(h.nans > 0))} ${percent(part)}`, broken] : ["none", ""]);
  if (!all) return [unknown, unknown, unknown, marks, unknown];
  return [
    [`${isBound ? "≤" : ""}${percent(lost)}`, lost > 0.01 ? "warning" : ""],
    [percent(share(found.subnormal, all)), ""],
    // No overflow among the finite values would pass for health: the infinities are in the next column.
    [!high && h.infs ? "-" : low === high ? percent(share(high, all)) : `${percent(share(low, all))}..${percent(share(high, all))}`, high ? over : ""],
    marks,
    [power(h.min + h.counts.length - 1), ""],
  ];
}
