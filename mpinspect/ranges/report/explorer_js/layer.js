// What is known of the chosen layer, in sentences.
// @ts-check

import { element } from "./dom.js";
import { number, percent, power, raised } from "./words.js";

/** The own view of the chosen layer: over the panel on a wide page, below the map on others. */
export class LayerView {
  /** @param {import("./view.js").View} view @param {import("./painter.js").Painter} painter @param {(changed: any) => void} change */
  constructor(view, painter, change) {
    this.view = view;
    this.painter = painter;
    this.close = element("button", { type: "button", className: "close", "aria-label": "close (Escape)", title: "Escape" }, "✕");
    this.close.addEventListener("click", () => change({ isOwn: false }));
    this.element = element("section", { className: "detail", tabIndex: 0, "aria-label": "The chosen layer" });
  }

  draw() {
    const layer = this.view.chosen;
    const found = layer && this.view.state.isOwn && this.view.figures(layer);
    this.element.hidden = !found;
    this.element.replaceChildren(...(found ? this.parts(layer, found) : []));
  }

  /** @param {any} layer @param {any} found its figures @returns {HTMLElement[]} */
  parts(layer, found) {
    const { view } = this;
    const notes = (view.data.notes.lines[layer.module] ?? []).map((/** @type {string} */ line) => element("li", {}, raised(line)));
    return [
      this.close,
      element("h3", {}, element("bdi", {}, layer.name || "(the model itself)")),
      ...facts(view, layer, found).map((fact) => element("p", {}, fact)),
      ...(notes.length ? [element("ul", {}, ...notes)] : []),
    ];
  }
}

/** @param {import("./view.js").View} view @param {any} layer @param {any} found */
function facts(view, layer, { h, all, flushed, subnormal, low, high }) {
  const { format, scale } = view.state;
  const over = low === high ? number(low) : `${number(low)} to ${number(high)}`;
  const fate = all ? `${number(flushed)} flushed to zero, ${number(subnormal)} kept with fewer bits, ${over} overflowed` : "no finite non-zero element, so its losses are unknown";
  const said = [
    `${number(all)} finite non-zero elements were counted in ${view.stepsInWords}, ${number(h.zeros)} zeros, ${number(h.infs)} infinities, ${number(h.nans)} NaNs.`,
    `${format.label}${view.isScaled() ? ` at a loss scale of ${power(scale)}` : ""}: ${fate}.`,
  ];
  if (layer.floor !== null && h.zeros > 0) said.push(`Magnitudes up to ${power(layer.floor)} may have been flushed before they were counted: then they are among the zeros.`);
  if (layer.noise) said.push("In theory this gradient is zero: what was counted is rounding noise.");
  for (const storage of view.storages) {
    const lost = view.lostOf(storage, layer);
    if (lost !== null) said.push(`Stored in ${storage.label}, ${percent(lost)} of its updates ${storage.measured ? "were" : "would be"} lost: weight and update together round back to the weight.`);
  }
  return said;
}
