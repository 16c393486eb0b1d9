// The columns of figures beside the strips.
// @ts-check

import { clamp, share } from "./histogram.js";
import { percent, power } from "./words.js";

/**
 * @typedef {object} ColumnOf
 * @property {string} name        by what a click sorts
 * @property {string} words       the heading
 * @property {string} meaning
 * @property {number} width       in pixels; 0 for those that share what is left
 * @property {boolean} [isWide]   whether a wide page alone has room for it
 */

/** A share that need not be known better. */
const NEGLIGIBLE = 0.001;
/** Columns of every model. @type {ColumnOf[]} */
const COLUMNS = [
  { name: "model", words: "layer", meaning: "", width: 0 },
  { name: "", words: "map", meaning: "", width: 0 },
  { name: "flushed", words: "flushed", meaning: "share of the non-zero elements that round to zero in this format; ~, 0% seen: zeros may have been values, too", width: 76 },
  { name: "subnormal", words: "subnormal", meaning: "survives with fewer bits", width: 90, isWide: true },
  { name: "overflow", words: "overflow", meaning: "beyond the format's largest value", width: 74 },
  { name: "broken", words: "inf, NaN", meaning: "infinities and NaNs counted", width: 92 },
  { name: "largest", words: "largest", meaning: "magnitude, rounded down to a power of two", width: 66, isWide: true },
];

/** @param {import("./view.js").View} view @returns {ColumnOf[]} */
export function columnsOf({ storages, data }) {
  const lost = storages.slice(0, 1).map((each) => ({ name: "lost", words: `lost in ${each.label}`, meaning: "share of the updates that rounding undoes where the weights are stored so", width: 106 }));
  const notes = data.notes.columns.map((/** @type {string[]} */ [words, meaning], /** @type {number} */ place) => ({ name: `note${place}`, words, meaning, width: clamp(words.length * 7 + 16, 84, 108) }));
  return [...COLUMNS, ...lost, ...notes];
}

/** A share of the visible values in words, as in every report. @param {number} lost @param {number} hidden the share that zeros can be of all values */
function partial(lost, hidden) {
  if (lost) return `~${percent(lost)}`;
  return hidden <= NEGLIGIBLE ? `<${percent(NEGLIGIBLE)}` : "0% seen";
}

/** The cells of what the format does to a layer, each with its tone. @param {any} layer @param {any} found @param {string} broken the tone of infinities and NaNs @returns {[string, string][]} */
export function figureCells(layer, found, broken) {
  const unknown = /** @type {[string, string]} */ (["-", ""]);
  if (!found) return Array(5).fill(unknown);
  const { h, all, low, high } = found;
  const nonFinite = /** @type {[string, string]} */ ([[h.infs && "✕ inf", h.nans && "○ NaN"].filter(Boolean).join(" ") || "none", h.infs || h.nans ? broken : ""]);
  if (!all) return [unknown, unknown, unknown, nonFinite, unknown];
  // Zeros of values that had passed through a narrow format may have been values: the share is that of the visible ones.
  const isPartial = layer.floor !== null && h.zeros > 0;
  const lost = share(found.flushed, all);
  return [
    [isPartial ? partial(lost, h.zeros / (h.zeros + all)) : percent(lost), lost > 0.01 ? "warning" : ""],
    [percent(share(found.subnormal, all)), ""],
    // The infinities stand in the next column.
    [!high && h.infs ? "finite: 0%" : low === high ? percent(share(high, all)) : `${percent(share(low, all))}..${percent(share(high, all))}`, high ? "error" : ""],
    nonFinite,
    [power(h.min + h.counts.length - 1), ""],
  ];
}
