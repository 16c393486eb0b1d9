// Widths and heights of a map's parts: the curve, the strips and the header share one axis of powers of two.
// @ts-check

import { isNarrow } from "./dom.js";
import { clamp } from "./histogram.js";

/** Pixels of a letter of a name, of what stands beside every name, and of a group's switch. */
export const [LETTER, BESIDE] = [7.4, 34];
const SWITCH = 18;
/** Pixels of the column of names at least and at most, on a wide and on a narrow page. */
const [NAMES, NARROW_NAMES] = [[160, 310], [72, 104]];
/** Pixels of a strip at least, of the table's borders with its scroll bar, and of a page that shows every column. */
const [LEAST_STRIP, BORDERS, SPACIOUS] = [140, 14, 1250];
/** Heights of a row and of the curve at least and at most, of the table's header, and of the parts on a page that scrolls. */
const [ROWS, CURVES, HEADER] = [[22, 60], [120, 520], 28];
const FREE = { row: ROWS[0], curve: 170, more: 0 };
/** Most pixels of a row below a folded curve, and of the time strip beside its own. */
const [MOST_ROW, MOST_STRIP] = [260, 160];

/** Widths in pixels. @typedef {{names: number, strip: number, isCompact: boolean}} Widths */

/**
 * The widths of the columns of names and of strips.
 * @param {number} wide pixels for all @param {import("./columns.js").ColumnOf[]} columns @param {number} longest letters of the longest name
 * @returns {Widths}
 */
export function widths(wide, columns, longest) {
  const isCompact = wide < SPACIOUS;
  const [least, most] = isNarrow() ? NARROW_NAMES : NAMES;
  // The names leave most to the rest.
  const names = clamp(longest * LETTER + BESIDE + SWITCH, least, Math.max(least, Math.min(most, 0.28 * wide)));
  const figures = columns.filter((column) => !column.isWide || !isCompact).reduce((sum, column) => sum + column.width, 0);
  return { names, strip: Math.max(wide - names - figures - BORDERS, LEAST_STRIP), isCompact };
}

/**
 * The heights of a row and of the curve in a map of fixed height, and of what the time strip gets besides; many rows scroll.
 * @param {number} free pixels for all, 0 on a page that scrolls @param {number} rows @param {number | null} folded height of a folded curve
 */
export function heights(free, rows, folded) {
  if (!free) return { ...FREE, curve: folded ?? FREE.curve };
  const [least, most] = ROWS;
  if (folded !== null) {
    const room = free - HEADER - folded;
    const row = clamp(Math.floor(room / Math.max(rows, 1)), least, MOST_ROW);
    return { row, curve: folded, more: clamp(room - rows * row, 0, MOST_STRIP) };
  }
  const curve = clamp(free - HEADER - rows * least, CURVES[0], Math.min(CURVES[1], free * 0.5));
  const row = clamp(Math.floor((free - HEADER - curve) / Math.max(rows, 1)), least, most);
  // What the rows leave is the curve's.
  return { more: 0, row, curve: Math.round(Math.max(curve, Math.min(CURVES[1], free - HEADER - rows * row))) };
}
