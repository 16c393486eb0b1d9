// The strips of the map and its axis, drawn on canvases.
// @ts-check

import { element } from "./dom.js";
import { clamp, nonFinite, nonzero } from "./histogram.js";
import { power } from "./words.js";

/** Height of the axis in pixels. */
const AXIS = 22;
/** Shares from 10^-5 on differ in lightness. */
const DECADES = 5;
/** Pixels of a row from which on a larger share is also higher. */
const TALL = 32;
/** How dark, and in tall rows how high, a share is, 0 to 1. @param {number} part */
const strengthOf = (part) => clamp(1 + Math.log10(part) / DECADES, 0, 1);
/** @param {number} strength @param {number} height of a row in pixels */
const tallOf = (strength, height) => (height < TALL ? height - 2 : Math.max(strength * (height - 4), 3));
/** Pixels of the bar of infinities and NaNs, of each of its signs, and a strip's part that it takes at most. */
const [BROKEN, SIGN, BROKEN_PART] = [30, 14, 0.3];
const COLOURS = ["ground", "fill", "soft", "ink", "info", "flushed", "subnormal", "overflow", "error", "warning"];

export class Painter {
  /** @param {import("./view.js").View} view @param {HTMLElement} root whose colours are used */
  constructor(view, root) {
    this.view = view;
    this.root = root;
    this.width = 0;
    /** Pixels left of the strips, and of a row's height. */
    this.left = 0;
    this.row = AXIS;
    /** Exponents at the ends. @type {[number, number]} */
    this.ends = [0, 1];
    /** @type {Map<string, string>} */
    this.colours = new Map();
    /** What each axis shows. @type {WeakMap<HTMLCanvasElement, string>} */
    this.axes = new WeakMap();
    /** @type {Map<string, CanvasPattern>} */
    this.hatchings = new Map();
  }

  /** Reads the colours again before the next drawing: reading them at each move of a slider takes longer than the drawing. */
  forget() {
    this.colours.clear();
  }

