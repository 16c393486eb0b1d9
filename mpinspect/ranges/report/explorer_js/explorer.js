// The map of a run's layers: the same integers as in the session, and the figures of ExponentHistogram computed from them.
// render(root, data) draws the map of one model into an element; start() draws every map of a page.
// @ts-check

import { ALL, asked, DIFFERENCE } from "./address.js";
import { Comparison } from "./comparison.js";
import { decode, element } from "./dom.js";
import { LayerMap } from "./map.js";
import { copyButtons, findingsLead, fixed, tabs } from "./panel.js";

export { decode, element } from "./dom.js";
export { nonzero } from "./histogram.js";
export { fp32Code } from "./layer.js";
export { percent } from "./words.js";

/** The map of each element that shows one. @type {WeakMap<HTMLElement, LayerMap>} */
const drawn = new WeakMap();

/**
 * Draws the map of one model; called again with newer data it keeps what the reader chose. Choices are sent as events "chosen".
 * @param {HTMLElement} root what is in it gives way
 * @param {any} data as explorer.py makes it @param {Node | string} lead stands before the map's controls
 */
export function render(root, data, lead = "") {
  const before = drawn.get(root);
  before?.gone.abort();
  drawn.set(root, new LayerMap(root, data, before?.view, lead));
}

/** Takes over in one map what was chosen in another: the detail of its event "chosen". @param {HTMLElement} root @param {any} choice */
export const follow = (root, choice) => drawn.get(root)?.follow(choice);

/** Ends a map that is taken out of the page. @param {HTMLElement} root */
export function forget(root) {
  drawn.get(root)?.gone.abort();
  drawn.delete(root);
}

/** What the reader chose in a map. @param {HTMLElement} root */
export const chosenIn = (root) => drawn.get(root)?.view.state;

/** The format in which maps are compared: the narrowest of those in which each would open. @param {any[]} several data of each */
export function comparedIn(several) {
  const own = several.map((data) => data.formats.find((/** @type {any} */ each) => each.name === data.format));
  return own.reduce((one, other) => (other.top - other.low < one.top - one.low ? other : one)).name;
}

/** The figures that a map shows, by layer. @param {HTMLElement} root @returns {Map<string, any>} */
export function figuresIn(root) {
  const view = drawn.get(root)?.view;
  const own = view ? view.ofKind.map((/** @type {any} */ layer) => [layer.name, view.figures(layer)]) : [];
  return new Map(own.filter((/** @type {any} */ [, figures]) => figures));
}

/** The same tensor in the view of a map. @param {HTMLElement} root @param {any} layer */
const layerIn = (root, layer) => drawn.get(root)?.view.layers.find((/** @type {any} */ each) => each.kind === layer.kind && each.name === layer.name);

/** Several models with a switch: one at a time, or the maps of all, which move together. What the reader chose in one holds for the next. */
class Models {
  /** @param {HTMLElement} root @param {string[]} packed @param {string[]} names */
  constructor(root, packed, names) {
    this.root = root;
    this.packed = packed;
    this.names = names;
    this.select = element("select", {}, ...names.map((name, place) => element("option", { value: place }, name)), element("option", { value: ALL }, "all together"));
    // Runs that are compared stand in pairs.
    const pairs = root.dataset.together === undefined ? [] : names.filter((_, place) => place % 2 === 0);
    this.select.prepend(...pairs.map((name, pair) => element("option", { value: `${DIFFERENCE}${pair}` }, `${name}, B, difference`)));
    this.switch = element("label", { className: "roomy", title: root.dataset.of ?? "Model" }, element("span", {}, root.dataset.of ?? "Model"), this.select);
    this.maps = element("div", { className: "maps" });
    /** Of each model decoded so far. @type {Promise<any>[]} */
    this.known = [];
    /** @type {HTMLElement[]} */
    this.shown = [];
    this.choice = {};
    root.classList.add("explorer");
    this.select.value = this.opens();
    this.select.addEventListener("change", () => this.show().then(() => drawn.get(this.shown[0])?.keep()));
  }

