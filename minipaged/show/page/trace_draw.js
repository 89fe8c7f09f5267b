// ------------------------------------------------------------------------------------------- drawing

let ink = {};
function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = "paper card ink faint line free cached pinned used filled copy evict swap preempt waiting".split(" ");
  ink = Object.fromEntries(names.map((name) => [`--${name}`, style.getPropertyValue(`--${name}`).trim()]));
}

const colours = new Map();
function colourOf(owner) {
  if (owner === CACHED) return ink["--cached"];
  if (owner === PINNED) return ink["--pinned"];
  if (!colours.has(owner)) colours.set(owner, `hsl(${(200 + owner * 137.508) % 360} 60% 62%)`); // the golden angle
  return colours.get(owner);
}

function draw() {
  const context = picture.getContext("2d");
  context.clearRect(0, 0, size.width, size.height);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  drawLanes(context);
  drawMap(context);
  drawLabels(context);
  drawBatch(context);
  drawUse(context);
  drawAxis(context);
  const last = Math.min(numSteps, Math.ceil(view.to));
  const blocks = rowHeight() < 1 ? ` · one line of pixels for ${(1 / rowHeight()).toFixed(1)} blocks: zoom in with ]` : "";
  element("range").textContent = `steps ${Math.floor(view.from)} – ${last - 1} of ${numSteps}${blocks}`;
  drawCursor();
}

function drawLanes(context) {
  LANES.forEach(([kind, name, colour], lane) => {
    const y = lane * LANE + LANE / 2;
    write(context, name, size.left - 8, y, ink["--faint"], "right");
    context.fillStyle = ink[colour];
    let drawn = -1;
    for (const [step] of marks[kind]) {
      const x = Math.round(xOf(step) + Math.min(stepWidth() / 2, 20));
      if (x === drawn || step + 1 < view.from || step > view.to) continue;
      context.fillRect((drawn = x) - 1, y - 5, stepWidth() > 3 ? 3 : 1.5, 10);
    }
  });
}

function clipTo(context, top, height, paint) {
  context.save();
  context.beginPath();
  context.rect(size.left, top, size.right - size.left, height);
  context.clip();
  paint();
  context.restore();
}

function drawMap(context) {
  clipTo(context, size.mapTop, size.mapHeight, () => {
    const height = rowHeight() > 5 ? rowHeight() - 1 : Math.max(1, rowHeight());
    let line = -1;
    for (const place of places) {
      const y = rowHeight() < 1 ? Math.floor(yOf(place.row)) : yOf(place.row);
      if (y === line || y + height < size.mapTop || y > size.mapTop + size.mapHeight) continue;
      line = y; // where several blocks fall on one line of pixels, the first is drawn, and the range says so
      context.fillStyle = ink["--free"];
      context.fillRect(size.left, y, size.right - size.left, height);
      drawRuns(context, place.changes, y, height);
    }
    if (stepWidth() >= 5) drawMoves(context);
  });
}

function drawRuns(context, changes, y, height) {
  for (let i = Math.max(0, changeAt(changes, view.from)); i < changes.length && changes[i] <= view.to; i += 3) {
    const owner = changes[i + 1], count = changes[i + 2];
    if (owner === FREE) continue;
    const x = Math.max(size.left, xOf(changes[i]));
    const width = Math.max(0.7, Math.min(size.right, xOf(changes[i + 3] ?? numSteps)) - x);
    context.fillStyle = colourOf(owner);
    context.fillRect(x, y, width, height);
    if (count > 1) shade(context, x, y, width, height);
    context.fillStyle = colourOf(owner);
    if (owner >= 0 && width > 18 && height > 11) {
      nameRun(context, letter(owner) + (count > 1 ? `… ×${count}` : ""), x, y, width, height);
    }
  }
}

function nameRun(context, name, x, y, width, height) {
  context.font = "600 12px system-ui, sans-serif";
  const nameWidth = context.measureText(name).width;
  if (nameWidth > width - 6) return;
  context.fillRect(x + 1, y + 1, nameWidth + 6, height - 2); // no stripes behind the letters
  write(context, name, x + 4, y + height / 2, "#16181d", "left", true);
}

// Shared blocks are striped, so that they are seen without colours too.
let stripes = null;
function shade(context, x, y, width, height) {
  if (!stripes) {
    const tile = Object.assign(document.createElement("canvas"), { width: 6, height: 6 });
    const pen = tile.getContext("2d");
    pen.strokeStyle = "rgba(255, 255, 255, 0.6)";
    pen.lineWidth = 2;
    for (const offset of [-6, 0, 6]) pen.stroke(new Path2D(`M${offset} 6 L${offset + 6} 0`));
    stripes = context.createPattern(tile, "repeat");
  }
  context.fillStyle = height > 4 ? stripes : "rgba(255, 255, 255, 0.35)";
  context.fillRect(x, y, width, height);
}

function drawMoves(context) {
  const middle = (row) => yOf(row) + rowHeight() / 2;
  const column = (step) => xOf(step) + Math.min(stepWidth() / 2, 20);
  for (const [step, source, target] of visible("copy")) arrow(context, column(step), middle(source), middle(target), ink["--copy"]);
  for (const [step, block, host] of visible("swap_out")) arrow(context, column(step), middle(block), middle(hostTop + host), ink["--swap"]);
  for (const [step, host, block] of visible("swap_in")) arrow(context, column(step), middle(hostTop + host), middle(block), ink["--swap"]);
  for (const [step, block] of visible("evict")) write(context, "×", xOf(step) + 5, middle(block), ink["--evict"], "center", true);
}

