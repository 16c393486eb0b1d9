// The map of one model: its controls, curve, table and time strip, drawn again whenever the reader chooses something.
// @ts-check

import { keep } from "./address.js";
import { element } from "./dom.js";
import { LayerView } from "./layer.js";
import { heights, widths } from "./layout.js";
import { Painter } from "./painter.js";
import { Shares } from "./shares.js";
import { eventList, summary } from "./summary.js";
import { Table } from "./table.js";
import { Timeline } from "./timeline.js";
import { View } from "./view.js";
import { raised } from "./words.js";

/** Maps of this selector fill a screen; others are as high as what is in them. */
const FILLS = ".picture.fixed, .picture.fixed *";

export class LayerMap {
  /** @param {HTMLElement} root what is in it gives way @param {any} data as explorer.py makes it @param {View | undefined} before @param {Node | string} lead stands before the controls */
  constructor(root, data, before, lead = "") {
    this.root = root;
    this.lead = lead;
    this.gone = new AbortController();
    const view = this.view = new View(data, before);
    this.painter = new Painter(view, root);
    const change = (/** @type {any} */ changed, isFinal = true) => this.change(changed, isFinal);
    this.table = new Table(view, this.painter, { change, choose: (layer) => this.choose(layer) });
    this.shares = new Shares(view, this.painter, change, () => this.keep());
    this.timeline = new Timeline(view, change, () => this.keep());
    this.own = new LayerView(view, change);
    this.kind = element("select", {}, ...view.kinds.map((/** @type {any} */ each) => element("option", { value: each.name }, each.title)));
    this.format = element("select", { className: "narrow" }, ...data.formats.map((/** @type {any} */ each) => element("option", { value: each.name }, each.label)));
    this.search = element("input", { type: "search", className: "narrow", placeholder: "search", "aria-label": "Search a layer", value: view.state.search });
    this.said = element("p", { className: "said", role: "status", "aria-live": "polite" });
    this.opening = element("p", { className: "opening" }, element("bdi", {}, raised(data.opening.words)));
    this.back = element("button", { type: "button", title: data.opening.kind ? "back to where it began" : "back to what was shown first" }, "back");
    /** Pixels for a chart; 0 once the page's width, or what stands in it, has changed. Reading it costs a layout of the page. */
    this.wide = 0;
    /** Pixels for the curve and the rows of a map that fills a screen; 0 for others. */
    this.free = 0;
    /** Whether the map shows less than what is chosen: it follows another map at the next frame, or once it is seen. */
    this.isBehind = false;
    this.isInView = true;
    this.isPrinted = false;
    this.fillRoot();
    this.listen();
    this.observe();
    this.draw();
    if (!before) this.table.scrollTo(view.chosen ?? view.firstMarked);
  }

  fillRoot() {
    const label = (/** @type {string} */ words, /** @type {Node} */ control) => element("label", { title: words }, element("span", {}, words), control);
    const help = element("details", { className: "help" }, element("summary", { title: "how to read the map" }, "?"), this.table.legend);
    const happened = eventList(this.view, (event) => this.chooseEvent(event));
    this.head = element("div", { className: "controls" }, this.lead, label("Tensors", this.kind), label("Format", this.format), this.shares.controls, this.search, happened, help, this.back);
    this.told = element("div", { className: "told" }, this.opening, " ", this.said);
    // The sentences stand below the rows: the picture is seen first.
    this.root.replaceChildren(this.head, this.shares.element, this.table.element, this.told, this.timeline.element, this.own.element);
    this.root.classList.add("explorer");
    this.root.classList.toggle("mild", !this.view.data.opening.grave);
    this.root.classList.toggle("calm", this.view.isCalm);
    this.root.classList.toggle("elsewhere", this.view.isElsewhere);
  }

