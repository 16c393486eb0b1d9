// The curve of what is lost against the loss scale, above the strips and on their axis: a scale stands where its flush edge lies in
// the map. Its handle moves the format along the axis. Where no loss scale matters the curve is folded: the map gets its room.
// @ts-check

import { dragged } from "./chart.js";
import { curvesOf, isNotable } from "./curves.js";
import { element, entry, isNarrow, key, svg } from "./dom.js";
import { clamp } from "./histogram.js";
import { SCALES } from "./view.js";
import { formatInWords, isOther, percent, power, scaleInWords } from "./words.js";

/** Exponent of FP32's largest value. */
const FLOAT32_TOP = 127;
/** Pixels above and below the field, and between two scales that are labelled. */
const [ABOVE, BELOW, APART] = [20, 18, 44];
/** Pixels of the scales and the handle of a folded curve, and of a line of words. */
const [HANDLE, SENTENCE] = [20, 26];

/** Pixels of a letter of a region's name. */
const ZONE_LETTER = 6.2;

/** A region between two pixels, its name, and half the width and the middle of that. @typedef {{left: number, right: number, words: string, half: number, at: number}} Named */

/**
 * Regions whose names have room: in a narrow one the name reaches into the neighbours, as far as theirs leave room; the narrowest have none.
 * @param {Named[]} names from the left @param {number} wide @returns {Named[]}
 */
function spread(names, wide) {
  const begin = Math.min(0, ...names.map(({ left }) => left));
  let end = begin;
  for (const name of names) {
    name.at = Math.max((name.left + name.right) / 2, end + name.half);
    end = name.at + name.half + ZONE_LETTER;
  }
  end = wide;
  for (const name of [...names].reverse()) {
    name.at = Math.min(name.at, end - name.half);
    end = name.at - name.half - ZONE_LETTER;
  }
  const hasRoom = end + ZONE_LETTER > begin - 1 && names.every(({ left, right, at }) => left <= at && at <= right);
  if (hasRoom || !names.length) return names;
  const [narrowest] = [...names].sort((one, other) => (one.right - one.left) / one.half - (other.right - other.left) / other.half);
  return spread(names.filter((name) => name !== narrowest), wide);
}

export class Shares {
  /** @param {import("./view.js").View} view @param {import("./painter.js").Painter} painter @param {(changed: any, isFinal?: boolean) => void} change @param {() => void} keep */
  constructor(view, painter, change, keep) {
    this.view = view;
    this.painter = painter;
    this.scale = element("input", { type: "range", className: "unseen", min: SCALES[0], max: SCALES[1], step: 1, "aria-label": "Loss scale, a power of two" });
    const { format, scale } = view.suggested;
    this.words = element("output", {});
    this.recommended = element("button", { type: "button", title: "the scale that suits these gradients best" });
    this.controls = element("span", { className: "scale" }, element("span", {}, "Loss scale "), this.words, ...(format ? [this.recommended] : []));
    this.fold = element("button", { type: "button", title: "the share lost at each loss scale" });
    this.fold.addEventListener("click", () => change({ hasCurve: !this.hasCurve }));
    this.picture = element("div", { className: "drag" });
    this.legend = element("figcaption", { className: "legend" });
    this.readout = element("p", { className: "readout" });
    this.otherwise = element("button", { type: "button" }, "what would FP16 do?");
    this.element = element("figure", { className: "losses" }, this.scale, this.picture, this.legend, this.readout);
    this.otherwise.addEventListener("click", () => change({ format: view.formatNamed("float16") }));
    this.scale.addEventListener("input", () => change({ scale: Number(this.scale.value) }, false));
    this.scale.addEventListener("change", keep);
    this.recommended.addEventListener("click", () => change({ format, scale }));
    dragged(this.picture, (event) => {
      if (!view.isMoved) return;
      const left = this.picture.getBoundingClientRect().left + painter.left;
      const to = clamp(Math.round(view.state.format.flush - painter.exponentAt(event.clientX - left)), ...SCALES);
      if (to !== view.state.scale) change({ scale: to }, false);
    }, keep);
  }

  /** The layers whose share is named: the chosen one or all. */
  get those() {
    return this.view.chosen ? [this.view.chosen] : this.view.ofKind;
  }

  /** Whether the share flushed is known as a bound alone. */
  get isBound() {
    return this.view.hidesValues && this.those.some((/** @type {any} */ layer) => this.view.hiddenIn(layer, this.view.figures(layer)));
  }

  /** Whether the curve is shown: as the reader chose, or where it has room and says something, which it does not of a bound. */
  get hasCurve() {
    return this.view.state.hasCurve ?? (!isNarrow() && isNotable(this.view) && !this.isBound);
  }

  /** Pixels of the figure if its curve is folded; null where it is shown. */
  get foldedHeight() {
    if (this.view.isMoved) return this.hasCurve ? null : ABOVE + HANDLE + BELOW;
    return this.heightOfZones + (this.view.isScaled() ? SENTENCE : 0);
  }

