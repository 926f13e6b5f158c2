"use strict";
// Charts as SVG. A chart is {title, names, colours, unit, kind, log, zero, mark}; its stage holds the
// rows:
// {steps, minutes, values: {name: [number | null (not logged) | "x" (not finite)]}}.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 210, LEFT = 54, RIGHT = 12, TOP = 10, BOTTOM = 24;
const SMOOTH = 0.9, FEW_POINTS = 40;

function element(name, attributes = {}, text = "") {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = text;
  return node;
}

function shape(parent, name, attributes, text = "") {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text) node.textContent = text;
  parent.append(node);
  return node;
}

function format(value) {
  if (value === "x") return "not finite";
  const size = Math.abs(value);
  if (value !== 0 && (size < 0.001 || size >= 1e6)) return String(Number(value.toPrecision(3)).toExponential());
  return String(Number(value.toPrecision(4)));
}

// Round steps: 1, 2 or 5 times a power of ten.
function ticks(low, high, wanted) {
  const rough = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const gap = power * [1, 2, 5, 10].find((step) => step * power >= rough);
  const found = [];
  for (let n = Math.ceil(low / gap - 1e-9); n * gap <= high + gap * 1e-9; n++) found.push(n * gap);
  return found;
}

// Decades; where they are few also 2 and 5 times each.
function logTicks(low, high) {
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
  const gap = Math.max(1, Math.ceil((to - from) / 5)), inner = to - from <= 2 ? [1, 2, 5] : [1];
  const found = [];
  for (let n = from; n <= to; n += gap) for (const k of inner) found.push(k * 10 ** n);
  return found.filter((v) => v >= low * 0.999 && v <= high * 1.001);
}

// A moving average without the pull of its start.
function smoothed(points) {
  let sum = 0, weight = 0;
  return points.map(([x, y]) => {
    sum = SMOOTH * sum + (1 - SMOOTH) * y;
    weight = SMOOTH * weight + 1 - SMOOTH;
    return [x, sum / weight];
  });
}

// Series as runs of points: one ends where a value is not finite.
function runsOf(values, xs) {
  const runs = [[]];
  values.forEach((value, n) => {
    if (value === "x") runs.push([]);
    else if (value !== null) runs[runs.length - 1].push([xs[n], value]);
  });
  return runs.filter((run) => run.length);
}

// The vertical range: all values, but not a few far ones that would flatten the rest.
function rangeOf(chart, numbers, log) {
  const sorted = [...numbers].sort((a, b) => a - b);
  let low = sorted[0], high = sorted[sorted.length - 1];
  const inner = [0.02, 0.98].map((q) => sorted[Math.round(q * (sorted.length - 1))]);
  const spread = inner[1] - inner[0];
  if (!log && sorted.length >= 20 && spread > 0 && high - low > 10 * spread) {
    low = Math.max(low, inner[0] - spread * 0.5);
    high = Math.min(high, inner[1] + spread * 0.5);
  }
  if (log) return low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
  if (chart.zero) [low, high] = [Math.min(0, low), Math.max(0, high)];
  if (chart.mark !== null) {
    [low, high] = [Math.min(chart.mark, low), Math.max(chart.mark, high)];
  }
  const pad = high > low ? (high - low) * 0.06 : Math.abs(high) * 0.1 || 1;
  return [chart.zero && low === 0 ? 0 : low - pad, high + pad];
}

class ChartView {
  constructor(chart, stage, settings) {
    Object.assign(this, { chart, stage, settings });
    this.values = chart.names.map((name) => stage.values[name]);
    this.colours = chart.colours;
    this.numbers = this.values.flat().filter((v) => typeof v === "number");
    const positive = this.numbers.length > 0 && this.numbers.every((v) => v > 0);
    this.log = chart.log && positive;
    this.figure = element("figure", { class: "chart" });
    const caption = element("figcaption");
    this.title = element("span", {}, chart.title);
    caption.append(this.title);
    if (positive && chart.kind === "line") caption.append(this.logButton());
    const save = element("button", { class: "png", title: "save as PNG" }, "PNG");
    save.addEventListener("click", () => this.save());
    caption.append(save);
    this.box = element("div");
    this.note = element("div", { class: "quiet" });
    this.figure.append(caption, this.box, this.legend(), this.note);
  }

