// The picture: what of the calls is visible, drawn on the canvas.

const canvas = document.getElementById("canvas");
const scroller = document.getElementById("picture");
const paint = canvas.getContext("2d");
const AXIS = 24;
const ROW = 17;
const BOX = 15;
const GAP = 6;
const HEADING = 24;
const FONT = "11px ui-monospace, monospace";
const LETTER = 6.7;
// Room at the right for calls that have not ended, as a share of the whole.
const MARGIN = 0.01;
const NARROWEST = 200;
// Pixels that a call gets at least; the end of a failed call is often unknown.
const LEAST = { d: 1, t: 3, c: 3, f: 8, n: 3, x: 3 };

const view = { from: 0, to: SPAN * (1 + MARGIN), world: -1, hovered: null, selected: null, pointer: null };
// What stands below one another: headings and lanes, with their places.
let places = [];
let gutter = 90;
let colours = {};

function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["paper", "band", "ink", "faint", "line", "mark", "done", "taken", "called", "failed", "never"]) {
    colours[name] = style.getPropertyValue(`--${name}`).trim();
    colours[`${name}-ink`] = style.getPropertyValue(`--${name}-ink`).trim();
  }
}

function layOut() {
  const shown = view.world < 0 ? data.worlds : [data.worlds[view.world]];
  let y = AXIS;
  let longest = 0;
  places = [];
  for (const world of shown) {
    if (shown.length > 1) {
      places.push({ y, height: HEADING, heading: world.name });
      y += HEADING;
    }
    for (const lane of world.lanes) {
      const height = lane.rows.length * ROW + GAP;
      places.push({ y, height, lane });
      y += height;
      longest = Math.max(longest, Math.min(lane.name.length, 24));
    }
  }
  gutter = Math.max(60, longest * LETTER + 16);
  // No higher than there is to show.
  scroller.style.maxHeight = `${y + 8}px`;
  document.getElementById("height").style.height = `${Math.max(0, y - scroller.clientHeight)}px`;
}

function width() {
  return canvas.clientWidth;
}

function xOf(time) {
  return gutter + ((time - view.from) / (view.to - view.from)) * (width() - gutter);
}

function timeAt(x) {
  return view.from + ((x - gutter) / (width() - gutter)) * (view.to - view.from);
}

// --- boxes -------------------------------------------------------------------------------------------------

const KINDS = { d: "done", t: "taken", c: "called", f: "failed", n: "never", x: "never" };

function hatch(to, x, y, wide, high, colour, both) {
  to.save();
  to.beginPath();
  to.rect(x, y, wide, high);
  to.clip();
  to.strokeStyle = colour;
  to.lineWidth = 1;
  to.beginPath();
  for (let at = Math.floor((x - high) / 6) * 6; at < x + wide; at += 6) {
    to.moveTo(at, y + high);
    to.lineTo(at + high, y);
    if (both) {
      to.moveTo(at, y);
      to.lineTo(at + high, y + high);
    }
  }
  to.stroke();
  to.restore();
}

// Draws a box by its state; the states also differ without their colours.
function drawBox(to, state, x, y, wide, high) {
  const kind = KINDS[state];
  if (kind === "never") {
    hatch(to, x, y, wide, high, colours.never, state === "x");
    to.strokeStyle = colours.never;
    to.strokeRect(x + 0.5, y + 0.5, Math.max(wide - 1, 0), high - 1);
    return;
  }
  to.fillStyle = colours[kind];
  to.fillRect(x, y, wide, high);
  if (state === "t" || state === "c") {
    to.fillStyle = colours[`${kind}-ink`];
    to.fillRect(x, y, wide, 2);
    if (state === "c") to.fillRect(x, y, 4, high);
  }
  if (state === "f") {
    to.strokeStyle = colours.ink;
    to.lineWidth = 2;
    to.strokeRect(x + 1, y + 1, Math.max(wide - 2, 1), high - 2);
    to.lineWidth = 1;
  }
}

const PREFIXES = { f: "✕ ", n: "never called: ", t: "", c: " ", d: "", x: "" };

function drawText(call, x, y, wide) {
  const room = Math.floor((wide - 8) / LETTER);
  if (room < 2) return;
  const number = call.number > 0 ? `${call.state === "f" ? PREFIXES.f : ""}#${call.number}` : "";
  const text = [`${PREFIXES[call.state]}${title(call)}`, title(call), number].find((each) => each.length <= room);
  if (!text) return;
  if (KINDS[call.state] === "never") {
    paint.fillStyle = colours.paper;
    paint.fillRect(x + 2, y + 1, text.length * LETTER + 4, BOX - 2);
  }
  paint.fillStyle = colours[`${KINDS[call.state]}-ink`];
  paint.fillText(text, x + 4, y + 9);
}

// Returns the part of a lane in what is called together with a call, if there is one.
function counterpart(call, lane) {
  if (lane === call.lane) return call;
  return call.key !== null && lane.world === call.lane.world ? lane.byKey.get(call.key) : undefined;
}

