// The table of layers: their names, strips and figures. Only the rows near those that are seen exist.
// @ts-check

import { element, isNarrow } from "./dom.js";
import { clamp, share } from "./histogram.js";
import { ROW } from "./painter.js";
import { percent } from "./words.js";

/** Most rows of a printed table, and rows that are seen at once. */
const [PRINTED, SHOWN] = [400, 18];
/** Columns of every model: by what a click sorts, the heading, its meaning. */
const COLUMNS = [
  ["model", "layer", ""],
  ["", "map", ""],
  ["flushed", "flushed", "share of the non-zero elements that round to zero in this format"],
  ["subnormal", "subnormal", "survives with fewer bits"],
  ["overflow", "overflow", "beyond the format's largest value"],
  ["broken", "inf, NaN", "infinities and NaNs counted"],
  ["largest", "largest", "magnitude, rounded down to a power of two"],
];

/** @param {import("./view.js").View} view */
function columnsOf({ storages, data }) {
  const lost = storages.slice(0, 1).map((each) => ["lost", `update lost in ${each.label}`, "share of the updates that rounding undoes where the weights are stored so"]);
  const notes = data.notes.columns.map((/** @type {string[]} */ [words, meaning], /** @type {number} */ place) => [`note${place}`, words, meaning]);
  return [...COLUMNS, ...lost, ...notes];
}

export class Table {
  /**
   * @param {import("./view.js").View} view
   * @param {import("./painter.js").Painter} painter
   * @param {{change: (changed: any) => void, choose: (layer: any) => void}} actions
   */
  constructor(view, painter, actions) {
    this.view = view;
    this.painter = painter;
    this.actions = actions;
    this.columns = columnsOf(view);
    this.axis = element("canvas", { "aria-hidden": "true" });
    this.heads = this.columns.map((column) => this.head(column));
    this.body = element("tbody", {});
    this.element = element("div", { className: "rows", tabIndex: 0, role: "region", "aria-label": "Layers: arrow keys choose one" },
      element("table", {}, element("thead", {}, element("tr", {}, ...this.heads)), this.body));
    /** @type {any[]} */
    this.shown = [];
    this.isPrinted = false;
    /** The rows that stand in the table, by what they are made of: creating a canvas takes longer than drawing on it. @type {Map<string, any>} */
    this.known = new Map();
    this.standing = { first: -1, of: -1, rows: /** @type {HTMLElement[]} */ ([]) };
    this.element.addEventListener("scroll", () => this.drawRows());
    this.element.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => this.pressed(event));
  }

  get legend() {
    const meanings = this.columns.filter(([, , meaning]) => meaning).map(([, words, meaning]) => `${words}: ${meaning}`);
    return element("p", { className: "legend" }, "The darker, the larger the share of the non-zero elements, by power of two. "
      + "Hatched on the left: flushed; from there to the dotted line: subnormal; hatched on the right: overflow. Shares are of what was counted in the sampled steps. ",
      meanings.join("; "), ".");
  }

  /** @param {string[]} column */
  head([name, words, meaning]) {
    if (!name) return element("th", { scope: "col", className: "map" }, this.axis, element("span", { className: "unseen" }, words));
    const button = element("button", { type: "button", title: meaning }, words);
    button.addEventListener("click", () => this.actions.change({ sort: name }));
    return element("th", { scope: "col", className: name === "model" ? "left" : "" }, button);
  }

  draw() {
    const { sort } = this.view.state;
    this.shown = this.view.rows();
    this.heads.forEach((head, column) => {
      const order = sort === "model" ? "ascending" : "descending";
      head.setAttribute("aria-sort", this.columns[column][0] === sort ? order : "none");
    });
    this.painter.axis(this.axis);
    this.drawRows();
  }

  drawRows() {
    const { shown, isPrinted } = this;
    const top = this.element.scrollTop / ROW;
    const first = isPrinted ? 0 : clamp(Math.floor(top) - 4, 0, Math.max(0, shown.length - 1));
    const last = isPrinted ? Math.min(shown.length, PRINTED) : Math.min(shown.length, first + SHOWN + 12);
    const before = this.known;
    this.known = new Map();
    const { look } = this.painter;
    const made = shown.slice(first, last).map((row, offset) => {
      const kept = before.get(this.nameOf(row)) ?? this.rowOf(row);
      this.known.set(this.nameOf(row), kept);
      // Rows above and below what is seen are there to be scrolled to, and are drawn then.
      const isSeen = isPrinted || Math.abs(first + offset - top - SHOWN / 2) <= SHOWN / 2 + 1;
      if (isSeen && kept.look !== look) this.painter.strip(kept.canvas, row.layer);
      if (isSeen) kept.look = look;
      this.fill(kept, row.layer, first + offset);
      return kept.row;
    });
    this.stand(first, last, made);
    this.body.parentElement?.setAttribute("aria-rowcount", String(shown.length));
  }

  /** Puts rows into the table, if others stand there: moving rows costs a layout of the page. @param {number} first @param {number} last @param {HTMLElement[]} rows */
  stand(first, last, rows) {
    const { standing, shown } = this;
    const isSame = first === standing.first && shown.length === standing.of && rows.length === standing.rows.length
      && rows.every((row, index) => row === standing.rows[index]);
    this.standing = { first, of: shown.length, rows };
    if (isSame) return;
    const spacer = (/** @type {number} */ count) => element("tr", { "aria-hidden": "true" },
      element("td", { colSpan: this.columns.length, style: `height:${count * ROW}px;padding:0;border:0` }));
    this.body.replaceChildren(...(first ? [spacer(first)] : []), ...rows, ...(last < shown.length ? [spacer(shown.length - last)] : []));
  }

  /** @param {any} row */
  nameOf(row) {
    return [row.layer.place, row.inside ?? "", row.members ? this.view.state.open.has(row.group) : "", isNarrow()].join();
  }

  /** A row with its name and empty cells. @param {any} row */
  rowOf(row) {
    const { layer } = row;
    const canvas = element("canvas", { width: 1, height: 1, "aria-hidden": "true", style: `width:${this.painter.width}px;height:${ROW - 2}px` });
    const name = row.members ? row.name : layer.name || "(the model itself)";
    const title = row.members ? `${row.members.length} layers; the worst: ${layer.name}` : name;
    const head = element("th", { scope: "row", className: `left${row.inside ? " inside" : ""}`, title },
      row.members ? this.switchOf(row, name) : element("bdi", {}, shortened(name)));
    const cells = this.columns.slice(2).map(() => element("td", {}));
    const made = element("tr", {}, head, element("td", { className: "map" }, canvas), ...cells);
    made.addEventListener("click", () => this.actions.choose(layer));
    return { row: made, canvas, cells, look: "" };
  }

  /** The button that opens and closes a group. @param {any} row @param {string} name */
  switchOf(row, name) {
    const { open } = this.view.state;
    const isOpen = open.has(row.group);
    const button = element("button", { type: "button", "aria-expanded": String(isOpen) }, `${isOpen ? "▾" : "▸"} `, element("bdi", {}, shortened(name)));
    button.addEventListener("click", (/** @type {Event} */ event) => {
      event.stopPropagation();
      if (isOpen) open.delete(row.group);
      else open.add(row.group);
      this.actions.change({});
    });
    return button;
  }

  /** Writes a layer's figures into its row. @param {any} kept @param {any} layer @param {number} index */
  fill(kept, layer, index) {
    const { view } = this;
    const found = view.figures(layer);
    const cells = [...figureCells(layer, found), ...this.lostCells(layer), ...this.noteCells(layer)];
    const { row } = kept;
    row.setAttribute("aria-rowindex", index + 1);
    row.classList.toggle("chosen", layer.name === view.state.layer);
    row.classList.toggle("marked", view.isMarked(layer));
    cells.forEach(([text, tone], column) => {
      const cell = kept.cells[column];
      if (cell.textContent !== text) cell.textContent = text;
      if (cell.className !== tone) cell.className = tone;
    });
    if (found) Object.assign(row.dataset, { name: layer.name, flushed: found.flushed, subnormal: found.subnormal, low: found.low, high: found.high, all: found.all });
    else for (const name of Object.keys(row.dataset)) delete row.dataset[name];
  }

  /** @param {any} layer @returns {[string, string][]} */
  lostCells(layer) {
    return this.view.storages.slice(0, 1).map((storage) => {
      const lost = this.view.lostOf(storage, layer);
      return lost === null ? ["-", ""] : [percent(lost), lost > 0.5 ? "warning" : ""];
    });
  }

  /** @param {any} layer @returns {[string, string][]} */
  noteCells(layer) {
    const { cells, columns } = this.view.data.notes;
    return (cells[layer.module] ?? columns.map(() => ["-", ""])).map((/** @type {[string, string]} */ [text, tone]) => [text, tone]);
  }

  /** Arrow keys choose another layer. @param {KeyboardEvent} event */
  pressed(event) {
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 };
    const move = moves[/** @type {keyof typeof moves} */ (event.key)];
    if (!move || event.target !== this.element || !this.shown.length) return;
    event.preventDefault();
    const { state } = this.view;
    const stops = this.shown.filter((row) => !row.members || !state.open.has(row.group));
    const now = stops.findIndex((row) => row.layer.name === state.layer);
    const next = stops[clamp(now + move, 0, stops.length - 1)];
    this.actions.change({ layer: next.layer.name });
    this.bringIntoView(this.shown.indexOf(next));
  }

  /** Scrolls to a layer, if it has a row. @param {any} layer */
  scrollTo(layer) {
    this.bringIntoView(this.shown.findLastIndex((row) => row.layer === layer));
  }

  /** @param {number} index of a row */
  bringIntoView(index) {
    const { element: rows } = this;
    const isSeen = index * ROW >= rows.scrollTop && (index + 2) * ROW <= rows.scrollTop + rows.clientHeight;
    if (index >= 0 && !isSeen) rows.scrollTop = index * ROW - rows.clientHeight / 2;
  }
}

