// The chart of what is lost against the loss scale, with a slider below it.
// @ts-check

import { align, chart, TOP } from "./chart.js";
import { element, entry, key, svg } from "./dom.js";
import { clamp, flushed, lostMass, nonzero, overflowed } from "./histogram.js";
import { SCALES } from "./view.js";
import { percent, power } from "./words.js";

/** Exponent of FP32's largest value. */
const FLOAT32_TOP = 127;

export class Shares {
  /** @param {import("./view.js").View} view @param {(changed: any, isFinal?: boolean) => void} change @param {() => void} keep */
  constructor(view, change, keep) {
    this.view = view;
    this.change = change;
    this.scale = element("input", { type: "range", min: SCALES[0], max: SCALES[1], step: 1, "aria-label": "Loss scale, a power of two" });
    this.words = element("output", {});
    const { format, scale } = view.suggested;
    this.recommended = element("button", { type: "button" }, format ? `show ${format.label} at 2^${scale}, as suggested` : "");
    this.picture = element("div", {});
    this.legend = element("figcaption", { className: "legend" });
    this.element = element("figure", {},
      element("div", { className: "controls" }, element("b", {}, "Loss scale"), this.words, ...(format ? [this.recommended] : [])),
      this.picture, this.scale, this.legend);
    this.drawn = { of: "", low: [0], mass: [0], high: [0], hasValues: false };
    this.scale.addEventListener("input", () => change({ scale: Number(this.scale.value) }, false));
    this.scale.addEventListener("change", keep);
    this.recommended.addEventListener("click", () => change({ format, scale }));
  }

  /** @param {number} wide in pixels */
  draw(wide) {
    const { view } = this;
    const { scale } = view.state;
    this.scale.value = String(scale);
    this.scale.disabled = this.recommended.disabled = !view.isScaled();
    this.words.textContent = power(scale);
    this.scale.setAttribute("aria-valuetext", power(scale));
    if (this.element.hidden) return;
    const of = view.chosen ? "of the chosen layer" : "of the worst layer";
    this.picture.replaceChildren(this.chart(wide, of));
    this.legend.replaceChildren(...this.legendOf(of));
    align(this.scale, wide);
  }

  /** @param {number} wide @param {string} of */
  chart(wide, of) {
    const { view } = this;
    const { scale, format } = view.state;
    const { low, mass, high, hasValues } = this.curves();
    const [lost, weight] = [low, mass].map((shares) => percent(shares[scale - SCALES[0]]));
    const words = hasValues ? `At ${power(scale)} ${lost} of the elements are flushed, and ${weight} of the sum of magnitudes` : `Unknown: ${this.unknown}`;
    const drawn = chart(wide, 176, `Shares flushed and overflowed, ${of}, against the loss scale. ${words}.`,
      { ends: SCALES, ticks: wide < 500 ? [-24, -8, 8, 24, 40] : [-24, -16, -8, 0, 8, 16, 24, 32, 40], words: power, title: "loss scale" },
      { ends: [0, 1], ticks: [0, 0.25, 0.5, 0.75, 1], words: (part) => `${100 * part}%`, title: "share" });
    const { picture, x, y, bottom } = drawn;
    const path = (/** @type {number[]} */ values) => values.map((value, place) => `${place ? "L" : "M"}${x(SCALES[0] + place).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    const upright = (/** @type {number} */ at, /** @type {string} */ name) => svg("line", { x1: x(at), x2: x(at), y1: TOP, y2: bottom, class: name });
    const safe = view.data.windows[format.name]?.map((/** @type {number} */ end) => clamp(end, ...SCALES));
    if (safe) picture.append(svg("rect", { x: x(safe[0]), width: Math.max(x(safe[1]) - x(safe[0]), 2), y: TOP, height: bottom - TOP, class: "window" }));
    if (hasValues) picture.append(svg("path", { d: path(low), class: "curve flushes" }), svg("path", { d: path(mass), class: "curve weighs" }), svg("path", { d: path(high), class: "curve overflows" }));
    picture.append(upright(clamp(view.data.own, ...SCALES), "own"), upright(scale, "now"));
    picture.addEventListener("click", (event) => this.change({ scale: Math.round(drawn.under(event)) }));
    return picture;
  }

  get unknown() {
    return `no finite non-zero element was counted in ${this.view.stepsInWords}`;
  }

  /** @param {string} of */
  legendOf(of) {
    const { data, state } = this.view;
    const { format, scale } = state;
    const safe = data.windows[format.name];
    // Of FP32's exponents all are there.
    const none = format.top >= FLOAT32_TOP ? `${format.label} needs no loss scale` : `no safe window is known for ${format.label}`;
    const curves = [key("flushes", `flushed, of the elements ${of}`),
      key("weighs", "flushed, of the sum of their magnitudes (estimated): small elements are many and weigh little"), key("overflows", "overflowed")];
    return [
      ...(this.drawn.hasValues ? curves : [entry(this.unknown)]),
      safe ? key("window", `${format.label}'s safe window ${power(safe[0])} .. ${power(safe[1])}: nothing overflows, and at most 1% of the sum of magnitudes is flushed in every layer`) : entry(none),
      key("own", `the run's own scale${data.collapsed ? " before it collapsed" : ""}, ${power(data.own)}`),
      key("now", `shown, ${power(scale)}`),
    ];
  }

  /** The shares flushed, of the elements and of the sum of magnitudes, and overflowed at every scale, of the chosen layer or of whichever is worst there. */
  curves() {
    const { view } = this;
    const { format, kind, block } = view.state;
    const layer = view.chosen;
    const of = JSON.stringify([kind, format.name, block, layer?.name]);
    if (this.drawn.of === of) return this.drawn;
    const those = (layer ? [layer] : view.ofKind.filter((/** @type {any} */ each) => !each.noise))
      .map((/** @type {any} */ each) => view.counted(each)).filter((/** @type {any} */ h) => h && nonzero(h));
    const scales = Array.from({ length: SCALES[1] - SCALES[0] + 1 }, (_, place) => SCALES[0] + place);
    const worst = (/** @type {(h: any, k: number) => number} */ share) =>
      scales.map((k) => those.reduce((/** @type {number} */ most, /** @type {any} */ h) => Math.max(most, share(h, k)), 0));
    this.drawn = {
      of,
      low: worst((h, k) => flushed(h, format, k) / nonzero(h)),
      mass: worst((h, k) => lostMass(h, format, k)),
      high: worst((h, k) => overflowed(h, format, k)[1] / nonzero(h)),
      hasValues: those.length > 0,
    };
    return this.drawn;
  }
}
