// The curve of what is lost against the loss scale, above the strips and on their axis: a scale stands where its flush edge lies in
// the map. Its handle moves the format along the axis.
// @ts-check

import { dragged } from "./chart.js";
import { curvesOf, sharesBelow } from "./curves.js";
import { element, entry, key, svg } from "./dom.js";
import { clamp } from "./histogram.js";
import { SCALES } from "./view.js";
import { percent, power } from "./words.js";

/** Exponent of FP32's largest value. */
const FLOAT32_TOP = 127;
/** Pixels above and below the field, and between two scales that are labelled. */
const [ABOVE, BELOW, APART] = [20, 18, 44];

export class Shares {
  /** @param {import("./view.js").View} view @param {import("./painter.js").Painter} painter @param {(changed: any, isFinal?: boolean) => void} change @param {() => void} keep */
  constructor(view, painter, change, keep) {
    this.view = view;
    this.painter = painter;
    this.scale = element("input", { type: "range", className: "unseen", min: SCALES[0], max: SCALES[1], step: 1, "aria-label": "Loss scale, a power of two" });
    const { format, scale } = view.suggested;
    this.words = element("output", {});
    this.recommended = element("button", { type: "button", title: "the scale that suits these gradients best" }, format ? `suggested: ${format.label} at ${power(scale)}` : "");
    this.controls = element("span", { className: "scale" }, element("span", {}, "Loss scale "), this.words, ...(format ? [this.recommended] : []));
    this.picture = element("div", { className: "drag" });
    this.legend = element("figcaption", { className: "legend" });
    this.readout = element("p", { className: "readout" });
    this.otherwise = element("button", { type: "button" }, "what would FP16 do?");
    this.isMoved = false;
    this.element = element("figure", { className: "losses" }, this.scale, this.picture, this.legend, this.readout);
    this.otherwise.addEventListener("click", () => change({ format: view.formatNamed("float16") }));
    this.scale.addEventListener("input", () => change({ scale: Number(this.scale.value) }, false));
    this.scale.addEventListener("change", keep);
    this.recommended.addEventListener("click", () => change({ format, scale }));
    dragged(this.picture, (event) => {
      if (!this.isMoved) return;
      const left = this.picture.getBoundingClientRect().left + painter.left;
      const to = clamp(Math.round(view.state.format.flush - painter.exponentAt(event.clientX - left)), ...SCALES);
      if (to !== view.state.scale) change({ scale: to }, false);
    }, keep);
  }

  /** @param {number} wide @param {number} height in pixels */
  draw(wide, height) {
    const { view } = this;
    const { scale, format } = view.state;
    const isScaled = view.isScaled();
    this.controls.hidden = this.scale.disabled = !isScaled;
    this.scale.value = String(scale);
    this.scale.setAttribute("aria-valuetext", power(scale));
    this.words.textContent = scale ? power(scale) : "1 (2⁰)";
    this.recommended.hidden = view.suggested.format === format && view.suggested.scale === scale;
    if (!height) return;
    /** Whether the flush edge lies on the map, where it can be moved. */
    this.isMoved = isScaled && this.painter.place(format.flush - scale) >= 0;
    this.picture.classList.toggle("drag", this.isMoved);
    const curves = this.isMoved ? curvesOf(view) : sharesBelow(view, this.painter.ends);
    const of = view.chosen ? "of the chosen layer" : "of the worst layer";
    this.picture.replaceChildren(this.chart(wide, height, of, curves));
    this.legend.replaceChildren(...this.legendOf(of, curves));
    // Below it lies the table.
    this.legend.style.maxHeight = `${height - BELOW}px`;
    this.legend.style.width = `${Math.max(this.painter.left - 40, 60)}px`;
    this.readout.replaceChildren(...this.readoutOf(curves));
    this.readout.style.width = `${Math.max(wide - this.painter.left - this.painter.width - 24, 60)}px`;
  }

  /** What is lost where the handle stands, or why there is none. @param {import("./curves.js").Curves} curves @returns {(Node | string)[]} */
  readoutOf({ low, mass, high, hasValues }) {
    const { format, scale } = this.view.state;
    if (!hasValues) return [];
    if (this.isMoved) {
      const [lost, weight, over] = [low, mass, high].map((shares) => percent(shares[scale - SCALES[0]]));
      return [element("b", {}, `at ${power(scale)}`), `${lost} flushed (${weight} of the magnitudes), ${over} overflow`];
    }
    if (!this.view.isScaled()) return ["no loss scale multiplies these"];
    return [`${format.label} flushes only below ${power(format.flush - scale)}, left of all that is shown: nothing is lost near this loss scale. `,
      ...(format.name === "float16" ? [] : [this.otherwise])];
  }

