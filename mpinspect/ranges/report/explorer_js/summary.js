// One sentence on the layers that are shown, and the list of events.
// @ts-check

import { NOTABLE } from "./curves.js";
import { element } from "./dom.js";
import { lostMass } from "./histogram.js";
import { formatInWords, number, numberOf, raised, scaleInWords, spanInWords } from "./words.js";

/** @param {number} count @param {string} one @param {string} several */
const verb = (count, one, several) => (count === 1 ? one : several);

/** @param {import("./view.js").View} view */
export function summary(view) {
  const own = view.ofKind;
  const found = own.map((/** @type {any} */ layer) => view.figures(layer)).filter(Boolean);
  const valued = found.filter((/** @type {any} */ each) => each.all > 0);
  const broken = found.filter((/** @type {any} */ each) => each.h.infs + each.h.nans > 0).length;
  const without = valued.length && valued.length < own.length ? `, ${own.length - valued.length} without a finite non-zero element` : "";
  const nonFinite = broken ? `, ${broken} ${verb(broken, "holds", "hold")} infinities or NaNs` : "";
  return `${formatInWords(view, "If")}${scaleOf(view)}: ${losses(view, valued, broken)}${without}${nonFinite}.${eventInWords(view)}`;
}

/** The steps, and which of the run's loss scales is shown. @param {import("./view.js").View} view */
function scaleOf(view) {
  const { data, state, stepsInWords } = view;
  const { own, collapsed, opening } = data;
  // The words before it name the steps of an event.
  const isNamed = view.isOpening && state.block >= 0;
  if (!view.isScaled() || !(view.isMoved || view.hasScale)) return isNamed ? "" : `, ${stepsInWords}`;
  const isTheirs = opening.block >= 0 && state.block === opening.block && state.scale === opening.scale;
  if (isTheirs) return ` at loss scale ${scaleInWords(state.scale)}${isNamed ? "" : `, that of ${stepsInWords}`}`;
  const isKnown = data.scales.some((/** @type {[number, number | null]} */ [, value]) => value !== null);
  const unknown = data.by_hand ? `the gradients as they arrive, with the loop's own scale, ${raised(data.by_hand)}` : "the run's is not known";
  const last = !isKnown ? unknown : `the run's, ${collapsed ? "before it collapsed" : "as last sampled"}${state.scale === own ? "" : `: ${scaleInWords(own)}`}`;
  return ` at loss scale ${scaleInWords(state.scale)}${view.hasScale ? ` (${last})` : ""}, ${stepsInWords}`;
}

/** @param {import("./view.js").View} view @param {any[]} valued @param {number} broken how many tensors hold infinities or NaNs */
function losses(view, valued, broken) {
  const { ofKind: own, data, state } = view;
  if (!valued.length) return own.length === 1 ? "the tensor holds no finite non-zero element" : `the ${own.length} tensors hold no finite non-zero element`;
  const hiding = own.some((/** @type {any} */ layer) => view.hiddenIn(layer, view.figures(layer)));
  const those = own.filter((/** @type {any} */ layer) => view.lossOf(layer) > NOTABLE);
  const losing = those.length;
  // Small elements are many and weigh little: the safe window of loss scales goes by their magnitudes.
  const isTrifle = losing && !hiding && those.every((/** @type {any} */ layer) => lostMass(view.counted(layer), state.format, view.log2Scale) <= NOTABLE);
  const its = verb(losing, "its", "their");
  const over = valued.filter((each) => each.high > 0).length;
  const { title } = data.kinds.find((/** @type {any} */ kind) => kind.name === state.kind);
  const tensors = numberOf(own.length, title.toLowerCase().replace(/s$/, ""));
  const hidden = view.hidesValues ? " (zeros may have been values)" : "";
  return `${hiding ? "up to " : ""}${losing} of ${tensors} ${verb(losing, "loses", "lose")} over 1% of ${its} elements${isTrifle ? `, but at most 1% of ${its} magnitude,` : ""} to zero${hidden}, ${over} ${verb(over, "overflows", "overflow")}${broken ? " in finite values" : ""}`;
}

/** A sentence on a chosen event whose step is not, or may not be, among the steps shown. @param {import("./view.js").View} view */
function eventInWords({ state, data }) {
  if (state.step === null) return "";
  const block = data.blocks[Math.max(state.block, 0)];
  const isInside = block.first <= state.step && state.step <= block.last;
  if (isInside && block.counted > block.last - block.first) return "";
  const counted = isInside ? `${number(block.counted)} of ${spanInWords(block)} were counted, perhaps without it` : `it was not counted; the nearest counted: ${spanInWords(block)}`;
  return ` The event is in step ${number(state.step)}; ${counted}.`;
}

/** The events, as a list of buttons, one for those that follow each other in the same place; "" without any. @param {import("./view.js").View} view @param {(event: any) => void} choose */
export function eventList({ data }, choose) {
  if (!data.events.length) return "";
  const list = data.places.map((/** @type {any} */ { words, first }) => {
    const event = data.events[first];
    const button = element("button", { type: "button" }, element("bdi", {}, words));
    button.addEventListener("click", () => choose(event));
    const facts = [event.facts, event.maxima, event.explanation].filter(Boolean).join("; ");
    return element("li", {}, button, ` ${facts}`);
  });
  const made = element("details", { className: "events" }, element("summary", {}, numberOf(data.events.length, "event")), element("ol", { tabIndex: 0 }, ...list));
  made.addEventListener("click", (/** @type {Event} */ event) => {
    if (event.target instanceof HTMLElement && event.target.closest("li button")) made.open = false;
  });
  return made;
}
