// The loss scale over the steps, with what happened, and below it the lost updates; the scrubber lies below on the same axis.
// @ts-check

import { align, chart, dragged, LEFT, ticks, TOP } from "./chart.js";
import { element, entry, key, svg } from "./dom.js";
import { LETTER } from "./layout.js";
import { blockAfter, fillWhole } from "./scrubber.js";
import { number, numberOf, power, raised, spanInWords } from "./words.js";

/** Pixels of the height of the strip, and of that of the lost updates. */
const [HEIGHT, LOST] = [74, 54];
/** Room below the lowest loss scale for the mark of its fall, as a share of the range of the scales. */
const FALL_ROOM = 0.5;
/** A loss scale that falls by less, in powers of two, stays as it is. */
const ROUNDING = 0.01;

export class Timeline {
  /** @param {import("./view.js").View} view @param {(changed: any, isFinal?: boolean) => void} change @param {() => void} keep */
  constructor(view, change, keep) {
    this.view = view;
    this.change = change;
    this.block = element("input", { type: "range", min: 0, max: view.lastStep, step: 1, "aria-label": "Steps shown" });
    this.words = element("output", {});
    this.whole = element("button", { type: "button" }, "show the whole run");
    this.pictures = element("div", {});
    this.legend = element("figcaption", { className: "legend" });
    /** The share flushed in each block. @type {(number | null)[]} */
    this.flushed = [];
    /** The largest magnitude in each block, where no loss scale is known. @type {(number | null)[]} */
    this.largest = [];
    const { hasScrubber } = view;
    this.element = element("figure", { className: "steps" },
      element("div", { className: "controls" }, element("b", {}, runInWords(view)), this.words, ...(hasScrubber ? [this.whole] : []), this.legend),
      this.pictures, ...(hasScrubber ? [this.block] : []));
    /** The step below a pointer; none before the first drawing. @type {(event: MouseEvent) => number} */
    this.under = () => 0;
    if (hasScrubber) {
      this.pictures.className = "drag";
      dragged(this.pictures, (event) => {
        const block = view.blockAt(this.under(event));
        if (block !== view.state.block) change({ block }, false);
      }, keep);
    }
    this.whole.addEventListener("click", () => change({ block: -1 }));
    this.block.addEventListener("change", keep);
    this.block.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => this.pressed(event));
    this.block.addEventListener("input", () => {
      this.block.classList.remove("whole");
      change({ block: view.blockAt(Number(this.block.value)) }, false);
    });
  }

  /** A key moves by a block; before the first one is the whole run. @param {KeyboardEvent} event */
  pressed(event) {
    const block = blockAfter(event.key, this.view.state.block, this.view.data.blocks.length - 1);
    if (block === null) return;
    event.preventDefault();
    this.change({ block });
  }

  /** @param {number} wide in pixels @param {number} more pixels of its height besides the usual ones */
  draw(wide, more = 0) {
    const { view } = this;
    const { block, step, kind, layer, format, scale } = view.state;
    const [slider, isWhole] = [this.block, block < 0];
    if (step !== null) slider.value = String(step);
    else if (!isWhole && (!this.isInside(Number(slider.value)) || slider.classList.contains("whole"))) slider.value = String(view.data.blocks[block].first);
    fillWhole(slider, isWhole);
    slider.setAttribute("aria-valuetext", view.stepsInWords);
    this.whole.hidden = isWhole;
    this.words.textContent = `shown: ${view.stepsInWords}`;
    const of = JSON.stringify([wide, more, block, kind, layer, format.name, scale]);
    if (this.pictures.dataset.of !== of) this.drawPictures(wide, HEIGHT + more);
    this.pictures.dataset.of = of;
    align(slider, wide);
  }

  /** Whether a step belongs to those that are shown, or to none that was counted. @param {number} step */
  isInside(step) {
    const { data, state } = this.view;
    const { first, last } = data.blocks[state.block];
    return first <= step && step <= last;
  }

  /** @param {number} wide @param {number} high in pixels */
  drawPictures(wide, high) {
    const { view } = this;
    const end = Math.max(view.lastStep, 1);
    const across = { ends: /** @type {[number, number]} */ ([0, end]), ticks: ticks(0, end, wide / 90), words: number };
    this.flushed = view.flushedOverSteps();
    this.largest = this.known.length ? [] : view.largestOverSteps();
    const drawn = this.main(wide, high, across);
    this.pictures.replaceChildren(drawn.picture);
    this.legend.replaceChildren(...this.legendOf());
    if (view.storages.length) this.drawLost(wide, across);
    this.under = drawn.under;
  }

  /** Whether anything is flushed in any block. */
  get hasFlushed() {
    return this.flushed.some(Boolean);
  }

  /** The known loss scales, as powers of two; none of a run that never had one. @returns {number[]} */
  get known() {
    if (!this.view.hasScale) return [];
    return this.view.data.scales.map((/** @type {[number, number | null]} */ [, value]) => value).filter((/** @type {number | null} */ value) => value !== null);
  }

  /** The changes by which the scale fell, by more than a rounding. @returns {any[]} */
  get falls() {
    const { scales } = this.view.data;
    return scales.filter((/** @type {any} */ [, value], /** @type {number} */ place) => place && value !== null && value < (scales[place - 1][1] ?? -Infinity) - ROUNDING);
  }

  /** The events before the step in which the trouble began. @returns {any[]} */
  get earlier() {
    const { events, opening } = this.view.data;
    return events.filter((/** @type {any} */ { step }) => step < (opening.step ?? 0));
  }

  /** Shades the steps from that on in which the trouble began, to its end if that is known. @param {any} drawn */
  since({ picture, x, right, bottom }) {
    const { step, until } = this.view.data.opening;
    if (step === null) return;
    const end = until === null ? right : Math.min(x(until + 1), right);
    picture.append(svg("rect", { x: x(step), width: Math.max(end - x(step), 0), y: TOP, height: bottom - TOP, class: "since" }),
      svg("line", { x1: x(step), x2: x(step), y1: TOP, y2: bottom, class: "since" }));
  }

  /** Names the step in which the trouble began, above all that is drawn. @param {any} drawn */
  began({ picture, x, right, bottom }) {
    const { step } = this.view.data.opening;
    if (step === null) return;
    const said = `step ${number(step)}`;
    // The steps that are shown lie to the left.
    const [needs, isLeft] = [said.length * LETTER, said.length * LETTER < right - x(step)];
    if (isLeft || needs < x(step) - LEFT) picture.append(svg("text", { x: x(step) + (isLeft ? 6 : -6), y: bottom - 5, "text-anchor": isLeft ? "start" : "end", class: "since" }, said));
  }

  /** The loss scale, or the largest magnitude of a run that has none, and what happened. @param {number} wide @param {number} high @param {import("./chart.js").Axis} across */
  main(wide, high, across) {
    const { data } = this.view;
    const { known } = this;
    const values = known.length ? known : [...this.largest.filter((each) => each !== null), ...this.held.map(([, value]) => value)];
    const [least, most] = values.length ? [Math.floor(Math.min(...values)), Math.ceil(Math.max(...values))] : [0, 0];
    const drawn = chart(wide, high, `${known.length ? "The loss scale" : "The largest magnitude"} over ${number(data.steps)} steps, with ${number(data.events.length)} events and ${number(data.skipped)} skipped steps. ${data.opening.said}${data.opening.step === null ? "" : `, step ${number(data.opening.step)}`}`.trim(),
      across, { ends: [least - (this.falls.length ? Math.max(1, FALL_ROOM * (most - least)) : 1), most + 1], ticks: values.length ? [...new Set([least, most])] : [], words: power });
    const { picture, x, y, right, bottom } = drawn;
    if (!values.length) picture.append(svg("text", { x: (LEFT + right) / 2, y: (TOP + bottom) / 2, "text-anchor": "middle" }, "no finite non-zero value was counted"));
    this.shade(drawn, bottom);
    this.since(drawn);
    // The last step's fall acts after the end.
    const at = (/** @type {number} */ step) => Math.min(x(step), right);
    const cross = (/** @type {number} */ at) => `M${at - 4} ${TOP - 2}l8 8m0 -8l-8 8`;
    const ring = (/** @type {number} */ at) => `M${at - 4} ${TOP + 2}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0`;
    const share = (/** @type {number} */ each) => bottom - each * (bottom - TOP);
    picture.append(svg("path", { d: this.hasFlushed ? this.pathOf(this.flushed, x, share) : "", class: "curve lost-share" }),
      svg("path", { d: this.pathOf(this.largest, x, y), class: "curve largest" }), ...this.sums(drawn), svg("path", { d: this.path(drawn, across.ends[1]), class: "curve scales" }),
      ...this.falls.map(([step, value]) => svg("path", { d: `M${at(step) - 4} ${y(value) + 3}h8l-4 7z`, class: "fall" }, svg("title", {}, `step ${number(step)}: the scale fell to ${power(value)}`))),
      ...data.events.map((/** @type {any} */ event) => svg("g", { class: this.earlier.includes(event) ? "event earlier" : "event" },
        svg("title", {}, event.words), svg("line", { x1: x(event.step), x2: x(event.step), y1: TOP + 6, y2: bottom }),
        svg("path", { d: (event.value === "nan" ? ring : cross)(x(event.step)) }))));
    this.began(drawn);
    return drawn;
  }

  /** The steps in which gradients were left over from earlier steps, with the largest magnitude in .grad as a power of two; none beside a loss scale, which has another axis. @returns {[number, number][]} */
  get held() {
    return this.known.length ? [] : this.view.data.held;
  }

  /** The sums of gradients that were never zeroed, a square each. @param {any} drawn @returns {SVGElement[]} */
  sums({ x, y }) {
    const places = this.held.map(([step, value]) => [x(step), y(value)]);
    return [svg("path", { d: places.map((place, index) => `${index ? "L" : "M"}${place.map((each) => each.toFixed(1)).join(" ")}`).join(""), class: "curve held" }),
      ...places.map(([left, top], index) => svg("rect", { x: left - 3, y: top - 3, width: 6, height: 6, class: "held" }, svg("title", {}, `step ${number(this.held[index][0])}: ${power(this.held[index][1])}`)))];
  }

  /** A line at the figure of each block, over its steps. @param {(number | null)[]} figures @param {(step: number) => number} x @param {(figure: number) => number} y */
  pathOf(figures, x, y) {
    return figures.map((figure, block) => {
      const { first, last } = this.view.data.blocks[block];
      return figure === null ? "" : `L${x(first).toFixed(1)} ${y(figure).toFixed(1)}H${Math.max(x(last), x(first) + 1).toFixed(1)}`;
    }).join("").replace(/^L/, "M");
  }

  /** The steps of the loss scale; a gap where it is not known. @param {any} drawn @param {number} end */
  path({ x, y }, end) {
    const { scales } = this.view.data;
    if (!this.known.length) return "";
    return scales.map((/** @type {[number, number | null]} */ [step, value], /** @type {number} */ place) => {
      if (value === null) return "";
      const isNew = !place || scales[place - 1][1] === null;
      return `${isNew ? `M${x(step).toFixed(1)} ` : "V"}${y(value).toFixed(1)}H${x(Math.min(scales[place + 1]?.[0] ?? end, end)).toFixed(1)}`;
    }).join("");
  }

  /** Marks the steps that are shown. @param {any} drawn @param {number} low */
  shade(drawn, low) {
    const { data, state, hasScrubber } = this.view;
    if (state.block < 0 || !hasScrubber) return;
    const { first, last } = data.blocks[state.block];
    drawn.picture.append(svg("rect", { x: drawn.x(first) - 1, width: Math.max(drawn.x(last) - drawn.x(first), 1) + 2, y: TOP, height: low - TOP, class: "shown" }));
  }

  legendOf() {
    const { data, state, hasScrubber, chosen } = this.view;
    const of = chosen ? "of the chosen layer" : "of the worst layer";
    const counted = data.blocks.at(-1)?.last ?? 0;
    const until = counted < this.view.lastStep ? `, counted up to step ${number(counted)}` : "";
    const finite = this.largest.findLastIndex((each) => each !== null);
    const finitely = `, finite up to step ${number(data.blocks[finite]?.last ?? 0)}`;
    const { earlier } = this;
    const has = (/** @type {string} */ value) => data.events.some((/** @type {any} */ event) => event.value === value && !earlier.includes(event));
    const skipped = earlier.every(({ skipped: isSkipped }) => isSkipped) ? ", update skipped" : "";
    return [
      ...(this.known.length ? [key("scales", "loss scale")] : []),
      ...(this.view.hasScale && !this.known.length ? [entry(data.by_hand ? `with the loop's own loss scale, ${raised(data.by_hand)}` : "no loss scale was seen")] : []),
      ...(this.largest.some((each) => each !== null) ? [key("largest", `largest magnitude ${chosen ? of : "of any layer"}${data.held.length ? ", of each backward alone" : ""}${finite < data.blocks.length - 1 ? finitely : until}`)] : []),
      ...(this.held.length ? [key("held", "largest magnitude in .grad, their sum")] : []),
      ...(this.hasFlushed ? [key("lost-share", `flushed, ${of} (0 to 100%)${until}`)] : []),
      ...(this.falls.length ? [key("fall", "scale fell")] : []),
      ...(data.skipped ? [entry(`${numberOf(data.skipped, "update")} skipped`)] : []),
      ...(has("inf") ? [key("inf", "first infinity of a step")] : []),
      ...(has("nan") ? [key("nan", "first NaN of a step")] : []),
      ...(earlier.length ? [key("earlier", `before the trouble began${skipped}`, "A dynamic loss scaler raises its scale until gradients overflow, and skips that update.")] : []),
      ...(state.block < 0 || !hasScrubber ? [] : [key("shown", "shown")]),
    ];
  }

  /** @param {number} wide @param {import("./chart.js").Axis} across */
  drawLost(wide, across) {
    const { storages, data, chosen: layer } = this.view;
    const one = layer && storages.some((storage) => storage.tensors[layer.name]) ? layer : null;
    const of = one ? "of the chosen layer" : "of all parameters";
    const drawn = chart(wide, LOST, `Share of the updates lost, ${of}, over the steps.`, across,
      { ends: [0, 1], ticks: [0, 1], words: (part) => `${100 * part}%` });
    this.shade(drawn, drawn.bottom);
    drawn.picture.append(...storages.map((storage, place) => svg("path", { d: this.pathOf(data.blocks.map((/** @type {any} */ _, /** @type {number} */ block) => this.view.lostOf(storage, one, block)), drawn.x, drawn.y), class: `curve lost${place}` })));
    this.pictures.append(drawn.picture);
    this.legend.append(...storages.map((storage, place) => key(`lost${place}`, `updates lost in ${storage.label}, ${of}${storage.measured ? "" : ", if stored so"}`)));
  }
}

/** The steps of the run, as its facts count them, and those that began without an end. @param {import("./view.js").View} view */
function runInWords({ data: { steps }, lastStep }) {
  const begun = lastStep >= steps ? [`${spanInWords({ first: steps, last: lastStep })} unfinished`] : [];
  return [`${numberOf(steps, "step")}${steps > 1 ? `, 0 to ${number(steps - 1)}` : ""}`, ...begun].join("; ");
}
