// The page's address keeps the reader's choice, so that a link shows the same.
// @ts-check

/** The choice of all models of a page, in its switch and its address. */
export const ALL = "all";
/** The choice of two runs and their difference. */
export const DIFFERENCE = "difference";

export const asked = () => new URLSearchParams(location.hash.slice(1));

/** What the address asks for a model; null where it asks for nothing, or for another model. @param {any} data @param {string} name */
export function wanted(data, name) {
  const found = asked();
  const isMine = !found.has("model") || found.get("model") === data.model || data.view !== undefined;
  return isMine ? found.get(name) : null;
}

/** Keeps what is shown in the address. Browsers allow some hundred such changes a minute. @param {import("./view.js").View} view @param {string} format */
export function keep({ data, state }, format = state.format.name) {
  const kept = new URLSearchParams({ model: data.model, kind: state.kind ?? "", format, scale: String(state.scale) });
  if (state.block >= 0) kept.set("block", String(state.block));
  if (state.layer !== null) kept.set("layer", state.layer);
  if (state.layer !== null && !state.isOwn) kept.set("beside", "");
  if (data.view) kept.set("view", data.view);
  const tab = asked().get("tab");
  if (tab) kept.set("tab", tab);
  remember(kept);
}

/** Keeps the tab that is shown in the address. @param {string} tab */
export function keepTab(tab) {
  const kept = asked();
  kept.set("tab", tab);
  remember(kept);
}

/** @param {URLSearchParams} kept */
function remember(kept) {
  try {
    history.replaceState(null, "", `#${kept}`);
  } catch {
    // A frame without an address of its own, as in a notebook.
  }
}
