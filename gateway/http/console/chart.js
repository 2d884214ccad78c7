// Charts with units on their axes: values over time, stacked by line, and a curve of one value over another. What stands
// under the pointer is told in the legend below, whose room is kept. uPlot is loaded when the first chart is drawn.

import { html, useEffect, useRef, useState } from "./ui.js";

const LINES = 5; // with a tint of their own; the rest is grey
let loading = null;

function uplot() {
  loading ??= new Promise((done, fail) => {
    const script = document.createElement("script");
    script.src = "/console/vendor/uplot.js";
    script.onload = () => done(globalThis.uPlot);
    script.onerror = () => fail(new Error("The chart could not be loaded."));
    document.head.append(script);
  });
  return loading;
}

// times: RFC 3339; lines: [{ name, values }], the largest first; shown: value => text; step: "hour" or "day"; ticks: what
// stands beside those of the axis of values.
// isStacked: values add up; else each line is drawn by itself.
export function Chart({ label, times, lines, shown, step, ticks = (at) => at.map(shown), isStacked = true }) {
  const [place, setPlace] = useState(null); // under the pointer
  const seconds = times.map((time) => Date.parse(time) / 1000);
  const top = isStacked ? [...lines.slice(0, LINES), ...restOf(lines)] : lines.slice(0, 1);
  const box = usePlot([seconds, ...stacked(top, isStacked)], [top, isStacked, step], (uPlot, at) => options(uPlot, at, top, ticks, step, isStacked, setPlace));
  const at = place === null || place >= times.length ? null : place;
  const sum = (line) => line.values.reduce((all, value) => all + Number(value ?? 0), 0);
  return html`<figure aria-label=${label}>
    <div class="chart-box" ref=${box} aria-hidden="true"></div>
    <figcaption class="legend">
      <span class="soft">${at === null ? (isStacked ? "In all" : "Point at the chart") : wordsOf(times[at], step)}</span>
      ${top.map((line, number) => html`<span key=${line.name}><i class="swatch-${number < LINES ? number : "rest"}"></i>${line.name} ${
        at === null ? (isStacked ? shown(sum(line)) : "") : shown(line.values[at])}</span>`)}
    </figcaption>
  </figure>`;
}

// points: [{ x, y, words }], in any order; mark: the one that is in force, { x, y, words }; across and up: the axes, { name,
// ticks: values => texts }.
export function Curve({ label, points: given, mark, across, up }) {
  const [place, setPlace] = useState(null); // under the pointer
  const points = given.toSorted((a, b) => a.x - b.x); // where the large model is the cheaper one, they fall
  const box = usePlot([points.map(({ x }) => x), points.map(({ y }) => y)], mark, (uPlot, at) => curveOptions(uPlot, at, points, mark, across, up, setPlace));
  return html`<figure aria-label=${label}>
    <p class="soft">${up.name}</p>
    <div class="chart-box" ref=${box} role="img" aria-label=${`${label}; ${mark.words}`}></div>
    <p class="soft number">${across.name}</p>
    <figcaption class="legend"><span>${place === null || place >= points.length ? mark.words : points[place].words}</span></figcaption>
  </figure>`;
}

// The box that a plot of `data` is drawn into: anew when it, or `also`, is another, and when the colours are.
function usePlot(data, also, optionsOf) {
  const box = useRef();
  useEffect(() => {
    let plot = null;
    let isGone = false;
    const draw = (uPlot) => {
      plot?.destroy();
      plot = new uPlot(optionsOf(uPlot, box.current), data, box.current);
    };
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    const again = () => loading.then(draw);
    const resize = new ResizeObserver(() => plot?.setSize(sizeOf(box.current)));
    uplot().then((uPlot) => {
      if (isGone) return;
      draw(uPlot);
      resize.observe(box.current);
      scheme.addEventListener("change", again);
    }, () => {});
    return () => {
      isGone = true;
      resize.disconnect();
      scheme.removeEventListener("change", again);
      plot?.destroy();
    };
  }, [JSON.stringify([data, also])]);
  return box;
}

function wordsOf(time, step) {
  return step === "day" ? time.slice(0, 10) : `${time.slice(5, 10)} ${time.slice(11, 16)} UTC`;
}

