// Widths and heights of a map's parts: the curve, the strips and the header share one axis of powers of two.
// @ts-check

import { isNarrow } from "./dom.js";
import { clamp } from "./histogram.js";

/** Pixels of a letter of a name, of what stands beside every name, and of a group's switch. */
export const [LETTER, BESIDE] = [7.4, 34];
const SWITCH = 18;
/** Pixels of the column of names at least and at most, on a wide and on a narrow page. */
const [NAMES, NARROW_NAMES] = [[160, 310], [72, 124]];
/** Pixels of a strip at least, of the table's borders with its scroll bar, and of a page that shows every column. */
const [LEAST_STRIP, BORDERS, SPACIOUS] = [140, 14, 1250];
/** Heights of a row and of the curve at least and at most, of the table's header, and of the parts on a page that scrolls. */
const [ROWS, CURVES, HEADER] = [[22, 600], [120, 190], 28];
const FREE = { row: ROWS[0], curve: 150, more: 0 };
/** Pixels of a letter and of a row of a narrow page, whose names have two lines. */
const [NARROW_LETTER, NARROW_ROW] = [6.4, 30];
/** The curve's share of the height, most pixels of a row if none is to blame, and of the time strip beside its own if a row is. */
const [CURVE, MODEST, MOST_STRIP] = [0.3, 64, 160];

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
  const names = clamp(longest * LETTER + BESIDE + SWITCH, least, isNarrow() ? most : Math.max(least, Math.min(most, 0.28 * wide)));
  const figures = columns.filter((column) => !column.isWide || !isCompact).reduce((sum, column) => sum + column.width, 0);
  return { names, strip: Math.max(wide - names - figures - BORDERS, LEAST_STRIP), isCompact };
}

/** Most letters of a line of a name. @param {number} wide pixels of the column without what stands beside every name */
export const letters = (wide) => Math.floor(wide / (isNarrow() ? NARROW_LETTER : LETTER));

/**
 * The heights of a row and of the curve in a map of fixed height, and of what the time strip gets besides; many rows scroll.
 * @param {number} free pixels for all, 0 on a page that scrolls @param {number} rows @param {number | null} folded height of a folded curve
 * @param {boolean} isElsewhere whether no row is to blame: the time strip then gets the room
 */
export function heights(free, rows, folded, isElsewhere = false) {
  if (!free) return { ...FREE, row: isNarrow() ? NARROW_ROW : FREE.row, curve: folded ?? FREE.curve };
  const curve = folded ?? Math.round(clamp(CURVE * free, CURVES[0], CURVES[1]));
  const room = free - HEADER - curve;
  const row = clamp(Math.floor(room / Math.max(rows, 1)), ROWS[0], isElsewhere ? MODEST : ROWS[1]);
  return { row, curve, more: clamp(room - rows * row, 0, isElsewhere ? room : MOST_STRIP) };
}