  /** The model that the address names, or the one that the page opens with; all where the page or the address asks for all. */
  opens() {
    const found = asked();
    const named = this.names.indexOf(found.get("model") ?? "");
    const isTogether = this.root.dataset.together !== undefined;
    const view = found.get("view") ?? (!found.has("model") && isTogether ? DIFFERENCE : "");
    if (view === DIFFERENCE && isTogether) return `${DIFFERENCE}${Math.max(named, 0) >> 1}`;
    return view === ALL ? ALL : String(named < 0 ? Number(this.root.dataset.first ?? 0) : named);
  }

  async show() {
    const view = this.select.value;
    const pair = view.startsWith(DIFFERENCE) ? 2 * Number(view.slice(DIFFERENCE.length)) : -1;
    const places = pair >= 0 ? [pair, pair + 1] : view === ALL ? this.names.map((_, place) => place) : [Number(view)];
    const data = await Promise.all(places.map((place) => (this.known[place] ??= decode(this.packed[place]))));
    // Another was chosen meanwhile.
    if (this.select.value !== view) return;
    for (const map of this.shown) forget(map);
    this.maps.classList.toggle("several", view === ALL && places.length > 1);
    const hasFocus = document.activeElement === this.select;
    this.root.replaceChildren(...(view === ALL ? [element("div", { className: "controls" }, this.switch)] : []), this.maps);
    if (pair >= 0) this.compare(data, this.names[pair + 1]);
    else this.begin(view, places, data);
    if (hasFocus) this.select.focus();
  }

  /** @param {string} view @param {number[]} places @param {any[]} data of each */
  begin(view, places, data) {
    const lead = view === ALL ? "" : this.switch;
    this.shown = places.map(() => element("div", {}));
    this.maps.replaceChildren(...this.shown.flatMap((map, place) => (view === ALL ? [element("h3", {}, element("bdi", {}, this.names[places[place]])), map] : [map])));
    this.shown.forEach((map, place) => this.beginOne(map, view === ALL ? { ...data[place], view, format: comparedIn(data) } : data[place], lead));
  }

  /** @param {any[]} data of both runs @param {string} name of the second */
  compare(data, name) {
    this.shown = [];
    const root = element("div", {});
    this.maps.replaceChildren(root);
    const [first, second] = data.map((each) => ({ ...each, view: DIFFERENCE, format: comparedIn(data) }));
    new Comparison(root, [first, second], async (layer) => {
      this.choice = { kind: layer.kind };
      await this.open(name);
      drawn.get(this.shown[0])?.choose(layerIn(this.shown[0], layer));
    }, this.switch);
  }

  /** Opens the map of one model, unless its map is there already. @param {string} name */
  async open(name) {
    const place = this.names.indexOf(name);
    if (place < 0 || this.select.value === String(place)) return;
    this.select.value = String(place);
    await this.show();
  }

  /** @param {HTMLElement} map @param {any} data @param {Node | string} lead */
  beginOne(map, data, lead) {
    render(map, data, lead);
    follow(map, this.choice);
    map.addEventListener("chosen", (/** @type {any} */ event) => {
      Object.assign(this.choice, event.detail);
      for (const other of this.shown) if (other !== map) follow(other, event.detail);
    });
  }
}

/** Shows a place in a root's map, in that of the named model if there are several. @param {HTMLElement} root @param {Models | null} models @param {import("./panel.js").Place} place */
async function showIn(root, models, { thing, layer, step }) {
  if (models && thing) await models.open(thing);
  if (models && !models.shown.length) await models.open(models.names[models.names.length - 1]);
  drawn.get(models ? models.shown[0] : root)?.showPlace(step, layer);
}

/** Draws every map of the page; where one can't be, what stands there stays and says why. */
export async function start() {
  copyButtons();
  tabs();
  for (const root of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll("[data-widget]"))) {
    try {
      const packed = (root.dataset.widget ?? "").split(" ");
      const models = packed.length === 1 ? null : new Models(root, packed, JSON.parse(root.dataset.names ?? "[]"));
      if (models) await models.show();
      else render(root, await decode(packed[0]));
      if (root.classList.contains("picture")) {
        fixed(root);
        findingsLead((place) => showIn(root, models, place));
      }
    } catch (error) {
      root.append(element("p", { className: "error" }, `The map could not be drawn: ${error}`));
    }
  }
}
