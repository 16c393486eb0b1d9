// The panel beside the map of a page: its findings lead to their rows, and its code can be copied.
// @ts-check

import { asked, keepTab } from "./address.js";
import { element } from "./dom.js";

/**
 * Where a finding leads.
 * @typedef {object} Place
 * @property {string} thing         name of the model; "" for the page's only one
 * @property {string} layer         a tensor or a module
 * @property {number | null} step
 */

/** Pages wider than this hold the map and the panel on one screen. */
const WIDE = "(min-width: 1001px)";

/** Lets a map fill the screen on wide pages. @param {HTMLElement} root */
export function fixed(root) {
  const wide = matchMedia(WIDE);
  const follow = () => root.classList.toggle("fixed", wide.matches);
  wide.addEventListener("change", follow);
  follow();
}

/** Adds a button that copies to every piece of code in the panel. */
export function copyButtons() {
  for (const code of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll(".panel pre"))) {
    const place = element("div", { className: "copied" }, copier(code, code.textContent ?? ""));
    code.replaceWith(place);
    place.prepend(code);
  }
}

/** Code with a button that copies it. @param {string} text @returns {HTMLElement} */
export function copied(text) {
  const code = element("pre", {}, ...text.split("\n").flatMap((line) => ["\n", element("span", {}, line)]).slice(1));
  return element("div", { className: "copied" }, code, copier(code, text));
}

/** A button that copies a piece of code. @param {HTMLElement} code @param {string} text */
function copier(code, text) {
  const button = element("button", { type: "button", className: "copy" }, "copy");
  button.addEventListener("click", async () => {
    button.textContent = (await copy(code, text)) ? "copied" : "press Ctrl-C";
  });
  return button;
}

/** Copies a text; selects it where the browser allows no more. @param {HTMLElement} code @param {string} text @returns {Promise<boolean>} whether it was copied */
async function copy(code, text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection()?.selectAllChildren(code);
    return document.execCommand("copy");
  }
}

/** Opens the tab that the address names, and keeps there which one is shown. */
export function tabs() {
  for (const tab of /** @type {NodeListOf<HTMLInputElement>} */ (document.querySelectorAll(".tabs input"))) {
    if (tab.value === asked().get("tab")) tab.checked = true;
    tab.addEventListener("change", () => keepTab(tab.value));
  }
}

/** Shows the rows and the step of each finding that a reader opens. @param {(place: Place) => void} show */
export function findingsLead(show) {
  for (const finding of /** @type {NodeListOf<HTMLDetailsElement>} */ (document.querySelectorAll(".panel details"))) {
    finding.addEventListener("toggle", () => {
      const { thing = "", layer = "", step } = finding.dataset;
      if (finding.open && (layer || step !== undefined)) show({ thing, layer, step: step === undefined ? null : Number(step) });
    });
  }
}
