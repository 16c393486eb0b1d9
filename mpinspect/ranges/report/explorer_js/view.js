// What is shown of a model: its layers, the reader's choice, and the figures that follow from both.
// @ts-check

import { wanted } from "./address.js";
import { clamp, flushed, merge, nonFinite, nonzero, overflowed, share, subnormal, unpack } from "./histogram.js";
import { isOther, spanInWords } from "./words.js";

/** The least and the largest loss scale, as powers of two. */
export const SCALES = /** @type {[number, number]} */ ([-24, 40]);

/** Of larger loss scales the map shows no edge: its columns would become narrow. */
const MOST_REACH = 24;

/** Tensors with their histograms, block by block and over the run. @param {any[]} tensors @returns {any} */
function unpacked(tensors) {
  const layers = tensors.map((/** @type {any} */ tensor, /** @type {number} */ place) => ({
    ...tensor,
    place,
    label: `${tensor.name || "(the model itself)"}${tensor.type}`,
    blocks: tensor.blocks.map((/** @type {any} */ packed) => packed && unpack(packed)),
  }));
  for (const layer of layers) layer.whole = merge(layer.blocks.filter(Boolean));
  return layers;
}

export class View {
  /** @param {any} data as explorer.py makes it @param {View | undefined} before the view of older data of the same model */
  constructor(data, before) {
    /** @type {any} */
    this.data = data;
    this.layers = unpacked(data.tensors);
    this.updates = unpacked(data.updates);
    this.kinds = data.kinds.filter((/** @type {any} */ kind) => this.layers.some((/** @type {any} */ layer) => layer.kind === kind.name));
    /** Storage formats in which updates are lost: the measured ones first, then the run's own format. @type {any[]} */
    this.storages = Object.entries(data.lost).map(([name, each]) => ({ ...each, rank: 2 * Number(each.measured) + Number(name === data.format) }))
      .sort((one, other) => other.rank - one.rank);
    this.lastStep = Math.max(data.steps - 1, data.opening.step ?? 0, ...data.blocks.map((/** @type {any} */ each) => each.last), ...data.events.map((/** @type {any} */ each) => each.step));
    this.hasScrubber = data.blocks.length > 1;
    /** Letters of the longest name. @type {number} */
    this.longest = [...this.layers, ...data.groups].reduce((most, each) => Math.max(most, (each.label ?? each.name).length), data.opening.name.length + 1);
    this.marked = new Set(data.opening.marked);
    this.near = new Set(data.opening.near);
    const [suggestedFormat, suggestedScale] = data.suggested ?? ["", 0];
    this.suggested = { format: this.formatNamed(suggestedFormat), scale: suggestedScale };
    /** @type {any} */
    this.state = this.opening();
    if (before) Object.assign(this.state, before.state, { format: this.sameFormat(before.state.format), block: before.blockNow(data.blocks) });
    else if (!this.state.kind) this.state.kind = wanted(data, "layer") ? this.kinds[0]?.name : this.worstKind();
    for (const layer of this.layers) {
      if (this.isRepeated(layer) && layer.name === this.state.layer) this.state.open.add(layer.group);
    }
  }

  /** What is shown at first: what the page's address asks for, else what opening.py chose; without a kind where neither names one. @returns {any} */
  opening() {
    const { data } = this;
    const asked = (/** @type {string} */ name) => wanted(data, name);
    const first = data.opening;
    // An address names all that is shown, but for the block if that is the whole run.
    const isAsked = ["kind", "format", "scale", "block", "layer"].some((name) => asked(name) !== null);
    return {
      kind: [asked("kind"), ...(asked("layer") ? [] : [first.kind])].find((name) => this.kinds.some((/** @type {any} */ kind) => kind.name === name)),
      format: this.formatNamed(asked("format")) ?? this.formatNamed(data.format) ?? data.formats[0],
      scale: clamp(Number(asked("scale") ?? first.scale) || 0, ...SCALES),
      block: clamp(Number(asked("block") ?? (isAsked ? -1 : first.block)), -1, data.blocks.length - 1),
      /** The step of the chosen event. @type {number | null} */
      step: null,
      /** Whether the curve of what is lost at each loss scale is shown; undefined where that depends on the curve. */
      hasCurve: first.curve ? undefined : false,
      /** Whether the chosen layer's own view is open. */
      isOwn: asked("layer") !== null && asked("beside") === null,
      search: "",
      sort: "model",
      layer: asked("layer"),
      open: new Set(),
    };
  }

  /** @param {string | null} name */
  formatNamed(name) {
    return this.data.formats.find((/** @type {any} */ each) => each.name === name);
  }

  /** The format of this model's data that equals one of other data. @param {any} other */
  sameFormat(other) {
    return this.formatNamed(other.name) ?? this.data.formats[0];
  }

