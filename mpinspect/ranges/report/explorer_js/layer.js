// A layer's own view: its histogram, its history, the module's tensors side by side, sentences, and the code that keeps it in FP32.
// @ts-check

import { element, key } from "./dom.js";
import { nonzero, share } from "./histogram.js";
import { histogramChart, historyChart, sharedAxis, smallChart } from "./own_charts.js";
import { copied } from "./panel.js";
import { formatInWords, number, percent, power, raised } from "./words.js";

/** Pixels of a chart where the view has no width yet. */
const UNMEASURED = 300;

/** The own view of the chosen layer: over the panel on a wide page, below the map on others. */
export class LayerView {
  /** @param {import("./view.js").View} view @param {(changed: any) => void} change */
  constructor(view, change) {
    this.view = view;
    this.change = change;
    this.close = element("button", { type: "button", className: "close", "aria-label": "close (Escape)", title: "Escape" }, "✕");
    this.close.addEventListener("click", () => change({ isOwn: false }));
    this.element = element("section", { className: "detail", tabIndex: 0, "aria-label": "The chosen layer" });
    this.drawn = "";
  }

  draw() {
    const { view } = this;
    const { state, chosen: layer } = view;
    const found = layer && state.isOwn && view.figures(layer);
    this.element.hidden = !found;
    // Reading it costs a layout of the page.
    const wide = (found && Math.max(this.element.clientWidth - 32, 0)) || UNMEASURED;
    // What a reader copies from must not be replaced while nothing changes.
    const of = found ? JSON.stringify([layer.place, state.block, state.format.name, state.scale, wide]) : "";
    if (this.drawn === of) return;
    this.drawn = of;
    this.element.replaceChildren(...(found ? this.parts(layer, found, Math.min(wide, 560)) : []));
  }

  /** @param {any} layer @param {any} found its figures @param {number} wide in pixels @returns {Node[]} */
  parts(layer, found, wide) {
    const { view } = this;
    const notes = (view.data.notes.lines[layer.module] ?? []).map((/** @type {string} */ line) => element("li", {}, raised(line)));
    const title = view.kinds.find((/** @type {any} */ kind) => kind.name === layer.kind)?.title ?? "";
    const code = fp32Code(layer.module, view.data.narrow_weights);
    const hasHistory = view.hasScrubber && layer.blocks.some((/** @type {any} */ h) => h && nonzero(h));
    return [
      this.close,
      element("h3", {}, element("bdi", {}, layer.label)),
      element("p", { className: "dim" }, `${title}, ${view.stepsInWords}`),
      ...(found.all ? [histogramChart(view, found, wide)] : []),
      ...facts(view, layer, found).map((fact) => element("p", {}, fact)),
      ...this.sideBySide(layer, wide),
      ...(hasHistory ? [element("h4", {}, "Over the run"), historyChart(view, layer, wide), element("p", { className: "legend" }, key("largest", "largest magnitude"), key("lost-share", "share flushed, 0 to 100%"))] : []),
      ...(notes.length ? [element("h4", {}, "Shapes and kernels"), element("ul", {}, ...notes)] : []),
      ...(code ? [element("h4", {}, "To keep it in FP32"), copied(code)] : []),
    ];
  }

  /** The module's tensors on one axis, each with a button that shows it. @param {any} layer @param {number} wide in pixels @returns {Node[]} */
  sideBySide(layer, wide) {
    const { view } = this;
    const those = view.ofModule(layer).map((each) => ({ each, found: view.figures(each) }));
    if (those.length < 2) return [];
    const ends = endsOf(those.map(({ found }) => found));
    const rows = those.flatMap(({ each, found }) => {
      const name = element("bdi", {}, roleOf(each));
      const head = each.kind === "update" || each === layer ? element("b", {}, name) : element("button", { type: "button" }, name);
      if (head.tagName === "BUTTON") head.addEventListener("click", () => this.change({ kind: each.kind, layer: each.name, isOwn: true }));
      const line = element("p", { className: "tensor" }, head, element("span", {}, this.fate(each, found)));
      return found?.all ? [line, smallChart(view, each, found, ends, wide)] : [line];
    });
    return [element("h4", {}, "Side by side"), ...rows, ...(ends ? [sharedAxis(ends, wide)] : [])];
  }

  /** What becomes of a tensor, in a few words. @param {any} each @param {any} found */
  fate(each, found) {
    if (!found) return "not counted in these steps";
    if (!found.all) return "no finite non-zero element";
    const [storage] = this.view.storages;
    const lost = each.kind === "update" && storage ? this.view.lostOf(storage, each) : null;
    if (lost !== null) return `${percent(lost)} lost in ${storage.label}`;
    return each.kind === "update" ? "" : `${percent(share(found.flushed, found.all))} flushed`;
  }
}

/** The exponents that several tensors reach; null where none has a finite non-zero element. @param {any[]} several figures @returns {[number, number] | null} */
function endsOf(several) {
  const seen = several.filter((found) => found?.all).map(({ h }) => h);
  return seen.length ? [Math.min(...seen.map((h) => h.min)) - 1, Math.max(...seen.map((h) => h.min + h.counts.length)) + 1] : null;
}

/** What a tensor is to its module: "gradient of weight". @param {any} tensor */
function roleOf({ name, module, kind }) {
  const own = name === module ? "the output" : module ? name.slice(module.length + 1) : name;
  if (kind.endsWith("gradient")) return `gradient of ${own}`;
  return kind === "update" ? `update of ${own}` : own;
}

/** The code that computes a module in FP32; "" for the model itself. @param {string} module @param {boolean} isNarrow whether weights are stored in 16 bits */
export function fp32Code(module, isNarrow) {
  if (!module) return "";
  const float = isNarrow ? "layer.float()\n" : "";
  return `layer = model.get_submodule(${JSON.stringify(module)})\n${float}forward = layer.forward\n\n\ndef in_fp32(*inputs):\n`
    + "    with torch.autocast(inputs[0].device.type, enabled=False):\n        return forward(*(x.float() for x in inputs))\n\n\nlayer.forward = in_fp32";
}

/** @param {import("./view.js").View} view @param {any} layer @param {any} found */
function facts(view, layer, { h, all, flushed, subnormal, low, high }) {
  const { scale } = view.state;
  const over = low === high ? number(low) : `${number(low)} to ${number(high)}`;
  const fate = all ? `${number(flushed)} flushed to zero, ${number(subnormal)} kept with fewer bits, ${over} overflowed` : "no finite non-zero element";
  const said = [
    `${number(all)} finite non-zero elements were counted in ${view.stepsInWords}, ${number(h.zeros)} zeros, ${number(h.infs)} infinities, ${number(h.nans)} NaNs.`,
    `${formatInWords(view, "If")}${view.isScaled() ? ` at a loss scale of ${power(scale)}` : ""}: ${fate}.`,
  ];
  if (layer.floor !== null && h.zeros > 0) said.push(`Magnitudes up to ${power(layer.floor)} may have been flushed before they were counted: then they are among the zeros.`);
  if (layer.noise) said.push("In theory this gradient is zero: what was counted is rounding noise.");
  for (const storage of view.storages) {
    const lost = view.lostOf(storage, layer);
    if (lost !== null) said.push(`Stored in ${storage.label}, ${percent(lost)} of its updates ${storage.measured ? "were" : "would be"} lost: weight and update together round back to the weight.`);
  }
  return said;
}
