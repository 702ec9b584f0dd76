// Charts whose values one can read and zoom into, and parts of pages that refresh themselves.
// Without this script, pages show the charts of the server and are loaded again by hand.
"use strict";

const LARGEST = 1e100; // of what uPlot finds ticks for
const SCROLLED = "[tabindex]";
const GONE = [401, 403, 404];

const plots = new Map(); // by metric, and the number of charts of it before: {plot, box, names}
const dark = matchMedia("(prefers-color-scheme: dark)");

function written(value) {
  return value == null ? "-" : String(Number(value.toPrecision(5)));
}

function variable(name) {
  return () => getComputedStyle(document.documentElement).getPropertyValue(name);
}

// Lines have values at other steps than their neighbours: the nearest step that a line has.
function nearest(plot, series, index) {
  const values = plot.data[series];
  for (let far = 0; far < values.length; far++) {
    for (const found of [index - far, index + far]) {
      if (values[found] !== undefined) return found;
    }
  }
  return index;
}

function columnsOf(line) {
  return line.lows.length ? [line.means, line.lows, line.highs] : [line.means];
}

function isDrawable(lines) {
  return lines.every((line) => columnsOf(line).flat().every((value) => Math.abs(value) < LARGEST));
}

function seriesOf(figure, line, label, at) {
  const style = getComputedStyle(figure.querySelector(`.colour-${line.number}`));
  const dash = style.strokeDasharray.match(/[\d.]+/g)?.map(Number);
  const value = (plot, mean, series, index) => {
    const [low, high] = line.lows.length ? [1, 2].map((each) => plot.data[at + each][index]) : [mean, mean];
    return low === high ? written(mean) : `${written(mean)} (${written(low)} to ${written(high)})`;
  };
  const range = { class: "range", points: { show: false } };
  const points = { fill: variable("--page") };
  const mean = { label, value, dash, points, stroke: style.color, width: 2 };
  const fill = style.color.replace("rgb(", "rgba(").replace(")", ", 0.2)");
  return line.lows.length
    ? { series: [mean, range, range], bands: [{ series: [at + 2, at + 1], fill }] }
    : { series: [mean], bands: [] };
}

function sizeOf(box) {
  return { width: box.clientWidth, height: Math.max(180, Math.round(box.clientWidth / 3)) };
}

function created(figure, lines, data, box) {
  const series = [{ label: "step", value: (plot, step) => step ?? "-" }];
  const bands = [];
  for (const line of lines) {
    const label = lines.length === 1 ? figure.dataset.metric : line.name;
    const made = seriesOf(figure, line, label, series.length);
    series.push(...made.series);
    bands.push(...made.bands);
  }
  const font = `12px ${getComputedStyle(document.body).fontFamily}`;
  const shown = (plot, values) => values.map((value) => (value == null ? "" : written(value)));
  const axis = { font, stroke: variable("--quiet"), values: shown };
  const grid = { stroke: variable("--line"), width: 1 };
  const axes = [
    { ...axis, grid: { show: false }, ticks: grid, incrs: steps() },
    { ...axis, grid, ticks: grid, size: 80 },
  ];
  const cursor = { dataIdx: nearest };
  return new uPlot(
    { ...sizeOf(box), series, bands, axes, cursor, scales: { x: { time: false } } },
    data,
    box,
  );
}

// The axis of steps has no mark between two of them.
function steps() {
  return [...Array(16).keys()].flatMap((power) => [1, 2, 5].map((each) => each * 10 ** power));
}

function drawFigure(figure, name) {
  const lines = JSON.parse(figure.dataset.numbers);
  if (!isDrawable(lines)) return;
  const data = uPlot.join(lines.map((line) => [line.steps, ...columnsOf(line)]));
  const names = JSON.stringify(lines.map((line) => [line.name, columnsOf(line).length]));
  const before = plots.get(name);
  const box = before?.names === names ? before.box : document.createElement("div");
  figure.append(box);
  figure.classList.add("drawn");
  if (box === before?.box) {
    show(before.plot, data);
  } else {
    const plot = created(figure, lines, data, box);
    const zoom = before && zoomOf(before.plot);
    if (zoom) plot.setScale("x", zoom);
    before?.plot.destroy();
    plots.set(name, { plot, box, names });
  }
  const picture = box.querySelector(".u-wrap");
  picture.setAttribute("role", "img");
  picture.setAttribute("aria-label", figure.querySelector("svg").getAttribute("aria-label"));
}

function zoomOf(plot) {
  const [steps] = plot.data;
  const { min, max } = plot.scales.x;
  return min > steps[0] || max < steps.at(-1) ? { min, max } : null;
}

function show(plot, data) {
  const zoom = zoomOf(plot);
  plot.setData(data, !zoom);
  if (zoom) plot.redraw();
}

function draw() {
  for (const each of document.querySelectorAll("[data-scripted]")) each.hidden = false;
  const counts = new Map();
  for (const figure of document.querySelectorAll("figure[data-numbers]")) {
    const { metric } = figure.dataset;
    const before = counts.get(metric) ?? 0;
    counts.set(metric, before + 1);
    if (!figure.classList.contains("drawn")) drawFigure(figure, `${before} ${metric}`);
  }
  for (const [name, { plot, box }] of plots) {
    if (!box.isConnected) {
      plot.destroy();
      plots.delete(name);
    }
  }
}

function isInUse(region) {
  const selection = getSelection();
  const isSelected = !selection.isCollapsed && selection.containsNode(region, true);
  return isSelected || region.querySelector(`:focus:not(${SCROLLED}), :checked, details[open]`) !== null;
}

const places = new Map(); // by region: what of it is scrolled and has the focus

function keepPlaces(region) {
  const kept = [...region.querySelectorAll(SCROLLED)].map((each) => ({
    left: each.scrollLeft,
    top: each.scrollTop,
    hasFocus: each === document.activeElement,
  }));
  places.set(region, kept);
}

function restorePlaces() {
  for (const [region, kept] of places) {
    for (const [number, each] of [...region.querySelectorAll(SCROLLED)].entries()) {
      const { left = 0, top = 0, hasFocus = false } = kept[number] ?? {};
      each.scrollTo(left, top);
      if (hasFocus) each.focus({ preventScroll: true });
    }
  }
  places.clear();
}

document.addEventListener("htmx:beforeRequest", (event) => {
  if (document.hidden || !event.target.querySelector("input").checked) event.preventDefault();
});
document.addEventListener("htmx:oobBeforeSwap", ({ target, detail }) => {
  if (isInUse(target)) detail.shouldSwap = false;
  else keepPlaces(target);
});
document.addEventListener("htmx:afterSwap", () => {
  restorePlaces();
  draw();
});
document.addEventListener("htmx:afterRequest", ({ target, detail }) => {
  const { status } = detail.xhr;
  const why = status ? `the server responded with ${status}` : "the server is away";
  target.querySelector("[role=status]").textContent = detail.successful ? "" : `Not refreshed: ${why}.`;
  // Without a session, with another one, or after a deletion, nothing comes back by itself.
  if (GONE.includes(status)) target.querySelector("input").checked = false;
});

addEventListener("resize", () => plots.forEach(({ plot, box }) => plot.setSize(sizeOf(box))));
dark.addEventListener("change", () => plots.forEach(({ plot }) => plot.redraw()));
draw();