  /** The first of the layers that are the culprit, or near it. */
  get firstMarked() {
    return this.layers.find((/** @type {any} */ layer) => layer.kind === this.state.kind && (this.isMarked(layer) || this.isNear(layer)));
  }

  /** Whether what is shown is what the page opened with. */
  get isOpening() {
    const { state, data } = this;
    const { kind, scale, block } = data.opening;
    return (!kind || state.kind === kind) && state.format.name === data.format && state.scale === scale && state.block === block;
  }

  /** Whether a layer is the culprit. @param {any} layer */
  isMarked(layer) {
    return layer.kind === this.data.opening.kind && this.marked.has(layer.name);
  }

  /** Whether a layer is part of a culprit without a tensor of its own, or the nearest to it. @param {any} layer */
  isNear(layer) {
    return layer.kind === this.data.opening.kind && this.near.has(layer.name);
  }

  /** Whether nothing is to blame: infinities and losses are then as they should be. */
  get isCalm() {
    const { kind, name, grave } = this.data.opening;
    return !kind && !name && !grave;
  }

  /** Whether something is to blame, but neither a layer nor the loss scale. */
  get isElsewhere() {
    return this.data.opening.elsewhere && this.lastStep > 0;
  }

  /** The tone of a layer's infinities and NaNs: "dim" where they follow from those of a culprit elsewhere, or ask for no change. @param {any} layer */
  toneOf(layer) {
    const { said, grave } = this.data.opening;
    return !this.isMarked(layer) && (said || !grave) ? "dim" : this.tone;
  }

  /** The tone of the run's gravest finding: a map is never redder than its verdict. */
  get tone() {
    return this.data.opening.grave ? "error" : "warning";
  }

  /** @param {any} layer */
  isRepeated(layer) {
    return this.data.groups[layer.group].size > 1;
  }

  /** Whether a loss scale multiplies a kind of tensor. */
  isScaled(name = this.state.kind) {
    return Boolean(this.kinds.find((/** @type {any} */ each) => each.name === name)?.is_scaled);
  }

  /** Whether the flush edge lies on the map, where the loss scale moves it. */
  get isMoved() {
    return this.isScaled() && this.state.format.flush - this.state.scale >= this.span()[0];
  }

  /** Whether the run multiplied its loss at all, as far as is known. */
  get hasScale() {
    return this.data.scales.some((/** @type {[number, number | null]} */ [, value]) => value !== 0);
  }

  get log2Scale() {
    return this.isScaled() ? this.state.scale : 0;
  }

  /** All tensors of a layer's module with its updates: each parameter's together, then the outputs'. @param {any} layer @returns {any[]} */
  ofModule({ module }) {
    const order = ["weight", "weight_gradient", "update", "activation", "activation_gradient"];
    const isOutput = (/** @type {any} */ each) => Number(order.indexOf(each.kind) > 2);
    const those = [...this.layers, ...this.updates].filter((each) => each.module === module);
    const first = new Map(those.map((each, place) => [each.name, place]));
    const place = (/** @type {any} */ each) => /** @type {number} */ (first.get(each.name));
    return those.sort((one, other) => isOutput(one) - isOutput(other) || place(one) - place(other) || order.indexOf(one.kind) - order.indexOf(other.kind));
  }

  /** The layers of the kind that is shown. */
  get ofKind() {
    return this.layers.filter((/** @type {any} */ layer) => layer.kind === this.state.kind);
  }

  get chosen() {
    return this.layers.find((/** @type {any} */ each) => each.kind === this.state.kind && each.name === this.state.layer);
  }

  /** @param {any} layer */
  counted(layer) {
    return this.state.block < 0 ? layer.whole : layer.blocks[this.state.block];
  }

  /** What the format does to a layer; null where nothing was counted. @param {any} layer */
  figures(layer) {
    const h = this.counted(layer);
    if (!h) return null;
    const [k, f, all] = [this.isScaled(layer.kind) ? this.state.scale : 0, this.state.format, nonzero(h)];
    const [low, high] = overflowed(h, f, k);
    return { h, all, flushed: flushed(h, f, k), subnormal: subnormal(h, f, k), low, high };
  }

  /** Whether zeros may have been values, in a run whose fault depends on that: what an earlier operation flushed is not in the counts. */
  get hidesValues() {
    const { said, curve } = this.data.opening;
    return Boolean(said && curve && this.ofKind.some((/** @type {any} */ layer) => layer.floor !== null && this.counted(layer)?.zeros));
  }

  /** Elements of a layer that an earlier operation may have flushed, in a run without a loss scale, or that needs a larger one. @param {any} layer @param {any} found its figures */
  hiddenIn(layer, found) {
    const isScaled = this.data.scales.some((/** @type {[number, number | null]} */ [, value]) => value);
    return this.hidesValues && (this.data.suggested || !isScaled) && layer.floor !== null ? (found?.h.zeros ?? 0) : 0;
  }