  logButton() {
    const button = element("button", { class: "log", "aria-pressed": this.log }, "log");
    button.addEventListener("click", () => {
      this.log = !this.log;
      button.setAttribute("aria-pressed", this.log);
      this.draw();
    });
    return button;
  }

  legend() {
    const legend = element("div", { class: "legend" });
    this.chart.names.forEach((name, n) => {
      const key = element("span");
      key.append(element("i", { class: `c${this.colours[n]}` }), name);
      legend.append(key);
    });
    if (this.chart.unit) this.title.append(element("small", { class: "quiet" }, ` ${this.chart.unit}`));
    return legend;
  }

  draw() {
    const width = this.box.clientWidth;
    if (!width) return;
    this.width = width;
    this.xs = this.stage[this.settings.over];
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    svg.setAttribute("role", "img");
    svg.setAttribute("tabindex", "0");
    svg.setAttribute("aria-label", `${this.chart.title}: ${this.chart.names.join(", ")}`);
    this.svg = svg;
    this.tip?.remove();
    this.box.replaceChildren(svg);
    this.note.textContent = "";
    if (!this.numbers.length) {
      shape(svg, "text", { x: LEFT, y: HEIGHT / 2, fill: "var(--quiet)" }, "no finite value");
      return;
    }
    if (this.chart.kind === "stack") this.stack(); else this.lines();
    this.listen();
  }

  // Axes with their scales: this.x and this.y turn values into places.
  axes(low, high) {
    const [first, last] = [Math.min(...this.xs), Math.max(...this.xs)];
    const right = this.width - RIGHT, bottom = HEIGHT - BOTTOM;
    const [from, to] = first === last ? [first - 1, last + 1] : [first, last];
    this.x = (v) => LEFT + ((v - from) / (to - from)) * (right - LEFT);
    const scale = this.log ? Math.log10 : (v) => v;
    this.y = (v) => bottom - ((scale(v) - scale(low)) / (scale(high) - scale(low))) * (bottom - TOP);
    for (const v of this.log ? logTicks(low, high) : ticks(low, high, 5)) {
      const y = this.y(v);
      shape(this.svg, "line", { x1: LEFT, x2: right, y1: y, y2: y, stroke: "var(--line)" });
      shape(this.svg, "text", { x: LEFT - 7, y: y + 4, "text-anchor": "end", ...SMALL }, format(v));
    }
    const time = this.settings.over === "minutes";
    const found = ticks(from, to, Math.max(2, Math.min(6, this.width / 90)));
    const marks = first === last ? [first] : found.filter((v) => time || Number.isInteger(v));
    for (const v of marks) {
      const label = time ? `${format(v)} min` : format(v);
      const anchor = this.x(v) > right - 20 ? "end" : "middle";
      shape(this.svg, "text", { x: this.x(v), y: HEIGHT - 6, "text-anchor": anchor, ...SMALL }, label);
    }
    const id = `clip-${ChartView.count++}`;
    const clip = shape(shape(this.svg, "defs", {}), "clipPath", { id });
    shape(clip, "rect", { x: LEFT - 4, y: TOP - 4, width: right - LEFT + 8, height: bottom - TOP + 8 });
    return shape(this.svg, "g", { "clip-path": `url(#${id})` });
  }

