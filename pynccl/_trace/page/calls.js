"use strict";
// The calls: read from the page's data, and laid out in rows.

const data = JSON.parse(document.getElementById("data").textContent);
const SPAN = Math.max(data.span, 1000);
const NOT_ENDED = -1;
// Overlapping calls of a rank are stacked; more than this share the last rows.
const MOST_ROWS = 4;
const STATES = {
  d: "completed",
  t: "in flight",
  c: "inside the library's function",
  f: "failed",
  n: "never called",
  x: "no record",
};
// The states that a search for what has not ended stops at.
const UNENDED = "tcfnx";

function readCalls(lane) {
  let begin = 0;
  return lane.begins.map((later, index) => {
    begin += later;
    const duration = lane.durations[index];
    const end = duration === NOT_ENDED ? SPAN : begin + Math.max(duration, 0);
    const what = data.whats[lane.whats[index]];
    const [state, number] = [lane.states[index], lane.numbers[index]];
    return { lane, index, begin, end, duration, what, state, number, key: keyOf(lane, what, number) };
  });
}

// Returns a name that is the same for what all ranks call together, and for a send and its receive.
function keyOf(lane, what, number) {
  if (number < 0) return null;
  const peer = what.find(([name]) => name === "peer");
  if (!peer) return `#${number}`;
  const pair = what[0][1] === "recv" ? [peer[1], lane.rank] : [lane.rank, peer[1]];
  return `${pair.join(" to ")} #${number}`;
}

function title(call) {
  const number = call.number > 0 ? ` #${call.number}` : "";
  return `${call.what[0][1]}${number}`;
}

// Gives each call a row in which the one before has ended, or the row that is free first.
function stack(calls) {
  const rows = [];
  for (const call of calls) {
    let row = rows.find((each) => each.end <= call.begin);
    if (!row && rows.length < MOST_ROWS) {
      row = { calls: [], ends: [], end: 0 };
      rows.push(row);
    }
    row = row || rows.reduce((a, b) => (b.end < a.end ? b : a));
    row.calls.push(call);
    call.row = row;
    row.end = Math.max(row.end, call.end);
    // The latest end so far, which only grows: a search by it finds the first call that can be visible.
    row.ends.push(row.end);
  }
  return rows.length ? rows : [{ calls: [], ends: [], end: 0 }];
}

// Returns the first index at which a growing function of it is at least a value.
function firstIndex(length, value, of) {
  let low = 0;
  let high = length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (of(middle) < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Returns the indices of a row's calls that can be visible, as [first, behind the last].
function visible(row, from, to) {
  const first = firstIndex(row.ends.length, from, (i) => row.ends[i]);
  const last = firstIndex(row.calls.length, to, (i) => row.calls[i].begin);
  return [first, last];
}

for (const world of data.worlds) {
  for (const lane of world.lanes) {
    lane.world = world;
    lane.calls = readCalls(lane);
    lane.rows = stack(lane.calls);
    lane.byKey = new Map(lane.calls.map((call) => [call.key, call]));
  }
}

// --- words -------------------------------------------------------------------------------------------------

const UNITS = [
  ["s", 1e9],
  ["ms", 1e6],
  ["µs", 1e3],
  ["ns", 1],
];

function sayDuration(ns) {
  const [unit, size] = UNITS.find(([, each]) => ns >= each) || UNITS[3];
  return `${Number((ns / size).toPrecision(4))} ${unit}`;
}

// Returns a time since the begin of the picture, with as many digits as tell times apart that differ by `step`.
function sayTime(ns, step) {
  const [unit, size] = UNITS.find(([, each]) => SPAN >= each) || UNITS[3];
  const digits = Math.min(Math.max(Math.ceil(Math.log10(size / step)), 0), 9);
  return `${(ns / size).toFixed(digits)} ${unit}`;
}

function sayEnd(call) {
  if (call.state === "x" || call.state === "n") return null;
  if (call.duration === NOT_ENDED) {
    const waited = sayDuration(Math.max(call.lane.written - call.begin, 0));
    return ["not ended", `${waited} later, when the dump was written`];
  }
  return call.duration < 0 ? ["end", "unknown"] : ["took", sayDuration(call.duration)];
}

// Returns names and values of a call.
function describe(call) {
  const begin = call.state === "n" ? "not called since" : "begin";
  const times = call.state === "x" ? [] : [[begin, sayTime(call.begin, 1)], sayEnd(call)];
  return [...times.filter(Boolean), ...call.what.slice(1)];
}
