// The difference of two texts, word by word.

import { h, visible } from "./dom.js";

const MAX_WORDS = 3000;

/** Return both texts, with marks on the words that only one of them has. */
export function difference(left, right) {
  const [before, after] = [words(left), words(right)];
  const parts = before.length > MAX_WORDS || after.length > MAX_WORDS ? [["removed", left], ["added", right]] : joined(common(before, after));
  return h("div", { class: "difference" }, ["removed", "added"].map((side) => h("div", { class: "text" },
    parts.filter(([kind]) => kind === "same" || kind === side).map(([kind, text]) => (kind === "same" ? visible(text) : h(side === "added" ? "ins" : "del", {}, visible(text)))))));
}

function words(text) {
  return text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];
}

/** Return [kind, word] pairs by the longest common subsequence. */
function common(before, after) {
  let start = 0;
  while (start < before.length && start < after.length && before[start] === after[start]) start += 1;
  const [rows, columns] = [before.length - start, after.length - start];
  const lengths = Array.from({ length: rows + 1 }, () => new Uint16Array(columns + 1));
  for (let row = rows - 1; row >= 0; row -= 1) {
    for (let column = columns - 1; column >= 0; column -= 1) {
      lengths[row][column] = before[start + row] === after[start + column] ? lengths[row + 1][column + 1] + 1 : Math.max(lengths[row + 1][column], lengths[row][column + 1]);
    }
  }
  const pairs = before.slice(0, start).map((word) => ["same", word]);
  let [row, column] = [0, 0];
  while (row < rows || column < columns) {
    if (row < rows && column < columns && before[start + row] === after[start + column]) {
      pairs.push(["same", before[start + row]]);
      row += 1;
      column += 1;
    } else if (column < columns && (row === rows || lengths[row][column + 1] > lengths[row + 1][column])) {
      pairs.push(["added", after[start + column]]);
      column += 1;
    } else {
      pairs.push(["removed", before[start + row]]);
      row += 1;
    }
  }
  return pairs;
}

function joined(pairs) {
  const parts = [];
  for (const [kind, word] of pairs) {
    if (parts.at(-1)?.[0] === kind) parts.at(-1)[1] += word;
    else parts.push([kind, word]);
  }
  return parts;
}
