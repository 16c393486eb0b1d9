// The rows of the table: layers, groups of repeated ones, and a culprit without a tensor of its own.
// @ts-check

import { share } from "./histogram.js";

/** Layers that are not grouped, since all have room on a screen. */
const FITTING = 24;
/** Most layers near a culprit that a closed group shows. */
const MOST_NEAR = 8;

/** @typedef {import("./view.js").View} View */

/** One entry a row: a layer, a group with the member that is worst, or a culprit without a tensor of its own. @param {View} view */
export function rowsOf(view) {
  const rows = layerRows(view);
  const { name: culprit, kind, after } = view.data.opening;
  if (!culprit || (kind && kind !== view.state.kind) || view.state.search) return rows;
  const isNear = (/** @type {any} */ { layer, members }) => (members ?? [layer]).some((/** @type {any} */ each) => view.isNear(each));
  const at = after ? rows.findLastIndex(isNear) + 1 : Math.max(rows.findIndex(isNear), 0);
  return [...rows.slice(0, at), { culprit }, ...rows.slice(at)];
}

/** @param {View} view @returns {any[]} */
function layerRows(view) {
  const words = view.state.search.toLowerCase();
  const found = view.ofKind.filter((/** @type {any} */ layer) => !words || layer.label.toLowerCase().includes(words));
  if (view.state.sort === "model") return words || found.length <= FITTING ? found.map((/** @type {any} */ layer) => ({ layer })) : grouped(view, found);
  return found.map((/** @type {any} */ layer) => ({ layer, rank: rankOf(view, layer) }))
    .sort((/** @type {any} */ one, /** @type {any} */ other) => other.rank - one.rank || one.layer.place - other.layer.place);
}

/** @param {View} view @param {any[]} layers in the model's order */
function grouped(view, layers) {
  const made = [];
  const groups = new Map();
  for (const layer of layers) {
    const group = view.data.groups[layer.group];
    if (group.size < 2) {
      made.push({ layer });
    } else if (groups.has(layer.group)) {
      groups.get(layer.group).members.push(layer);
    } else {
      const row = { group: layer.group, name: group.name, members: [layer], layer };
      groups.set(layer.group, row);
      made.push(row);
    }
  }
  for (const row of groups.values()) row.layer = view.worst(row.members);
  // Of a closed group the culprit stands below it all the same, and so do layers near it, unless these are many.
  const stands = (/** @type {any} */ layer) => view.isMarked(layer) || (view.near.size <= MOST_NEAR && view.isNear(layer));
  return made.flatMap((/** @type {any} */ row) => [row, ...(row.members ?? []).filter((/** @type {any} */ layer) => view.state.open.has(row.group) || stands(layer))
    .map((/** @type {any} */ layer) => ({ layer, inside: true }))]);
}

/** By what the rows are sorted; the largest is first. @param {View} view @param {any} layer @returns {number} */
function rankOf(view, layer) {
  const { sort } = view.state;
  const found = view.figures(layer);
  if (!found) return -1;
  if (sort === "flushed") return share(found.flushed, found.all);
  if (sort === "subnormal") return share(found.subnormal, found.all);
  if (sort === "overflow") return share(found.high, found.all);
  if (sort === "broken") return found.h.infs + found.h.nans;
  if (sort === "lost") return view.lostOf(view.storages[0], layer) ?? -1;
  if (sort.startsWith("note")) return view.data.notes.cells[layer.module]?.[Number(sort.slice(4))]?.[2] ?? -1;
  return found.all ? found.h.min + found.h.counts.length + 400 : 0;
}
