// The map of a run's layers: the same integers as in the session, and the figures of ExponentHistogram worked out from them.
// One ES module without dependencies: render(root, data) draws the map of one model into an element.
// @ts-check

/**
 * @typedef {object} Format   limits of a number format; exponents are of powers of two
 * @property {string} name
 * @property {string} label
 * @property {number} low            of the smallest subnormal
 * @property {number} normal         of the smallest normal
 * @property {number} top            of the largest finite value
 * @property {number} edge           significand of the overflow edge
 * @property {boolean} tie           whether a value on the edge overflows
 * @property {boolean} ftz           whether subnormals are flushed
 *
 * @typedef {object} Histogram
 * @property {number} min            exponent of the first count
 * @property {number[]} counts
 * @property {number[]} powers       of these the powers of two
 * @property {number[]} tops         of these the significands of 2 - 2^-11 and more
 * @property {number} zeros
 * @property {number} infs
 * @property {number} nans
 * @property {number} smallest       significand of the smallest magnitude
 * @property {number} largest        significand of the largest
 * @property {number[]} below        below[i]: elements with an exponent less than min + i
 */

/** Significands from here up round to 2 in 11 bits. */
const NEAR_TOP = 2 - 2 ** -11;

/** @param {any[]} packed as explorer.py packs one @returns {Histogram} */
export function unpack(packed) {
  const [min, zeros, infs, nans, smallest, largest, counts, powers, tops] = packed;
  return { min, counts, powers, tops, zeros, infs, nans, smallest, largest, below: sums(counts) };
}

/** @param {number[]} counts */
function sums(counts) {
  const below = [0];
  for (const count of counts) below.push(below[below.length - 1] + count);
  return below;
}

/** Counts of all of them together. @param {Histogram[]} parts @returns {Histogram} */
export function merge(parts) {
  const used = parts.filter((part) => part.counts.length);
  const min = used.length ? Math.min(...used.map((part) => part.min)) : 0;
  const end = used.length ? Math.max(...used.map((part) => part.min + part.counts.length)) : 0;
  const [counts, powers, tops] = [0, 0, 0].map(() => new Array(end - min).fill(0));
  for (const part of used) {
    const start = part.min - min;
    part.counts.forEach((count, place) => {
      counts[start + place] += count;
      powers[start + place] += part.powers[place];
      tops[start + place] += part.tops[place];
    });
  }
  const lowest = used.filter((part) => part.min === min).map((part) => part.smallest);
  const highest = used.filter((part) => part.min + part.counts.length === end).map((part) => part.largest);
  const total = (/** @type {"zeros" | "infs" | "nans"} */ field) => parts.reduce((sum, part) => sum + part[field], 0);
  return {
    min, counts, powers, tops, below: sums(counts),
    zeros: total("zeros"), infs: total("infs"), nans: total("nans"),
    smallest: lowest.length ? Math.min(...lowest) : 1, largest: highest.length ? Math.max(...highest) : 1,
  };
}

/** @param {Histogram} h */
export const nonzero = (h) => h.below[h.counts.length];

/** Elements with an exponent less than this one. @param {Histogram} h @param {number} exponent */
const countBelow = (h, exponent) => h.below[Math.min(Math.max(exponent - h.min, 0), h.counts.length)];

/** @param {Histogram} h @param {number[]} array @param {number} exponent */
const at = (h, array, exponent) => array[exponent - h.min] ?? 0;

/** Non-zero elements of x * 2^k that the format rounds to zero: exact. @param {Histogram} h @param {Format} f @param {number} k */
export function flushed(h, f, k) {
  if (f.ftz) return countBelow(h, f.normal - k);
  const edge = f.low - 1 - k;
  return countBelow(h, edge) + at(h, h.powers, edge);
}

/** Elements that survive with fewer bits: exact. @param {Histogram} h @param {Format} f @param {number} k */
export const subnormal = (h, f, k) => countBelow(h, f.normal - k) - flushed(h, f, k);

