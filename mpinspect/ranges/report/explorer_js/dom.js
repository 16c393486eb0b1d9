// Elements of the page, and the data that its HTML holds.
// @ts-check

/** The JSON in gzip in base64. @param {string} text */
export async function decode(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

/** @param {string} tag @param {Record<string, any>} fields @param {(Node | string)[]} children @returns {any} */
export function element(tag, fields = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(fields)) {
    if (name in made) /** @type {any} */ (made)[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** @param {string} tag @param {Record<string, any>} fields @param {(Node | string)[]} children @returns {SVGElement} */
export function svg(tag, fields, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(fields)) made.setAttribute(name, value);
  made.append(...children);
  return /** @type {SVGElement} */ (made);
}

/** A sign of a legend, drawn as in the chart, its words, and what they mean. @param {string} name @param {string} words */
export const key = (name, words, meaning = "") => element("span", { className: "entry", title: meaning }, element("i", { className: `key ${name}` }), words);

/** An entry of a legend without a sign. @param {string} words */
export const entry = (words) => element("span", { className: "entry" }, words);

export const isNarrow = () => matchMedia("(max-width: 760px)").matches;