  /** @param {number} wide @param {number} height @param {string} of @param {import("./curves.js").Curves} curves */
  chart(wide, height, of, { places, low, mass, high, hasValues }) {
    const { view, painter, isMoved } = this;
    const { scale, format } = view.state;
    const { left, width } = painter;
    const [top, bottom] = [ABOVE, height - BELOW];
    const words = !hasValues ? `Unknown: ${this.unknown}` : isMoved ? `At ${power(scale)} ${percent(low[scale - SCALES[0]])} of the elements are flushed, and ${percent(mass[scale - SCALES[0]])} of the sum of magnitudes`
      : "Nothing is flushed at a loss scale that the map has room for";
    const picture = svg("svg", { width: wide, height, viewBox: `0 0 ${wide} ${height}`, role: "img", "aria-label": `Shares ${isMoved ? "flushed and overflowed" : "below each power of two"}, ${of}${isMoved ? ", against the loss scale" : ""}. ${words}.` });
    // What lies beyond the strips is clipped.
    const field = svg("svg", { x: left, y: 0, width, height, overflow: "hidden" });
    const x = (/** @type {number} */ place) => painter.place(isMoved ? format.flush - place : place);
    const y = (/** @type {number} */ share) => bottom - share * (bottom - top);
    const path = (/** @type {number[]} */ values) => values.map((value, index) => `${index ? "L" : "M"}${x(places[index]).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    const safe = isMoved && view.data.windows[format.name]?.map((/** @type {number} */ end) => clamp(end, ...SCALES));
    if (safe) field.append(svg("rect", { x: x(safe[1]), width: Math.max(x(safe[0]) - x(safe[1]), 2), y: top, height: bottom - top, class: "window" }));
    field.append(...[0, 0.5, 1].map((share) => svg("line", { x1: 0, x2: width, y1: y(share), y2: y(share), class: "grid" })));
    if (hasValues) field.append(svg("path", { d: path(low), class: `curve ${isMoved ? "flushes" : "under"}` }), svg("path", { d: path(mass), class: "curve weighs" }));
    if (hasValues && isMoved) field.append(svg("path", { d: path(high), class: "curve overflows" }));
    if (!hasValues) field.append(svg("text", { x: width / 2, y: (top + bottom) / 2 - 6, "text-anchor": "middle", class: "none" }, this.unknown));
    field.append(...(isMoved ? this.uprights(x, top, height) : []), ...this.zones(height));
    picture.append(field, ...[0, 0.5, 1].map((share) => svg("text", { x: left - 5, y: y(share) + 4, "text-anchor": "end" }, `${100 * share}%`)));
    if (isMoved) picture.append(...this.scaleTicks(x), ...this.handle(x(scale), top));
    return picture;
  }

  /** Lines at the run's own scale and at the one that is shown. @param {(k: number) => number} x @param {number} top @param {number} height */
  uprights(x, top, height) {
    const { data, state } = this.view;
    /** @type {[number, string][]} */
    const lines = [[clamp(data.own, ...SCALES), "own"], [state.scale, "now"]];
    return lines.map(([k, name]) => svg("line", { x1: x(k), x2: x(k), y1: top, y2: height, class: name }));
  }

  /** The loss scales above the field, each where its flush edge lies. @param {(k: number) => number} x */
  scaleTicks(x) {
    const { left, width } = this.painter;
    const step = [1, 2, 4, 8, 16].find((each) => Math.abs(x(each) - x(0)) >= APART) ?? 32;
    const found = [svg("text", { x: left - 5, y: 12, "text-anchor": "end" }, "loss scale")];
    for (let k = Math.ceil(SCALES[0] / step) * step; k <= SCALES[1]; k += step) {
      const at = x(k);
      if (at >= 12 && at <= width - 12) found.push(svg("text", { x: left + at, y: 12, "text-anchor": "middle" }, power(k)));
    }
    return found;
  }

  /** The handle on the flush edge; none if that lies right of the map. @param {number} at @param {number} top */
  handle(at, top) {
    const { left, width } = this.painter;
    if (at > width) return [];
    return [svg("rect", { x: left + at - 6, y: top - 2, width: 12, height: 18, rx: 3, class: "grip" }, svg("title", {}, "drag: the loss scale")),
      svg("path", { d: `M${left + at - 2} ${top + 2}v10m4 0v-10`, class: "grip-lines" })];
  }

  /** The names of the format's regions, at the foot of the field. @param {number} height */
  zones(height) {
    const { view, painter } = this;
    const { format } = view.state;
    const k = view.log2Scale;
    /** @type {[number, number, string][]} */
    const zones = [[painter.ends[0], format.flush - k, "flushed"], [format.flush - k, format.normal - k, "subnormal"], [format.normal - k, format.top + 1 - k, `${format.label}'s range`], [format.top + 1 - k, painter.ends[1], "overflow"]];
    return zones.flatMap(([from, to, words]) => {
      const [left, right] = [Math.max(painter.place(from), 0), Math.min(painter.place(to), painter.width)];
      return right - left > words.length * 6.2 ? [svg("text", { x: (left + right) / 2, y: height - 5, "text-anchor": "middle", class: "zone" }, words)] : [];
    });
  }

  get unknown() {
    return `no finite non-zero element was counted in ${this.view.stepsInWords}`;
  }

  /** @param {string} of @param {import("./curves.js").Curves} curves */
  legendOf(of, { hasValues }) {
    const { data, state } = this.view;
    const { format } = state;
    if (!hasValues) return [];
    if (!this.isMoved) {
      return [key("under", `elements below, ${of}`, "share of the non-zero elements below a power of two: what a format would flush that ended there"),
        key("weighs", "magnitudes below", "share of the sum of their magnitudes, estimated")];
    }
    const safe = data.windows[format.name];
    // Of FP32's exponents all are there.
    const none = format.top >= FLOAT32_TOP ? `${format.label} needs no loss scale` : `no safe window is known for ${format.label}`;
    const curves = [key("flushes", `flushed, ${of}`, "share of the non-zero elements that round to zero"),
      key("weighs", "flushed, by magnitude", "share of the sum of their magnitudes, estimated: small elements are many and weigh little"),
      key("overflows", "overflowed", "share of the non-zero elements beyond the format's largest value")];
    const window = safe && key("window", `safe window ${power(safe[0])} .. ${power(safe[1])}`, "loss scales at which nothing overflows, and at most 1% of the sum of magnitudes is flushed in every layer");
    return [...curves, window ?? entry(none), key("own", `the run's last scale${data.collapsed ? " before it collapsed" : ""}, ${power(data.own)}`)];
  }
}