/** Least and largest number of finite elements beyond the format. @param {Histogram} h @param {Format} f @param {number} k */
export function overflowed(h, f, k) {
  const exponent = f.top - k;
  const certain = nonzero(h) - countBelow(h, exponent + 1);
  const count = at(h, h.counts, exponent);
  if (!count) return [certain, certain];
  const [powers, tops] = [at(h, h.powers, exponent), at(h, h.tops, exponent)];
  if (f.edge === NEAR_TOP && f.tie) return [certain + tops, certain + tops];
  const beyond = (/** @type {number} */ significand) => significand > f.edge || (f.tie && significand === f.edge);
  let [low, high] = f.edge < NEAR_TOP ? [tops, count - powers] : [0, tops];
  if (exponent === h.min + h.counts.length - 1) {
    if (!beyond(h.largest)) return [certain, certain];
    low = Math.max(low, 1);
  }
  if (exponent === h.min) {
    if (beyond(h.smallest)) return [certain + count, certain + count];
    high = Math.min(high, count - 1);
  }
  return [certain + low, certain + high];
}

/** A share with two digits, never rounded to 0% or 100%. @param {number} fraction */
export function percent(fraction) {
  const value = 100 * fraction;
  if (value === 0 || value === 100) return `${value}%`;
  if (value < 0.001) return "<0.001%";
  if (value < 10) return `${Number(value.toPrecision(2))}%`;
  if (value < 99.5) return `${Math.round(value)}%`;
  return value < 99.995 ? `${Number(value.toPrecision(4))}%` : ">99.99%";
}

