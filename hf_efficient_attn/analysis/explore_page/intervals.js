// Sets of key positions as half-open intervals, [start, stop, start, stop, ...]: sorted, disjoint, not touching.

// Append an interval to a list that is sorted so far; it is joined with the last one where they touch.
function append(list, start, stop) {
  if (start >= stop) return;
  const end = list.length - 1;
  if (end > 0 && start <= list[end]) list[end] = Math.max(list[end], stop);
  else list.push(start, stop);
}

function union(first, second) {
  if (!first.length) return second;
  if (!second.length) return first;
  const joined = [];
  let i = 0;
  let j = 0;
  while (i < first.length || j < second.length) {
    if (j >= second.length || (i < first.length && first[i] <= second[j])) {
      append(joined, first[i], first[i + 1]);
      i += 2;
    } else {
      append(joined, second[j], second[j + 1]);
      j += 2;
    }
  }
  return joined;
}

function intersect(first, second) {
  const common = [];
  let i = 0;
  let j = 0;
  while (i < first.length && j < second.length) {
    const start = Math.max(first[i], second[j]);
    const stop = Math.min(first[i + 1], second[j + 1]);
    if (start < stop) common.push(start, stop);
    if (first[i + 1] < second[j + 1]) i += 2;
    else j += 2;
  }
  return common;
}

// The positions from `from` to `to` - 1 that do not lie in the intervals.
function complement(intervals, from, to) {
  const rest = [];
  let at = from;
  for (let i = 0; i < intervals.length; i += 2) {
    if (intervals[i] > at) rest.push(at, intervals[i]);
    at = intervals[i + 1];
  }
  if (at < to) rest.push(at, to);
  return rest;
}

function clip(intervals, from, to) {
  const cut = [];
  for (let i = 0; i < intervals.length; i += 2) {
    const start = Math.max(intervals[i], from);
    const stop = Math.min(intervals[i + 1], to);
    if (start < stop) cut.push(start, stop);
  }
  return cut;
}

// Sorted intervals of any numbers.
function intervalsOf(numbers) {
  const list = [];
  for (const number of [...numbers].sort((a, b) => a - b)) append(list, number, number + 1);
  return list;
}

function sizeOf(intervals) {
  let size = 0;
  for (let i = 0; i < intervals.length; i += 2) size += intervals[i + 1] - intervals[i];
  return size;
}

// How many of the positions first ... last lie in the intervals.
function countWithin(intervals, first, last) {
  return sizeOf(clip(intervals, first, last + 1));
}
