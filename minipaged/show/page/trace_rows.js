"use strict";
// Time against physical block. trace.py has kept, for each block, the steps at which it changed hands; this draws them.
//
//   lanes     a tick for each preemption, swap, copy and eviction
//   map       a row for each block that was ever used, the host pool's below; a column for each step
//   batch     sequences and waiting requests in each step
//   KV        blocks in use, and how far they are filled
//   axis      steps
//
// (trace_rows.js: where everything is; trace_draw.js: the picture; trace_move.js: words, keys, pointer.)
// Two canvases lie on each other: `picture` is drawn anew when the view changes, `cursor` when the pointer moves.

const FREE = -1, CACHED = -2, PINNED = -3;
const element = (id) => document.getElementById(id);
const data = JSON.parse(element("data").textContent);
const { pools, series, marks, requests, words, blockSize } = data;
const numSteps = words.length;

const LANES = [
  ["preempt", "preempted", "--preempt"], ["swap_out", "swap out", "--swap"], ["swap_in", "swap in", "--swap"],
  ["copy", "copies", "--copy"], ["evict", "evictions", "--evict"],
].filter(([kind]) => marks[kind].length);
const markSteps = [...new Set(LANES.flatMap(([kind]) => marks[kind].map((mark) => mark[0])))].sort((a, b) => a - b);

// ------------------------------------------------------------------------------------------- rows: which block is where

const numUsed = (changes) => changes.findLastIndex((list) => list.length > 0) + 1;
const deviceRows = Math.max(1, numUsed(pools.device ?? []));
const hostRows = numUsed(pools.host ?? []);
const hostTop = deviceRows + Math.max(0.7, 0.03 * (deviceRows + hostRows)); // a gap between the two pools
const numRows = hostRows ? hostTop + hostRows : deviceRows;

// Places in the map, from top to bottom: what to call each, and its changes.
const places = [
  ...pools.device.slice(0, deviceRows).map((changes, block) => ({ row: block, name: `block ${block}`, changes })),
  ...pools.host.slice(0, hostRows).map((changes, block) => ({ row: hostTop + block, name: `host block ${block}`, changes })),
];

// The last change of a block at or before a step: an index into its flat list, or -3 where it was always free.
function changeAt(changes, step) {
  let low = 0, high = changes.length / 3;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (changes[3 * middle] <= step) low = middle + 1; else high = middle;
  }
  return 3 * (low - 1);
}

function momentAt(changes, step) {
  const i = changeAt(changes, step);
  if (i < 0) return { owner: FREE, count: 0, from: 0, to: changes[0] ?? numSteps };
  return { owner: changes[i + 1], count: changes[i + 2], from: changes[i], to: changes[i + 3] ?? numSteps };
}

const letter = (sequence) =>
  String.fromCharCode(65 + (sequence % 26)) + (sequence >= 26 ? Math.floor(sequence / 26) : "");

// ------------------------------------------------------------------------------------------- geometry

const GUTTER = 84, LANE = 15, GAP = 16, BATCH = 64, KV = 84, AXIS = 24;
const canvases = element("canvases"), picture = element("picture"), cursor = element("cursor");
const view = { from: 0, to: Math.max(1, numSteps), top: 0, bottom: numRows };
const size = {};
let chosen = { step: 0, place: null };

function measure() {
  size.width = canvases.clientWidth;
  size.left = GUTTER;
  size.right = size.width - 8;
  size.mapTop = LANES.length * LANE + 6;
  size.mapHeight = Math.min(460, Math.max(150, 20 * numRows));
  size.batchTop = size.mapTop + size.mapHeight + GAP;
  size.kvTop = size.batchTop + BATCH + GAP;
  size.height = size.kvTop + KV + AXIS;
  for (const canvas of [picture, cursor]) {
    canvas.width = size.width * devicePixelRatio;
    canvas.height = size.height * devicePixelRatio;
    canvas.style.height = `${size.height}px`;
    canvas.getContext("2d").setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  }
}

const stepWidth = () => (size.right - size.left) / (view.to - view.from);
const rowHeight = () => size.mapHeight / (view.bottom - view.top);
const xOf = (step) => size.left + (step - view.from) * stepWidth();
const yOf = (row) => size.mapTop + (row - view.top) * rowHeight();
const stepAt = (x) => clamp(Math.floor(view.from + (x - size.left) / stepWidth()), 0, numSteps - 1);
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

function placeAt(y) {
  const row = view.top + (y - size.mapTop) / rowHeight();
  if (y < size.mapTop || y > size.mapTop + size.mapHeight) return null;
  return places.find((place) => place.row <= row && row < place.row + 1) ?? null;
}
