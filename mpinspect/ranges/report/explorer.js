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
 * @property {number} flush          from which on not everything is flushed: above it half of the smallest subnormal rounds up
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
  const edge = f.flush - k;
  return countBelow(h, edge) + (f.ftz ? 0 : at(h, h.powers, edge));
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

/** Mean of significands spread evenly over [1, 2), for values of which the exponent alone is known. */
const MEAN_SIGNIFICAND = 1.5;
/** Of each histogram the sum of magnitudes below each exponent, in units of the largest power of two. @type {WeakMap<Histogram, number[]>} */
const masses = new WeakMap();

/** Share of the sum of magnitudes that the format flushes, an estimate as in Python. @param {Histogram} h @param {Format} f @param {number} k */
export function lostMass(h, f, k) {
  const bins = h.counts.length;
  if (!bins) return 0;
  let mass = masses.get(h);
  if (!mass) {
    mass = sums(h.counts.map((count, bin) => (h.powers[bin] + 2 * h.tops[bin] + MEAN_SIGNIFICAND * (count - h.powers[bin] - h.tops[bin])) * 2 ** (bin + 1 - bins)));
    masses.set(h, mass);
  }
  const edge = f.flush - k;
  const onEdge = f.ftz ? 0 : at(h, h.powers, edge) * 2 ** (edge - h.min + 1 - bins);
  return (mass[clamp(edge - h.min, 0, bins)] + onEdge) / mass[bins];
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

/** @param {string} tag @param {Record<string, any>} fields @param {(Node | string)[]} children @returns {SVGElement} */
function svg(tag, fields, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(fields)) made.setAttribute(name, value);
  made.append(...children);
  return /** @type {SVGElement} */ (made);
}

/**
 * @typedef {object} Axis
 * @property {[number, number]} ends
 * @property {number[]} ticks
 * @property {(value: number) => string} words   what stands at a tick
 * @property {string} title
 */

/** Pixels around a chart's field. */
const [LEFT, RIGHT, TOP, BOTTOM] = [54, 14, 12, 36];

/**
 * A chart with labelled axes and nothing in its field, and where values lie in it.
 * @param {number} width @param {number} height in pixels @param {string} told for who can't see it @param {Axis} across @param {Axis} up
 */
