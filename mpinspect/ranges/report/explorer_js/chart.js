// A chart with labelled axes.
// @ts-check

import { svg } from "./dom.js";

/**
 * @typedef {object} Axis
 * @property {[number, number]} ends
 * @property {number[]} ticks
 * @property {(value: number) => string} words   what stands at a tick
 */

/** Pixels around a chart's field. */
export const [LEFT, RIGHT, TOP, BOTTOM] = [54, 14, 12, 18];

/**
 * A chart with labelled axes and nothing in its field, and where values lie in it.
 * @param {number} width @param {number} height in pixels @param {string} told for who can't see it @param {Axis} across @param {Axis} up
 */
export function chart(width, height, told, across, up) {
  const along = (/** @type {Axis} */ axis, /** @type {number} */ value) => (value - axis.ends[0]) / (axis.ends[1] - axis.ends[0] || 1);
  const [right, bottom] = [width - RIGHT, height - BOTTOM];
  const x = (/** @type {number} */ value) => LEFT + along(across, value) * (right - LEFT);
  const y = (/** @type {number} */ value) => bottom - along(up, value) * (bottom - TOP);
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": told });
  picture.append(
    ...up.ticks.flatMap((tick) => [
      svg("line", { x1: LEFT, x2: right, y1: y(tick), y2: y(tick), class: "grid" }),
      svg("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, up.words(tick)),
    ]),
    svg("path", { d: `M${LEFT} ${TOP}V${bottom}H${right}`, class: "axis" }),
    ...across.ticks.map((tick) => svg("text", { x: x(tick), y: bottom + 14, "text-anchor": x(tick) > right - 18 ? "end" : "middle" }, across.words(tick))),
  );
  /** The value below a pointer. @param {MouseEvent} event */
  const under = (event) => {
    const part = (event.clientX - picture.getBoundingClientRect().left - LEFT) / (right - LEFT);
    return across.ends[0] + Math.min(Math.max(part, 0), 1) * (across.ends[1] - across.ends[0]);
  };
  return { picture, x, y, right, bottom, under };
}

/** Round numbers from one to another. @param {number} from @param {number} to @param {number} most how many about */
export function ticks(from, to, most) {
  const least = Math.max((to - from) / most, 1);
  const unit = 10 ** Math.floor(Math.log10(least));
  const step = unit * ([1, 2, 5].find((each) => each * unit >= least) ?? 10);
  const found = [];
  for (let value = Math.ceil(from / step) * step; value <= to; value += step) found.push(value);
  return found;
}

/** Lays a slider below a chart, on the same axis: its ends are half a thumb from its edges. @param {HTMLElement} slider @param {number} wide */
export function align(slider, wide) {
  Object.assign(slider.style, { marginLeft: `${LEFT - 8}px`, width: `${wide - LEFT - RIGHT + 16}px` });
}

/**
 * Follows a pointer that is pressed on an element: calls back with each event, and at the end. The element must outlive what is drawn in it.
 * @param {HTMLElement} element @param {(event: PointerEvent) => void} move @param {() => void} end
 */
export function dragged(element, move, end) {
  element.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    element.setPointerCapture(event.pointerId);
    move(event);
  });
  element.addEventListener("pointermove", (event) => {
    if (element.hasPointerCapture(event.pointerId)) move(event);
  });
  element.addEventListener("pointerup", end);
}
