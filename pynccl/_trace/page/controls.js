// The controls: wheel, pointer, keys, buttons, and the details of a call.

const details = document.getElementById("details");

function element(kind, text, ...inner) {
  const made = document.createElement(kind);
  made.textContent = text;
  made.append(...inner);
  return made;
}

function showDetails() {
  const call = view.hovered || view.selected;
  details.replaceChildren();
  if (!call) return;
  const where = data.worlds.length > 1 ? `, ${call.lane.world.name}` : "";
  const what = call.state === "x" ? call.what[0][1] : `${title(call)}, ${STATES[call.state]}`;
  const pairs = [...describe(call), ["on", call.lane.about]];
  const list = element("dl", "", ...pairs.map(([name, value]) =>
    element("div", "", element("dt", name), element("dd", value))));
  details.append(element("h2", `${call.lane.name}: ${what}${where}`), list);
}

function look(from, to) {
  const whole = SPAN * (1 + MARGIN);
  const wide = Math.min(Math.max(to - from, NARROWEST), whole);
  view.from = Math.min(Math.max(from, 0), whole - wide);
  view.to = view.from + wide;
  redraw();
}

function zoom(factor, x) {
  const at = timeAt(x);
  const wide = Math.min(Math.max((view.to - view.from) * factor, NARROWEST), SPAN * (1 + MARGIN));
  const share = (at - view.from) / (view.to - view.from);
  look(at - wide * share, at - wide * share + wide);
}

function move(pixels) {
  const time = timeAt(pixels) - timeAt(0);
  look(view.from + time, view.to + time);
}

function select(call) {
  if (!call) return;
  view.selected = call;
  view.hovered = null;
  const place = places.find((each) => each.lane === call.lane);
  const top = scroller.scrollTop;
  if (place.y - AXIS < top) scroller.scrollTop = place.y - AXIS;
  else if (place.y + place.height > top + scroller.clientHeight) {
    scroller.scrollTop = place.y + place.height - scroller.clientHeight;
  }
  const wide = view.to - view.from;
  if (call.end < view.from || call.begin > view.to) look(call.begin - wide / 3, call.begin + wide * 2 / 3);
  showDetails();
  redraw();
}

function unselect() {
  view.selected = null;
  showDetails();
  redraw();
}

// --- keys and buttons --------------------------------------------------------------------------------------

function lanes() {
  return places.filter((place) => place.lane && place.lane.calls.length).map((place) => place.lane);
}

function beside(step) {
  const call = view.selected;
  return call ? call.lane.calls[call.index + step] || call : lanes().length && lanes()[0].calls[0];
}

// Returns the call of the rank above or below: the same call, or what it did at that time.
function across(step) {
  const call = view.selected;
  if (!call) return beside(0);
  const all = lanes();
  const lane = all[all.indexOf(call.lane) + step];
  if (!lane) return call;
  const equal = counterpart(call, lane);
  return equal || lane.calls[Math.max(0, firstIndex(lane.calls.length, call.begin + 1, (i) => lane.calls[i].begin) - 1)];
}

function nextUnended() {
  const found = lanes().flatMap((lane) => lane.calls.filter((call) => UNENDED.includes(call.state)));
  return found[(found.indexOf(view.selected) + 1) % found.length];
}

function zoomTo(call) {
  if (!call) return;
  const wide = Math.max(call.end - call.begin, NARROWEST / 2);
  look(call.begin - wide * 0.25, call.begin + wide * 1.25);
}

const KEYS = {
  ArrowLeft: () => select(beside(-1)),
  ArrowRight: () => select(beside(1)),
  ArrowUp: () => select(across(-1)),
  ArrowDown: () => select(across(1)),
  Enter: () => zoomTo(view.selected),
  Escape: unselect,
  n: () => select(nextUnended()),
  "+": () => zoom(0.6, (gutter + width()) / 2),
  "=": () => zoom(0.6, (gutter + width()) / 2),
  w: () => zoom(0.6, (gutter + width()) / 2),
  "-": () => zoom(1 / 0.6, (gutter + width()) / 2),
  s: () => zoom(1 / 0.6, (gutter + width()) / 2),
  a: () => move(-width() / 5),
  d: () => move(width() / 5),
  0: () => look(0, Infinity),
  Home: () => look(0, Infinity),
};

canvas.addEventListener("keydown", (event) => {
  const action = KEYS[event.key];
  if (!action || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  action();
});

document.getElementById("fit").addEventListener("click", () => look(0, Infinity));
document.getElementById("next").addEventListener("click", () => {
  select(nextUnended());
  canvas.focus({ preventScroll: true });
});

// --- wheel and pointer -------------------------------------------------------------------------------------

canvas.addEventListener("wheel", (event) => {
  if (event.offsetX < gutter && !event.ctrlKey) return;
  event.preventDefault();
  const lines = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1;
  const along = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) move(along * lines);
  else zoom(Math.exp(event.deltaY * lines * 0.002), event.offsetX);
}, { passive: false });

let dragged = null;
canvas.addEventListener("pointerdown", (event) => {
  dragged = { x: event.offsetX, y: event.offsetY, far: false };
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointermove", (event) => {
  if (dragged) {
    const [right, down] = [event.offsetX - dragged.x, event.offsetY - dragged.y];
    if (!dragged.far && Math.abs(right) + Math.abs(down) < 4) return;
    move(-right);
    scroller.scrollTop -= down;
    dragged = { x: event.offsetX, y: event.offsetY, far: true };
    return;
  }
  view.pointer = event.offsetX;
  view.hovered = callAt(event.offsetX, event.offsetY);
  showDetails();
  redraw();
});
canvas.addEventListener("pointerup", (event) => {
  const call = dragged && !dragged.far ? callAt(event.offsetX, event.offsetY) : null;
  dragged = null;
  if (call) select(call);
});
canvas.addEventListener("pointercancel", () => {
  dragged = null;
});
canvas.addEventListener("pointerleave", () => {
  view.pointer = view.hovered = null;
  showDetails();
  redraw();
});

// --- start -------------------------------------------------------------------------------------------------

function drawLegend() {
  const legend = document.getElementById("legend");
  legend.replaceChildren();
  const present = new Set(data.worlds.flatMap((world) => world.lanes.flatMap((lane) => [...new Set(lane.states)])));
  for (const [state, words] of Object.entries(STATES)) {
    if (!present.has(state)) continue;
    const sample = document.createElement("canvas");
    [sample.width, sample.height] = [52, 28];
    const to = sample.getContext("2d");
    to.scale(2, 2);
    drawBox(to, state, 0, 0, 26, 14);
    const item = element("li", "", sample);
    item.append(words);
    legend.append(item);
  }
}

function refresh() {
  readColours();
  layOut();
  drawLegend();
  redraw();
}

const chooser = document.getElementById("world");
chooser.append(new Option(`all ${data.worlds.length}`, -1), ...data.worlds.map((world, i) => new Option(world.name, i)));
document.getElementById("chooser").hidden = data.worlds.length < 2;
chooser.addEventListener("change", () => {
  Object.assign(view, { world: Number(chooser.value), hovered: null, selected: null });
  scroller.scrollTop = 0;
  showDetails();
  refresh();
});
scroller.addEventListener("scroll", redraw);
new ResizeObserver(refresh).observe(scroller);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refresh);
refresh();
select(nextUnended());
