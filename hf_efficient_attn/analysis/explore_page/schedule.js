// Long work in small slices between frames, so that the page never stutters.

const SLICE_MS = 6;
// what takes least time, or is looked at first, is done first
const JOB_ORDER = ["readers", "tiles", "count", "overall", "reach"];
const jobs = new Map();
let isTicking = false;
let redraw = null;

// Do the work of a generator, which yields often; a job of the same name replaces one that is not finished.
function startJob(name, generator) {
  jobs.set(name, generator);
  requestTick();
}

// Draw the canvases before the next frame.
function requestRedraw() {
  redraw = drawAll;
  requestTick();
}

function requestTick() {
  if (isTicking) return;
  isTicking = true;
  requestAnimationFrame(tick);
}

function tick() {
  isTicking = false;
  const end = performance.now() + SLICE_MS;
  while (jobs.size && performance.now() < end) {
    const name = JOB_ORDER.find((each) => jobs.has(each));
    const job = jobs.get(name);
    // a job may start another one of its name
    if (job.next().done && jobs.get(name) === job) jobs.delete(name);
  }
  if (redraw) {
    const draw = redraw;
    redraw = null;
    draw();
  }
  if (jobs.size) requestTick();
}
