// Histograms of exponents, and the figures of ExponentHistogram computed from the same integers.
// @ts-check

/**
 * @typedef {object} Format   limits of a number format; exponents are of powers of two
 * @property {string} name
 * @property {string} label
 * @property {number} low            of the smallest subnormal
 * @property {number} normal         of the smallest normal
 * @property {number} top            of the largest finite value
 * @property {number} edge           significand of the overflow edge
 * @property {boolean} tie           whether a value on the edge overflows
 * @property {number} flush          from which on not everything is flushed: above it half of the smallest subnormal rounds up
 * @property {boolean} ftz           whether subnormals are flushed
 *
 * @typedef {object} Histogram
 * @property {number} min            exponent of the first count
 * @property {number[]} counts
 * @property {number[]} powers       of these the powers of two
 * @property {number[]} tops         of these the significands of 2 - 2^-11 and more
 * @property {number} zeros
 * @property {number} infs
 * @property {number} nans
 * @property {number} smallest       significand of the smallest magnitude
 * @property {number} largest        significand of the largest
 * @property {number[]} below        below[i]: elements with an exponent less than min + i
 * @property {number} all            finite non-zero elements
 */

/** Significands from here up round to 2 in 11 bits. */
const NEAR_TOP = 2 - 2 ** -11;

/** @param {any[]} packed as explorer.py packs one @returns {Histogram} */
export function unpack(packed) {
  const [min, zeros, infs, nans, smallest, largest, counts, powers, tops] = packed;
  const below = sums(counts);
  return { min, counts, powers, tops, zeros, infs, nans, smallest, largest, below, all: below[counts.length] };
}

/** @param {number[]} counts */
function sums(counts) {
  const below = [0];
  for (const count of counts) below.push(below[below.length - 1] + count);
  return below;
}

/** Counts of all of them together. @param {Histogram[]} parts @returns {Histogram} */
export function merge(parts) {
  const used = parts.filter((part) => part.counts.length);
  const min = used.length ? Math.min(...used.map((part) => part.min)) : 0;
  const end = used.length ? Math.max(...used.map((part) => part.min + part.counts.length)) : 0;
  const [counts, powers, tops] = [0, 0, 0].map(() => new Array(end - min).fill(0));
  for (const part of used) {
    const start = part.min - min;
    part.counts.forEach((count, place) => {
      counts[start + place] += count;
      powers[start + place] += part.powers[place];
      tops[start + place] += part.tops[place];
    });
  }
  const lowest = used.filter((part) => part.min === min).map((part) => part.smallest);
  const highest = used.filter((part) => part.min + part.counts.length === end).map((part) => part.largest);
  const total = (/** @type {"zeros" | "infs" | "nans"} */ field) => parts.reduce((sum, part) => sum + part[field], 0);
  const below = sums(counts);
  return {
    min, counts, powers, tops, below, all: below[counts.length],
    zeros: total("zeros"), infs: total("infs"), nans: total("nans"),
    smallest: lowest.length ? Math.min(...lowest) : 1, largest: highest.length ? Math.max(...highest) : 1,
  };
}

/** The share of infinities and NaNs among all elements. @param {Histogram} h */
export const nonFinite = (h) => share(h.infs + h.nans, h.all + h.zeros + h.infs + h.nans);

/** @param {Histogram} h */
export const nonzero = (h) => h.all;

/** Elements with an exponent less than this one. @param {Histogram} h @param {number} exponent */
const countBelow = (h, exponent) => h.below[Math.min(Math.max(exponent - h.min, 0), h.counts.length)];

/** @param {Histogram} h @param {number[]} array @param {number} exponent */
const at = (h, array, exponent) => array[exponent - h.min] ?? 0;

/** Non-zero elements of x * 2^k that the format rounds to zero: exact. @param {Histogram} h @param {Format} f @param {number} k */
export function flushed(h, f, k) {
  const edge = f.flush - k;
  return countBelow(h, edge) + (f.ftz ? 0 : at(h, h.powers, edge));
}

/** Elements that survive with fewer bits: exact. @param {Histogram} h @param {Format} f @param {number} k */
export const subnormal = (h, f, k) => countBelow(h, f.normal - k) - flushed(h, f, k);

/** Least and largest number of finite elements beyond the format. @param {Histogram} h @param {Format} f @param {number} k */
export function overflowed(h, f, k) {
  const exponent = f.top - k;
  const certain = nonzero(h) - countBelow(h, exponent + 1);
  const count = at(h, h.counts, exponent);
  if (!count) return [certain, certain];
  const [powers, tops] = [at(h, h.powers, exponent), at(h, h.tops, exponent)];
  if (f.edge === NEAR_TOP && f.tie) return [certain + tops, certain + tops];
  const beyond = (/** @type {number} */ significand) => significand > f.edge || (f.tie && significand === f.edge);
  let [low, high] = f.edge < NEAR_TOP ? [tops, count - powers] : [0, tops];
  if (exponent === h.min + h.counts.length - 1) {
    if (!beyond(h.largest)) return [certain, certain];
    low = Math.max(low, 1);
  }
  if (exponent === h.min) {
    if (beyond(h.smallest)) return [certain + count, certain + count];
    high = Math.min(high, count - 1);
  }
  return [certain + low, certain + high];
}

/** Mean of significands spread evenly over [1, 2), for values of which the exponent alone is known. */
const MEAN_SIGNIFICAND = 1.5;
/** Of each histogram the sum of magnitudes below each exponent, in units of the largest power of two. @type {WeakMap<Histogram, number[]>} */
const masses = new WeakMap();

/** Share of the sum of magnitudes that the format flushes, an estimate as in Python. @param {Histogram} h @param {Format} f @param {number} k */
export function lostMass(h, f, k) {
  const bins = h.counts.length;
  if (!bins) return 0;
  let mass = masses.get(h);
  if (!mass) {
    mass = sums(h.counts.map((count, bin) => (h.powers[bin] + 2 * h.tops[bin] + MEAN_SIGNIFICAND * (count - h.powers[bin] - h.tops[bin])) * 2 ** (bin + 1 - bins)));
    masses.set(h, mass);
  }
  const edge = f.flush - k;
  const onEdge = f.ftz ? 0 : at(h, h.powers, edge) * 2 ** (edge - h.min + 1 - bins);
  return (mass[clamp(edge - h.min, 0, bins)] + onEdge) / mass[bins];
}

/** @param {number} value @param {number} low @param {number} high */
export const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

/** A share, 0 of nothing. @param {number} count @param {number} all */
export const share = (count, all) => (all ? count / all : 0);