  /** Share of a layer's elements that the format flushes, at most: with those that were flushed before. @param {any} layer */
  lossOf(layer) {
    const found = this.figures(layer);
    if (!found?.all) return 0;
    const hidden = this.hiddenIn(layer, found);
    return share(found.flushed + hidden, found.all + hidden);
  }

  /** Whether the map shows what another format than the run's would do to a healthy run. */
  get isWhatIf() {
    return this.isCalm && isOther(this);
  }

  /** Share of a parameter's updates that are lost, or of all parameters'; null where none was seen. @param {any} storage @param {any} layer @param {number} block */
  lostOf(storage, layer, block = this.state.block) {
    /** @type {any[]} */
    const chosen = layer ? [storage.tensors[layer.name] ?? []] : Object.values(storage.tensors);
    const seen = chosen.flatMap((blocks) => (block < 0 ? blocks : [blocks[block]])).filter(Boolean);
    const all = seen.reduce((sum, each) => sum + each[1], 0);
    return all ? seen.reduce((sum, each) => sum + each[0], 0) / all : null;
  }

  /** The largest figure of any layer, or that of the chosen one, in each block; null where nothing was counted. @param {(h: any) => number} of @returns {(number | null)[]} */
  overSteps(of) {
    const those = this.chosen ? [this.chosen] : this.ofKind.filter((/** @type {any} */ layer) => !layer.noise);
    return this.data.blocks.map((/** @type {any} */ _, /** @type {number} */ block) => {
      let most = -Infinity;
      for (const { blocks } of those) {
        const h = blocks[block];
        if (h && nonzero(h)) most = Math.max(most, of(h));
      }
      return Number.isFinite(most) ? most : null;
    });
  }

  /** The share flushed in each block. */
  flushedOverSteps() {
    const [k, f] = [this.log2Scale, this.state.format];
    return this.overSteps((h) => flushed(h, f, k) / nonzero(h));
  }

  /** The largest magnitude in each block, as a power of two; null also where it is not finite. */
  largestOverSteps() {
    return this.overSteps((h) => (nonFinite(h) ? Infinity : h.min + h.counts.length - 1 + Math.log2(h.largest)));
  }

  /** @param {any} layer */
  badness(layer) {
    const found = this.figures(layer);
    return found && !layer.noise ? share(found.high, found.all) * 2 + share(found.flushed, found.all) : -1;
  }

  /** @param {any[]} members */
  worst(members) {
    return members.reduce((one, other) => (this.badness(other) > this.badness(one) ? other : one));
  }

  /** The scaled kind whose worst layer loses most, where the page opens. */
  worstKind() {
    const scaled = this.layers.filter((/** @type {any} */ layer) => this.isScaled(layer.kind));
    return (scaled.length ? this.worst(scaled) : this.layers[0])?.kind;
  }

  /** Exponents at the left and the right end of the map: the same at every scale, so that only the limits move. @returns {[number, number]} */
  span() {
    const seen = this.ofKind.filter((/** @type {any} */ layer) => nonzero(layer.whole)).map((/** @type {any} */ layer) => layer.whole);
    const f = this.state.format;
    const ends = seen.flatMap((/** @type {any} */ h) => [h.min, h.min + h.counts.length]);
    if (f.top - f.low >= 64) return [Math.min(...ends, 0) - 1, Math.max(...ends, 0) + 1];
    return [Math.min(...ends, f.low - 4, f.flush - this.reach() - 3) - 1, Math.max(...ends, f.top + 2) + 1];
  }

  /** The largest loss scale that the map has room for, beside the one chosen. */
  reach() {
    if (!this.isScaled()) return 0;
    const { data, state, suggested } = this;
    const window = data.windows[state.format.name] ?? [0, 0];
    return clamp(Math.max(data.opening.scale, data.own, window[1], suggested.format === state.format ? suggested.scale : 0), 0, MOST_REACH);
  }

  /** The block that contains a step. @param {number} step */
  blockAt(step) {
    return Math.max(0, this.data.blocks.findLastIndex((/** @type {any} */ each) => each.first <= step));
  }

  /** The block that was shown, among those of newer data: they grow together, and the last goes on. @param {any[]} blocks */
  blockNow(blocks) {
    if (this.state.block < 0) return -1;
    const { first } = this.data.blocks[this.state.block];
    return this.state.block === this.data.blocks.length - 1 ? blocks.length - 1 : blocks.findIndex((each) => each.last >= first);
  }

  get stepsInWords() {
    return this.state.block < 0 ? "the whole run" : spanInWords(this.data.blocks[this.state.block]);
  }
}
