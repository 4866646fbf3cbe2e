// Sets of keys as half-open intervals [start, stop, start, stop, ...], sorted, disjoint and not touching, and the keys
// of each query of a pattern, which Python has written into the page.

function range(start, stop) {
  return Array.from({ length: Math.max(0, stop - start) }, (_, index) => start + index);
}

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

function sizeOf(intervals) {
  let size = 0;
  for (let i = 0; i < intervals.length; i += 2) size += intervals[i + 1] - intervals[i];
  return size;
}

// A pattern is the union of parts. A part {period, rows} has the ends of a query's intervals relative to the query, which
// are the same for every query of its remainder by the period. A part {ranges} lists [first, last, ends] for queries
// first ... last; an end is a number, or [start, stop] if it moves evenly from the first query to the last.
class KeyIntervals {
  constructor(parts) {
    this.parts = parts;
  }

  // The keys from ... to - 1 that a query attends to.
  keys(query, from, to) {
    return this.parts.map((part) => endsOf(part, query, from, to)).reduce(union, []);
  }
}

function endsOf({ period, rows, ranges }, query, from, to) {
  const found = [];
  const add = (start, stop) => append(found, Math.max(start, from), Math.min(stop, to));
  if (period) {
    const ends = rows[query % period];
    for (let i = firstBeyond(ends, from - query); i < ends.length && ends[i] + query < to; i += 2) {
      add(ends[i] + query, ends[i + 1] + query);
    }
    return found;
  }
  const [first, last, ends] = ranges[rangeOf(ranges, query)];
  const at = (end) => (typeof end === "number" ? end : end[0] + ((end[1] - end[0]) * (query - first)) / (last - first));
  for (let i = 0; i < ends.length; i += 2) add(at(ends[i]), at(ends[i + 1]));
  return found;
}

// The place of the first interval that ends after a position.
function firstBeyond(ends, position) {
  let [low, high] = [0, ends.length / 2];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ends[2 * middle + 1] > position) high = middle;
    else low = middle + 1;
  }
  return 2 * low;
}

// The place of the range that holds a query; they are sorted and hold all queries.
function rangeOf(ranges, query) {
  let [low, high] = [0, ranges.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (ranges[middle][0] <= query) low = middle;
    else high = middle - 1;
  }
  return low;
}