  /** Pixels of the names of the format's regions where no scale moves them; 0 if the map shows one region only. */
  get heightOfZones() {
    const { format } = this.view.state;
    const [low, high] = this.view.span();
    return [format.flush, format.normal, format.top + 1].some((edge) => low < edge && edge < high) && !this.view.isScaled() ? BELOW : 0;
  }

  drawControls() {
    const { view } = this;
    const { scale, format } = view.state;
    this.scale.disabled = !view.isScaled();
    this.controls.hidden = this.scale.disabled || !(view.isMoved || view.hasScale);
    this.scale.value = String(scale);
    this.scale.setAttribute("aria-valuetext", power(scale));
    this.words.textContent = scaleInWords(scale);
    const { suggested } = view;
    if (!suggested.format) return;
    this.recommended.hidden = suggested.format === format && suggested.scale === scale;
    this.recommended.textContent = `suggested${suggested.format === format ? "" : ` for ${suggested.format.label}`}: ${scaleInWords(suggested.scale)}`;
  }

  /** @param {number} wide @param {number} height in pixels */
  draw(wide, height) {
    const { view, painter } = this;
    const { isMoved } = view;
    this.drawControls();
    this.picture.classList.toggle("drag", isMoved);
    this.element.classList.toggle("line", !isMoved);
    const curves = curvesOf(view);
    const of = view.chosen ? "of the chosen layer" : "of the worst layer";
    const tall = isMoved ? height : this.heightOfZones;
    this.picture.replaceChildren(...(tall ? [this.chart(wide, tall, of, curves)] : []));
    this.fold.textContent = this.hasCurve ? "hide the curve" : "show the curve";
    this.legend.replaceChildren(...(isMoved && this.hasCurve ? this.legendOf(of, curves) : []));
    // Below it lies the table.
    this.legend.style.maxHeight = `${height - BELOW}px`;
    this.legend.style.width = `${Math.max(painter.left - 40, 60)}px`;
    this.readout.replaceChildren(...this.readoutOf(curves));
    this.readout.style.width = `${Math.max(wide - painter.left - painter.width - 24, 60)}px`;
  }

  /** What is lost where the handle stands, or why there is none. @param {import("./curves.js").Curves} curves @returns {(Node | string)[]} */
  readoutOf({ low, mass, high, broken, hasValues }) {
    const { view } = this;
    const { isMoved, state } = view;
    const { format, scale } = state;
    if (!view.isScaled()) return [];
    const whatIf = view.isWhatIf ? [element("b", { className: "what-if" }, `what ${format.label} would do`)] : [];
    if (!isMoved) {
      return [...whatIf, `${format.label} flushes only below ${power(format.flush - scale)}, left of all that is shown. `,
        ...(format.name === "float16" ? [] : [this.otherwise])];
    }
    if (!hasValues) return [this.fold, ...(this.hasCurve ? [] : [element("span", {}, "no finite non-zero value was counted")])];
    const [counted, weight, over] = [low, mass, high].map((shares) => percent(shares[scale - SCALES[0]]));
    // Zeros that may have been values bound the share of the elements, and leave that of the magnitudes unknown.
    const { isBound, those } = this;
    const lost = isBound ? `≤${percent(Math.max(...those.map((/** @type {any} */ layer) => view.lossOf(layer))))}` : counted;
    const beside = broken && this.hasCurve ? [element("b", { className: "bad" }, `${this.view.chosen ? "" : "up to "}${percent(broken)} inf, NaN: the curves are of finite values`)] : [];
    if (view.hidesValues && this.hasCurve) beside.push(element("span", {}, "zeros may have been values"));
    return [...whatIf, element("b", {}, `at ${power(scale)}`), this.fold, element("span", {}, `${lost} flushed${this.hasCurve && !isBound ? ` (${weight} of the magnitudes)` : ""}, ${over} overflow${broken && !this.hasCurve ? " (finite)" : ""}`), ...beside];
  }

  /** @param {number} wide @param {number} height @param {string} of @param {import("./curves.js").Curves} curves */
  chart(wide, height, of, curves) {
    const { view, painter } = this;
    const { scale, format } = view.state;
    const { left, width } = painter;
    const at = scale - SCALES[0];
    const words = curves.hasValues ? `At ${power(scale)} ${percent(curves.low[at])} of the elements are flushed, and ${percent(curves.mass[at])} of the sum of magnitudes` : `Unknown: ${this.unknown}`;
    const told = view.isMoved ? `Shares flushed and overflowed, ${of}, against the loss scale. ${words}.` : `The regions of ${format.label}.`;
    const picture = svg("svg", { width: wide, height, viewBox: `0 0 ${wide} ${height}`, role: "img", "aria-label": told });
    // What lies beyond the strips is clipped.
    const field = svg("svg", { x: left, y: 0, width, height, overflow: "hidden" });
    picture.append(field);
    const x = (/** @type {number} */ place) => painter.place(format.flush - place);
    if (view.isMoved && this.hasCurve) this.drawCurves(picture, field, x, height, curves);
    field.append(...(view.isMoved ? this.uprights(x, ABOVE, height) : []));
    picture.append(...this.zones(height));
    if (view.isMoved) picture.append(...this.scaleTicks(x), ...this.handle(x(scale), ABOVE));
    return picture;
  }

