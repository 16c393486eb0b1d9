// The table of layers: their names, strips and figures. Only the rows near those that are seen exist.
// @ts-check

import { columnsOf, figureCells } from "./columns.js";
import { shownInstead, whyMarked } from "./culprit.js";
import { element, isNarrow } from "./dom.js";
import { clamp } from "./histogram.js";
import { BESIDE, letters } from "./layout.js";
import { rowsOf } from "./rows.js";
import { percent, shortened, STRIP, wrapping } from "./words.js";

/** Most rows of a printed table, rows that are made beyond those that are seen, and pixels of a table that has no height yet. */
const [PRINTED, SPARE, UNSEEN] = [400, 8, 420];

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
    this.cols = this.columns.map((column) => element("col", { className: column.isWide ? "wide" : column.name }));
    this.body = element("tbody", {});
    this.element = element("div", { className: "rows", tabIndex: 0, role: "region", "aria-label": "Layers: arrow keys choose one" },
      element("table", {}, element("colgroup", {}, ...this.cols), element("thead", {}, element("tr", {}, ...this.heads)), this.body));
    /** @type {any[]} */
    this.shown = [];
    /** The column that a narrow page shows. */
    this.figure = "flushed";
    this.isPrinted = false;
    /** Pixels that are scrolled away and that are seen, 0 where not known: reading them costs a layout of the page. */
    this.top = 0;
    this.height = 0;
    /** The widths that the columns have. */
    this.laid = "";
    /** The rows that stand in the table, by what they are made of: creating a canvas takes longer than drawing on it. @type {Map<string, any>} */
    this.known = new Map();
    this.standing = { first: -1, of: -1, rows: /** @type {HTMLElement[]} */ ([]) };
    this.element.addEventListener("scroll", () => {
      this.top = this.element.scrollTop;
      this.drawRows();
    });
    this.element.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => this.pressed(event));
  }

  /** How to read the map, as a list. */
  get legend() {
    const meanings = this.columns.filter(({ meaning }) => meaning).map(({ words, meaning }) => `${words}: ${meaning}.`);
    const said = ["A row is a tensor, a column a power of two; the darker (in tall rows also the higher), the larger the share of the non-zero elements.",
      STRIP,
      "■ (an error) or ▲ (a warning): the culprit. ▷: part of a culprit without a tensor of its own, or next to it.", ...meanings, "Shares are of what was counted in the sampled steps.",
      "Drag the handle of the curve, or the steps below. In the table arrow keys choose a layer; a click opens its own view, Escape closes it."];
    return element("ul", { tabIndex: 0 }, ...said.map((line) => element("li", {}, line)));
  }

  /** The columns that say something of the kind shown: updates are of parameters. A narrow page has room for one figure. */
  get visible() {
    const isOutput = (this.view.state.kind ?? "").startsWith("activation");
    if (isNarrow()) return this.columns.filter(({ name }, place) => place < 2 || name === this.figure);
    return this.columns.filter(({ name }) => name !== "lost" || !isOutput);
  }

  /** The one figure of a narrow page, the first that shows something of the culprit, or of any layer. */
  figureOf() {
    const { view } = this;
    if (!isNarrow()) return "flushed";
    const own = view.ofKind.filter((/** @type {any} */ layer) => !view.marked.size || view.isMarked(layer));
    const seen = new Set(own.flatMap((/** @type {any} */ layer) => this.cellsOf(layer, view.figures(layer)).map(([, tone], column) => tone && this.columns[column + 2].name)));
    return ["broken", "overflow", "flushed", "lost"].find((name) => seen.has(name)) ?? "flushed";
  }

  /** The cells of a layer, each with its tone. @param {any} layer @param {any} found its figures @returns {[string, string][]} */
  cellsOf(layer, found) {
    return [...figureCells(found, this.view.tone, this.view.toneOf(layer), this.view.lossOf(layer), this.view.hiddenIn(layer, found) > 0), ...this.lostCells(layer), ...this.noteCells(layer)];
  }

  /** @param {import("./columns.js").ColumnOf} column */
  head({ name, words, meaning, isWide }) {
    if (!name) return element("th", { scope: "col", className: "map" }, this.axis, element("span", { className: "unseen" }, words));
    const button = element("button", { type: "button", title: meaning }, words);
    button.addEventListener("click", () => this.actions.change({ sort: name }));
    return element("th", { scope: "col", className: name === "model" ? "left" : isWide ? "wide" : name }, button);
  }

  /** Takes the rows to show; they are drawn once their size is known. */
  choose() {
    this.shown = rowsOf(this.view);
    this.figure = this.figureOf();
    return this.shown.length;
  }

  /** @param {import("./layout.js").Widths} widths */
  draw({ names, strip, isCompact }) {
    const { sort } = this.view.state;
    const { visible } = this;
    const each = this.columns.map((column, place) => ((column.isWide && isCompact) || !visible.includes(column) ? 0 : [names, strip][place] ?? column.width));
    const laid = [...each, this.figure, this.painter.row, this.shown.length].join();
    if (laid !== this.laid) this.lay(each, isCompact);
    this.laid = laid;
    this.heads.forEach((head, column) => {
      const order = sort === "model" ? "ascending" : "descending";
      head.setAttribute("aria-sort", this.columns[column].name === sort ? order : "none");
    });
    this.painter.axis(this.axis);
    this.drawRows();
    if (this.height) return;
    this.height = this.element.clientHeight;
    this.top = this.element.scrollTop;
    if (this.height > UNSEEN) this.drawRows();
  }

  /** @param {number[]} each width of a column @param {boolean} isCompact */
  lay(each, isCompact) {
    this.element.classList.toggle("compact", isCompact);
    this.element.classList.toggle("lossless", this.visible.length < this.columns.length);
    this.element.classList.toggle("narrow", isNarrow());
    this.cols.forEach((col, place) => {
      col.style.width = `${each[place]}px`;
      for (const each of [col, this.heads[place]]) each.classList.toggle("figure", this.columns[place].name === this.figure);
    });
    // Of a wider table the browser would widen the columns, and the strips would leave the curve's axis.
    /** @type {HTMLElement} */ (this.element.firstElementChild).style.width = `${each.reduce((sum, one) => sum + one, 0)}px`;
    this.element.style.setProperty("--row", `${this.painter.row}px`);
    this.height = 0;
  }

  drawRows() {
    const { shown, isPrinted } = this;
    const { row: height } = this.painter;
    const top = this.top / height;
    // The rows that stand already may leave the table lower than it will be.
    const seen = Math.ceil((this.height || UNSEEN) / height);
    const first = isPrinted ? 0 : clamp(Math.floor(top) - SPARE, 0, Math.max(0, shown.length - 1));
    const last = isPrinted ? Math.min(shown.length, PRINTED) : Math.min(shown.length, Math.floor(top) + seen + SPARE);
    // Rows that leave are kept for a while: sorted by a share, they come back.
    if (this.known.size > PRINTED) this.known.clear();
    const { look } = this.painter;
    const made = shown.slice(first, last).map((row, offset) => {
      const kept = this.known.get(this.nameOf(row)) ?? this.rowOf(row);
      this.known.set(this.nameOf(row), kept);
      // Rows above and below what is seen are there to be scrolled to, and are drawn then.
      const isSeen = isPrinted || Math.abs(first + offset - top - seen / 2) <= seen / 2 + 1;
      if (isSeen && row.layer && kept.look !== look) this.painter.strip(kept.canvas, row.layer);
      if (isSeen) kept.look = look;
      this.fill(kept, row, first + offset);
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
      element("td", { colSpan: this.columns.length, style: `height:${count * this.painter.row}px;padding:0;border:0` }));
    this.body.replaceChildren(...(first ? [spacer(first)] : []), ...rows, ...(last < shown.length ? [spacer(shown.length - last)] : []));
  }

  /** @param {any} row */
  nameOf(row) {
    if (row.culprit) return `culprit ${this.painter.left}`;
    return [row.layer.place, row.inside ?? "", row.members ? this.view.state.open.has(row.group) : "", this.painter.left].join();
  }

  canvas() {
    return element("canvas", { width: 1, height: 1, "aria-hidden": "true", style: `width:${this.painter.width}px;height:${this.painter.row - 2}px` });
  }

  /** A row with its name and empty cells. @param {any} row */
  rowOf(row) {
    if (row.culprit) return this.culpritRow(row.culprit);
    const { layer } = row;
    const canvas = this.canvas();
    const name = row.members ? row.name : layer.label;
    const title = row.members ? `${name}: ${row.members.length} layers; the worst: ${layer.label}` : name;
    const head = element("th", { scope: "row", className: `left${row.inside ? " inside" : ""}`, title, "aria-label": title },
      row.members ? this.switchOf(row, name) : this.nameIn(name, row.inside ? 2 : 0));
    const cells = this.columns.slice(2).map((column) => element("td", { className: column.isWide ? "wide" : "" }));
    const why = element("span", { className: "why", hidden: true });
    const made = element("tr", {}, head, element("td", { className: "map", title: STRIP }, canvas, why), ...cells);
    made.addEventListener("click", () => this.actions.choose(layer));
    return { row: made, canvas, why, cells, look: "" };
  }

  /** The row of a culprit without a tensor of its own: words in place of a strip. @param {string} name */
  culpritRow(name) {
    const head = element("th", { scope: "row", className: "left", title: name, "aria-label": name }, this.nameIn(name, 2));
    const why = element("td", { className: "words", colSpan: this.columns.length - 1 });
    return { row: element("tr", { className: "marked culprit" }, head, why), why, cells: [] };
  }

  /** A name, or its end. @param {string} name @param {number} beside letters that stand before it */
  nameIn(name, beside) {
    return wrapping(shortened(name, Math.max(letters(this.painter.left - BESIDE) - beside, 6), isNarrow() ? 2 : 1));
  }

  /** The button that opens and closes a group. @param {any} row @param {string} name */
  switchOf(row, name) {
    const { open } = this.view.state;
    const isOpen = open.has(row.group);
    const button = element("button", { type: "button", "aria-expanded": String(isOpen) }, `${isOpen ? "▾" : "▸"} `, this.nameIn(name, 2));
    button.addEventListener("click", (/** @type {Event} */ event) => {
      event.stopPropagation();
      if (isOpen) open.delete(row.group);
      else open.add(row.group);
      this.actions.change({});
    });
    return button;
  }

  /** Writes a layer's figures into its row. @param {any} kept @param {any} of the layer or group @param {number} index */
  fill(kept, of, index) {
    const { view } = this;
    const { layer } = of;
    const { row } = kept;
    row.setAttribute("aria-rowindex", index + 1);
    if (!layer) {
      kept.why.textContent = whyMarked(view);
      return;
    }
    const found = view.figures(layer);
    const cells = this.cellsOf(layer, found);
    row.classList.toggle("chosen", layer.name === view.state.layer);
    // Below a group its marked members stand by themselves.
    row.classList.toggle("marked", !of.members && view.isMarked(layer));
    row.classList.toggle("near", !of.members && view.isNear(layer));
    // Where a culprit's own figures do not show its fault, words say why it is marked.
    const isSaid = row.classList.contains("marked") && !isNarrow() && (view.data.opening.at || shownInstead(view) || cells.every(([, tone]) => !tone || tone === "good"));
    kept.why.hidden = !isSaid;
    kept.why.textContent = isSaid ? whyMarked(view) : "";
    kept.why.classList.toggle("right", isSaid && this.painter.isLeft(found));
    cells.forEach(([text, tone], column) => {
      const cell = kept.cells[column];
      if (cell.textContent !== text) cell.textContent = text;
      const { isWide, name, meaning } = this.columns[column + 2];
      cell.title = meaning;
      const named = [isWide ? "wide" : name, tone, name === this.figure ? "figure" : ""].join(" ");
      if (cell.className !== named) cell.className = named;
    });
    if (found) Object.assign(row.dataset, { name: layer.name, flushed: found.flushed, subnormal: found.subnormal, low: found.low, high: found.high, all: found.all });
    else for (const name of Object.keys(row.dataset)) delete row.dataset[name];
  }

  /** @param {any} layer @returns {[string, string][]} */
  lostCells(layer) {
    return this.view.storages.slice(0, 1).map((storage) => {
      const lost = this.view.lostOf(storage, layer);
      return lost === null ? ["-", ""] : [percent(lost), lost > 0.5 && storage.measured && !this.view.isCalm ? "warning" : ""];
    });
  }

  /** @param {any} layer @returns {[string, string][]} */
  noteCells(layer) {
    const { cells, columns } = this.view.data.notes;
    return (cells[layer.module] ?? columns.map(() => ["-", ""])).map((/** @type {[string, string]} */ [text, tone]) => [text, tone]);
  }

  /** Arrow keys choose another layer, and open its own view. @param {KeyboardEvent} event */
  pressed(event) {
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 };
    const move = moves[/** @type {keyof typeof moves} */ (event.key)];
    if (!move || event.target !== this.element || !this.shown.length) return;
    event.preventDefault();
    const { state } = this.view;
    const stops = this.shown.filter((row) => row.layer && (!row.members || !state.open.has(row.group)));
    const now = stops.findIndex((row) => row.layer.name === state.layer);
    const next = stops[clamp(now + move, 0, stops.length - 1)];
    this.actions.change({ layer: next.layer.name, isOwn: true });
    this.bringIntoView(this.shown.indexOf(next));
  }

  /** Scrolls to a layer, if it has a row. @param {any} layer */
  scrollTo(layer) {
    this.bringIntoView(this.shown.findLastIndex((row) => row.layer === layer));
  }

  /** @param {number} index of a row */
  bringIntoView(index) {
    const { element: rows } = this;
    const { row } = this.painter;
    // The header covers one row.
    const isSeen = index * row >= rows.scrollTop && (index + 2) * row <= rows.scrollTop + rows.clientHeight;
    if (index >= 0 && !isSeen) rows.scrollTop = index * row - rows.clientHeight / 2;
    this.top = rows.scrollTop;
  }
}
