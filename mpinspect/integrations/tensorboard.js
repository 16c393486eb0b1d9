// The page "Ranges" of TensorBoard: a list of the runs, and the verdict and the map of each run chosen.
// TensorBoard imports this module into a frame of its own and calls render().
// @ts-check

import { chosenIn, comparedIn, decode, element, figuresIn, follow, forget, nonzero, percent, render as draw } from "./explorer.js";

/** Milliseconds between two looks at the runs, and how much longer than an answer took they are at least. */
const [PAUSE, PAUSES] = [4000, 10];
/** Runs that are shown side by side at most: each map has a canvas a row. */
const MOST_SHOWN = 8;
/** Layers in the table of differences. */
const MOST_ROWS = 10;
/** Where the choice is kept for as long as the tab is open. */
const KEPT = "mpinspect.runs";

/** @param {string} path @param {Record<string, string>} query */
async function asked(path, query = {}) {
  const address = new URL(path, import.meta.url);
  address.search = String(new URLSearchParams(query));
  const response = await fetch(address);
  if (response.ok || response.status === 404) return response.json();
  throw new Error(`status ${response.status}`);
}

/** Seconds in words. @param {number} seconds */
function ago(seconds) {
  const [size, unit] = /** @type {[number, string][]} */ ([[86400, "d"], [3600, "h"], [60, "min"]]).find(([size]) => seconds >= size) ?? [1, "s"];
  return `${Math.max(0, Math.floor(seconds / size))} ${unit} ago`;
}

/** One run of those chosen: its verdict, its findings and its map. */
class Shown {
  /** @param {string} id @param {string} name @param {(shown: Shown, choice: any) => void} moved */
  constructor(id, name, moved) {
    this.id = id;
    this.name = name;
    this.version = "";
    /** The formats, and that in which the map opens by itself; null without a map. @type {any} */
    this.own = null;
    /** The format in which it was opened beside others. */
    this.opened = "";
    this.state = element("p", { className: "dim" }, "Reading the run ...");
    this.words = element("div");
    this.map = element("div");
    this.map.addEventListener("chosen", (/** @type {CustomEvent} */ event) => moved(this, event.detail));
    this.element = element("section", { className: "part" }, element("h2", {}, name), this.state, this.words, this.map);
  }

  /** Asks whether the run has changed, and shows it if so. @param {Shown[]} others that are shown beside */
  async refresh(others) {
    const answer = await asked("./run", { id: this.id, version: this.version });
    if (answer.version && answer.version === this.version) return;
    this.version = answer.version ?? "";
    this.element.classList.toggle("going-on", answer.ended === false);
    if (answer.error) {
      this.state.textContent = answer.error;
      this.state.className = "error";
      return;
    }
    this.state.textContent = [answer.title, answer.steps, answer.ended ? "" : "the run goes on, or was killed"].filter(Boolean).join("; ");
    this.state.className = "dim";
    this.showWords(answer);
    try {
      if (answer.map) await this.showMap(await decode(answer.map), others.filter((each) => each.own));
      else this.map.replaceChildren(element("p", {}, answer.ended ? "No tensor was counted." : "No tensor has been counted so far."));
    } catch (error) {
      this.map.replaceChildren(element("p", { className: "error" }, `The map could not be drawn: ${error}`));
    }
  }

  /** @param {any} answer */
  showWords(answer) {
    const isOpen = this.words.querySelector("details")?.open ?? false;
    const verdict = answer.verdict.map((/** @type {any} */ line) => (line.tone === "code" ? element("pre", {}, line.text) : element("p", { className: line.tone }, line.text)));
    const findings = answer.findings.map((/** @type {any} */ finding) => element("div", { className: `finding ${finding.severity}` },
      element("b", {}, finding.severity), element("span", { className: "id" }, finding.id), element("p", {}, finding.message),
      ...(finding.fix ? [element("p", { className: "fix" }, finding.fix)] : []), ...(finding.code ? [element("pre", {}, finding.code)] : [])));
    const notes = answer.notes.map((/** @type {string} */ note) => element("p", { className: "dim" }, note));
    const counted = (/** @type {number} */ number, /** @type {string} */ word) => `${number} ${word}${number === 1 ? "" : "s"}`;
    const details = element("details", { open: isOpen }, element("summary", {}, `${counted(findings.length, "finding")}, ${counted(notes.length, "note")}`), ...findings, ...notes);
    this.words.replaceChildren(...verdict, ...(findings.length + notes.length ? [details] : []));
  }

  /** Draws the map, and leaves the reader where they were. @param {any} data @param {Shown[]} others with a map */
  async showMap(data, others) {
    // What is being dragged would be replaced under the pointer, which may be let go where nobody tells the page.
    for (let waits = 0; isHeld && waits < 100; waits += 1) await new Promise((resolve) => setTimeout(resolve, 100));
    const places = () => /** @type {HTMLElement[]} */ ([...this.map.querySelectorAll("button, input, select, [tabindex]")]);
    const focused = places().indexOf(/** @type {HTMLElement} */ (document.activeElement));
    const top = this.map.querySelector(".rows")?.scrollTop ?? 0;
    if (this.own) draw(this.map, data);
    else this.drawBeside(data, others);
    this.map.querySelector(".rows")?.scrollTo(0, top);
    if (focused >= 0) places()[focused]?.focus({ preventScroll: true });
  }

