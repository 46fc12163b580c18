// Lines and points over the seconds before now, drawn by uPlot.

import { $ } from "./dom.js";

const charts = [];

export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const ago = (u, values) => values.map((value) => (value === 0 ? "now" : `${value} s`));

// `series` as uPlot takes them, but for `color`: a variable of the style sheet.
export class Chart {
  constructor(id, seconds, series, { height = 150, scales = {}, axes = [], onCursor } = {}) {
    Object.assign(this, { id, seconds, series, height, scales, axes, onCursor });
    this.data = [[], ...series.map(() => [])];
    this.draw();
    charts.push(this);
  }

  draw() {
    this.plot?.destroy();
    const place = $(this.id);
    const axis = { stroke: color("dim"), grid: { stroke: color("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const shown = this.series.map((each) => ({
      width: 1.5,
      ...each,
      stroke: color(each.color) + (each.filled ? "88" : ""),
      fill: each.filled && `${color(each.color)}18`,
      points: each.dots ? { show: true, size: 3.5, fill: color(each.color), width: 0 } : { show: false },
      paths: each.dots ? () => null : undefined,
    }));
    const options = {
      width: Math.max(place.clientWidth, 120),
      height: this.height,
      padding: [8, 16, 0, 0],
      scales: { x: { time: false, range: () => [-this.seconds, 0] }, ...this.scales },
      series: [{ label: "t", value: (u, v) => (v == null ? "" : `${v.toFixed(2)} s`) }, ...shown],
      axes: [{ ...axis, size: 24, values: ago }, ...this.axes.map((each) => ({ ...axis, size: 44, ...each }))],
      cursor: { drag: { x: false, y: false }, points: { show: false } },
      legend: { live: false, markers: { width: 0, fill: (u, i) => color(this.series[i - 1].color) } },
      hooks: { setCursor: [(u) => this.onCursor?.(u.cursor.idx)] },
    };
    this.plot = new uPlot(options, this.data, place);
  }

  show(data) {
    this.data = data;
    this.plot.setData(data);
  }

  resize() {
    const place = $(this.id);
    if (place.clientWidth) this.plot.setSize({ width: place.clientWidth, height: this.height });
  }
}

export function resizeAll() {
  for (const each of charts) each.resize();
}

new ResizeObserver(resizeAll).observe(document.body);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((each) => each.draw()));
