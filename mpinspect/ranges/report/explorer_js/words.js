// Figures and names in words.
// @ts-check

import { element } from "./dom.js";

/** A share with two digits, never rounded to 0% or 100%. @param {number} fraction */
export function percent(fraction) {
  const value = 100 * fraction;
  if (value === 0 || value === 100) return `${value}%`;
  if (value < 0.001) return "<0.001%";
  if (value < 10) return `${Number(value.toPrecision(2))}%`;
  if (value < 99.5) return `${Math.round(value)}%`;
  return value < 99.995 ? `${Number(value.toPrecision(4))}%` : ">99.99%";
}

const RAISED = /** @type {Record<string, string>} */ ({ "-": "⁻", ".": "·", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" });

/** A power of two. @param {number} exponent */
export const power = (exponent) => `2${[...String(Number(exponent.toFixed(1)))].map((digit) => RAISED[digit]).join("")}`;

/** A loss scale as a number too, where that is short: "1024 (2¹⁰)". @param {number} exponent */
export const scaleInWords = (exponent) => (Number.isInteger(exponent) && exponent >= 0 && exponent <= 24 ? `${2 ** exponent} (${power(exponent)})` : power(exponent));

/** A text of Python's with its powers of two as this page writes them. @param {string} text */
export const raised = (text) => text.replace(/\b2\^(-?\d+(?:\.\d+)?)/g, (_, exponent) => power(Number(exponent)));

/** The end of a name that has no room, in its lines: whole parts of a path, since the end distinguishes layers. @param {string} name @param {number} most letters of a line */
export function shortened(name, most, lines = 1) {
  const parts = name.split(BETWEEN);
  for (const first of parts.keys()) {
    const left = `${first ? "…" : ""}${parts.slice(first).join("")}`;
    if (left.split(BETWEEN).reduce(([line, used], part) => (used + part.length > most ? [line + 1, part.length] : [line, used + part.length]), [1, 0])[0] <= lines && left.length <= most * lines) return left;
  }
  return `…${name.slice(1 - most)}`;
}

/** Where a path may be cut or wrapped: after a single dot, and after a space. */
const BETWEEN = /(?<=[^.]\.)(?=[^.])|(?<= )/;

/** A name that wraps between its parts alone. @param {string} name @returns {Node} */
export const wrapping = (name) => element("bdi", {}, ...name.split(BETWEEN).flatMap((part) => [element("wbr"), part]).slice(1));

/** How to read a strip. */
export const STRIP = "Hatched on the left: flushed to zero. From there to the dotted line: subnormal. Hatched on the right: overflow. A bar at the right end: infinities (✕) and NaNs (○).";

/** @param {number} count */
export const number = (count) => count.toLocaleString("en");

/** A number of things. @param {number} count @param {string} thing */
export const numberOf = (count, thing) => `${number(count)} ${thing}${count === 1 ? "" : "s"}`;

/** Whether the run computes in another format than the one that is shown. @param {any} view */
export const isOther = ({ data, state }) => data.computes !== "" && state.format.name !== data.computes;

/** The format that is shown: "FP16", or "if FP16" of a run that computes in another one. @param {any} view */
export const formatInWords = (view, lead = "if") => `${isOther(view) ? `${lead} ` : ""}${view.state.format.label}`;

/** @param {{first: number, last: number}} block */
export const spanInWords = ({ first, last }) => (first === last ? `step ${first}` : `steps ${first} to ${last}`);
