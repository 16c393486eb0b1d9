// The slider of steps: a block of them, or the whole run, which no place on the slider stands for.
// @ts-check

import { clamp } from "./histogram.js";

/** A slider that fills the steps shown. @param {HTMLInputElement} slider @param {boolean} isWhole whether the whole run is shown */
export function fillWhole(slider, isWhole) {
  slider.classList.toggle("whole", isWhole);
  if (isWhole) slider.value = slider.max;
}

/** The block that a key chooses, -1 for the whole run, which is before the first; null for other keys. @param {string} key @param {number} block @param {number} last */
export function blockAfter(key, block, last) {
  const to = { ArrowLeft: block - 1, ArrowDown: block - 1, ArrowRight: block + 1, ArrowUp: block + 1, Home: -1, End: last }[key];
  return to === undefined ? null : clamp(to, -1, last);
}
