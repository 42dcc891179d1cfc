// Draws the branches of an attempt as a tree of messages.

import { chat, h, link } from "./dom.js";

/** Return the rows of a tree, which are its branches, in order. */
export function rowsOf(node) {
  return [...node.rows, ...node.children.flatMap(rowsOf)].sort((one, two) => one - two);
}

/** Return a tree: the messages that branches share, then each branch with its own. `leaf(row, branch)` is shown at its end. */
export function branchTree(node, leaf, rows = rowsOf(node)) {
  return h("div", { class: "branches" }, node.messages.length ? chat(node.messages) : null,
    node.rows.map((row) => h("p", { class: "leaf" }, leaf(row, rows.indexOf(row) + 1))),
    node.children.length ? h("ul", { class: "tree" }, node.children.map((child) => h("li", {}, branchTree(child, leaf, rows)))) : null);
}

export function branchLink(id, row, branch, current) {
  return link(`#/sample/${id}/${row}`, row === current ? h("b", {}, `branch ${branch} (this one)`) : `branch ${branch}`);
}
