// ------------------------------------------------------------------------------------------- words

function describe(place, step) {
  const { owner, count, from, to } = momentAt(place.changes, step);
  const until = to < numSteps ? `until step ${series.step[to - 1]}` : "until the end";
  const when = `from step ${series.step[from]} ${until}`;
  if (owner === FREE) return `${place.name} is free, ${when}.`;
  if (owner === CACHED) return `${place.name} is free and kept for its content, ${when}.`;
  if (owner === PINNED) return `${place.name} is pinned, ${when}.`;
  const others = count > 1 ? ` and ${count - 1} more` : "";
  return `${place.name} is held by ${letter(owner)}${others} (${requests[owner]}), ${when}.`;
}

function numbersOf(step) {
  const at = (name) => series[name][step];
  const parts = [
    `${at("sequences")} sequences, ${at("tokens")} tokens`,
    `${at("used")} of ${pools.device.length} blocks in use`, `${at("filled")} of their ${at("used") * blockSize} slots filled`,
  ];
  if (series.milliseconds.at(-1) > 50) parts.unshift(`${(at("milliseconds") / 1000).toFixed(2)} s`);
  for (const name of ["cached", "waiting", "swapped"]) if (at(name)) parts.push(`${at(name)} ${name}`);
  return parts.join(" · ");
}

function choose(step, place = chosen.place) {
  if (!numSteps) return;
  chosen = { step: clamp(step, 0, numSteps - 1), place };
  const width = view.to - view.from;
  if (chosen.step < view.from) look(chosen.step, chosen.step + width);
  else if (chosen.step + 1 > view.to) look(chosen.step + 1 - width, chosen.step + 1);
  element("step").textContent = `Step ${series.step[chosen.step]}`;
  element("numbers").textContent = numbersOf(chosen.step);
  element("words").replaceChildren(...words[chosen.step].split("\n").map((sentence) =>
    Object.assign(document.createElement("li"), { textContent: sentence })));
  element("block").textContent = place ? describe(place, chosen.step) : "Choose a block to see who holds it.";
  canvases.setAttribute("aria-valuenow", chosen.step);
  canvases.setAttribute("aria-valuetext", `step ${series.step[chosen.step]}: ${words[chosen.step].replaceAll("\n", "; ")}`);
  document.body.dataset.step = chosen.step;
  drawCursor();
}

// ------------------------------------------------------------------------------------------- moving about

function look(from, to) {
  const width = clamp(to - from, Math.min(4, Math.max(1, numSteps)), Math.max(1, numSteps));
  view.from = clamp(from, 0, Math.max(1, numSteps) - width);
  view.to = view.from + width;
  draw();
}

function lookAtRows(top, bottom) {
  const height = clamp(bottom - top, Math.min(4, numRows), numRows);
  view.top = clamp(top, 0, numRows - height);
  view.bottom = view.top + height;
  draw();
}

// The step (or row) under the pointer stays where it is.
function zoom(factor, step = chosen.step + 0.5) {
  look(step - (step - view.from) * factor, step + (view.to - step) * factor);
}

function zoomRows(factor, row = chosen.place?.row ?? (view.top + view.bottom) / 2) {
  lookAtRows(row - (row - view.top) * factor, row + (view.bottom - row) * factor);
}

function whole() {
  Object.assign(view, { top: 0, bottom: numRows });
  look(0, numSteps);
}

function toMark(way) {
  const step = way > 0 ? markSteps.find((mark) => mark > chosen.step) : markSteps.findLast((mark) => mark < chosen.step);
  if (step !== undefined) choose(step);
}

function toPlace(way) {
  const index = chosen.place ? places.indexOf(chosen.place) + way : 0;
  choose(chosen.step, places[clamp(index, 0, places.length - 1)]);
}

const KEYS = {
  ArrowRight: (event) => choose(chosen.step + (event.shiftKey ? 10 : 1)),
  ArrowLeft: (event) => choose(chosen.step - (event.shiftKey ? 10 : 1)),
  ArrowDown: () => toPlace(1),
  ArrowUp: () => toPlace(-1),
  Home: () => choose(0),
  End: () => choose(numSteps - 1),
  n: () => toMark(1),
  p: () => toMark(-1),
  "+": () => zoom(0.6),
  "=": () => zoom(0.6),
  "-": () => zoom(1 / 0.6),
  "]": () => zoomRows(0.6),
  "[": () => zoomRows(1 / 0.6),
  0: whole,
};

canvases.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key](event);
});

function pointAt(event) {
  const box = canvases.getBoundingClientRect();
  return { x: event.clientX - box.left, y: event.clientY - box.top };
}