  /** @param {SVGElement} picture @param {SVGElement} field @param {(k: number) => number} x @param {number} height @param {import("./curves.js").Curves} curves */
  drawCurves(picture, field, x, height, { places, low, mass, high, hasValues }) {
    const { view } = this;
    const { left, width } = this.painter;
    const [top, bottom] = [ABOVE, height - BELOW];
    const y = (/** @type {number} */ share) => bottom - share * (bottom - top);
    const path = (/** @type {number[]} */ values) => values.map((value, index) => `${index ? "L" : "M"}${x(places[index]).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    const safe = view.data.windows[view.state.format.name]?.map((/** @type {number} */ end) => clamp(end, ...SCALES));
    if (safe) field.append(svg("rect", { x: x(safe[1]), width: Math.max(x(safe[0]) - x(safe[1]), 2), y: top, height: bottom - top, class: "window" }));
    field.append(...[0, 0.5, 1].map((share) => svg("line", { x1: 0, x2: width, y1: y(share), y2: y(share), class: "grid" })));
    if (hasValues) field.append(...[[low, "flushes"], [mass, "weighs"], [high, "overflows"]].map(([values, name]) => svg("path", { d: path(/** @type {number[]} */ (values)), class: `curve ${name}` })));
    else field.append(svg("text", { x: width / 2, y: (top + bottom) / 2 - 6, "text-anchor": "middle", class: "none" }, this.unknown));
    picture.append(...[0, 0.5, 1].map((share) => svg("text", { x: left - 5, y: y(share) + 4, "text-anchor": "end" }, `${100 * share}%`)));
  }

  /** Whether the run's own scale is another than the one that is shown, and the curve's legend names it. */
  get isOwnApart() {
    return this.hasCurve && this.view.hasScale && this.view.data.own !== this.view.state.scale;
  }

  /** Lines at the run's own scale and at the one that is shown. @param {(k: number) => number} x @param {number} top @param {number} height */
  uprights(x, top, height) {
    const { data, state } = this.view;
    /** @type {[number, string][]} */
    const lines = [...(this.isOwnApart ? [/** @type {[number, string]} */ ([clamp(data.own, ...SCALES), "own"])] : []), [state.scale, "now"]];
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
    const zones = [[painter.ends[0], format.flush - k, "flushed"], [format.flush - k, format.normal - k, "subnormal"], [format.normal - k, format.top + 1 - k, isOther(view) ? `range ${formatInWords(view)}` : `${format.label}'s range`], [format.top + 1 - k, painter.ends[1], "overflow"]];
    const names = zones.map(([from, to, words]) => {
      const [left, right] = [Math.max(painter.place(from), 0), Math.min(painter.place(to), painter.width)];
      return { left, right, words, half: words.length * ZONE_LETTER / 2, at: 0 };
    }).filter(({ left, right }) => right > left);
    // Left of the map is room for the first name, which would lie on its region's edge and the handle.
    const [first] = names;
    if (first) first.left = Math.min(first.left, first.right - 2 * first.half - ZONE_LETTER);
    return spread(names, painter.width)
      .map(({ words, at }) => svg("text", { x: painter.left + at, y: height - 5, "text-anchor": "middle", class: "zone" }, words));
  }

  get unknown() {
    return `no finite non-zero element was counted in ${this.view.stepsInWords}`;
  }

  /** @param {string} of @param {import("./curves.js").Curves} curves */
  legendOf(of, { low, mass, hasValues }) {
    const { data, state } = this.view;
    const { format } = state;
    if (!hasValues) return [];
    const safe = data.windows[format.name];
    // Of FP32's exponents all are there.
    const none = format.top >= FLOAT32_TOP ? `${format.label} needs no loss scale` : `no safe window is known for ${format.label}`;
    const curves = [key("flushes", `flushed, ${of}`, "share of the non-zero elements that round to zero"),
      key("weighs", "flushed, by magnitude", "share of the sum of their magnitudes, estimated: small elements are many and weigh little"),
      key("overflows", "overflowed", "share of the non-zero elements beyond the format's largest value")];
    // The smallest of these scales loses most.
    const [elements, magnitudes] = [low, mass].map((shares) => percent(shares[clamp(safe?.[0] ?? 0, ...SCALES) - SCALES[0]]));
    const window = safe && key("window", `safe window ${power(safe[0])} .. ${power(safe[1])}: flushes up to ${elements} of the elements, ${magnitudes} of the magnitudes`, "loss scales at which nothing overflows, and at most 1% of the sum of magnitudes is flushed in every layer");
    const own = this.isOwnApart ? [key("own", `${data.collapsed ? "scale before it collapsed" : "last sampled scale"}, ${power(data.own)}`, "the run's loss scale")] : [];
    return [...curves, window ?? entry(none), ...own];
  }
}