// The lines that have no tint of their own, as one.
function restOf(lines) {
  const rest = lines.slice(LINES);
  if (!rest.length) return [];
  return [{ name: `${rest.length} more`, values: rest[0].values.map((_, at) => rest.reduce((sum, line) => sum + Number(line.values[at] ?? 0), 0)) }];
}

// uPlot draws each line over the one before: the sum of all first, then that of all but the last, and so on.
function stacked(lines, isStacked) {
  if (!isStacked) return lines.map((line) => line.values.map((value) => (value === null ? null : Number(value))));
  const sums = [];
  let below = lines[0]?.values.map(() => 0) ?? [];
  for (const line of lines) {
    below = below.map((sum, at) => sum + Number(line.values[at] ?? 0));
    sums.unshift(below);
  }
  return sums;
}

const DIGIT = 9; // pixels, at most
const widthOf = (_, words) => 8 + DIGIT * Math.max(4, ...(words ?? []).map((each) => each.length));

const sizeOf = (box) => ({ width: box.clientWidth, height: box.clientHeight });

// What all plots share, in the colours of the moment.
function shared(uPlot, box, setPlace) {
  const style = getComputedStyle(box);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const font = `${style.fontSize} ${style.fontFamily}`;
  const axis = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font };
  const common = {
    ...sizeOf(box),
    legend: { show: false },
    padding: [8, 4, 0, 0],
    cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
    hooks: { setCursor: [(plot) => setPlace(plot.cursor.idx ?? null)] },
  };
  return { colour, axis, common };
}

function options(uPlot, box, lines, ticks, step, isStacked, setPlace) {
  const { colour, axis, common } = shared(uPlot, box, setPlace);
  const tint = (number) => colour(`series-${number < LINES ? number : "rest"}`);
  const bars = uPlot.paths.bars({ size: [0.72, 40], align: 1 });
  const drawnAs = isStacked ? { paths: bars, width: 0 } : { width: 2 };
  const order = lines.map((_, number) => number);
  if (isStacked) order.reverse();
  const hour = (stamp) => new Date(stamp * 1000).toISOString();
  return {
    ...common,
    tzDate: (stamp) => uPlot.tzDate(new Date(stamp * 1000), "UTC"),
    scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
    axes: [
      { ...axis, grid: { show: false }, space: 64, size: 30, values: (_, at) => at.map((stamp) => (step === "day" || stamp % 86_400 === 0 ? hour(stamp).slice(5, 10) : hour(stamp).slice(11, 16))) },
      { ...axis, size: widthOf, space: 40, values: (_, at) => ticks(at) },
    ],
    series: [{}, ...order.map((number) => ({ ...drawnAs, fill: isStacked ? tint(number) : undefined, stroke: isStacked ? undefined : colour("accent"), points: { show: !isStacked } }))],
  };
}

function curveOptions(uPlot, box, points, mark, across, up, setPlace) {
  const { colour, axis, common } = shared(uPlot, box, setPlace);
  const marked = (plot) => {
    const [x, y] = [plot.valToPos(mark.x, "x", true), plot.valToPos(mark.y, "y", true)];
    const { ctx, bbox } = plot;
    ctx.strokeStyle = ctx.fillStyle = colour("ink");
    ctx.setLineDash([4, 4]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.setLineDash([]);
    ctx.beginPath();
    ctx.arc(x, y, 5 * devicePixelRatio, 0, 2 * Math.PI);
    ctx.fill();
  };
  return {
    ...common,
    padding: [8, 12, 0, 0],
    scales: { x: { time: false }, y: { range: (_, low, high) => [Math.max(0, low - 0.02), Math.min(1, high + 0.02)] } },
    axes: [
      { ...axis, grid: { show: false }, space: 96, size: 30, values: (_, at) => across.ticks(at) },
      { ...axis, size: widthOf, space: 40, values: (_, at) => up.ticks(at) },
    ],
    series: [{}, { width: 2, stroke: colour("accent"), points: { show: true, fill: colour("accent"), size: 5 } }],
    hooks: { ...common.hooks, draw: [marked] },
  };
}
