// Long work in small slices between frames, so that the page never stutters.

const SLICE_MS = 6;
const jobs = new Map();
let isTicking = false;
let redraw = null;

// Do the work of a generator, which yields often; a job of the same name replaces one that is not finished.
function startJob(name, generator) {
  jobs.set(name, generator);
  requestTick();
}

function stopJob(name) {
  jobs.delete(name);
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
    const [name, job] = jobs.entries().next().value;
    // the jobs take turns
    jobs.delete(name);
    if (!job.next().done && !jobs.has(name)) jobs.set(name, job);
  }
  if (redraw) {
    const draw = redraw;
    redraw = null;
    draw();
  }
  if (jobs.size) requestTick();
}
