// The words in the culprit's row: why it is marked, the step in which that began, and the steps that the map shows instead.
// @ts-check

import { number, spanInWords } from "./words.js";

/** Why the culprit's row is marked: the phase, the line and the operator where they are known, and the step. @param {import("./view.js").View} view */
export function whyMarked(view) {
  const { at, phase, said, step } = view.data.opening;
  const why = at ? [phase, at].filter(Boolean).join(", ") : said;
  return [why, ...(step === null ? [] : [`step ${number(step)}`])].join(", ") + shownInstead(view);
}

/** The steps whose figures the map shows, if the culprit's step is none of them. @param {import("./view.js").View} view */
export function shownInstead({ data, state }) {
  const { step } = data.opening;
  if (step === null || state.block < 0) return "";
  const block = data.blocks[state.block];
  if (block.first <= step && step <= block.last) return "";
  return ` (shown: ${spanInWords(block)}, ${block.last < step ? "before" : "after"} it)`;
}