  lines() {
    const [low, high] = rangeOf(this.chart, this.numbers, this.log);
    const plot = this.axes(low, high);
    const outside = this.numbers.filter((v) => v < low || v > high).length;
    const broken = this.values.flat().filter((v) => v === "x").length;
    const notes = [];
    if (outside) notes.push(`values beyond the axis: ${outside}`);
    if (broken) notes.push(`values that are not finite: ${broken}`);
    this.note.textContent = notes.join("; ");
    if (this.chart.mark !== null && !this.log) {
      const y = this.y(this.chart.mark);
      shape(plot, "line", { x1: LEFT, x2: this.width, y1: y, y2: y, stroke: "var(--quiet)", "stroke-dasharray": "2 4" });
    }
    this.chart.names.forEach((name, n) => this.line(plot, name, this.values[n], `var(--c${this.colours[n]})`));
  }

  line(plot, name, values, colour) {
    const held = name.startsWith("eval/");
    const dash = held ? "6 4" : "none";
    for (const points of runsOf(values, this.xs)) {
      const smooth = this.settings.smooth && points.length > 5 && !held;
      const path = (some) => "M" + some.map(([x, y]) => `${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`).join("L");
      const style = { fill: "none", stroke: colour, "stroke-width": 1.8, "stroke-dasharray": dash, "stroke-linejoin": "round" };
      shape(plot, "path", { ...style, d: path(points), class: "raw", opacity: smooth ? 0.25 : 1 });
      if (smooth) shape(plot, "path", { ...style, d: path(smoothed(points)), class: "smoothed" });
      const dots = held || points.length === 1 ? points : [];
      for (const [x, y] of dots.length <= FEW_POINTS ? dots : []) {
        shape(plot, "circle", { cx: this.x(x), cy: this.y(y), r: 3.2, fill: colour });
      }
    }
    values.forEach((value, n) => {
      if (value !== "x") return;
      const x = this.x(this.xs[n]);
      shape(plot, "line", { x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM, stroke: "var(--bad)", opacity: 0.6 });
    });
  }

  stack() {
    const totals = this.xs.map((_, n) => this.values.reduce((sum, v) => sum + (v[n] || 0), 0));
    const middle = [...totals].sort((a, b) => a - b)[totals.length >> 1];
    const usual = totals.filter((v) => v <= 5 * middle);
    const beyond = totals.length - usual.length;
    const plot = this.axes(0, 1.05 * Math.max(...(usual.length ? usual : totals)) || 1);
    if (beyond) {
      const most = format(Math.max(...totals));
      this.note.textContent = `rows beyond the axis (compiling, evaluation): ${beyond}, up to ${most} s`;
    }
    const base = totals.map(() => 0), centres = this.xs.map(this.x);
    this.values.forEach((values, k) => {
      let d = "";
      values.forEach((value, n) => {
        if (typeof value !== "number") return;
        const from = n ? (centres[n - 1] + centres[n]) / 2 : centres[n];
        const to = n + 1 < centres.length ? (centres[n] + centres[n + 1]) / 2 : centres[n];
        const [start, end] = to - from < 2 ? [centres[n] - 1, centres[n] + 1] : [from, to];
        d += `M${start.toFixed(1)} ${this.y(base[n]).toFixed(1)}H${end.toFixed(1)}V${this.y(base[n] + value).toFixed(1)}H${start.toFixed(1)}Z`;
        base[n] += value;
      });
      shape(plot, "path", { d, fill: `var(--c${this.colours[k]})` });
    });
  }