  /** Draws the map first, in the format that the others show, or that suits all if nobody chose one. @param {any} data @param {Shown[]} others */
  drawBeside(data, others) {
    this.own = { formats: data.formats, format: data.format };
    const chosen = others.filter((each) => chosenIn(each.map).format.name !== each.opened)[0];
    draw(this.map, { ...data, format: chosen ? chosenIn(chosen.map).format.name : comparedIn([this, ...others].map((each) => each.own)) });
    const { format, kind } = chosenIn(this.map);
    for (const each of others) follow(each.map, { format, kind });
    for (const each of [this, ...others]) each.opened = chosen ? "" : format.name;
  }
}

/**
 * The layers in which the runs' maps differ most, as they stand: by the share flushed or overflowed, then by the largest value.
 * @param {Shown[]} runs @returns {Node[]}
 */
function differences(runs) {
  const maps = runs.map((run) => figuresIn(run.map));
  const names = [...new Set(maps.flatMap((found) => [...found.keys()]))];
  const between = (/** @type {number[]} */ values) => (values.length < 2 ? 0 : Math.max(...values) - Math.min(...values));
  const rows = names.map((name) => {
    const cells = maps.map((found) => found.get(name));
    const counted = cells.filter((cell) => cell?.all);
    return { name, cells, lost: between(counted.map((cell) => (cell.flushed + cell.high) / cell.all)),
      largest: between(counted.map((cell) => cell.h.min + cell.h.counts.length)), isMissing: cells.some((cell) => !cell) };
  }).filter((row) => row.lost > 0 || row.largest > 0 || row.isMissing).sort((one, other) => other.lost - one.lost || other.largest - one.largest);
  const words = (/** @type {any} */ cell) => {
    if (!cell) return "not counted";
    if (!nonzero(cell.h)) return "all zero";
    return `${percent(cell.flushed / cell.all)} flushed${cell.high ? `, ${percent(cell.high / cell.all)} overflow` : ""}, up to 2^${cell.h.min + cell.h.counts.length - 1}`;
  };
  const head = element("tr", {}, ...["layer", ...runs.map((run) => run.name)].map((text, place) => element("th", { scope: "col", className: place ? "" : "left" }, text)));
  const body = rows.slice(0, MOST_ROWS).map((row) => element("tr", {}, element("th", { scope: "row", className: "left" }, row.name || "(the model itself)"),
    ...row.cells.map((cell) => element("td", {}, words(cell)))));
  const said = `Of ${names.length} layers ${rows.length} differ${rows.length > MOST_ROWS ? `; the ${MOST_ROWS} that differ most` : ""}, at what is chosen below.`;
  const table = element("div", { className: "scroll" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
  return [element("h2", {}, "Where the runs differ"), element("p", { className: "dim" }, said), ...(body.length ? [table] : [])];
}

let isHeld = false;

/** Makes the frame a page of ours, with listeners that know whether a pointer is held down. */
function prepare() {
  // TensorBoard's base is not the frame's own address: a permalink would lead elsewhere.
  document.querySelector("base")?.remove();
  document.documentElement.lang = "en";
  document.head.append(element("link", { rel: "stylesheet", href: String(new URL("./style.css", import.meta.url)) }));
  document.body.className = "mpinspect ranges-page";
  for (const [name, is] of /** @type {[string, boolean][]} */ ([["pointerdown", true], ["pointerup", false], ["pointercancel", false]])) {
    addEventListener(name, () => { isHeld = is; }, true);
  }
}

/** The list of runs, and those of them that are chosen. */
class Runs {
  constructor() {
    this.search = element("input", { type: "search", placeholder: "part of a name" });
    this.search.setAttribute("aria-label", "Search runs");
    this.search.addEventListener("input", () => this.drawList());
    this.list = element("div", { className: "list" });
    this.said = element("p", { className: "dim" }, "Looking for runs ...");
    this.said.setAttribute("role", "status");
    this.troubles = element("div");
    this.hint = element("p", { className: "dim" }, "Choose a run of the list; of several the maps move together.");
    this.table = element("section", { className: "differences" });
    this.parts = element("main", {}, this.hint, this.table);
    document.body.append(element("nav", {}, element("h1", {}, "Runs"), this.search, this.said, this.list, this.troubles), this.parts);
    /** @type {any[]} */
    this.known = [];
    /** @type {Map<string, Shown>} */
    this.shown = new Map();
    /** @type {Map<string, any>} */
    this.entries = new Map();
    this.chosen = new Set(remembered());
    this.slowest = 0;
    this.isLooking = false;
  }

  /** The entry of a run, made once: one that is being clicked must not be replaced. @param {any} run */
  entry(run) {
    if (!this.entries.has(run.id)) {
      const box = element("input", { type: "checkbox", value: run.id });
      box.addEventListener("change", () => this.choose(run.id, box.checked));
      const age = element("span", { className: "dim" });
      const name = run.name === "." ? "(the log directory itself)" : run.name;
      this.entries.set(run.id, { box, age, row: element("label", { title: name }, box, element("span", {}, name), age) });
    }
    const made = this.entries.get(run.id);
    const isChosen = this.chosen.has(run.id);
    Object.assign(made.box, { checked: isChosen, disabled: !isChosen && this.chosen.size >= MOST_SHOWN });
    made.age.textContent = run.age;
    return made.row;
  }

  drawList() {
    const words = this.search.value.toLowerCase();
    const rows = this.known.filter((run) => run.name.toLowerCase().includes(words)).map((run) => this.entry(run));
    const { list } = this;
    if (rows.length !== list.children.length || rows.some((row, place) => row !== list.children[place])) list.replaceChildren(...rows);
  }

  /** @param {string} id @param {boolean} is */
  choose(id, is) {
    if (is) this.chosen.add(id);
    else this.chosen.delete(id);
    try {
      sessionStorage.setItem(KEPT, JSON.stringify([...this.chosen]));
    } catch {
      // A browser that keeps nothing: the choice lasts as long as the page.
    }
    this.drawList();
    this.look();
  }

  async refreshList() {
    const answer = await asked("./runs");
    this.known = answer.runs.map((/** @type {any} */ run) => ({ ...run, age: ago(answer.now - run.written) }));
    for (const id of this.chosen) if (!this.known.some((run) => run.id === id)) this.chosen.delete(id);
    const newest = this.known.reduce((one, other) => (one && one.written >= other.written ? one : other), null);
    if (!this.chosen.size && newest && !this.shown.size) this.chosen.add(newest.id);
    this.said.textContent = this.known.length
      ? `${this.known.length} in ${answer.where}`
      : `No run of mpinspect lies below ${answer.where}. An Inspector writes one into its log_dir, and mpinspect run into its --log-dir; give TensorBoard a directory above these.`;
    this.hint.hidden = !this.known.length || this.chosen.size > 1;
    this.troubles.replaceChildren(...answer.troubles.map((/** @type {string} */ words) => element("p", { className: "warning" }, words)));
    this.drawList();
  }

  /** Takes the maps of runs that are no longer chosen out of the page. */
  dropOthers() {
    for (const [id, each] of this.shown) {
      if (this.chosen.has(id)) continue;
      forget(each.map);
      each.element.remove();
      this.shown.delete(id);
    }
  }

  /** Shows a chosen run, or refreshes it. @param {string} id */
  async refresh(id) {
    const run = this.known.find((each) => each.id === id);
    if (!this.shown.has(id)) {
      const made = new Shown(id, run.name === "." ? "The log directory itself" : run.name, (from, choice) => this.moved(from, choice));
      this.shown.set(id, made);
      this.parts.append(made.element);
    }
    await this.shown.get(id)?.refresh([...this.shown.values()].filter((each) => each.id !== id));
  }

  /** Lets the other maps follow one. @param {Shown} from @param {any} choice */
  moved(from, choice) {
    for (const each of this.shown.values()) if (each !== from) follow(each.map, choice);
    this.compare();
  }

  compare() {
    this.table.replaceChildren(...(this.shown.size > 1 ? differences([...this.shown.values()]) : []));
  }

  /** Asks for the list and the runs chosen, each at a time. */
  async look() {
    if (this.isLooking) return;
    this.isLooking = true;
    const begun = performance.now();
    try {
      await this.refreshList();
      this.dropOthers();
      for (const id of this.chosen) await this.refresh(id);
    } catch (error) {
      this.said.textContent = `TensorBoard does not answer (${error}): what stands here is the last that it said.`;
    }
    this.compare();
    this.slowest = performance.now() - begun;
    this.isLooking = false;
    // Something was chosen meanwhile.
    if ([...this.chosen].some((id) => !this.shown.has(id)) || [...this.shown.keys()].some((id) => !this.chosen.has(id))) this.look();
  }

  async goOn() {
    // Of a page that nobody sees nothing is asked: another tab, or another page of TensorBoard, which hides the frame.
    if (!document.hidden && innerWidth) await this.look();
    setTimeout(() => this.goOn(), Math.max(PAUSE, PAUSES * this.slowest));
  }
}

/** Shows the page, and goes on showing what the runs write. TensorBoard calls it once. */
export function render() {
  prepare();
  new Runs().goOn();
}

/** @returns {string[]} */
function remembered() {
  try {
    const kept = JSON.parse(sessionStorage.getItem(KEPT) ?? "[]");
    return Array.isArray(kept) ? kept : [];
  } catch {
    return [];
  }
}
