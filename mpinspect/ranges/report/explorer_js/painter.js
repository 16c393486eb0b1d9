// The strips of the map and its axis, drawn on canvases.
// @ts-check

import { element } from "./dom.js";
import { clamp, nonzero } from "./histogram.js";

/** Height of a row in pixels. */
export const ROW = 22;
/** Shares from 10^-5 on differ in lightness. */
const DECADES = 5;
const COLOURS = ["fill", "soft", "flushed", "overflow"];

export class Painter {
  /** @param {import("./view.js").View} view @param {HTMLElement} root whose colours are used */
  constructor(view, root) {
    this.view = view;
    this.root = root;
    this.width = 0;
    /** Exponents at the ends. @type {[number, number]} */
    this.ends = [0, 1];
    /** @type {Map<string, string>} */
    this.colours = new Map();
    /** @type {Map<string, CanvasPattern>} */
    this.hatchings = new Map();
  }

  /** Prepares for a drawing: the page's colours may have changed. @param {number} width */
  begin(width) {
    const style = getComputedStyle(this.root);
    this.colours = new Map(COLOURS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
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
    return [state.block, state.format.name, log2Scale, this.ends, this.width, window.devicePixelRatio, ...this.colours.values()].join();
  }

  /** Pixels from the left. @param {number} exponent */
  place(exponent) {
    return ((exponent - this.ends[0]) / (this.ends[1] - this.ends[0])) * this.width;
  }

  /** @param {HTMLCanvasElement} canvas @param {number} height */
  sharp(canvas, height) {
    const ratio = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(this.width * ratio)) {
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

  /** The strip of a layer: the darker, the larger the share. @param {HTMLCanvasElement} canvas @param {any} layer */
  strip(canvas, layer) {
    const context = this.sharp(canvas, ROW - 2);
    const h = this.view.counted(layer);
    if (h) {
      const all = nonzero(h);
      context.fillStyle = this.colour("fill");
      h.counts.forEach((/** @type {number} */ count, /** @type {number} */ index) => {
        if (!count) return;
        context.globalAlpha = 0.15 + 0.85 * clamp(1 + Math.log10(count / all) / DECADES, 0, 1);
        const left = Math.round(this.place(h.min + index));
        context.fillRect(left, 1, Math.max(Math.round(this.place(h.min + index + 1)) - left, 1), ROW - 4);
      });
      context.globalAlpha = 1;
    }
    this.limits(context, ROW - 2);
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
    context.strokeStyle = this.colour("soft");
    for (const exponent of [f.flush - k, f.normal - k, f.top + 1 - k]) {
      const x = Math.round(this.place(exponent)) + 0.5;
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
    Object.assign(pen, { strokeStyle: colour, globalAlpha: 0.35, lineWidth: ratio });
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
    const context = this.sharp(canvas, ROW);
    context.fillStyle = this.colour("soft");
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "center";
    const [low, high] = this.ends;
    const step = [2, 4, 8, 16, 32, 64].find((each) => (high - low) / each < this.width / 44) ?? 64;
    for (let exponent = Math.ceil(low / step) * step; exponent <= high; exponent += step) {
      const x = this.place(exponent);
      if (x > 14 && x < this.width - 14) context.fillText(`2^${exponent}`, x, ROW - 6);
    }
  }
}