/** The JSON in gzip in base64. @param {string} text */
export async function decode(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

/** @param {string} tag @param {Record<string, any>} fields @param {(Node | string)[]} children @returns {any} */
function element(tag, fields = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(fields)) {
    if (name in made) /** @type {any} */ (made)[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const ROW = 22;
const [WIDE, NARROW] = [360, 180];
const isNarrow = () => matchMedia("(max-width: 760px)").matches;
const SHOWN = 18;
const SCALES = [-24, 40];
/** Shares from 10^-5 on are told apart. */
const DECADES = 5;

/** Of each element that shows a map: what the reader chose in it. @type {WeakMap<HTMLElement, any>} */
const drawn = new WeakMap();

/** Takes over in one map what was chosen in another: the detail of its event "chosen". @param {HTMLElement} root @param {any} choice */
export const follow = (root, choice) => drawn.get(root)?.follow(choice);

/** The figures that a map shows, by layer. @param {HTMLElement} root @returns {Map<string, any>} */
export const figuresIn = (root) => drawn.get(root)?.figures() ?? new Map();

/**
 * Draws the map of one model; called again with newer data it keeps what the reader chose. Choices are told as events "chosen".
 * @param {HTMLElement} root what is in it gives way
 * @param {any} data as explorer.py makes it
 */
export function render(root, data) {
  const before = drawn.get(root);
  before?.gone.abort();
  const gone = new AbortController();
  const layers = data.tensors.map((/** @type {any} */ tensor, /** @type {number} */ place) => ({
    ...tensor,
    place,
    blocks: tensor.blocks.map((/** @type {any} */ packed) => packed && unpack(packed)),
  }));
  for (const layer of layers) layer.whole = merge(layer.blocks.filter(Boolean));
  const kinds = data.kinds.filter((/** @type {any} */ kind) => layers.some((/** @type {any} */ layer) => layer.kind === kind.name));
  const asked = new URLSearchParams(location.hash.slice(1));
  const isMine = !asked.has("model") || asked.get("model") === data.model;
  const wanted = (/** @type {string} */ name) => (isMine ? asked.get(name) : null);
  const sameFormat = (/** @type {Format} */ other) => data.formats.find((/** @type {Format} */ each) => each.name === other.name) ?? data.formats[0];
  const state = {
    kind: kinds.some((/** @type {any} */ kind) => kind.name === wanted("kind")) ? wanted("kind") : kinds[0]?.name,
    format: data.formats.find((/** @type {Format} */ format) => format.name === wanted("format"))
      ?? data.formats.find((/** @type {Format} */ format) => format.name === data.format) ?? data.formats[0],
    scale: clamp(Number(wanted("scale") ?? data.own) || 0, SCALES[0], SCALES[1]),
    block: clamp(Number(wanted("block") ?? -1), -1, data.blocks.length - 1),
    search: "",
    sort: "model",
    layer: wanted("layer"),
    open: new Set(),
  };
  if (before) Object.assign(state, before.state, { format: sameFormat(before.state.format), block: before.blockNow(data.blocks) });

  // -- the controls
  const kind = element("select", {}, ...kinds.map((/** @type {any} */ each) => element("option", { value: each.name }, each.title)));
  const format = element("select", {}, ...data.formats.map((/** @type {Format} */ each) => element("option", { value: each.name }, each.label)));
  const scale = element("input", { type: "range", min: SCALES[0], max: SCALES[1], step: 1 });
  const scaleWords = element("output", {});
  const block = element("input", { type: "range", min: -1, max: data.blocks.length - 1, step: 1 });
  const blockWords = element("output", {});
  const search = element("input", { type: "search", placeholder: "part of a name", value: state.search });
  const recommended = element("button", { type: "button" }, data.recommended === null ? "" : `recommended: 2^${data.recommended}`);
  const label = (/** @type {string} */ words, /** @type {Node[]} */ ...controls) => element("label", {}, element("span", {}, words), ...controls);
  const controls = element("div", { className: "controls" },
    label("Tensors", kind), label("Format", format), label("Loss scale", scale, scaleWords),
    ...(data.recommended === null ? [] : [recommended]),
    ...(data.blocks.length > 1 ? [label("Steps", block, blockWords)] : []), label("Search", search));
  const said = element("p", { className: "said", role: "status", "aria-live": "polite" });
  const axis = element("canvas", { "aria-hidden": "true" });
  const headings = [["model", "layer"], ["", "map"], ["flushed", "flushed"], ["subnormal", "subnormal"], ["overflow", "overflow"], ["broken", "inf, NaN"], ["largest", "largest"]];
  const heads = headings.map(([name, words]) => {
    if (!name) return element("th", { scope: "col", className: "map" }, axis);
    const button = element("button", { type: "button" }, words);
    button.addEventListener("click", () => change({ sort: name }));
    return element("th", { scope: "col", className: name === "model" ? "left" : "" }, button);
  });
  const body = element("tbody", {});
  const scroll = element("div", { className: "rows", tabIndex: 0, role: "region", "aria-label": "Layers: arrow keys choose one" },
    element("table", {}, element("thead", {}, element("tr", {}, ...heads)), body));
  const detail = element("div", { className: "detail" });
  const legend = element("p", { className: "legend" }, "The darker, the larger the share of the non-zero elements, by power of two. "
    + "Hatched on the left: flushed to zero; from there to the dotted line: kept with fewer bits; hatched on the right: overflow. Shares are of what was counted in the sampled steps.");
  root.replaceChildren(controls, said, scroll, legend, detail);
  root.classList.add("explorer");

  // -- what is shown
  const isScaled = () => kinds.find((/** @type {any} */ each) => each.name === state.kind)?.is_scaled;
  const log2Scale = () => (isScaled() ? state.scale : 0);
  const counted = (/** @type {any} */ layer) => (state.block < 0 ? layer.whole : layer.blocks[state.block]);
  /** @param {any} layer */
  function figures(layer) {
    const h = counted(layer);
    if (!h) return null;
    const [k, f, all] = [log2Scale(), state.format, nonzero(h)];
    const [low, high] = overflowed(h, f, k);
    return { h, all, flushed: flushed(h, f, k), subnormal: subnormal(h, f, k), low, high };
  }
  const share = (/** @type {number} */ count, /** @type {number} */ all) => (all ? count / all : 0);
  /** @param {any} layer @returns {number} */
  function rank(layer) {
    const found = figures(layer);
    if (!found) return -1;
    if (state.sort === "flushed") return share(found.flushed, found.all);
    if (state.sort === "subnormal") return share(found.subnormal, found.all);
    if (state.sort === "overflow") return share(found.high, found.all);
    if (state.sort === "broken") return found.h.infs + found.h.nans;
    return found.all ? found.h.min + found.h.counts.length + 400 : 0;
  }
  /** One entry a row: a layer, or a group of repeated ones with the member that is worst. */
  function rows() {
    const words = state.search.toLowerCase();
    const found = layers.filter((/** @type {any} */ layer) => layer.kind === state.kind
      && (!words || layer.name.toLowerCase().includes(words)));
    if (state.sort !== "model") {
      return found.map((/** @type {any} */ layer) => ({ layer, rank: rank(layer) }))
        .sort((/** @type {any} */ one, /** @type {any} */ other) => other.rank - one.rank || one.layer.place - other.layer.place);
    }
    const made = [];
    const groups = new Map();
    for (const layer of found) {
      const group = data.groups[layer.group];
      if (words || group.size < 2) {
        made.push({ layer });
      } else if (groups.has(layer.group)) {
        groups.get(layer.group).members.push(layer);
      } else {
        const row = { group: layer.group, name: group.name, members: [layer], layer };
        groups.set(layer.group, row);
        made.push(row);
      }
    }
    for (const row of groups.values()) row.layer = worst(row.members);
    return made.flatMap((/** @type {any} */ row) => (row.members && state.open.has(row.group)
      ? [row, ...row.members.map((/** @type {any} */ layer) => ({ layer, inside: true }))] : [row]));
  }
  /** @param {any[]} members */
  function worst(members) {
    const badness = (/** @type {any} */ layer) => {
      const found = figures(layer);
      return found ? share(found.high, found.all) * 2 + share(found.flushed, found.all) : -1;
    };
    return members.reduce((one, other) => (badness(other) > badness(one) ? other : one));
  }

  // -- drawing
  let shown = rows();
  /** Exponents at the left and the right end of the map. */
  function span() {
    const seen = layers.filter((/** @type {any} */ layer) => layer.kind === state.kind && nonzero(layer.whole)).map((/** @type {any} */ layer) => layer.whole);
    const f = state.format;
    const ends = seen.flatMap((/** @type {Histogram} */ h) => [h.min, h.min + h.counts.length]);
    // The same at every scale, so that only the limits move.
    const isNarrowFormat = f.top - f.low < 64;
    return [Math.min(...ends, isNarrowFormat ? f.low - 4 : 0) - 1, Math.max(...ends, isNarrowFormat ? f.top + 2 : 0) + 1];
  }
  let ends = span();
  let width = WIDE;
  const colours = () => {
    const style = getComputedStyle(root);
    return (/** @type {string} */ name) => style.getPropertyValue(`--${name}`).trim();
  };
  /** @param {HTMLCanvasElement} canvas @param {number} height */
  function sharp(canvas, height) {
    const ratio = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    return context;
  }
  /** Exponent from which on not everything is flushed: of a subnormal the upper half of the binade below rounds up. */
  const flushEdge = () => (state.format.ftz ? state.format.normal : state.format.low - 1);
  const place = (/** @type {number} */ exponent) => ((exponent - ends[0]) / (ends[1] - ends[0])) * width;
  /** Where the format flushes, holds fewer bits, and overflows: hatched, with lines at the edges. */
  function limits(/** @type {CanvasRenderingContext2D} */ context, /** @type {number} */ height, /** @type {(name: string) => string} */ colour) {
    const [k, f] = [log2Scale(), state.format];
    const zones = [[ends[0], flushEdge() - k, "warning", 1], [f.top + 1 - k, ends[1], "error", -1]];
    for (const [from, to, name, slope] of /** @type {[number, number, string, number][]} */ (zones)) {
      const [left, right] = [Math.max(place(from), 0), Math.min(place(to), width)];
      if (right <= left) continue;
      context.save();
      context.beginPath();
      context.rect(left, 0, right - left, height);
      context.clip();
      context.strokeStyle = colour(name);
      context.globalAlpha = 0.35;
      context.beginPath();
      for (let x = left - height; x < right + height; x += 6) {
        context.moveTo(x, slope > 0 ? height : 0);
        context.lineTo(x + height, slope > 0 ? 0 : height);
      }
      context.stroke();
      context.restore();
    }
    context.strokeStyle = colour("soft");
    for (const exponent of [flushEdge() - k, f.normal - k, f.top + 1 - k]) {
      const x = Math.round(place(exponent)) + 0.5;
      context.setLineDash(exponent === f.normal - k ? [2, 2] : []);
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, height);
      context.stroke();
    }
    context.setLineDash([]);
  }
  /** @param {HTMLCanvasElement} canvas @param {any} layer @param {(name: string) => string} colour */
  function strip(canvas, layer, colour) {
    const context = sharp(canvas, ROW - 2);
    const h = counted(layer);
    if (h) {
      const all = nonzero(h);
      context.fillStyle = colour("fill");
      h.counts.forEach((/** @type {number} */ count, /** @type {number} */ index) => {
        if (!count) return;
        context.globalAlpha = 0.15 + 0.85 * clamp(1 + Math.log10(count / all) / DECADES, 0, 1);
        const left = Math.round(place(h.min + index));
        context.fillRect(left, 1, Math.max(Math.round(place(h.min + index + 1)) - left, 1), ROW - 4);
      });
      context.globalAlpha = 1;
    }
    limits(context, ROW - 2, colour);
  }
  function drawAxis(/** @type {(name: string) => string} */ colour) {
    const context = sharp(/** @type {HTMLCanvasElement} */ (axis), ROW);
    context.fillStyle = colour("soft");
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "center";
    const step = [2, 4, 8, 16, 32, 64].find((each) => (ends[1] - ends[0]) / each < width / 36) ?? 64;
    for (let exponent = Math.ceil(ends[0] / step) * step; exponent <= ends[1]; exponent += step) {
      const x = place(exponent);
      if (x > 14 && x < width - 14) context.fillText(`2^${exponent}`, x, ROW - 6);
    }
  }
  function drawRows() {
    const colour = colours();
    const first = clamp(Math.floor(scroll.scrollTop / ROW) - 4, 0, Math.max(0, shown.length - 1));
    const last = Math.min(shown.length, first + SHOWN + 12);
    const spacer = (/** @type {number} */ number) => element("tr", { "aria-hidden": "true" },
      element("td", { colSpan: headings.length, style: `height:${number * ROW}px;padding:0;border:0` }));
    const made = shown.slice(first, last).map((/** @type {any} */ row, /** @type {number} */ offset) => drawnRow(row, first + offset, colour));
    body.replaceChildren(...(first ? [spacer(first)] : []), ...made, ...(last < shown.length ? [spacer(shown.length - last)] : []));
    body.parentElement?.setAttribute("aria-rowcount", String(shown.length));
  }
  /** @param {any} row @param {number} index @param {(name: string) => string} colour */
  function drawnRow(row, index, colour) {
    const { layer } = row;
    const found = figures(layer);
    const canvas = element("canvas", { "aria-hidden": "true" });
    strip(/** @type {HTMLCanvasElement} */ (canvas), layer, colour);
    const name = row.members ? row.name : layer.name || "(the model itself)";
    const head = element("th", { scope: "row", className: `left${row.inside ? " inside" : ""}`, title: row.members ? `${row.members.length} layers; the worst: ${layer.name}` : name });
    if (row.members) {
      const isOpen = state.open.has(row.group);
      const button = element("button", { type: "button", "aria-expanded": String(isOpen) }, `${isOpen ? "▾" : "▸"} ${shortened(name)}`);
      button.addEventListener("click", (/** @type {Event} */ event) => {
        event.stopPropagation();
        if (isOpen) state.open.delete(row.group);
        else state.open.add(row.group);
        change({});
      });
      head.append(button);
    } else {
      head.textContent = shortened(name);
    }
    const words = found ? cellWords(layer, found) : ["-", "-", "-", "-", "-"];
    const tones = found ? [tone(found.flushed, found.all, 0.01), "", found.high ? "error" : "", found.h.infs || found.h.nans ? "error" : "", ""] : [];
    const made = element("tr", { "aria-rowindex": index + 1, className: row.layer.name === state.layer ? "chosen" : "" },
      head, element("td", { className: "map" }, canvas),
      ...words.map((text, column) => element("td", { className: tones[column] ?? "" }, text)));
    if (found) Object.assign(made.dataset, { name: layer.name, flushed: found.flushed, subnormal: found.subnormal, low: found.low, high: found.high, all: found.all });
    made.addEventListener("click", () => change({ layer: layer.name }));
    return made;
  }
  /** The end of a long name: it tells layers apart. The whole stands in the title, and below once the layer is chosen. */
  const shortened = (/** @type {string} */ name) => {
    const most = isNarrow() ? 16 : 48;
    return name.length > most ? `…${name.slice(1 - most)}` : name;
  };
  const tone = (/** @type {number} */ count, /** @type {number} */ all, /** @type {number} */ limit) => (share(count, all) > limit ? "warning" : "");
  /** @param {any} layer @param {any} found */
  function cellWords(layer, found) {
    const { h, all } = found;
    // Zeros of what had passed through a narrow format may have been values: then the share is one of the visible ones.
    const isPartial = layer.floor !== null && h.zeros > 0;
    const over = found.low === found.high ? percent(share(found.high, all)) : `${percent(share(found.low, all))}..${percent(share(found.high, all))}`;
    const broken = [h.infs && "inf", h.nans && "NaN"].filter(Boolean).join(", ") || "none";
    return [`${isPartial ? "~" : ""}${percent(share(found.flushed, all))}`, percent(share(found.subnormal, all)),
      over, broken, all ? `2^${h.min + h.counts.length - 1}` : "-"];
  }
  function drawDetail() {
    const layer = layers.find((/** @type {any} */ each) => each.kind === state.kind && each.name === state.layer);
    const found = layer && figures(layer);
    if (!found) {
      detail.replaceChildren();
      return;
    }
    const { h, all } = found;
    const name = layer.name || "(the model itself)";
    const over = found.low === found.high ? `${found.low.toLocaleString("en")}` : `${found.low.toLocaleString("en")} to ${found.high.toLocaleString("en")}`;
    const facts = [
      `${all.toLocaleString("en")} non-zero elements were counted in ${stepsInWords()}, ${h.zeros.toLocaleString("en")} zeros, ${h.infs.toLocaleString("en")} infinities, ${h.nans.toLocaleString("en")} NaNs.`,
      `${state.format.label}${isScaled() ? ` at a loss scale of 2^${state.scale}` : ""}: ${found.flushed.toLocaleString("en")} flushed to zero, ${found.subnormal.toLocaleString("en")} kept with fewer bits, ${over} overflowed.`,
    ];
    if (layer.floor !== null && h.zeros > 0) facts.push(`Magnitudes up to 2^${layer.floor} may have been flushed before they were counted: then they are among the zeros.`);
    if (layer.noise) facts.push("In theory this gradient is zero: what was counted is rounding noise.");
    detail.replaceChildren(element("h4", {}, name), ...facts.map((fact) => element("p", {}, fact)), ...(isScaled() ? [curve(layer)] : []));
  }
  /** The flushed and the overflowed share at every scale. @param {any} layer */
  function curve(layer) {
    const h = counted(layer);
    const [wide, height, left, bottom] = [480, 120, 40, 18];
    const all = nonzero(h);
    const x = (/** @type {number} */ k) => left + ((k - SCALES[0]) / (SCALES[1] - SCALES[0])) * (wide - left - 8);
    const y = (/** @type {number} */ part) => 6 + (1 - part) * (height - bottom - 8);
    const path = (/** @type {(k: number) => number} */ value) => {
      let drawn = "";
      for (let k = SCALES[0]; k <= SCALES[1]; k += 1) drawn += `${drawn ? "L" : "M"}${x(k).toFixed(1)} ${y(share(value(k), all)).toFixed(1)}`;
      return drawn;
    };
    const svg = (/** @type {string} */ tag, /** @type {Record<string, any>} */ fields, /** @type {string} */ words = "") => {
      const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
      for (const [name, value] of Object.entries(fields)) made.setAttribute(name, value);
      made.textContent = words;
      return made;
    };
    const picture = svg("svg", { viewBox: `0 0 ${wide} ${height}`, role: "img", "aria-label": "Shares flushed and overflowed against the loss scale" });
    picture.append(
      svg("path", { d: path((k) => flushed(h, state.format, k)), class: "curve flushes" }),
      svg("path", { d: path((k) => overflowed(h, state.format, k)[1]), class: "curve overflows" }),
      svg("line", { x1: x(state.scale), x2: x(state.scale), y1: 4, y2: height - bottom, class: "now" }),
      ...[0, 0.5, 1].map((part) => svg("text", { x: left - 6, y: y(part) + 4, "text-anchor": "end" }, `${100 * part}%`)),
      ...[-24, -8, 8, 24, 40].map((k) => svg("text", { x: x(k), y: height - 3, "text-anchor": k === SCALES[1] ? "end" : "middle" }, `2^${k}`)),
    );
    const legend = element("p", { className: "dim" }, "flushed (solid) and overflowed (dashed), of the non-zero elements, against the loss scale");
    const figure = element("figure", {}, legend);
    figure.prepend(picture);
    return figure;
  }
  const stepsInWords = () => {
    if (state.block < 0) return "the whole run";
    const { first, last } = data.blocks[state.block];
    return first === last ? `step ${first}` : `steps ${first} to ${last}`;
  };
  function draw() {
    width = isNarrow() ? NARROW : WIDE;
    shown = rows();
    ends = span();
    kind.value = state.kind ?? "";
    format.value = state.format.name;
    scale.value = String(state.scale);
    scale.disabled = recommended.disabled = !isScaled();
    scaleWords.textContent = isScaled() ? `2^${state.scale}` : "does not multiply these";
    block.value = String(state.block);
    blockWords.textContent = stepsInWords();
    heads.forEach((head, column) => head.setAttribute("aria-sort", headings[column][0] === state.sort ? (state.sort === "model" ? "ascending" : "descending") : "none"));
    const own = layers.filter((/** @type {any} */ layer) => layer.kind === state.kind);
    const losing = own.filter((/** @type {any} */ layer) => { const found = figures(layer); return found && share(found.flushed, found.all) > 0.01; }).length;
    const over = own.filter((/** @type {any} */ layer) => { const found = figures(layer); return found && found.high > 0; }).length;
    const broken = own.filter((/** @type {any} */ layer) => { const found = figures(layer); return found && found.h.infs + found.h.nans > 0; }).length;
    said.textContent = `${state.format.label}${isScaled() ? ` at 2^${state.scale}` : ""}, ${stepsInWords()}: of ${own.length} tensors ${losing} ${losing === 1 ? "loses" : "lose"} more than 1% of their elements to zero, ${over} ${over === 1 ? "overflows" : "overflow"}${broken ? `, ${broken} ${broken === 1 ? "holds" : "hold"} infinities or NaNs` : ""}.`;
    drawAxis(colours());
    drawRows();
    drawDetail();
  }
  /** @param {Partial<typeof state>} changed */
  function change(changed) {
    Object.assign(state, changed);
    draw();
    root.dispatchEvent(new CustomEvent("chosen", { detail: changed }));
    const told = new URLSearchParams({ model: data.model, kind: state.kind ?? "", format: state.format.name, scale: String(state.scale) });
    if (state.block >= 0) told.set("block", String(state.block));
    if (state.layer !== null) told.set("layer", state.layer);
    try {
      history.replaceState(null, "", `#${told}`);
    } catch {
      // A frame without an address of its own, as in a notebook.
    }
  }
  kind.addEventListener("change", () => change({ kind: kind.value }));
  format.addEventListener("change", () => change({ format: data.formats.find((/** @type {Format} */ each) => each.name === format.value) }));
  scale.addEventListener("input", () => change({ scale: Number(scale.value) }));
  block.addEventListener("input", () => change({ block: Number(block.value) }));
  search.addEventListener("input", () => change({ search: search.value }));
  recommended.addEventListener("click", () => change({ scale: data.recommended }));
  scroll.addEventListener("scroll", drawRows);
  scroll.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 };
    const move = moves[/** @type {keyof typeof moves} */ (event.key)];
    if (!move || event.target !== scroll || !shown.length) return;
    event.preventDefault();
    const now = shown.findIndex((/** @type {any} */ row) => row.layer.name === state.layer);
    const next = clamp(now + move, 0, shown.length - 1);
    if (next * ROW < scroll.scrollTop || (next + 2) * ROW > scroll.scrollTop + scroll.clientHeight) scroll.scrollTop = next * ROW - scroll.clientHeight / 2;
    change({ layer: shown[next].layer.name });
  });
  for (const query of ["(prefers-color-scheme: dark)", "(max-width: 760px)"]) matchMedia(query).addEventListener("change", draw, { signal: gone.signal });
  drawn.set(root, {
    state,
    gone,
    /** The block that was looked at, among those of newer data: they grow together, and the last goes on. @param {any[]} blocks */
    blockNow(blocks) {
      if (state.block < 0) return -1;
      const { first } = data.blocks[state.block];
      return state.block === data.blocks.length - 1 ? blocks.length - 1 : blocks.findIndex((each) => each.last >= first);
    },
    figures: () => new Map(layers.filter((/** @type {any} */ layer) => layer.kind === state.kind)
      .map((/** @type {any} */ layer) => [layer.name, figures(layer)]).filter((/** @type {any} */ entry) => entry[1])),
    /** @param {any} choice */
    follow({ block: ignored, format: other, kind: name, ...choice }) {
      if (other) choice.format = sameFormat(other);
      if (kinds.some((/** @type {any} */ each) => each.name === name)) choice.kind = name;
      Object.assign(state, choice);
      search.value = state.search;
      draw();
    },
  });
  draw();
}

/** @param {number} value @param {number} low @param {number} high */
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

/** Draws every map of the page; where one can't be, what stands there stays and says why. */
export async function start() {
  for (const root of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll("[data-widget]"))) {
    try {
      render(root, await decode(root.dataset.widget ?? ""));
    } catch (error) {
      root.append(element("p", { className: "error" }, `The map could not be drawn: ${error}`));
    }
  }
}
