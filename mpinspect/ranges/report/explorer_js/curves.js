// What a format loses at every loss scale, and what any format would lose that flushes below a power of two.
// @ts-check

import { flushed, lostMass, nonzero, overflowed } from "./histogram.js";
import { SCALES } from "./view.js";

/**
 * Shares of the chosen layer, or of whichever is worst at each place.
 * @typedef {object} Curves
 * @property {string} of
 * @property {number[]} places   loss scales, or exponents
 * @property {number[]} low      flushed, of the elements
 * @property {number[]} mass     flushed, of the sum of magnitudes
 * @property {number[]} high     overflowed at most; nothing for exponents
 * @property {boolean} hasValues
 */

/** The curves of each view that were computed last. @type {WeakMap<import("./view.js").View, Curves>} */
const computed = new WeakMap();

/** The curves against the loss scale. @param {import("./view.js").View} view @returns {Curves} */
export function curvesOf(view) {
  const { format } = view.state;
  return kept(view, format.name, SCALES, (worst, places) => ({
    low: worst((h, k) => flushed(h, format, k) / nonzero(h), places),
    mass: worst((h, k) => lostMass(h, format, k), places),
    high: worst((h, k) => overflowed(h, format, k)[1] / nonzero(h), places),
  }));
}

/** The shares below each power of two. @param {import("./view.js").View} view @param {[number, number]} ends exponents @returns {Curves} */
export function sharesBelow(view, ends) {
  const edge = (/** @type {number} */ exponent) => /** @type {import("./histogram.js").Format} */ ({ ...view.state.format, flush: exponent, ftz: true });
  return kept(view, `below ${ends}`, ends, (worst, places) => ({
    low: worst((h, exponent) => flushed(h, edge(exponent), 0) / nonzero(h), places),
    mass: worst((h, exponent) => lostMass(h, edge(exponent), 0), places),
    high: [],
  }));
}

/** @typedef {(share: (h: any, place: number) => number, places: number[]) => number[]} Worst */

/**
 * @param {import("./view.js").View} view @param {string} name @param {[number, number]} ends
 * @param {(worst: Worst, places: number[]) => {low: number[], mass: number[], high: number[]}} make @returns {Curves}
 */
function kept(view, name, ends, make) {
  const { kind, block } = view.state;
  const layer = view.chosen;
  const of = JSON.stringify([name, kind, block, layer?.name]);
  const known = computed.get(view);
  if (known?.of === of) return known;
  const those = (layer ? [layer] : view.ofKind.filter((/** @type {any} */ each) => !each.noise))
    .map((/** @type {any} */ each) => view.counted(each)).filter((/** @type {any} */ h) => h && nonzero(h));
  const places = Array.from({ length: ends[1] - ends[0] + 1 }, (_, index) => ends[0] + index);
  /** @type {Worst} */
  const worst = (share, at) => at.map((place) => those.reduce((/** @type {number} */ most, /** @type {any} */ h) => Math.max(most, share(h, place)), 0));
  const made = { of, places, hasValues: those.length > 0, ...make(worst, places) };
  computed.set(view, made);
  return made;
}
