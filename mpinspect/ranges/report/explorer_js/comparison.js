// Two runs of a model side by side: the strips of A and B on one axis, and their difference as a third; tensors that did not move
// are hidden.
// @ts-check

import { keep, wanted } from "./address.js";
import { whyMarked } from "./culprit.js";
import { element, entry, isNarrow } from "./dom.js";
import { clamp, nonzero } from "./histogram.js";
import { BESIDE, LETTER, letters } from "./layout.js";
import { Painter } from "./painter.js";
import { blockAfter, fillWhole } from "./scrubber.js";
import { View } from "./view.js";
import { formatInWords, numberOf, percent, shortened, STRIP, wrapping } from "./words.js";

/** Most rows, pixels of a row at least and at most, and of the columns of figures with the table's borders. */
const [MOST, LEAST, TALLEST, FIGURES] = [200, 24, 200, 176];
/** Pixels of the culprit's row, and of the table's header with the margins below the table. */
const [CULPRIT, BESIDES] = [40, 60];
/** The choice of the format in which each run computes, in the select and the address. */
const OWN = "own";

/** A tensor of both runs. @typedef {{first: any, second: any, elsewhere: number, from: number | null}} Pair */

export class Comparison {
  /**
   * @param {HTMLElement} root what is in it gives way @param {[any, any]} data of A and B, opened in the format in which they are compared
   * @param {(layer: any) => void} choose called with a tensor of B @param {Node} lead stands before the controls
   */
  constructor(root, data, choose, lead) {
    this.root = root;
    this.lead = lead;
    this.choose = choose;
    this.views = data.map((each) => new View(each, undefined));
    this.rows = element("div", { className: "rows compared", tabIndex: 0, role: "region", "aria-label": "Tensors of both runs" });
    this.painters = this.views.map((view) => new Painter(view, this.rows));
    const [first, second] = this.views;
    const [one, other] = data.map((each) => each.opening);
    /** What the map of the run opens with whose culprit is marked: B, unless A alone has one, or an error. */
    this.opening = one.said && (!other.said || (one.grave && !other.grave)) ? one : other;
    const { marked, near, name } = this.opening;
    /** Names of the tensors to blame there, or of those that are part of the culprit. @type {Set<string>} */
    this.ofCulprit = new Set([...marked, ...(name ? near : [])]);
    const kinds = second.kinds.filter((/** @type {any} */ kind) => first.kinds.some((/** @type {any} */ other) => other.name === kind.name));
    const asked = wanted(data[1], "kind");
    const moved = data[1].changes.find((/** @type {any} */ [,,, from]) => from !== null);
    /** The tensor that moved first, which the headline names unless a run broke. */
    this.first = this.opening.said ? null : moved;
    const opens = [asked, this.opening.said && this.opening.kind, moved?.[0], kinds[0]?.name].find((name) => kinds.some((/** @type {any} */ kind) => kind.name === name));
    for (const view of this.views) Object.assign(view.state, { kind: opens, scale: view.data.own, block: -1, layer: null, isOwn: false });
    this.kind = element("select", {}, ...kinds.map((/** @type {any} */ each) => element("option", { value: each.name }, `${each.title} (${this.movedOf(each.name)} moved)`)));
    /** Whether the runs compute in two formats, so that each can be drawn in its own. */
    this.differ = this.views.every((view) => view.formatNamed(view.data.computes)) && first.data.computes !== second.data.computes;
    this.format = element("select", { className: this.differ ? "pair" : "narrow" }, ...(this.differ ? [element("option", { value: OWN }, this.views.map((view) => view.formatNamed(view.data.computes).label).join(", "))] : []), ...second.data.formats.map((/** @type {any} */ each) => element("option", { value: each.name }, each.label)));
    this.all = element("input", { type: "checkbox" });
    this.block = element("input", { type: "range", "aria-label": "Steps", min: 0, max: data[1].blocks.length - 1, step: 1 });
    this.steps = element("output", {});
    this.whole = element("button", { type: "button" }, "show the whole run");
    this.said = element("p", { className: "said", role: "status", "aria-live": "polite" });
    this.axes = ["A", "B", "difference"].map((words) => element("canvas", { "aria-hidden": "true", className: words }));
    this.titles = ["A", "B", "B minus A"].map((words) => element("b", {}, words));
    this.body = element("tbody", {});
    this.cols = [0, 1, 2, 3, 4, 5].map(() => element("col", {}));
    this.fill();
    this.use(this.differ && [null, OWN].includes(wanted(data[1], "format")) ? OWN : second.state.format.name);
    const resized = new ResizeObserver(() => this.draw());
    resized.observe(root);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      for (const painter of this.painters) painter.forget();
      this.draw();
    });
    this.draw();
  }

  fill() {
    const label = (/** @type {string} */ words, /** @type {Node} */ control) => element("label", { className: control === this.kind ? "roomy" : "", title: words }, element("span", {}, words), control);
    const heads = this.titles.map((title, place) => element("th", { scope: "col", className: "map" }, title, this.axes[place]));
    this.rows.append(element("table", {}, element("colgroup", {}, ...this.cols), element("thead", {}, element("tr", {}, element("th", { scope: "col", className: "left" }, "layer"), ...heads,
      element("th", { scope: "col", title: "share of its elements that lie in other powers of two in B" }, "moved"), element("th", { scope: "col", title: "the first step in which it moved beyond its normal variation" }, "from step"))), this.body));
    this.root.replaceChildren(element("div", { className: "controls" }, this.lead, label("Tensors", this.kind), label("Format", this.format), label("unmoved too", this.all), ...(this.views[1].hasScrubber ? [this.block, this.steps, this.whole] : [])), this.said, this.rows,
      this.legend = element("p", { className: "legend" }, entry("A and B: the stronger the colour, the larger the share; the format's edges at each run's own loss scale."), entry(STRIP), entry("B minus A: up where B has more, down where A has."), entry("moved: the share of elements in other powers of two, a mean over the steps.")));
    this.root.classList.add("explorer");
    this.root.classList.toggle("mild", !this.opening.grave);
    this.kind.addEventListener("change", () => this.change({ kind: this.kind.value }));
    this.format.addEventListener("change", () => {
      this.use(this.format.value);
      this.change({});
    });
    this.all.addEventListener("change", () => this.draw());
    this.block.addEventListener("input", () => this.take(Number(this.block.value)));
    this.whole.addEventListener("click", () => this.take(-1));
    this.block.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      const block = blockAfter(event.key, this.views[1].state.block, this.views[1].data.blocks.length - 1);
      if (block === null) return;
      event.preventDefault();
      this.take(block);
    });
  }

  /** Chooses a format for both runs. @param {string} name OWN for the one in which each computes */
  use(name) {
    this.format.value = name;
    this.views.forEach((view, place) => {
      view.state.format = view.formatNamed(name === OWN ? view.data.computes : name);
      this.titles[place].textContent = `${"AB"[place]}, ${formatInWords(view)}`;
    });
    this.rows.classList.toggle("what-if", this.views.every((view) => view.isWhatIf));
    for (const painter of this.painters) painter.forget();
  }

  /** @param {any} changed part of the state of both */
  change(changed) {
    for (const view of this.views) Object.assign(view.state, changed);
    this.draw();
    keep(this.views[1], this.format.value);
  }

  /** Shows a block of steps of B, and A at the same step; -1 for both runs as a whole. @param {number} block */
  take(block) {
    const [first, second] = this.views;
    second.state.block = block;
    first.state.block = block < 0 ? -1 : first.blockAt(second.data.blocks[block].first);
    this.draw();
  }

  /** Says which steps are shown. */
  drawSteps() {
    const { block } = this.views[1].state;
    if (block >= 0) this.block.value = String(block);
    fillWhole(this.block, block < 0);
    this.whole.hidden = block < 0;
    const [one, other] = this.views.map((view) => view.stepsInWords);
    this.steps.textContent = one === other ? one : `${one} in A, ${other} in B`;
    this.block.setAttribute("aria-valuetext", this.steps.textContent);
  }

  /** By exponent, the share of the non-zero elements in B less that in A. @param {Pair} pair @returns {Difference} */
  differenceOf({ first, second }) {
    /** @type {Map<number, number>} */
    const shares = new Map();
    [first, second].forEach((layer, place) => {
      const h = this.views[place].counted(layer);
      const all = h ? nonzero(h) : 0;
      if (all) h.counts.forEach((/** @type {number} */ count, /** @type {number} */ index) => shares.set(h.min + index, (shares.get(h.min + index) ?? 0) + (2 * place - 1) * (count / all)));
    });
    return { shares, largest: Math.max(0, ...[...shares.values()].map(Math.abs)) };
  }

  /** The number of tensors of a kind that moved. @param {string} kind */
  movedOf(kind) {
    return this.views[1].data.changes.filter((/** @type {any} */ [of,,, from]) => of === kind && from !== null).length;
  }

  /** Whether a tensor belongs to the culprit. @param {Pair} pair */
  isOfCulprit({ second }) {
    return this.ofCulprit.has(second.name);
  }

  /** The tensors of the kind shown: those of the culprit, or the one that moved first, then the most moved. @returns {Pair[]} */
  pairs() {
    const [first, second] = this.views;
    const { kind } = second.state;
    const named = (/** @type {View} */ view, /** @type {string} */ name) => view.layers.find((/** @type {any} */ layer) => layer.kind === kind && layer.name === name);
    return second.data.changes.filter((/** @type {any} */ [of]) => of === kind)
      .map((/** @type {any} */ [, name, elsewhere, from]) => ({ first: named(first, name), second: named(second, name), elsewhere, from }))
      .filter((/** @type {Pair} */ pair) => pair.first && pair.second)
      .sort((/** @type {Pair} */ one, /** @type {Pair} */ other) => Number(this.isOfCulprit(other)) - Number(this.isOfCulprit(one)));
  }

  draw() {
    const wide = this.root.clientWidth;
    if (!wide) return;
    this.kind.value = this.views[1].state.kind ?? "";
    this.drawSteps();
    const all = this.pairs();
    const moved = all.filter((pair) => pair.from !== null);
    const shown = this.all.checked || !moved.length ? all : moved;
    this.said.textContent = `${all.length - shown.length ? `${numberOf(all.length - shown.length, "tensor")} that did not move ${all.length - shown.length === 1 ? "is" : "are"} hidden. ` : ""}`
      + (shown.length > MOST ? `The ${MOST} that moved most of ${shown.length} are shown.` : moved.length ? "" : "None moved beyond its normal variation; all are shown.");
    this.lay(wide, shown.slice(0, MOST));
    const differences = shown.slice(0, MOST).map((pair) => this.differenceOf(pair));
    const most = Math.max(...differences.map(({ largest }) => largest), 1e-9);
    this.axes.forEach((axis, place) => this.painters[Math.min(place, 1)].axis(axis));
    this.body.replaceChildren(...this.culpritRows(), ...shown.slice(0, MOST).map((pair, place) => this.row(pair, differences[place], most)));
  }

  /** Each place where something went wrong, and what; no warning stands beside an error. @returns {[string, string][]} */
  get culprits() {
    /** @type {Map<string, string[]>} */
    const runs = new Map();
    for (const view of [...this.views].reverse()) {
      const { name, marked, said, grave } = view.data.opening;
      if (!said || grave !== this.opening.grave) continue;
      const place = name || this.views[0].layers.find((/** @type {any} */ each) => each.name === marked[0])?.label || marked[0];
      const words = JSON.stringify([place, whyMarked(view)]);
      runs.set(words, ["AB"[this.views.indexOf(view)], ...(runs.get(words) ?? [])]);
    }
    return [...runs].map(([words, names]) => [JSON.parse(words)[0], `${names.join(", ")}: ${JSON.parse(words)[1]}`]);
  }

  /** A row for each of these places. */
  culpritRows() {
    return this.culprits.map(([place, why]) => element("tr", { className: "marked culprit", style: `--row:${CULPRIT}px` },
      element("th", { scope: "row", className: "left", title: place }, this.nameIn(place)), element("td", { className: "words", colSpan: 5 }, why)));
  }

  /** A name, or its end. @param {string} name */
  nameIn(name) {
    return wrapping(shortened(name, Math.max(letters((this.names ?? 0) - BESIDE), 6), isNarrow() ? 2 : 1));
  }

  /** Gives all strips one axis and one width. @param {number} wide in pixels @param {Pair[]} shown */
  lay(wide, shown) {
    const longest = shown.reduce((most, { second }) => Math.max(most, second.label.length), this.opening.name.length + 2);
    const names = isNarrow() ? 92 : clamp(longest * LETTER + BESIDE, 120, 250);
    const figures = isNarrow() ? 0 : FIGURES;
    const strip = Math.max(Math.floor((wide - names - figures - 16) / 3), 60);
    const [all, rows, legend] = [this.root, this.rows, this.legend].map((each) => each.getBoundingClientRect());
    const free = all.bottom - rows.top - legend.height - BESIDES - this.culprits.length * CULPRIT;
    const row = clamp(Math.floor(free / Math.max(shown.length, 1)), LEAST, TALLEST);
    [names, strip, strip, strip, figures / 2, figures / 2].forEach((width, place) => { this.cols[place].style.width = `${width}px`; });
    this.rows.classList.toggle("narrow", !figures);
    this.rows.style.setProperty("--row", `${row}px`);
    for (const painter of this.painters) painter.begin(names, strip - 8, row);
    const ends = this.painters.map((painter) => painter.ends);
    for (const painter of this.painters) painter.ends = [Math.min(ends[0][0], ends[1][0]), Math.max(ends[0][1], ends[1][1])];
    this.names = names;
  }

  /** @param {Pair} pair @param {Difference} difference @param {number} most the largest difference of a share in any row */
  row({ first, second, elsewhere, from }, difference, most) {
    const button = element("button", { type: "button", title: second.label, "aria-label": second.label }, this.nameIn(second.label));
    button.addEventListener("click", () => this.choose(second));
    const canvases = [first, second, null].map(() => element("canvas", { "aria-hidden": "true" }));
    this.painters[0].strip(canvases[0], first);
    this.painters[1].strip(canvases[1], second);
    this.painters[1].difference(canvases[2], difference.shares, most);
    const isFirst = this.first && this.first[0] === second.kind && this.first[1] === second.name;
    const classes = [from === null ? "" : "moved", isFirst ? "marked" : this.isOfCulprit({ first, second, elsewhere, from }) ? "near" : ""];
    return element("tr", { className: classes.join(" ").trim() }, element("th", { scope: "row", className: "left" }, button), ...canvases.map((canvas) => element("td", { className: "map", title: STRIP }, canvas)),
      element("td", {}, percent(elsewhere)), element("td", {}, from === null ? "-" : String(from)));
  }
}

/** Differences of shares, and the largest of them. @typedef {{shares: Map<number, number>, largest: number}} Difference */