  /** Prepares for a drawing. @param {number} left @param {number} width @param {number} row its height */
  begin(left, width, row) {
    this.left = left;
    this.row = row;
    if (!this.colours.size) {
      const style = getComputedStyle(this.root);
      this.colours = new Map(COLOURS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    }
    this.width = width;
    this.ends = this.view.span();
  }

  /** @param {string} name */
  colour(name) {
    return this.colours.get(name) ?? "";
  }

  /** What a strip shows besides its layer. */
  get look() {
    const { state, log2Scale } = this.view;
    return [state.block, state.format.name, log2Scale, this.ends, this.width, this.row, window.devicePixelRatio, ...this.colours.values()].join();
  }

  /** Pixels from the left. @param {number} exponent */
  place(exponent) {
    return ((exponent - this.ends[0]) / (this.ends[1] - this.ends[0])) * this.width;
  }

  /** Whether the middle of a layer's values lies in the left half. @param {any} found its figures */
  isLeft(found) {
    return Boolean(found?.all) && this.place(found.h.min + found.h.counts.length / 2) < this.width / 2;
  }

  /** The exponent at a distance from the left. @param {number} pixels */
  exponentAt(pixels) {
    return this.ends[0] + (pixels / this.width) * (this.ends[1] - this.ends[0]);
  }

  /** @param {HTMLCanvasElement} canvas @param {number} height */
  sharp(canvas, height) {
    const ratio = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(this.width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(this.width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.width = `${this.width}px`;
      canvas.style.height = `${height}px`;
    }
    const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.width, height);
    return context;
  }

  /** The strip of a layer: the darker, the larger the share; what the format flushes or overflows has its region's colour. @param {HTMLCanvasElement} canvas @param {any} layer */
  strip(canvas, layer) {
    const height = this.row - 2;
    const context = this.sharp(canvas, height);
    const h = this.view.counted(layer);
    if (h) {
      const all = nonzero(h);
      const [k, f] = [this.view.log2Scale, this.view.state.format];
      let before = "";
      h.counts.forEach((/** @type {number} */ count, /** @type {number} */ index) => {
        if (!count) return;
        const exponent = h.min + index;
        const name = exponent < f.flush - k ? "flushed" : exponent > f.top - k ? "overflow" : "fill";
        if (name !== before) context.fillStyle = this.colour(name);
        before = name;
        const strength = strengthOf(count / all);
        context.globalAlpha = 0.15 + 0.85 * strength;
        const left = Math.round(this.place(h.min + index));
        const tall = tallOf(strength, height);
        context.fillRect(left, height - 1 - tall, Math.max(Math.round(this.place(h.min + index + 1)) - left, 1), tall);
      });
      context.globalAlpha = 1;
    }
    this.limits(context, height);
    if (h && h.zeros && !nonzero(h) && !(h.infs + h.nans)) {
      Object.assign(context, { fillStyle: this.colour("soft"), font: "13px system-ui, sans-serif", textBaseline: "middle" });
      context.fillText("only zeros", 8, height / 2);
    }
    if (h && h.infs + h.nans) this.marks(context, h, height, this.view.toneOf(layer).replace("dim", "soft"));
  }

  /** Differences of shares as bars from the middle: up where there are more in B. @param {HTMLCanvasElement} canvas @param {Map<number, number>} shares by exponent @param {number} most the largest in any strip */
  difference(canvas, shares, most) {
    const height = this.row - 2;
    const context = this.sharp(canvas, height);
    const middle = Math.round(height / 2);
    for (const [exponent, share] of shares) {
      const left = Math.round(this.place(exponent));
      const tall = (Math.abs(share) / most) * (middle - 2);
      context.fillStyle = this.colour(share > 0 ? "info" : "soft");
      context.fillRect(left, share > 0 ? middle - tall : middle, Math.max(Math.round(this.place(exponent + 1)) - left, 1), tall);
    }
    context.fillStyle = this.colour("soft");
    context.fillRect(0, middle, this.width, 1);
  }

  /** A bar for the share of infinities and NaNs, at the right end, with a cross for infinities and a ring for NaNs. @param {CanvasRenderingContext2D} context @param {any} h @param {number} height @param {string} colour its name */
  marks(context, h, height, colour) {
    const [middle, size] = [height / 2, 4];
    const strength = strengthOf(nonFinite(h));
    const tall = tallOf(strength, height);
    Object.assign(context, { fillStyle: this.colour(colour), globalAlpha: 0.15 + 0.85 * strength });
    const wide = Math.min(BROKEN, BROKEN_PART * this.width);
    context.fillRect(this.width - wide, height - 1 - tall, wide, tall);
    context.globalAlpha = 1;
    context.beginPath();
    // In a narrow bar a NaN, which an infinity becomes, stands for both.
    const isRoomy = wide > 2 * SIGN || !h.nans;
    const cross = this.width - (wide > 2 * SIGN ? 22 : 8);
    if (h.infs && isRoomy) {
      for (const slope of [-1, 1]) {
        context.moveTo(cross - size, middle - slope * size);
        context.lineTo(cross + size, middle + slope * size);
      }
    }
    if (h.nans) {
      context.moveTo(this.width - 8 + size, middle);
      context.arc(this.width - 8, middle, size, 0, 2 * Math.PI);
    }
    // They are light on a bar that covers them; else a rim sets them off from values below them.
    for (const [name, lineWidth] of tall > middle + size ? [["ground", 2]] : [["ground", 5], [colour, 2]]) {
      Object.assign(context, { strokeStyle: this.colour(/** @type {string} */ (name)), lineWidth });
      context.stroke();
    }
    context.lineWidth = 1;
  }

  /** Where the format flushes, holds fewer bits, and overflows: hatched, with lines at the edges. @param {CanvasRenderingContext2D} context @param {number} height */
  limits(context, height) {
    const [k, f] = [this.view.log2Scale, this.view.state.format];
    /** @type {[number, number, string, number][]} */
    const zones = [[this.ends[0], f.flush - k, "flushed", 1], [f.top + 1 - k, this.ends[1], "overflow", -1]];
    for (const [from, to, name, slope] of zones) {
      const [left, right] = [Math.max(this.place(from), 0), Math.min(this.place(to), this.width)];
      if (right <= left) continue;
      context.fillStyle = this.hatching(context, this.colour(name), slope);
      context.fillRect(left, 0, right - left, height);
    }
    const [low, normal] = [this.place(f.flush - k), this.place(f.normal - k)];
    Object.assign(context, { fillStyle: this.colour("subnormal"), globalAlpha: 0.16 });
    if (normal > 0 && low < this.width) context.fillRect(Math.max(low, 0), 0, Math.min(normal, this.width) - Math.max(low, 0), height);
    context.globalAlpha = 1;
    for (const exponent of [f.flush - k, f.normal - k, f.top + 1 - k]) {
      const x = Math.round(this.place(exponent)) + 0.5;
      context.strokeStyle = this.colour(exponent === f.normal - k ? "soft" : "ink");
      context.setLineDash(exponent === f.normal - k ? [2, 2] : []);
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, height);
      context.stroke();
    }
    context.setLineDash([]);
  }

  /** Diagonal lines, as a pattern: to fill with it takes a tenth of drawing the lines. @param {CanvasRenderingContext2D} context @param {string} colour @param {number} slope */
  hatching(context, colour, slope) {
    const ratio = window.devicePixelRatio || 1;
    const name = [colour, slope, ratio].join();
    const known = this.hatchings.get(name);
    if (known) return known;
    const side = Math.round(6 * ratio);
    const tile = element("canvas", { width: side, height: side });
    const pen = tile.getContext("2d");
    Object.assign(pen, { strokeStyle: colour, globalAlpha: 0.45, lineWidth: ratio });
    pen.beginPath();
    // The lines of the neighbouring tiles reach into the corners.
    for (const shift of [-side, 0, side]) {
      pen.moveTo(shift - side, slope > 0 ? 2 * side : -side);
      pen.lineTo(shift + 2 * side, slope > 0 ? -side : 2 * side);
    }
    pen.stroke();
    const made = /** @type {CanvasPattern} */ (context.createPattern(tile, "repeat"));
    made.setTransform(new DOMMatrix().scale(1 / ratio));
    this.hatchings.set(name, made);
    return made;
  }

  /** @param {HTMLCanvasElement} canvas */
  axis(canvas) {
    const of = [this.ends, this.width, this.colour("soft"), window.devicePixelRatio].join();
    if (this.axes.get(canvas) === of) return;
    this.axes.set(canvas, of);
    const context = this.sharp(canvas, AXIS);
    context.fillStyle = this.colour("soft");
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "center";
    const [low, high] = this.ends;
    const step = [2, 4, 8, 16, 32, 64].find((each) => (high - low) / each < this.width / 44) ?? 64;
    for (let exponent = Math.ceil(low / step) * step; exponent <= high; exponent += step) {
      const x = this.place(exponent);
      if (x > 14 && x < this.width - 14) context.fillText(power(exponent), x, AXIS - 6);
    }
  }
}