function chart(width, height, told, across, up) {
  const along = (/** @type {Axis} */ axis, /** @type {number} */ value) => (value - axis.ends[0]) / (axis.ends[1] - axis.ends[0] || 1);
  const [right, bottom] = [width - RIGHT, height - BOTTOM];
  const x = (/** @type {number} */ value) => LEFT + along(across, value) * (right - LEFT);
  const y = (/** @type {number} */ value) => bottom - along(up, value) * (bottom - TOP);
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": told });
  picture.append(
    ...up.ticks.flatMap((tick) => [
      svg("line", { x1: LEFT, x2: right, y1: y(tick), y2: y(tick), class: "grid" }),
      svg("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, up.words(tick)),
    ]),
    svg("path", { d: `M${LEFT} ${TOP}V${bottom}H${right}`, class: "axis" }),
    ...across.ticks.map((tick) => svg("text", { x: x(tick), y: bottom + 14, "text-anchor": x(tick) > right - 18 ? "end" : "middle" }, across.words(tick))),
    svg("text", { x: (LEFT + right) / 2, y: height - 4, "text-anchor": "middle", class: "title" }, across.title),
    svg("text", { transform: `translate(11 ${(TOP + bottom) / 2}) rotate(-90)`, "text-anchor": "middle", class: "title" }, up.title),
  );
  /** The value below a pointer. @param {MouseEvent} event */
  const under = (event) => {
    const part = (event.clientX - picture.getBoundingClientRect().left - LEFT) / (right - LEFT);
    return across.ends[0] + Math.min(Math.max(part, 0), 1) * (across.ends[1] - across.ends[0]);
  };
  return { picture, x, y, right, bottom, under };
}

/** Round numbers from one to another. @param {number} from @param {number} to @param {number} most how many about */
function ticks(from, to, most) {
  const least = Math.max((to - from) / most, 1);
  const unit = 10 ** Math.floor(Math.log10(least));
  const step = unit * ([1, 2, 5].find((each) => each * unit >= least) ?? 10);
  const found = [];
  for (let value = Math.ceil(from / step) * step; value <= to; value += step) found.push(value);
  return found;
}

const power = (/** @type {number} */ exponent) => `2^${Number(exponent.toFixed(1))}`;
const number = (/** @type {number} */ count) => count.toLocaleString("en");
/** A sign of a legend, drawn as in the chart, and its words. @param {string} name @param {string} words */
const key = (name, words) => element("span", { className: "entry" }, element("i", { className: `key ${name}` }), words);

const ROW = 22;
/** Most rows of a printed table. */
const PRINTED = 400;
const [WIDE, NARROW] = [360, 180];
const isNarrow = () => matchMedia("(max-width: 760px)").matches;
const SHOWN = 18;
const SCALES = [-24, 40];
/** Exponent of FP32's largest value. */
const FLOAT32_TOP = 127;
/** Shares from 10^-5 on are told apart. */
const DECADES = 5;

/** Of each element that shows a map: what the reader chose in it. @type {WeakMap<HTMLElement, any>} */
const drawn = new WeakMap();
/** The choice of all models of a page, in its switch and its address. */
const ALL = "all";

/** Takes over in one map what was chosen in another: the detail of its event "chosen". @param {HTMLElement} root @param {any} choice */
export const follow = (root, choice) => drawn.get(root)?.follow(choice);

/** Ends a map that is taken out of the page. @param {HTMLElement} root */
export function forget(root) {
  drawn.get(root)?.gone.abort();
  drawn.delete(root);
}

/** What the reader chose in a map. @param {HTMLElement} root */
export const chosenIn = (root) => drawn.get(root)?.state;

/** The format in which maps are compared: the narrowest of those in which each would open. @param {any[]} several data of each */
export function comparedIn(several) {
  const own = several.map((data) => data.formats.find((/** @type {Format} */ each) => each.name === data.format));
  return own.reduce((one, other) => (other.top - other.low < one.top - one.low ? other : one)).name;
}

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
  const lastStep = Math.max(data.steps - 1, ...data.blocks.map((/** @type {any} */ each) => each.last), ...data.events.map((/** @type {any} */ each) => each.step));
  const isRepeated = (/** @type {any} */ layer) => data.groups[layer.group].size > 1;
  /** Storage formats in which updates are lost, the measured ones first. @type {any[]} */
  const storages = Object.values(data.lost).sort((one, other) => Number(other.measured) - Number(one.measured));
  const kinds = data.kinds.filter((/** @type {any} */ kind) => layers.some((/** @type {any} */ layer) => layer.kind === kind.name));
  const asked = new URLSearchParams(location.hash.slice(1));
  const isMine = !asked.has("model") || asked.get("model") === data.model || data.view === ALL;
  const wanted = (/** @type {string} */ name) => (isMine ? asked.get(name) : null);
  const sameFormat = (/** @type {Format} */ other) => data.formats.find((/** @type {Format} */ each) => each.name === other.name) ?? data.formats[0];
  const state = {
    kind: kinds.some((/** @type {any} */ kind) => kind.name === wanted("kind")) ? wanted("kind") : kinds[0]?.name,
    format: data.formats.find((/** @type {Format} */ format) => format.name === wanted("format"))
      ?? data.formats.find((/** @type {Format} */ format) => format.name === data.format) ?? data.formats[0],
    scale: clamp(Number(wanted("scale") ?? data.own) || 0, SCALES[0], SCALES[1]),
    block: clamp(Number(wanted("block") ?? -1), -1, data.blocks.length - 1),
    /** The step of the chosen event. @type {number | null} */
    step: null,
    search: "",
    sort: "model",
    layer: wanted("layer"),
    open: new Set(),
  };
  for (const layer of layers) if (layer.name === state.layer && isRepeated(layer)) state.open.add(layer.group);
  if (before) Object.assign(state, before.state, { format: sameFormat(before.state.format), block: before.blockNow(data.blocks) });

  // -- the controls
  const kind = element("select", {}, ...kinds.map((/** @type {any} */ each) => element("option", { value: each.name }, each.title)));
  const format = element("select", {}, ...data.formats.map((/** @type {Format} */ each) => element("option", { value: each.name }, each.label)));
  const scale = element("input", { type: "range", min: SCALES[0], max: SCALES[1], step: 1, "aria-label": "Loss scale, a power of two" });
  const scaleWords = element("output", {});
  const block = element("input", { type: "range", min: 0, max: lastStep, step: 1, "aria-label": "Steps shown" });
  const blockWords = element("output", {});
  const search = element("input", { type: "search", placeholder: "part of a name", value: state.search });
  const [suggestedFormat, suggestedScale] = data.suggested ?? ["", 0];
  const suggested = data.formats.find((/** @type {Format} */ each) => each.name === suggestedFormat);
  const recommended = element("button", { type: "button" }, suggested ? `show ${suggested.label} at 2^${suggestedScale}, as suggested` : "");
  const whole = element("button", { type: "button" }, "show the whole run");
  const label = (/** @type {string} */ words, /** @type {Node[]} */ ...controls) => element("label", {}, element("span", {}, words), ...controls);
  const controls = element("div", { className: "controls" }, label("Tensors", kind), label("Format", format), label("Search", search));
  const said = element("p", { className: "said", role: "status", "aria-live": "polite" });
  const hasScrubber = data.blocks.length > 1;
  const [shares, timeline] = [element("div", {}), element("div", {})];
  const ofScale = element("figure", {},
    element("div", { className: "controls" }, element("b", {}, "Loss scale"), scaleWords, ...(suggested ? [recommended] : [])), shares, scale);
  const overSteps = element("figure", {},
    element("div", { className: "controls" }, element("b", {}, "Steps"), blockWords, ...(hasScrubber ? [whole] : [])), timeline, ...(hasScrubber ? [block] : []));
  const legends = [element("figcaption", { className: "legend" }), element("figcaption", { className: "legend" })];
  ofScale.append(legends[0]);
  overSteps.append(legends[1]);
  const charts = element("div", { className: "charts" }, ofScale, overSteps);
  const axis = element("canvas", { "aria-hidden": "true" });
  const headings = [["model", "layer", ""], ["", "map", ""], ["flushed", "flushed", "share of the non-zero elements that round to zero in this format"],
    ["subnormal", "subnormal", "survives with fewer bits"], ["overflow", "overflow", "beyond the format's largest value"],
    ["broken", "inf, NaN", "infinities and NaNs counted"], ["largest", "largest", "magnitude, rounded down to a power of two"],
    ...(storages.length ? [["lost", `update lost in ${storages[0].label}`, "share of the updates that rounding undoes where the weights are stored so"]] : []),
    ...data.notes.columns.map((/** @type {string[]} */ [words, meaning], /** @type {number} */ place) => [`note${place}`, words, meaning])];
  const heads = headings.map(([name, words, meaning]) => {
    if (!name) return element("th", { scope: "col", className: "map" }, axis, element("span", { className: "unseen" }, words));
    const button = element("button", { type: "button", title: meaning }, words);
    button.addEventListener("click", () => change({ sort: name }));
    return element("th", { scope: "col", className: name === "model" ? "left" : "" }, button);
  });
  const body = element("tbody", {});
  const scroll = element("div", { className: "rows", tabIndex: 0, role: "region", "aria-label": "Layers: arrow keys choose one" },
    element("table", {}, element("thead", {}, element("tr", {}, ...heads)), body));
  const detail = element("div", { className: "detail" });
  const happened = events();
  const legend = element("p", { className: "legend" }, "The darker, the larger the share of the non-zero elements, by power of two. "
    + "Hatched on the left: flushed; from there to the dotted line: subnormal; hatched on the right: overflow. Shares are of what was counted in the sampled steps. ",
    headings.filter(([, , meaning]) => meaning).map(([, words, meaning]) => `${words}: ${meaning}`).join("; "), ".");
  root.replaceChildren(controls, said, charts, happened, scroll, legend, detail);
  root.classList.add("explorer");

  // -- what is shown
  const isScaled = (/** @type {string | undefined} */ name = state.kind) => kinds.find((/** @type {any} */ each) => each.name === name)?.is_scaled;
  const log2Scale = () => (isScaled() ? state.scale : 0);
  const counted = (/** @type {any} */ layer) => (state.block < 0 ? layer.whole : layer.blocks[state.block]);
  /** @param {any} layer */
  function figures(layer) {
    const h = counted(layer);
    if (!h) return null;
    const [k, f, all] = [isScaled(layer.kind) ? state.scale : 0, state.format, nonzero(h)];
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
    if (state.sort === "lost") return lostOf(storages[0], layer) ?? -1;
    if (state.sort.startsWith("note")) return data.notes.cells[layer.module]?.[Number(state.sort.slice(4))]?.[2] ?? -1;
    return found.all ? found.h.min + found.h.counts.length + 400 : 0;
  }
  /** Share of a parameter's updates that are lost, or of all parameters'; null where none was seen. @param {any} storage @param {any} layer @param {number} block */
  function lostOf(storage, layer, block = state.block) {
    /** @type {any[]} */
    const chosen = layer ? [storage.tensors[layer.name] ?? []] : Object.values(storage.tensors);
    const seen = chosen.flatMap((blocks) => (block < 0 ? blocks : [blocks[block]])).filter(Boolean);
    const nonzero = seen.reduce((sum, each) => sum + each[1], 0);
    return nonzero ? seen.reduce((sum, each) => sum + each[0], 0) / nonzero : null;
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
  /** @param {any} layer */
  function badness(layer) {
    const found = figures(layer);
    return found && !layer.noise ? share(found.high, found.all) * 2 + share(found.flushed, found.all) : -1;
  }
  /** @param {any[]} members */
  const worst = (members) => members.reduce((one, other) => (badness(other) > badness(one) ? other : one));
  /** The scaled kind whose worst layer loses most, where the page opens. */
  function worstKind() {
    const scaled = layers.filter((/** @type {any} */ layer) => isScaled(layer.kind));
    return (scaled.length ? worst(scaled) : layers[0])?.kind;
  }

  if (!before && !wanted("kind") && !wanted("layer")) state.kind = worstKind();

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
  let isPrinted = false;
  const colours = () => {
    const style = getComputedStyle(root);
    const known = new Map(["fill", "soft", "warning", "error"].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    return (/** @type {string} */ name) => known.get(name) ?? "";
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
  const place = (/** @type {number} */ exponent) => ((exponent - ends[0]) / (ends[1] - ends[0])) * width;
  /** Where the format flushes, holds fewer bits, and overflows: hatched, with lines at the edges. */
  function limits(/** @type {CanvasRenderingContext2D} */ context, /** @type {number} */ height, /** @type {(name: string) => string} */ colour) {
    const [k, f] = [log2Scale(), state.format];
    const zones = [[ends[0], state.format.flush - k, "warning", 1], [f.top + 1 - k, ends[1], "error", -1]];
    for (const [from, to, name, slope] of /** @type {[number, number, string, number][]} */ (zones)) {
      const [left, right] = [Math.max(place(from), 0), Math.min(place(to), width)];
      if (right <= left) continue;
      context.fillStyle = hatching(context, colour(name), slope);
      context.fillRect(left, 0, right - left, height);
    }
    context.strokeStyle = colour("soft");
    for (const exponent of [state.format.flush - k, f.normal - k, f.top + 1 - k]) {
      const x = Math.round(place(exponent)) + 0.5;
      context.setLineDash(exponent === f.normal - k ? [2, 2] : []);
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, height);
      context.stroke();
    }
    context.setLineDash([]);
  }
  /** @type {Map<string, CanvasPattern>} */
  const hatchings = new Map();
  /** Diagonal lines, as a pattern: to fill with it takes a tenth of drawing the lines. @param {CanvasRenderingContext2D} context @param {string} colour @param {number} slope */
  function hatching(context, colour, slope) {
    const ratio = window.devicePixelRatio || 1;
    const key = [colour, slope, ratio].join();
    const known = hatchings.get(key);
    if (known) return known;
    const side = Math.round(6 * ratio);
    const tile = element("canvas", { width: side, height: side });
    const pen = tile.getContext("2d");
    pen.strokeStyle = colour;
    pen.globalAlpha = 0.35;
    pen.lineWidth = ratio;
    pen.beginPath();
    // The lines of the neighbouring tiles reach into the corners.
    for (const shift of [-side, 0, side]) {
      pen.moveTo(shift - side, slope > 0 ? 2 * side : -side);
      pen.lineTo(shift + 2 * side, slope > 0 ? -side : 2 * side);
    }
    pen.stroke();
    const made = /** @type {CanvasPattern} */ (context.createPattern(tile, "repeat"));
    made.setTransform(new DOMMatrix().scale(1 / ratio));
    hatchings.set(key, made);
    return made;
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
    const step = [2, 4, 8, 16, 32, 64].find((each) => (ends[1] - ends[0]) / each < width / 44) ?? 64;
    for (let exponent = Math.ceil(ends[0] / step) * step; exponent <= ends[1]; exponent += step) {
      const x = place(exponent);
      if (x > 14 && x < width - 14) context.fillText(`2^${exponent}`, x, ROW - 6);
    }
  }
  function drawRows() {
    const colour = colours();
    const first = isPrinted ? 0 : clamp(Math.floor(scroll.scrollTop / ROW) - 4, 0, Math.max(0, shown.length - 1));
    const last = isPrinted ? Math.min(shown.length, PRINTED) : Math.min(shown.length, first + SHOWN + 12);
    const spacer = (/** @type {number} */ number) => element("tr", { "aria-hidden": "true" },
      element("td", { colSpan: headings.length, style: `height:${number * ROW}px;padding:0;border:0` }));
    // What a strip shows besides its layer: one that shows it already is not drawn again.
    const look = [state.block, state.format.name, log2Scale(), ends, width, window.devicePixelRatio, colour("fill"), colour("soft"), isNarrow()].join();
    const middle = scroll.scrollTop / ROW + SHOWN / 2;
    const before = rowElements;
    rowElements = new Map();
    const made = shown.slice(first, last).map((/** @type {any} */ row, /** @type {number} */ offset) => {
      const key = [layers.indexOf(row.layer), row.inside ?? "", row.members ? state.open.has(row.group) : "", isNarrow()].join();
      const kept = before.get(key) ?? rowOf(row);
      rowElements.set(key, kept);
      // Rows above and below what is seen are there to be scrolled to, and are drawn then.
      const isSeen = isPrinted || Math.abs(first + offset - middle) <= SHOWN / 2 + 1;
      if (isSeen && kept.look !== look) strip(kept.canvas, row.layer, colour);
      if (isSeen) kept.look = look;
      fill(kept, row.layer, first + offset);
      return kept.row;
    });
    const all = [...(first ? [spacer(first)] : []), ...made, ...(last < shown.length ? [spacer(shown.length - last)] : [])];
    // Moving rows about costs a layout of the page.
    if (first !== drawnFrom || shown.length !== drawnOf || made.length !== standing.length || made.some((row, index) => row !== standing[index])) body.replaceChildren(...all);
    [drawnFrom, drawnOf, standing] = [first, shown.length, made];
    body.parentElement?.setAttribute("aria-rowcount", String(shown.length));
  }
  /** The rows that stand in the table, by what they are made of: creating a canvas takes longer than drawing on it. @type {Map<string, any>} */
  let rowElements = new Map();
  let [drawnFrom, drawnOf] = [-1, -1];
  /** @type {HTMLElement[]} */
  let standing = [];
  /** A row with its name and empty cells. @param {any} row */
  function rowOf(row) {
    const { layer } = row;
    const canvas = element("canvas", { width: 1, height: 1, "aria-hidden": "true", style: `width:${width}px;height:${ROW - 2}px` });
    const name = row.members ? row.name : layer.name || "(the model itself)";
    const head = element("th", { scope: "row", className: `left${row.inside ? " inside" : ""}`, title: row.members ? `${row.members.length} layers; the worst: ${layer.name}` : name });
    if (row.members) {
      const isOpen = state.open.has(row.group);
      const button = element("button", { type: "button", "aria-expanded": String(isOpen) }, `${isOpen ? "▾" : "▸"} `, element("bdi", {}, shortened(name)));
      button.addEventListener("click", (/** @type {Event} */ event) => {
        event.stopPropagation();
        if (isOpen) state.open.delete(row.group);
        else state.open.add(row.group);
        change({});
      });
      head.append(button);
    } else {
      head.append(element("bdi", {}, shortened(name)));
    }
    const cells = headings.slice(2).map(() => element("td", {}));
    const made = element("tr", {}, head, element("td", { className: "map" }, canvas), ...cells);
    made.addEventListener("click", () => choose(layer));
    return { row: made, canvas, cells, look: "" };
  }
  /** Writes a layer's figures into its row. @param {any} kept @param {any} layer @param {number} index */
  function fill(kept, layer, index) {
    const found = figures(layer);
    const words = found ? cellWords(layer, found) : ["-", "-", "-", "-", "-"];
    const lost = storages.length ? lostOf(storages[0], layer) : null;
    /** @type {[string, string][]} */
    const more = (data.notes.cells[layer.module] ?? data.notes.columns.map(() => ["-", ""])).map((/** @type {[string, string]} */ [text, tone]) => [text, tone]);
    if (storages.length) more.unshift([lost === null ? "-" : percent(lost), lost !== null && lost > 0.5 ? "warning" : ""]);
    const tones = found ? [tone(found.flushed, found.all, 0.01), "", found.high ? "error" : "", found.h.infs || found.h.nans ? "error" : "", ""] : [];
    const { row } = kept;
    row.setAttribute("aria-rowindex", index + 1);
    row.className = layer.name === state.layer ? "chosen" : "";
    [...words.map((text, column) => [text, tones[column] ?? ""]), ...more].forEach(([text, tone], column) => {
      const cell = kept.cells[column];
      if (cell.textContent !== text) cell.textContent = text;
      if (cell.className !== tone) cell.className = tone;
    });
    if (found) Object.assign(row.dataset, { name: layer.name, flushed: found.flushed, subnormal: found.subnormal, low: found.low, high: found.high, all: found.all });
    else for (const key of Object.keys(row.dataset)) delete row.dataset[key];
  }
  /** The end of a long name: it tells layers apart. The whole stands in the title, and below once the layer is chosen. */
  const shortened = (/** @type {string} */ name) => {
    const most = isNarrow() ? 12 : 42;
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
    if (!all) return ["-", "-", "-", broken, "-"];
    return [`${isPartial ? "~" : ""}${percent(share(found.flushed, all))}`, percent(share(found.subnormal, all)),
      over, broken, `2^${h.min + h.counts.length - 1}`];
  }
  function drawDetail() {
    const layer = chosen();
    const found = layer && figures(layer);
    if (!found) {
      detail.replaceChildren();
      return;
    }
    const { h, all } = found;
    const name = layer.name || "(the model itself)";
    const over = found.low === found.high ? `${found.low.toLocaleString("en")}` : `${found.low.toLocaleString("en")} to ${found.high.toLocaleString("en")}`;
    const facts = [
      `${all.toLocaleString("en")} finite non-zero elements were counted in ${stepsInWords()}, ${h.zeros.toLocaleString("en")} zeros, ${h.infs.toLocaleString("en")} infinities, ${h.nans.toLocaleString("en")} NaNs.`,
      `${state.format.label}${isScaled() ? ` at a loss scale of 2^${state.scale}` : ""}: ${all ? `${found.flushed.toLocaleString("en")} flushed to zero, ${found.subnormal.toLocaleString("en")} kept with fewer bits, ${over} overflowed` : "no finite non-zero element, so its losses are unknown"}.`,
    ];
    if (layer.floor !== null && h.zeros > 0) facts.push(`Magnitudes up to 2^${layer.floor} may have been flushed before they were counted: then they are among the zeros.`);
    if (layer.noise) facts.push("In theory this gradient is zero: what was counted is rounding noise.");
    for (const storage of storages) {
      const lost = lostOf(storage, layer);
      if (lost !== null) facts.push(`Stored in ${storage.label}, ${percent(lost)} of its updates ${storage.measured ? "were" : "would be"} lost: weight and update together round back to the weight.`);
    }
    const notes = (data.notes.lines[layer.module] ?? []).map((/** @type {string} */ line) => element("li", {}, line));
    detail.replaceChildren(element("h4", {}, element("bdi", {}, name)), ...facts.map((fact) => element("p", {}, fact)), ...(notes.length ? [element("ul", {}, ...notes)] : []));
  }
  const chosen = () => layers.find((/** @type {any} */ each) => each.kind === state.kind && each.name === state.layer);

  // -- the charts
  let drawnCurves = { of: "", low: [0], mass: [0], high: [0], hasValues: false };
  /** The shares flushed, of the elements and of the sum of magnitudes, and overflowed at every scale, of the chosen layer or of whichever is worst there. */
  function curves() {
    const layer = chosen();
    const of = JSON.stringify([state.kind, state.format.name, state.block, layer?.name]);
    if (drawnCurves.of === of) return drawnCurves;
    const those = (layer ? [layer] : layers.filter((/** @type {any} */ each) => each.kind === state.kind && !each.noise))
      .map(counted).filter((/** @type {Histogram | null} */ h) => h && nonzero(h));
    const scales = Array.from({ length: SCALES[1] - SCALES[0] + 1 }, (_, place) => SCALES[0] + place);
    const worst = (/** @type {(h: Histogram, k: number) => number} */ share) =>
      scales.map((k) => those.reduce((/** @type {number} */ most, /** @type {Histogram} */ h) => Math.max(most, share(h, k)), 0));
    drawnCurves = {
      of, low: worst((h, k) => flushed(h, state.format, k) / nonzero(h)), mass: worst((h, k) => lostMass(h, state.format, k)),
      high: worst((h, k) => overflowed(h, state.format, k)[1] / nonzero(h)), hasValues: those.length > 0,
    };
    return drawnCurves;
  }
  /** @param {HTMLElement} slider */
  function align(slider) {
    // A slider's ends are half a thumb from its edges.
    Object.assign(slider.style, { marginLeft: `${LEFT - 8}px`, width: `${wide - LEFT - RIGHT + 16}px` });
  }
  /** Pixels for a chart; 0 once the page's width, or what stands in it, has changed. Reading it costs a layout of the page. */
  let wide = 0;
  function measure() {
    if (wide && ofScale.hidden === !isScaled()) return;
    ofScale.hidden = !isScaled();
    wide = Math.max(overSteps.clientWidth, 240);
  }
  function drawShares() {
    if (ofScale.hidden) return;
    const { low, mass, high, hasValues } = curves();
    const window = data.windows[state.format.name];
    const of = chosen() ? "of the chosen layer" : "of the worst layer";
    const [lost, weight] = [low, mass].map((shares) => percent(shares[state.scale - SCALES[0]]));
    const unknown = `no finite non-zero element was counted in ${stepsInWords()}`;
    const told = hasValues ? `At ${power(state.scale)} ${lost} of the elements are flushed, and ${weight} of the sum of magnitudes` : `Unknown: ${unknown}`;
    const drawn = chart(wide, 176, `Shares flushed and overflowed, ${of}, against the loss scale. ${told}.`,
      { ends: /** @type {[number, number]} */ (SCALES), ticks: wide < 500 ? [-24, -8, 8, 24, 40] : [-24, -16, -8, 0, 8, 16, 24, 32, 40], words: power, title: "loss scale" },
      { ends: [0, 1], ticks: [0, 0.25, 0.5, 0.75, 1], words: (part) => `${100 * part}%`, title: "share" });
    const { picture, x, y, bottom } = drawn;
    const path = (/** @type {number[]} */ values) => values.map((value, place) => `${place ? "L" : "M"}${x(SCALES[0] + place).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    const upright = (/** @type {number} */ at, /** @type {string} */ name) => svg("line", { x1: x(at), x2: x(at), y1: TOP, y2: bottom, class: name });
    const within = window && [clamp(window[0], SCALES[0], SCALES[1]), clamp(window[1], SCALES[0], SCALES[1])];
    if (within) picture.append(svg("rect", { x: x(within[0]), width: Math.max(x(within[1]) - x(within[0]), 2), y: TOP, height: bottom - TOP, class: "window" }));
    if (hasValues) picture.append(svg("path", { d: path(low), class: "curve flushes" }), svg("path", { d: path(mass), class: "curve weighs" }), svg("path", { d: path(high), class: "curve overflows" }));
    picture.append(upright(clamp(data.own, SCALES[0], SCALES[1]), "own"), upright(state.scale, "now"));
    picture.addEventListener("click", (event) => change({ scale: Math.round(drawn.under(event)) }));
    shares.replaceChildren(picture);
    align(scale);
    // Of FP32's exponents all are there.
    const none = state.format.top >= FLOAT32_TOP ? `${state.format.label} needs no loss scale` : `no safe window is known for ${state.format.label}`;
    legends[0].replaceChildren(...(hasValues ? [key("flushes", `flushed, of the elements ${of}`), key("weighs", "flushed, of the sum of their magnitudes (estimated): small elements are many and weigh little"), key("overflows", "overflowed")]
      : [element("span", { className: "entry" }, unknown)]),
      window ? key("window", `${state.format.label}'s safe window ${power(window[0])} .. ${power(window[1])}: nothing overflows, and at most 1% of the sum of magnitudes is flushed in every layer`)
        : element("span", { className: "entry" }, none),
      key("own", `the run's own scale${data.collapsed ? " before it collapsed" : ""}, ${power(data.own)}`), key("now", `shown, ${power(state.scale)}`));
  }
  /** Which block a step is in. @param {number} step */
  const blockAt = (step) => Math.max(0, data.blocks.findLastIndex((/** @type {any} */ each) => each.first <= step));
  /** The loss scale over the steps, what happened, and below it the lost updates; the scrubber lies below on the same axis. */
  function drawHistory() {
    const of = JSON.stringify([wide, state.block, state.kind, state.layer]);
    if (timeline.dataset.of === of) return;
    timeline.dataset.of = of;
    const known = data.scales.map((/** @type {[number, number | null]} */ [, value]) => value).filter((/** @type {number | null} */ value) => value !== null);
    const ends = known.length ? [Math.floor(Math.min(...known)) - 1, Math.ceil(Math.max(...known)) + 1] : [0, 1];
    const across = { ends: /** @type {[number, number]} */ ([0, Math.max(lastStep, 1)]), ticks: ticks(0, Math.max(lastStep, 1), wide / 90), words: number, title: "step" };
    const falls = data.scales.filter((/** @type {any} */ [, value], /** @type {number} */ place) => place && value !== null && value < (data.scales[place - 1][1] ?? -Infinity));
    const drawn = chart(wide, 176, `The loss scale over ${number(data.steps)} steps, with ${number(data.events.length)} events and ${number(data.skipped)} skipped steps.`,
      across, { ends: /** @type {[number, number]} */ (ends), ticks: known.length ? ticks(ends[0], ends[1], 5) : [], words: power, title: "loss scale" });
    const { picture, x, y, bottom } = drawn;
    const shade = (/** @type {any} */ of, /** @type {Element} */ into, /** @type {number} */ low) => {
      if (state.block < 0 || !hasScrubber) return;
      const { first, last } = data.blocks[state.block];
      into.append(svg("rect", { x: of.x(first) - 1, width: Math.max(of.x(last) - of.x(first), 1) + 2, y: TOP, height: low - TOP, class: "shown" }));
    };
    shade(drawn, picture, bottom);
    let path = "";
    data.scales.forEach((/** @type {[number, number | null]} */ [step, value], /** @type {number} */ place) => {
      if (value === null) return;
      const isNew = !place || data.scales[place - 1][1] === null;
      path += `${isNew ? `M${x(step).toFixed(1)} ` : "V"}${y(value).toFixed(1)}H${x(data.scales[place + 1]?.[0] ?? across.ends[1]).toFixed(1)}`;
    });
    const cross = (/** @type {number} */ at) => `M${at - 4} ${TOP - 2}l8 8m0 -8l-8 8`;
    const ring = (/** @type {number} */ at) => `M${at - 4} ${TOP + 2}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0`;
    picture.append(svg("path", { d: path, class: "curve scales" }),
      ...falls.map((/** @type {any} */ [step, value]) => svg("path", { d: `M${x(step) - 4} ${y(value) + 4}h8l-4 7z`, class: "fall" }, svg("title", {}, `step ${number(step)}: the scale fell to ${power(value)}`))),
      ...data.events.map((/** @type {any} */ event) => svg("g", { class: "event" },
        svg("title", {}, event.words), svg("line", { x1: x(event.step), x2: x(event.step), y1: TOP + 6, y2: bottom }),
        svg("path", { d: (event.value === "nan" ? ring : cross)(x(event.step)) }))));
    timeline.replaceChildren(picture);
    const has = (/** @type {string} */ value) => data.events.some((/** @type {any} */ event) => event.value === value);
    legends[1].replaceChildren(known.length ? key("scales", "loss scale") : element("span", { className: "entry" }, "the loss scale is not known"),
      ...(falls.length ? [key("fall", "the scale fell, as after a skipped step")] : []),
      ...(data.skipped ? [element("span", { className: "entry" }, `${number(data.skipped)} ${data.skipped === 1 ? "step was" : "steps were"} skipped`)] : []),
      ...(has("inf") ? [key("inf", "first infinity of a step")] : []), ...(has("nan") ? [key("nan", "first NaN of a step")] : []),
      ...(state.block < 0 || !hasScrubber ? [] : [key("shown", `shown, ${stepsInWords()}`)]));
    if (storages.length) drawLost(across, shade);
    if (hasScrubber) timeline.onclick = (/** @type {MouseEvent} */ event) => change({ block: blockAt(drawn.under(event)) });
    align(block);
  }
  /** @param {Axis} across @param {(of: any, into: Element, low: number) => void} shade */
  function drawLost(across, shade) {
    const layer = chosen();
    const one = layer && storages.some((storage) => storage.tensors[layer.name]) ? layer : null;
    const of = one ? "of the chosen layer" : "of all parameters";
    const drawn = chart(wide, 130, `Share of the updates lost, ${of}, over the steps.`, across,
      { ends: [0, 1], ticks: [0, 0.5, 1], words: (part) => `${100 * part}%`, title: "updates" });
    shade(drawn, drawn.picture, drawn.bottom);
    storages.forEach((storage, place) => {
      let path = "";
      data.blocks.forEach((/** @type {any} */ each, /** @type {number} */ number) => {
        const lost = lostOf(storage, one, number);
        if (lost === null) return;
        path += `${path ? "L" : "M"}${drawn.x(each.first).toFixed(1)} ${drawn.y(lost).toFixed(1)}H${Math.max(drawn.x(each.last), drawn.x(each.first) + 1).toFixed(1)}`;
      });
      drawn.picture.append(svg("path", { d: path, class: `curve lost${place}` }));
    });
    timeline.append(drawn.picture);
    legends[1].append(...storages.map((storage, place) => key(`lost${place}`, `updates lost in ${storage.label}, ${of}${storage.measured ? "" : ", if stored so"}`)));
  }
  /** The events, as a list that leads to their steps and layers. */
  function events() {
    if (!data.events.length) return "";
    const list = data.events.map((/** @type {any} */ event) => {
      const button = element("button", { type: "button" }, element("bdi", {}, event.words));
      button.addEventListener("click", () => {
        if (hasScrubber) state.block = blockAt(event.step);
        state.step = event.step;
        choose(layers.find((/** @type {any} */ each) => each.name === event.tensor && each.kind === event.kind)
          ?? layers.find((/** @type {any} */ each) => each.module === event.module && each.kind === state.kind)
          ?? layers.find((/** @type {any} */ each) => each.module === event.module));
      });
      const maxima = event.maxima ? `; ${event.maxima}` : "";
      return element("li", {}, button, ` ${event.facts}${maxima}${event.explanation ? `; ${event.explanation}` : ""}`);
    });
    return element("details", {}, element("summary", {}, `${number(list.length)} ${list.length === 1 ? "event" : "events"}, the first: ${data.events[0].words}`), element("ol", {}, ...list));
  }
  const spanInWords = (/** @type {any} */ { first, last }) => (first === last ? `step ${first}` : `steps ${first} to ${last}`);
  const stepsInWords = () => (state.block < 0 ? "the whole run" : spanInWords(data.blocks[state.block]));
  /** A sentence on a chosen event whose step is not, or may not be, among the steps shown. */
  const eventInWords = () => {
    if (state.step === null) return "";
    const block = data.blocks[Math.max(state.block, 0)];
    const isInside = block.first <= state.step && state.step <= block.last;
    if (isInside && block.counted > block.last - block.first) return "";
    const counted = isInside ? `${number(block.counted)} of ${spanInWords(block)} were counted, perhaps without it` : `it was not counted; the nearest counted: ${spanInWords(block)}`;
    return ` The event is in step ${number(state.step)}; ${counted}.`;
  };
  function draw() {
    isBehind = false;
    width = isNarrow() ? NARROW : WIDE - 36 * (headings.length - 7);
    shown = rows();
    ends = span();
    kind.value = state.kind ?? "";
    format.value = state.format.name;
    scale.value = String(state.scale);
    scale.disabled = recommended.disabled = !isScaled();
    scaleWords.textContent = power(state.scale);
    scale.setAttribute("aria-valuetext", power(state.scale));
    if (state.block < 0) block.value = String(lastStep);
    else if (state.step !== null) block.value = String(state.step);
    else if (blockAt(Number(block.value)) !== state.block || block.classList.contains("whole")) block.value = String(data.blocks[state.block].first);
    block.classList.toggle("whole", state.block < 0);
    block.setAttribute("aria-valuetext", stepsInWords());
    whole.hidden = state.block < 0;
    blockWords.textContent = stepsInWords();
    heads.forEach((head, column) => head.setAttribute("aria-sort", headings[column][0] === state.sort ? (state.sort === "model" ? "ascending" : "descending") : "none"));
    const own = layers.filter((/** @type {any} */ layer) => layer.kind === state.kind);
    const found = own.map(figures).filter(Boolean);
    const valued = found.filter((/** @type {any} */ each) => each.all > 0);
    const losing = valued.filter((/** @type {any} */ each) => share(each.flushed, each.all) > 0.01).length;
    const over = valued.filter((/** @type {any} */ each) => each.high > 0).length;
    const broken = found.filter((/** @type {any} */ each) => each.h.infs + each.h.nans > 0).length;
    const tensors = (/** @type {number} */ count) => `${count} ${count === 1 ? "tensor" : "tensors"}`;
    const verb = (/** @type {number} */ count, /** @type {string} */ one, /** @type {string} */ several) => (count === 1 ? one : several);
    const losses = valued.length ? `${losing} of ${tensors(own.length)} ${verb(losing, "loses", "lose")} over 1% of ${verb(losing, "its", "their")} elements to zero, ${over} ${verb(over, "overflows", "overflow")}`
      : `losses are unknown, since ${own.length === 1 ? "the tensor holds" : `the ${own.length} tensors hold`} no finite non-zero element`;
    const without = valued.length && valued.length < own.length ? `, ${own.length - valued.length} without a finite non-zero element` : "";
    said.textContent = `${state.format.label}${isScaled() ? ` at 2^${state.scale}` : ""}, ${stepsInWords()}: ${losses}${without}${broken ? `, ${broken} ${verb(broken, "holds", "hold")} infinities or NaNs` : ""}.${eventInWords()}`;
    measure();
    drawShares();
    drawHistory();
    drawAxis(colours());
    drawRows();
    drawDetail();
  }
  /** Chooses a layer wherever it is: of another kind, in a group that is closed, above or below what is seen. @param {any} layer */
  function choose(layer) {
    if (!layer) {
      change({});
      return;
    }
    if (isRepeated(layer)) state.open.add(layer.group);
    change({ kind: layer.kind, layer: layer.name });
    bringIntoView(shown.findLastIndex((/** @type {any} */ row) => row.layer === layer));
  }
  /** @param {number} index of a row */
  function bringIntoView(index) {
    if (index >= 0 && (index * ROW < scroll.scrollTop || (index + 2) * ROW > scroll.scrollTop + scroll.clientHeight)) scroll.scrollTop = index * ROW - scroll.clientHeight / 2;
  }
  /** @param {Partial<typeof state>} changed @param {boolean} isFinal false while a slider is being moved */
  function change(changed, isFinal = true) {
    if ("block" in changed) state.step = null;
    Object.assign(state, changed);
    draw();
    root.dispatchEvent(new CustomEvent("chosen", { detail: changed }));
    if (isFinal) tell();
  }
  /** Keeps what is shown in the page's address. Browsers allow some hundred such changes a minute. */
  function tell() {
    const told = new URLSearchParams({ model: data.model, kind: state.kind ?? "", format: state.format.name, scale: String(state.scale) });
    if (state.block >= 0) told.set("block", String(state.block));
    if (state.layer !== null) told.set("layer", state.layer);
    if (data.view) told.set("view", data.view);
    try {
      history.replaceState(null, "", `#${told}`);
    } catch {
      // A frame without an address of its own, as in a notebook.
    }
  }
  kind.addEventListener("change", () => change({ kind: kind.value }));
  format.addEventListener("change", () => change({ format: data.formats.find((/** @type {Format} */ each) => each.name === format.value) }));
  scale.addEventListener("input", () => change({ scale: Number(scale.value) }, false));
  block.addEventListener("input", () => {
    block.classList.remove("whole");
    change({ block: blockAt(Number(block.value)) }, false);
  });
  for (const slider of [scale, block]) slider.addEventListener("change", tell);
  block.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    // A key moves by a block; before the first one is the whole run.
    const last = data.blocks.length - 1;
    const to = { ArrowLeft: state.block - 1, ArrowDown: state.block - 1, ArrowRight: state.block + 1, ArrowUp: state.block + 1, Home: -1, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    change({ block: clamp(to, -1, last) });
  });
  whole.addEventListener("click", () => change({ block: -1 }));
  search.addEventListener("input", () => change({ search: search.value }));
  recommended.addEventListener("click", () => change({ format: suggested, scale: suggestedScale }));
  scroll.addEventListener("scroll", drawRows);
  scroll.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 };
    const move = moves[/** @type {keyof typeof moves} */ (event.key)];
    if (!move || event.target !== scroll || !shown.length) return;
    event.preventDefault();
    const stops = shown.filter((/** @type {any} */ row) => !row.members || !state.open.has(row.group));
    const now = stops.findIndex((/** @type {any} */ row) => row.layer.name === state.layer);
    const next = stops[clamp(now + move, 0, stops.length - 1)];
    change({ layer: next.layer.name });
    bringIntoView(shown.indexOf(next));
  });
  for (const moment of ["beforeprint", "afterprint"]) {
    addEventListener(moment, () => {
      isPrinted = moment === "beforeprint";
      draw();
    }, { signal: gone.signal });
  }
  /** Whether the map shows less than what is chosen: it follows another map at the next frame, or once it is seen. */
  let isBehind = false;
  let isInView = true;
  function soon() {
    if (isBehind) return;
    isBehind = true;
    requestAnimationFrame(catchUp);
  }
  function catchUp() {
    if (isBehind && isInView && !gone.signal.aborted) draw();
  }
  const viewed = new IntersectionObserver((entries) => {
    isInView = entries[entries.length - 1].isIntersecting;
    catchUp();
  });
  viewed.observe(root);
  gone.signal.addEventListener("abort", () => viewed.disconnect());
  let seenWidth = root.clientWidth;
  const resized = new ResizeObserver(() => {
    if (root.clientWidth === seenWidth) return;
    seenWidth = root.clientWidth;
    wide = 0;
    draw();
  });
  resized.observe(root);
  gone.signal.addEventListener("abort", () => resized.disconnect());
  for (const query of ["(prefers-color-scheme: dark)", "(max-width: 760px)"]) matchMedia(query).addEventListener("change", draw, { signal: gone.signal });
  drawn.set(root, {
    state,
    gone,
    tell,
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
      soon();
    },
  });
  draw();
  if (!before) bringIntoView(shown.findLastIndex((/** @type {any} */ row) => row.layer === chosen()));
}

