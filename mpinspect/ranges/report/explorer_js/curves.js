// What a format loses at every loss scale.
// @ts-check

import { flushed, lostMass, nonFinite, nonzero, overflowed } from "./histogram.js";
import { SCALES } from "./view.js";

/**
 * Shares of the chosen layer, or of whichever is worst at each place.
 * @typedef {object} Curves
 * @property {string} of
 * @property {number[]} places   loss scales
 * @property {number[]} low      flushed, of the elements
 * @property {number[]} mass     flushed, of the sum of magnitudes
 * @property {number[]} high     overflowed at most
 * @property {number} broken     infinities and NaNs, of all elements: at no loss scale among the others
 * @property {boolean} hasValues
 */

/** The share from which a loss is named, and worth a curve. */
export const NOTABLE = 0.01;

/** Whether more than a trifle is lost at some loss scale whose flush edge lies on the map. @param {import("./view.js").View} view */
export function isNotable(view) {
  const { places, low, high, hasValues } = curvesOf(view);
  const [left, right] = view.span();
  const { flush } = view.state.format;
  return hasValues && places.some((k, index) => left <= flush - k && flush - k <= right && Math.max(low[index], high[index]) > NOTABLE);
}

/** The curves of each view that were computed last. @type {WeakMap<import("./view.js").View, Curves>} */
const computed = new WeakMap();

/** The curves against the loss scale. @param {import("./view.js").View} view @returns {Curves} */
export function curvesOf(view) {
  const { kind, block, format } = view.state;
  const layer = view.chosen;
  const of = JSON.stringify([format.name, kind, block, layer?.name]);
  const known = computed.get(view);
  if (known?.of === of) return known;
  const all = (layer ? [layer] : view.ofKind.filter((/** @type {any} */ each) => !each.noise))
    .map((/** @type {any} */ each) => view.counted(each)).filter(Boolean);
  const those = all.filter(nonzero);
  const places = Array.from({ length: SCALES[1] - SCALES[0] + 1 }, (_, index) => SCALES[0] + index);
  const worst = (/** @type {(h: any, k: number) => number} */ share) => places.map((k) => those.reduce((/** @type {number} */ most, /** @type {any} */ h) => Math.max(most, share(h, k)), 0));
  const made = { of, places, hasValues: those.length > 0, broken: Math.max(...all.map(nonFinite), 0),
    low: worst((h, k) => flushed(h, format, k) / nonzero(h)), mass: worst((h, k) => lostMass(h, format, k)), high: worst((h, k) => overflowed(h, format, k)[1] / nonzero(h)) };
  computed.set(view, made);
  return made;
}