const visible = (kind) => marks[kind].filter(([step]) => step + 1 >= view.from && step <= view.to);

function arrow(context, x, from, to, colour) {
  const way = Math.sign(to - from) || 1;
  context.strokeStyle = context.fillStyle = colour;
  context.lineWidth = 1.5;
  context.beginPath();
  context.arc(x, from, 2.5, 0, 2 * Math.PI);
  context.fill();
  context.stroke(new Path2D(`M${x} ${from} V${to - 5 * way}`));
  context.fill(new Path2D(`M${x} ${to} l-4 ${-7 * way} h8 z`));
}

function write(context, text, x, y, colour, align = "left", isBold = false) {
  context.fillStyle = colour;
  context.textAlign = align;
  context.font = `${isBold ? "600 " : ""}12px system-ui, sans-serif`;
  context.fillText(text, x, y);
}

function drawLabels(context) {
  const every = Math.max(1, nice(15 / rowHeight()));
  for (const place of places) {
    const y = yOf(place.row) + rowHeight() / 2;
    const number = place.row >= hostTop ? place.row - hostTop : place.row;
    if (Math.round(number) % every || y < size.mapTop || y > size.mapTop + size.mapHeight) continue;
    write(context, place.name, size.left - 8, y, ink["--faint"], "right");
  }
}

// 1, 2, 5, 10, 20, 50 …: the first that is large enough.
function nice(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= least);
}

function drawBatch(context) {
  const highest = Math.max(1, peak(series.sequences), peak(series.waiting));
  frame(context, size.batchTop, BATCH, ["batch", `${highest} at most`]);
  clipTo(context, size.batchTop, BATCH, () => {
    plot(context, series.sequences, highest, size.batchTop, BATCH, ink["--filled"], true);
    if (peak(series.waiting)) plot(context, series.waiting, highest, size.batchTop, BATCH, ink["--waiting"], false);
  });
  if (peak(series.waiting)) write(context, "waiting", size.left - 8, size.batchTop + 42, ink["--waiting"], "right");
}

function drawUse(context) {
  const all = pools.device.length;
  frame(context, size.kvTop, KV, ["KV blocks", `of ${all}`]);
  const filled = series.filled.map((slots) => slots / blockSize);
  clipTo(context, size.kvTop, KV, () => {
    plot(context, series.used, all, size.kvTop, KV, ink["--used"], true);
    plot(context, filled, all, size.kvTop, KV, ink["--filled"], true);
  });
  write(context, "in use", size.left - 8, size.kvTop + 44, ink["--used"], "right");
  write(context, "filled", size.left - 8, size.kvTop + 60, ink["--filled"], "right");
}

const peak = (values) => values.reduce((most, value) => Math.max(most, value), 0);

function frame(context, top, height, names) {
  context.fillStyle = ink["--free"];
  context.fillRect(size.left, top, size.right - size.left, height);
  names.forEach((name, line) => write(context, name, size.left - 8, top + 8 + 16 * line, ink[line ? "--faint" : "--ink"], "right"));
}

// The largest value within each pixel, as an area or as a line.
function plot(context, values, highest, top, height, colour, isArea) {
  const path = new Path2D();
  const level = (value) => top + height - (value / highest) * (height - 4);
  path.moveTo(size.left, isArea ? top + height : level(values[Math.floor(view.from)] ?? 0));
  const last = Math.min(view.to, numSteps);
  for (let step = Math.floor(view.from); step < last; ) {
    const next = Math.max(step + 1, Math.floor(step + 1 / stepWidth()));
    const y = level(peak(values.slice(step, next)));
    path.lineTo(xOf(step), y);
    path.lineTo(xOf(next), y);
    step = next;
  }
  context.fillStyle = context.strokeStyle = colour;
  context.lineWidth = 1.5;
  if (!isArea) return context.stroke(path);
  path.lineTo(xOf(last), top + height);
  return context.fill(path);
}

function drawAxis(context) {
  const every = nice(64 / stepWidth());
  const y = size.height - AXIS + 12;
  write(context, "step", size.left - 8, y, ink["--faint"], "right");
  for (let step = Math.ceil(view.from / every) * every; step < Math.min(view.to, numSteps); step += every) {
    write(context, String(series.step[step]), xOf(step) + Math.min(stepWidth() / 2, 20), y, ink["--faint"], "center");
  }
}

function drawCursor() {
  const context = cursor.getContext("2d");
  context.clearRect(0, 0, size.width, size.height);
  if (!numSteps) return;
  const x = xOf(chosen.step), width = Math.max(1.5, stepWidth());
  if (x + width < size.left || x > size.right) return;
  context.strokeStyle = ink["--ink"];
  context.lineWidth = 1.5;
  context.strokeRect(x, 1, width, size.height - AXIS - 2);
  if (!chosen.place) return;
  context.strokeRect(size.left, yOf(chosen.place.row), size.right - size.left, Math.max(2, rowHeight()));
}