  // The row nearest to the pointer, or the next one by arrow keys.
  listen() {
    const rows = this.xs.map((_, n) => n).filter((n) => this.values.some((v) => v[n] !== null));
    const near = (event) => {
      const at = event.clientX - this.svg.getBoundingClientRect().left;
      return rows.reduce((a, b) => (Math.abs(this.x(this.xs[b]) - at) < Math.abs(this.x(this.xs[a]) - at) ? b : a));
    };
    let shown = -1;
    const show = (n) => { shown = n; this.point(n); };
    this.svg.addEventListener("pointermove", (event) => show(near(event)));
    this.svg.addEventListener("pointerdown", (event) => show(near(event)));
    this.svg.addEventListener("pointerleave", () => this.unpoint());
    this.svg.addEventListener("blur", () => this.unpoint());
    this.svg.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      event.preventDefault();
      const next = rows.indexOf(shown) + move;
      show(rows[Math.max(0, Math.min(rows.length - 1, shown < 0 ? 0 : next))]);
    });
  }

  point(n) {
    this.unpoint();
    const x = this.x(this.xs[n]);
    shape(this.svg, "line", { x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM, stroke: "var(--quiet)", class: "cursor" });
    const tip = element("div", { class: "tip" });
    const minutes = this.stage.minutes[n];
    tip.append(element("b", {}, `step ${this.stage.steps[n]}`), ` · ${format(minutes)} min`);
    this.chart.names.forEach((name, k) => {
      const value = this.values[k][n];
      if (value === null) return;
      const row = element("div"), key = element("span", { class: "key" });
      key.append(element("i", { class: `c${this.colours[k]}` }), name);
      row.append(key, element("b", {}, format(value)));
      tip.append(row);
    });
    this.figure.append(tip);
    const left = Math.min(x + 20, this.figure.clientWidth - tip.offsetWidth - 6);
    tip.style.left = `${left < x && left + tip.offsetWidth > x ? Math.max(6, x - tip.offsetWidth - 6) : left}px`;
    tip.style.top = `${this.box.offsetTop + TOP}px`;
    this.tip = tip;
  }

  unpoint() {
    this.tip?.remove();
    this.svg.querySelector(".cursor")?.remove();
  }

  // The chart as a PNG of twice its size, in the colours that are on the screen.
  async png() {
    const copy = this.svg.cloneNode(true);
    const style = getComputedStyle(document.documentElement);
    const colour = (text) => text.replace(/var\((--\w+)\)/g, (_, name) => style.getPropertyValue(name).trim());
    copy.setAttribute("xmlns", SVG);
    copy.setAttribute("width", this.width);
    copy.setAttribute("height", HEIGHT);
    const url = "data:image/svg+xml," + encodeURIComponent(colour(copy.outerHTML));
    const image = new Image();
    image.src = url;
    await image.decode();
    const canvas = element("canvas"), pen = canvas.getContext("2d");
    const keys = this.keyPlaces(pen);
    const height = HEIGHT + 20 + 16 * (keys[keys.length - 1].line + 1);
    [canvas.width, canvas.height] = [2 * this.width, 2 * height];
    pen.scale(2, 2);
    pen.fillStyle = style.getPropertyValue("--paper");
    pen.fillRect(0, 0, this.width, height);
    pen.drawImage(image, 0, 18, this.width, HEIGHT);
    pen.font = "600 13px sans-serif";
    pen.fillStyle = style.getPropertyValue("--ink");
    const unit = this.chart.unit ? ` (${this.chart.unit})` : "";
    pen.fillText(this.chart.title + unit, 8, 15);
    pen.font = KEY_FONT;
    this.chart.names.forEach((name, n) => {
      pen.fillStyle = style.getPropertyValue(`--c${this.colours[n]}`);
      pen.fillText(name, keys[n].left, HEIGHT + 31 + 16 * keys[n].line);
    });
    return canvas.toDataURL("image/png");
  }

  // Where the names stand below a PNG: side by side, in as many lines as they need.
  keyPlaces(pen) {
    let left = 8, line = 0;
    pen.font = KEY_FONT;
    return this.chart.names.map((name) => {
      const width = pen.measureText(name).width;
      if (left > 8 && left + width > this.width - 8) [left, line] = [8, line + 1];
      const place = { left, line };
      left += width + 14;
      return place;
    });
  }

  async save() {
    const name = this.chart.title.toLowerCase().replace(/[^a-z0-9]+/g, "-");
    element("a", { href: await this.png(), download: `${name}.png` }).click();
  }
}
ChartView.count = 0;
const KEY_FONT = "11px sans-serif";
const SMALL = { fill: "var(--quiet)", "font-size": 11, "font-family": "sans-serif" };