/** The end of a long name, which distinguishes layers. The whole name is the title, and stands below once the layer is chosen. @param {string} name */
function shortened(name) {
  const most = isNarrow() ? 12 : 42;
  return name.length > most ? `…${name.slice(1 - most)}` : name;
}

/** The cells of what the format does to a layer, each with its tone. @param {any} layer @param {any} found @returns {[string, string][]} */
function figureCells(layer, found) {
  const unknown = /** @type {[string, string]} */ (["-", ""]);
  if (!found) return Array(5).fill(unknown);
  const { h, all, low, high } = found;
  const broken = /** @type {[string, string]} */ ([[h.infs && "inf", h.nans && "NaN"].filter(Boolean).join(", ") || "none", h.infs || h.nans ? "error" : ""]);
  if (!all) return [unknown, unknown, unknown, broken, unknown];
  // Zeros of values that had passed through a narrow format may have been values: the share is that of the visible ones.
  const isPartial = layer.floor !== null && h.zeros > 0;
  const lost = share(found.flushed, all);
  return [
    [`${isPartial ? "~" : ""}${percent(lost)}`, lost > 0.01 ? "warning" : ""],
    [percent(share(found.subnormal, all)), ""],
    [low === high ? percent(share(high, all)) : `${percent(share(low, all))}..${percent(share(high, all))}`, high ? "error" : ""],
    broken,
    [`2^${h.min + h.counts.length - 1}`, ""],
  ];
}