  listen() {
    this.kind.addEventListener("change", () => this.change({ kind: this.kind.value }));
    this.format.addEventListener("change", () => this.change({ format: this.view.formatNamed(this.format.value) }));
    this.search.addEventListener("input", () => this.change({ search: this.search.value }));
    this.back.addEventListener("click", () => this.goBack());
    const { signal } = this.gone;
    addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.view.state.isOwn) this.change({ isOwn: false });
    }, { signal });
    for (const moment of ["beforeprint", "afterprint"]) {
      addEventListener(moment, () => {
        this.isPrinted = this.table.isPrinted = moment === "beforeprint";
        this.wide = 0;
        this.redraw();
      }, { signal });
    }
    for (const query of ["(prefers-color-scheme: dark)", "(max-width: 760px)"]) matchMedia(query).addEventListener("change", () => this.redraw(), { signal });
  }

  /** Draws again when the page's size changes, and follows other maps only while it is seen. */
  observe() {
    const viewed = new IntersectionObserver((entries) => {
      this.isInView = entries[entries.length - 1].isIntersecting;
      this.catchUp();
    });
    const size = () => [this.root.clientWidth, this.root.matches(FILLS) && this.root.clientHeight].join();
    let seen = size();
    const resized = new ResizeObserver(() => {
      if (size() === seen) return;
      seen = size();
      this.wide = 0;
      this.draw();
    });
    for (const observer of [viewed, resized]) {
      observer.observe(this.root);
      this.gone.signal.addEventListener("abort", () => observer.disconnect());
    }
  }

  /** Draws with the colours of another scheme or medium. */
  redraw() {
    this.painter.forget();
    this.draw();
  }

  draw() {
    const { view, painter, table } = this;
    this.isBehind = false;
    this.kind.value = view.state.kind ?? "";
    this.format.value = view.state.format.name;
    this.said.textContent = summary(view);
    this.opening.hidden = !view.data.opening.words || !view.isOpening;
    this.back.hidden = view.isOpening;
    const rows = table.choose();
    this.measure();
    // The colours of losses would contradict the verdict.
    if (this.root.classList.contains("what-if") !== view.isWhatIf) this.painter.forget();
    this.root.classList.toggle("what-if", view.isWhatIf);
    const given = widths(this.wide, table.visible, view.longest);
    const { row, curve, more } = heights(this.isPrinted ? 0 : this.free, rows, this.shares.foldedHeight, view.isElsewhere && view.data.events.length + view.data.held.length > 0);
    painter.begin(given.names + 1, given.strip, row);
    this.shares.draw(this.wide, curve);
    this.timeline.draw(this.wide, more);
    table.draw(given);
    this.own.draw();
  }

  /** Reads the page's size, unless it is known. */
  measure() {
    if (this.wide) return;
    this.wide = Math.max(this.timeline.element.clientWidth, 240);
    this.free = 0;
    if (!this.root.matches(FILLS) || this.isPrinted) return;
    this.shares.drawControls();
    this.timeline.draw(this.wide);
    const others = [this.head, this.told, this.timeline.element].reduce((sum, each) => sum + each.getBoundingClientRect().height + 4, 8);
    this.free = Math.max(this.root.clientHeight - others, 200);
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

  /** Shows what the page opened with. */
  goBack() {
    const { kind, scale, block } = this.view.data.opening;
    this.change({ kind: kind || this.view.state.kind, scale, block, format: this.view.formatNamed(this.view.data.format), layer: null, isOwn: false, search: "", sort: "model" });
    this.search.value = "";
    this.table.scrollTo(this.view.firstMarked);
  }

  /** Chooses a layer wherever it is: of another kind, in a group that is closed, above or below what is seen. @param {any} layer @param {boolean} isOwn whether its own view opens */
  choose(layer, isOwn = true) {
    if (!layer) {
      this.change({});
      return;
    }
    if (this.view.isRepeated(layer)) this.view.state.open.add(layer.group);
    this.change({ kind: layer.kind, layer: layer.name, isOwn });
    this.table.scrollTo(layer);
  }

  /** Shows the step and the layer of an event. @param {any} event */
  chooseEvent(event) {
    this.showPlace(event.step, event.module, event.tensor, event.kind);
  }

  /** Shows a module or tensor, at a step if one is given. @param {number | null} step @param {string} module @param {string} tensor @param {string} kind */
  showPlace(step, module, tensor = module, kind = "") {
    const { view } = this;
    if (step !== null) {
      if (view.hasScrubber) view.state.block = view.blockAt(step);
      view.state.step = step;
    }
    const first = (/** @type {(layer: any) => boolean} */ is) => view.layers.find((/** @type {any} */ each) => is(each) && each.kind === view.state.kind) ?? view.layers.find(is);
    this.choose(view.layers.find((/** @type {any} */ each) => each.name === tensor && each.kind === kind) ?? first((each) => each.name === tensor)
      ?? first((each) => each.module === module) ?? first((each) => module !== "" && each.module.startsWith(`${module}.`)), false);
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