canvases.addEventListener("wheel", (event) => {
  event.preventDefault();
  const { x, y } = pointAt(event);
  const factor = Math.exp((event.deltaY || event.deltaX) * 0.0015);
  if (event.shiftKey) zoomRows(factor, view.top + (y - size.mapTop) / rowHeight());
  else zoom(factor, view.from + (x - size.left) / stepWidth());
}, { passive: false });

let drag = null;
canvases.addEventListener("pointerdown", (event) => {
  drag = { ...pointAt(event), ...view, moved: false };
  canvases.setPointerCapture(event.pointerId);
});
canvases.addEventListener("pointermove", (event) => {
  const { x, y } = pointAt(event);
  if (!drag) return showTip(x, y);
  drag.moved ||= Math.abs(x - drag.x) + Math.abs(y - drag.y) > 4;
  if (!drag.moved) return undefined;
  const steps = (drag.x - x) / stepWidth(), rows = (drag.y - y) / rowHeight();
  lookAtRows(drag.top + rows, drag.bottom + rows);
  return look(drag.from + steps, drag.to + steps);
});
canvases.addEventListener("pointerup", (event) => {
  const { x, y } = pointAt(event);
  if (drag && !drag.moved && x >= size.left) choose(stepAt(x), placeAt(y));
  drag = null;
});
canvases.addEventListener("pointerleave", () => (element("tip").hidden = true));
canvases.addEventListener("dblclick", whole);

function showTip(x, y) {
  const tip = element("tip");
  tip.hidden = x < size.left || x > size.right || !numSteps;
  if (tip.hidden) return;
  const step = stepAt(x), place = placeAt(y), sentences = words[step].split("\n");
  const more = sentences.length > 5 ? [`… and ${sentences.length - 5} more: click`] : [];
  tip.textContent = [`step ${series.step[step]}`, ...(place ? [describe(place, step)] : []), "",
    ...sentences.slice(0, 5), ...more].join("\n");
  tip.style.left = `${clamp(x + 14, 0, size.width - tip.offsetWidth)}px`;
  tip.style.top = `${Math.max(0, y + 16 + tip.offsetHeight > size.height ? y - tip.offsetHeight - 10 : y + 16)}px`;
}

// ------------------------------------------------------------------------------------------- the beginning

function tell() {
  const runs = places.reduce((sum, { changes }) => sum + changes.filter((owner, i) => i % 3 === 1 && owner !== FREE).length, 0);
  const counts = {
    steps: numSteps, blocks: pools.device.length, hostBlocks: pools.host.length, runs, sequences: Object.keys(requests).length,
    copies: marks.copy.length, evictions: marks.evict.length, swapsOut: marks.swap_out.length, swapsIn: marks.swap_in.length,
    preemptions: marks.preempt.length, hits: marks.hit.length,
  };
  Object.assign(document.body.dataset, counts);
  const count = (number, one, many = `${one}s`) => (number ? [`${number} ${number === 1 ? one : many}`] : []);
  const seconds = (series.milliseconds.at(-1) ?? 0) / 1000; // a replayed run has no times of its own
  const host = counts.hostBlocks ? `, ${hostRows} of ${counts.hostBlocks} host blocks` : "";
  element("about").textContent = [
    `${count(numSteps, "step")}${seconds > 0.05 ? ` in ${seconds.toFixed(1)} s` : ""}`,
    ...count(counts.sequences, "sequence"),
    `${numUsed(pools.device)} of ${counts.blocks} blocks of ${blockSize} tokens ever used${host}`,
    ...count(counts.copies, "block copy", "block copies"), ...count(counts.hits, "block found in the cache", "blocks found in the cache"), ...count(counts.evictions, "eviction"),
    ...count(counts.swapsOut, "block swapped out", "blocks swapped out"), ...count(counts.preemptions, "preemption"),
  ].join(" · ");
  for (const entry of document.querySelectorAll("#legend [data-kind]")) entry.hidden = !marks[entry.dataset.kind].length;
  if (data.title) document.title = element("title").textContent = data.title;
  canvases.setAttribute("aria-valuemax", Math.max(0, numSteps - 1));
}

function refresh() {
  readColours();
  measure();
  draw();
}

const BUTTONS = { closer: () => zoom(0.6), farther: () => zoom(1 / 0.6), whole, next: () => toMark(1), previous: () => toMark(-1) };
for (const [id, act] of Object.entries(BUTTONS)) element(id).addEventListener("click", act);
addEventListener("resize", refresh);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refresh);
tell();
refresh();
choose(Number(new URLSearchParams(location.hash.slice(1)).get("step") ?? 0)); // page.html#step=12 opens at the 13th step
document.body.dataset.ready = "yes";