function drawRow(row, y) {
  const [first, last] = visible(row, view.from, view.to);
  const special = [];
  let painted = -1;
  paint.font = FONT;
  for (let i = first; i < last; i++) {
    const call = row.calls[i];
    const x = Math.max(xOf(call.begin), gutter - 2);
    const right = Math.min(xOf(call.end), width() + 2);
    if (right < x) continue;
    if (call.state !== "d") special.push([call, x, Math.max(right - x, LEAST[call.state])]);
    // What lies within a painted pixel is not visible.
    else if (right > painted) {
      const wide = Math.max(right - x, 1);
      drawBox(paint, "d", x, y, wide > 4 ? wide - 1 : wide, BOX);
      drawText(call, x, y, wide);
      painted = Math.ceil(x + wide) - 0.5;
    }
  }
  let stopped = -Infinity;
  for (const [call, x, wide] of special) {
    if (x + wide < stopped + 1) continue;
    drawBox(paint, call.state, x, y, wide, BOX);
    drawText(call, x, y, wide);
    stopped = x + wide;
  }
}

function outline(call, y, colour) {
  const x = Math.max(xOf(call.begin), gutter - 2);
  const wide = Math.max(Math.min(xOf(call.end), width() + 2) - x, 3);
  if (x + wide < gutter || x > width()) return;
  paint.strokeStyle = colour;
  paint.lineWidth = 2;
  paint.strokeRect(x, y - 1, wide, BOX + 2);
  paint.lineWidth = 1;
}

// Outlines a call, and those of other ranks that belong to it.
function outlineSame(place, top) {
  const chosen = view.hovered || view.selected;
  if (!chosen) return;
  const other = counterpart(chosen, place.lane);
  if (!other) return;
  outline(other, place.y - top + GAP / 2 + place.lane.rows.indexOf(other.row) * ROW, other === chosen ? colours.mark : colours.faint);
}

// --- everything --------------------------------------------------------------------------------------------

function stepOfAxis() {
  const least = ((view.to - view.from) / (width() - gutter)) * 110;
  const power = 10 ** Math.floor(Math.log10(least));
  return power * ([1, 2, 5].find((factor) => factor * power >= least) || 10);
}

function drawAxis(high) {
  const step = stepOfAxis();
  paint.fillStyle = colours.paper;
  paint.fillRect(0, 0, width(), AXIS);
  paint.font = FONT;
  for (let time = Math.ceil(view.from / step) * step; time <= view.to; time += step) {
    const x = Math.round(xOf(time)) + 0.5;
    paint.strokeStyle = colours.line;
    paint.beginPath();
    paint.moveTo(x, AXIS - 6);
    paint.lineTo(x, AXIS);
    paint.stroke();
    paint.fillStyle = colours.faint;
    if (x + 60 < width()) paint.fillText(sayTime(time, step), x + 3, AXIS / 2);
  }
  if (view.pointer !== null && view.pointer > gutter) {
    paint.strokeStyle = colours.mark;
    paint.beginPath();
    paint.moveTo(view.pointer + 0.5, AXIS - 8);
    paint.lineTo(view.pointer + 0.5, high);
    paint.stroke();
  }
  paint.strokeStyle = colours.line;
  paint.strokeRect(-1, -1, width() + 2, AXIS + 0.5);
}

function drawLane(place, top, number) {
  const y = place.y - top;
  paint.fillStyle = number % 2 ? colours.band : colours.paper;
  paint.fillRect(0, y, width(), place.height);
  place.lane.rows.forEach((row, index) => drawRow(row, y + GAP / 2 + index * ROW));
  outlineSame(place, top);
  // Over boxes that begin further left.
  paint.fillStyle = number % 2 ? colours.band : colours.paper;
  paint.fillRect(0, y, gutter - 2, place.height);
  paint.fillStyle = colours.ink;
  paint.font = FONT;
  paint.fillText(place.lane.name.slice(0, 24), 6, y + GAP / 2 + 8);
}

function drawHeading(place, top) {
  paint.fillStyle = colours.paper;
  paint.fillRect(0, place.y - top, width(), place.height);
  paint.fillStyle = colours.ink;
  paint.font = `bold ${FONT}`;
  paint.fillText(place.heading.slice(0, 200), 6, place.y - top + HEADING / 2);
}

function draw() {
  const ratio = window.devicePixelRatio || 1;
  const high = scroller.clientHeight;
  canvas.style.height = `${high}px`;
  canvas.width = Math.round(width() * ratio);
  canvas.height = Math.round(high * ratio);
  paint.setTransform(ratio, 0, 0, ratio, 0, 0);
  paint.textBaseline = "middle";
  paint.fillStyle = colours.paper;
  paint.fillRect(0, 0, width(), high);
  const top = scroller.scrollTop;
  places.forEach((place, number) => {
    if (place.y + place.height < top || place.y > top + high) return;
    if (place.lane) drawLane(place, top, number);
    else drawHeading(place, top);
  });
  drawAxis(high);
}

let drawn = 0;
function redraw() {
  drawn = drawn || requestAnimationFrame(() => {
    drawn = 0;
    draw();
  });
}

// Returns the call at a place of the canvas; of several in one pixel, the last that is not complete.
function callAt(x, y) {
  const at = y + scroller.scrollTop;
  const place = places.find((each) => each.lane && at >= each.y && at < each.y + each.height);
  if (!place || x < gutter || y < AXIS) return null;
  const row = place.lane.rows[Math.floor((at - place.y - GAP / 2) / ROW)];
  if (!row) return null;
  const [first, last] = visible(row, timeAt(x - LEAST.f), timeAt(x + 2));
  const near = row.calls.slice(first, last).filter((call) => call.end >= timeAt(x - Math.max(LEAST[call.state], 2)));
  return near.filter((call) => call.state !== "d").pop() || near.pop() || null;
}