/** @param {number} value @param {number} low @param {number} high */
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

/**
 * Draws the map of an element; of several models the one that the address names or the first, with a switch of the model,
 * or those of all models, which move together. What the reader chose in one holds for the next.
 * @param {HTMLElement} root
 */
async function begin(root) {
  const packed = (root.dataset.widget ?? "").split(" ");
  /** @type {string[]} */
  const names = JSON.parse(root.dataset.names ?? "[]");
  if (packed.length === 1) {
    render(root, await decode(packed[0]));
    return;
  }
  const asked = new URLSearchParams(location.hash.slice(1));
  const first = String(Math.max(names.indexOf(asked.get("model") ?? ""), 0));
  const opens = asked.get("view") === ALL || (!asked.has("model") && root.dataset.together !== undefined) ? ALL : first;
  const model = element("select", {}, ...names.map((name, place) => element("option", { value: place }, name)), element("option", { value: ALL }, "all, which move together"));
  const maps = element("div", {});
  /** Of each model decoded so far. @type {Promise<any>[]} */
  const known = [];
  /** @type {HTMLElement[]} */
  let shown = [];
  const choice = {};
  async function show() {
    const view = model.value;
    const places = view === ALL ? names.map((_, place) => place) : [Number(view)];
    const data = await Promise.all(places.map((place) => (known[place] ??= decode(packed[place]))));
    // Another was chosen meanwhile.
    if (model.value !== view) return;
    for (const map of shown) forget(map);
    if (!maps.isConnected) root.replaceChildren(element("div", { className: "controls" }, element("label", {}, element("span", {}, "Model"), model)), maps);
    shown = places.map(() => element("div", {}));
    maps.replaceChildren(...shown.flatMap((map, place) => (view === ALL ? [element("h3", {}, element("bdi", {}, names[places[place]])), map] : [map])));
    shown.forEach((map, place) => {
      render(map, view === ALL ? { ...data[place], view, format: comparedIn(data) } : data[place]);
      follow(map, choice);
      map.addEventListener("chosen", (/** @type {any} */ event) => {
        Object.assign(choice, event.detail);
        for (const other of shown) if (other !== map) follow(other, event.detail);
      });
    });
  }
  model.value = opens;
  model.addEventListener("change", () => show().then(() => drawn.get(shown[0])?.tell()));
  root.classList.add("explorer");
  await show();
}

/** Draws every map of the page; where one can't be, what stands there stays and says why. */
export async function start() {
  for (const root of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll("[data-widget]"))) {
    try {
      await begin(root);
    } catch (error) {
      root.append(element("p", { className: "error" }, `The map could not be drawn: ${error}`));
    }
  }
}
