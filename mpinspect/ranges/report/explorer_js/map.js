// The map of one model: its controls, charts and table, drawn again whenever the reader chooses something.
// @ts-check

import { keep } from "./address.js";
import { element, isNarrow } from "./dom.js";
import { layerDetail } from "./layer.js";
import { Painter } from "./painter.js";
import { Shares } from "./shares.js";
import { eventList, summary } from "./summary.js";
import { Table } from "./table.js";
import { Timeline } from "./timeline.js";
import { View } from "./view.js";

/** Pixels of the strips on a wide and on a narrow page, and of a column beyond the common seven. */
const [WIDE, NARROW, COLUMN, COMMON] = [360, 180, 36, 7];

export class LayerMap {
  /** @param {HTMLElement} root what is in it gives way @param {any} data as explorer.py makes it @param {View | undefined} before */
  constructor(root, data, before) {
    this.root = root;
    this.gone = new AbortController();
    const view = this.view = new View(data, before);
    this.painter = new Painter(view, root);
    const change = (/** @type {any} */ changed, isFinal = true) => this.change(changed, isFinal);
    this.table = new Table(view, this.painter, { change, choose: (layer) => this.choose(layer) });
    this.shares = new Shares(view, change, () => this.keep());
    this.timeline = new Timeline(view, change, () => this.keep());
    this.kind = element("select", {}, ...view.kinds.map((/** @type {any} */ each) => element("option", { value: each.name }, each.title)));
    this.format = element("select", {}, ...data.formats.map((/** @type {any} */ each) => element("option", { value: each.name }, each.label)));
    this.search = element("input", { type: "search", placeholder: "part of a name", value: view.state.search });
    this.said = element("p", { className: "said", role: "status", "aria-live": "polite" });
    this.detail = element("div", { className: "detail" });
    /** Pixels for a chart; 0 once the page's width, or what stands in it, has changed. Reading it costs a layout of the page. */
    this.wide = 0;
    /** Whether the map shows less than what is chosen: it follows another map at the next frame, or once it is seen. */
    this.isBehind = false;
    this.isInView = true;
    this.fillRoot();
    this.listen();
    this.observe();
    this.draw();
    if (!before) this.table.scrollTo(view.chosen ?? view.layers.find((/** @type {any} */ layer) => layer.kind === view.state.kind && view.isMarked(layer)));
  }

  fillRoot() {
    const label = (/** @type {string} */ words, /** @type {Node} */ control) => element("label", {}, element("span", {}, words), control);
    const controls = element("div", { className: "controls" }, label("Tensors", this.kind), label("Format", this.format), label("Search", this.search));
    const charts = element("div", { className: "charts" }, this.shares.element, this.timeline.element);
    const happened = eventList(this.view, (event) => this.chooseEvent(event));
    const { words } = this.view.data.opening;
    this.root.replaceChildren(...(words ? [element("p", { className: "opening" }, element("bdi", {}, words))] : []), controls, this.said, charts, happened, this.table.element, this.table.legend, this.detail);
    this.root.classList.add("explorer");
  }

  listen() {
    this.kind.addEventListener("change", () => this.change({ kind: this.kind.value }));
    this.format.addEventListener("change", () => this.change({ format: this.view.formatNamed(this.format.value) }));
    this.search.addEventListener("input", () => this.change({ search: this.search.value }));
    const { signal } = this.gone;
    for (const moment of ["beforeprint", "afterprint"]) {
      addEventListener(moment, () => {
        this.table.isPrinted = moment === "beforeprint";
        this.draw();
      }, { signal });
    }
    for (const query of ["(prefers-color-scheme: dark)", "(max-width: 760px)"]) matchMedia(query).addEventListener("change", () => this.draw(), { signal });
  }

  /** Draws again when the page's width changes, and follows other maps only while it is seen. */
  observe() {
    const viewed = new IntersectionObserver((entries) => {
      this.isInView = entries[entries.length - 1].isIntersecting;
      this.catchUp();
    });
    let seenWidth = this.root.clientWidth;
    const resized = new ResizeObserver(() => {
      if (this.root.clientWidth === seenWidth) return;
      seenWidth = this.root.clientWidth;
      this.wide = 0;
      this.draw();
    });
    for (const observer of [viewed, resized]) {
      observer.observe(this.root);
      this.gone.signal.addEventListener("abort", () => observer.disconnect());
    }
  }

  draw() {
    const { view } = this;
    this.isBehind = false;
    this.kind.value = view.state.kind ?? "";
    this.format.value = view.state.format.name;
    this.said.textContent = summary(view);
    this.measure();
    this.shares.draw(this.wide);
    this.timeline.draw(this.wide);
    this.painter.begin(isNarrow() ? NARROW : WIDE - COLUMN * (this.table.columns.length - COMMON));
    this.table.draw();
    this.detail.replaceChildren(...layerDetail(view));
  }

  measure() {
    const isHidden = !this.view.isScaled();
    if (this.wide && this.shares.element.hidden === isHidden) return;
    this.shares.element.hidden = isHidden;
    this.wide = Math.max(this.timeline.element.clientWidth, 240);
  }

  /** @param {any} changed part of the state @param {boolean} isFinal false while a slider is being moved */
  change(changed, isFinal = true) {
    const { state } = this.view;
    if ("block" in changed) state.step = null;
    Object.assign(state, changed);
    this.draw();
    this.root.dispatchEvent(new CustomEvent("chosen", { detail: changed }));
    if (isFinal) this.keep();
  }

  keep() {
    keep(this.view);
  }

  /** Chooses a layer wherever it is: of another kind, in a group that is closed, above or below what is seen. @param {any} layer */
  choose(layer) {
    if (!layer) {
      this.change({});
      return;
    }
    if (this.view.isRepeated(layer)) this.view.state.open.add(layer.group);
    this.change({ kind: layer.kind, layer: layer.name });
    this.table.scrollTo(layer);
  }

  /** Shows the step and the layer of an event. @param {any} event */
  chooseEvent(event) {
    const { view } = this;
    if (view.hasScrubber) view.state.block = view.blockAt(event.step);
    view.state.step = event.step;
    const first = (/** @type {(layer: any) => boolean} */ is) => view.layers.find(is);
    this.choose(first((each) => each.name === event.tensor && each.kind === event.kind)
      ?? first((each) => each.module === event.module && each.kind === view.state.kind)
      ?? first((each) => each.module === event.module));
  }

  /** Takes over what was chosen in another map, at the next frame. @param {any} choice */
  follow({ block: ignored, format, kind, ...choice }) {
    const { view } = this;
    if (format) choice.format = view.sameFormat(format);
    if (view.kinds.some((/** @type {any} */ each) => each.name === kind)) choice.kind = kind;
    Object.assign(view.state, choice);
    this.search.value = view.state.search;
    if (this.isBehind) return;
    this.isBehind = true;
    requestAnimationFrame(() => this.catchUp());
  }

  catchUp() {
    if (this.isBehind && this.isInView && !this.gone.signal.aborted) this.draw();
  }
}
