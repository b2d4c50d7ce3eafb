// One chart of one panel: mean and band of every group, single lanes, marks. It is the same in the dashboard and in a
// file of its own, and takes numbers as they are: statistics and the reduction to pixels have happened before.
"use strict";

const lox = (() => {
  // Okabe and Ito's colours, which people with any kind of colour vision can tell apart, a little darker or lighter
  // where they would not be seen on the background. After the last, lines are dashed.
  const COLORS = {
    light: ["#0072b2", "#d55e00", "#009e73", "#b8568f", "#b87a00", "#3d9bd1", "#7a6a00", "#5a5a5a"],
    dark: ["#56a8e8", "#f28a3c", "#2fc79d", "#e59bc6", "#f0b73a", "#8fd3fb", "#e8de5a", "#b8b8b8"],
  };
  const DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3]];
  const DIGITS = 6;

  const theme = () => {
    const chosen = document.documentElement.dataset.theme;
    return chosen === "dark" || chosen === "light" ? chosen
      : matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  };
  const color = (n) => COLORS[theme()][n % COLORS.light.length];
  const dash = (n) => DASHES[Math.floor(n / COLORS.light.length) % DASHES.length];
  const faded = (hex, alpha) => hex + Math.round(alpha * 255).toString(16).padStart(2, "0");
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Text only ever becomes a text node: names of keys and runs come from programs.
  const el = (tag, properties = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name === "class") node.className = value;
      else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (name === "data") for (const [k, v] of Object.entries(value)) node.dataset[k] = v;
      else if (value === true) node.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
    }
    for (const child of children.flat()) {
      if (child !== null && child !== undefined) node.append(child instanceof Node ? child : document.createTextNode(child));
    }
    return node;
  };

  const number = (value) => {
    if (value === null || value === undefined) return "–";
    if (Number.isInteger(value) && Math.abs(value) < 1e9) return String(value);
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-4 || size >= 1e9)) return value.toExponential(DIGITS - 1);
    return value.toPrecision(DIGITS);
  };
  const short = (value) => {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e6 || size < 1e-3) return value.toExponential(1).replace("e+", "e").replace(".0e", "e");
    return String(+value.toPrecision(4));
  };
  const seconds = (value) => {
    if (value === null || value === undefined) return "–";
    const s = Math.abs(value);
    if (s < 60) return `${+value.toPrecision(3)} s`;
    const h = Math.floor(s / 3600), m = Math.floor((s % 3600) / 60), rest = Math.floor(s % 60);
    const two = (n) => String(n).padStart(2, "0");
    return (value < 0 ? "-" : "") + (h ? `${h}:${two(m)}:${two(rest)}` : `${m}:${two(rest)}`);
  };
  const place = (x, value) => (x === "wall" ? seconds(value) : number(value));
  const oneDigit = (value, round) => {
    const unit = 10 ** Math.floor(Math.log10(value));
    return +(round(+(value / unit).toPrecision(12)) * unit).toPrecision(1);
  };
  const counted = (range) => (range[0] === range[1] ? `${range[0]}` : `${range[0]}–${range[1]}`);
  const listed = (names) => names.slice(0, 12).join(", ") + (names.length > 12 ? `, … (${names.length})` : "");

  // --- growing ---

  const ARRAYS = ["x", "center", "low", "high", "low_there", "high_there", "at"];

  // Put what has changed behind what is known, in place of what it replaces.
  const grown = (old, news) => {
    if (!news.grow) return news;
    const groups = news.groups.map((group, n) => {
      const before = old.groups[n];
      if (group.same) return { ...group, ...pick(before, [...ARRAYS, "single", "per_bin"]) };
      const cut = firstAtLeast(before.x, group.from);
      const merged = { ...group, per_bin: Math.max(before.per_bin, group.per_bin) };
      // A band without reduced points has its own edges everywhere.
      for (const name of ARRAYS) {
        const fallback = name === "low_there" ? "low" : name === "high_there" ? "high" : name;
        if (before[name] || group[name]) {
          merged[name] = (before[name] || before[fallback]).slice(0, cut).concat(group[name] || group[fallback]);
        }
      }
      if (group.single) {
        const start = firstAtLeast(before.single.x, group.from);
        merged.single = {
          ...group.single,
          per_bin: Math.max(before.single.per_bin, group.single.per_bin),
          x: before.single.x.slice(0, start).concat(group.single.x),
          values: group.single.values.map((v, lane) => before.single.values[lane].slice(0, start).concat(v)),
        };
      }
      return merged;
    });
    return { ...news, groups };
  };
  const pick = (from, names) => Object.fromEntries(names.filter((n) => from[n] !== undefined).map((n) => [n, from[n]]));
  const firstAtLeast = (sorted, x) => {
    let low = 0, high = sorted.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (sorted[middle] < x) low = middle + 1; else high = middle;
    }
    return low;
  };
  const nearest = (sorted, x) => {
    if (!sorted.length) return -1;
    const n = Math.min(firstAtLeast(sorted, x), sorted.length - 1);
    return n > 0 && x - sorted[n - 1] < sorted[n] - x ? n - 1 : n;
  };

  // --- the chart ---

  class Chart {
    // `options`: logX, logY, hidden (a set of names of groups), sync (charts with the same have one cursor), range,
    // onZoom(from, to), height
    constructor(root, options = {}) {
      this.root = root;
      this.options = { hidden: new Set(), height: 220, ...options };
      this.canvas = el("div", { class: "plot" });
      this.legend = el("div", { class: "legend" });
      this.notes = el("div", { class: "notes" });
      root.append(this.canvas, this.legend, this.notes);
      this.plot = null;
      this.panel = null;
      this.shape = "";
      this.at = null; // where the cursor is, on the axis
      this.observer = new ResizeObserver(() => this.resize());
      this.observer.observe(this.canvas);
    }

    resize() {
      const width = Math.floor(this.canvas.clientWidth);
      if (this.plot && width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: this.options.height });
    }

    destroy() {
      this.observer.disconnect();
      if (this.plot) this.plot.destroy();
      this.root.replaceChildren();
    }

    set(panel, options = {}) {
      this.panel = panel;
      Object.assign(this.options, options);
      const { series, bands, tables } = this.layout();
      const shape = JSON.stringify([series.map((s) => [s.label, s.stroke, s.dash, s.width]), panel.x, this.options.logX,
        this.options.logY, this.options.height, theme()]);
      const data = tables.length ? uPlot.join(tables) : [[]];
      if (this.plot && shape === this.shape) {
        this.plot.setData(data, false);
        this.rescale();
      } else {
        this.build(series, bands, data);
        this.shape = shape;
      }
      this.showLegend();
      this.showNotes();
    }

    shown() {
      return this.panel.groups.filter((group) => !this.options.hidden.has(group.name));
    }

    layout() {
      const positive = (values) => (this.options.logY ? values.map((v) => (v > 0 ? v : null)) : values);
      const series = [{}], bands = [], tables = [];
      for (const group of this.shown()) {
        const stroke = color(group.color);
        for (const old of group.replaced || []) {
          series.push({ label: old.name, stroke: css("--grey"), width: 1, dash: [3, 3], points: { show: false } });
          tables.push([old.x, positive(old.values)]);
        }
        if (group.single) {
          const alpha = Math.max(0.1, 0.4 / Math.sqrt(Math.max(1, group.single.names.length / 2)));
          for (const name of group.single.names) {
            series.push({ label: name, stroke: faded(stroke, alpha), width: 1, points: { show: false } });
          }
          tables.push([group.single.x, ...group.single.values.map(positive)]);
        }
      }
      for (const group of this.shown()) {
        const stroke = color(group.color);
        const table = [group.x];
        if (group.low) {
          const edge = { stroke: faded(stroke, 0.25), width: 0.5, points: { show: false } };
          // On a logarithmic axis, a band that reaches zero goes on to the lower end, wherever that is.
          series.push({ ...edge, label: `${group.name} high` }, { ...edge, label: `${group.name} low`, auto: !this.options.logY });
          bands.push({ series: [series.length - 2, series.length - 1], fill: faded(stroke, theme() === "dark" ? 0.22 : 0.16) });
          const low = this.options.logY ? group.low.map((v) => (v === null ? null : Math.max(v, 1e-300))) : group.low;
          table.push(positive(group.high), low);
        }
        const few = group.x.length < 2;
        series.push({ label: group.name, stroke, width: 1.75, dash: dash(group.color), points: { show: few, size: 6, fill: stroke } });
        table.push(positive(group.center));
        tables.push(table);
      }
      return { series, bands, tables };
    }

    build(series, bands, data) {
      if (this.plot) this.plot.destroy();
      const font = "11px system-ui, sans-serif";
      const axis = {
        stroke: css("--muted"), font, labelFont: font, grid: { stroke: css("--grid"), width: 1 },
        ticks: { stroke: css("--grid"), width: 1, size: 4 },
      };
      const x = this.panel.x;
      const labels = (values) => values.map((v) => (v === null ? null : x === "wall" ? seconds(v) : short(v)));
      const options = {
        width: Math.max(160, Math.floor(this.canvas.clientWidth)),
        height: this.options.height,
        padding: [8, 18, 0, 0], // room for half of the last number below
        legend: { show: false },
        series, bands,
        scales: {
          x: { time: false, distr: this.options.logX ? 3 : 1, range: (u, low, high) => this.xRange(low, high) },
          y: this.options.logY ? { distr: 3, range: (u, low, high) => (low === null ? [0.1, 1] : [oneDigit(low, Math.floor), oneDigit(high, Math.ceil)]) } : {},
        },
        axes: [
          { ...axis, size: 28, space: 60, values: (u, values) => labels(values) },
          { ...axis, size: 54, space: 32, values: (u, values) => values.map((v) => (v === null ? null : short(v))) },
        ],
        cursor: {
          y: false,
          drag: { x: true, y: false, setScale: false },
          points: { show: false },
          ...(this.options.sync ? { sync: { key: this.options.sync, scales: ["x", null], setSeries: false } } : {}),
        },
        hooks: {
          setCursor: [(u) => {
            const left = u.cursor.left;
            this.at = left === undefined || left === null || left < 0 ? null : u.posToVal(left, "x");
            this.showValues();
          }],
          setSelect: [(u) => {
            if (u.select.width < 4) return;
            const from = u.posToVal(u.select.left, "x"), to = u.posToVal(u.select.left + u.select.width, "x");
            u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
            if (this.options.onZoom) this.options.onZoom(from, to); else this.zoom([from, to]);
          }],
          draw: [(u) => this.drawMarks(u)],
        },
      };
      this.plot = new uPlot(options, data, this.canvas);
      this.plot.over.addEventListener("dblclick", () => {
        if (this.options.onZoom) this.options.onZoom(null, null); else this.zoom(null);
      });
    }

    xRange(low, high) {
      if (this.options.range) return this.options.range;
      if (low === null || high === null) return this.options.logX ? [1, 10] : [0, 1];
      if (low === high) return this.options.logX ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
      return [low, high];
    }

    zoom(range) {
      this.options.range = range;
      this.rescale();
    }

    rescale() {
      const [xs] = this.plot.data;
      const range = this.xRange(xs.length ? xs[0] : null, xs.length ? xs[xs.length - 1] : null);
      this.plot.setScale("x", { min: range[0], max: range[1] });
    }

    // A cross where a lane turned NaN, a square where it stopped before the others.
    drawMarks(u) {
      const context = u.ctx, size = 4 * devicePixelRatio;
      context.save();
      context.beginPath();
      context.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
      context.clip();
      for (const group of this.shown()) {
        context.strokeStyle = color(group.color);
        context.fillStyle = css("--panel");
        context.lineWidth = 1.5 * devicePixelRatio;
        for (const mark of group.marks || []) {
          if (mark.y === null || (this.options.logY && mark.y <= 0)) continue;
          const x = u.valToPos(mark.x, "x", true);
          const y = Math.min(Math.max(u.valToPos(mark.y, "y", true), u.bbox.top + size), u.bbox.top + u.bbox.height - size);
          context.beginPath();
          if (mark.why === "nan") {
            context.moveTo(x - size, y - size); context.lineTo(x + size, y + size);
            context.moveTo(x - size, y + size); context.lineTo(x + size, y - size);
          } else {
            context.rect(x - size * 0.8, y - size * 0.8, size * 1.6, size * 1.6);
            context.fill();
          }
          context.stroke();
        }
      }
      context.restore();
    }

    showLegend() {
      const rows = this.shown().map((group) => {
        const swatch = el("span", { class: "swatch" });
        swatch.style.background = color(group.color);
        return el("div", { class: "row", data: { group: group.name }, title: `${group.name}: ${group.method}, n = ${counted(group.n)}` },
          swatch, el("span", { class: "name" }, group.name), el("span", { class: "values" }));
      });
      this.where = el("div", { class: "row where" });
      this.legend.replaceChildren(this.where, ...rows);
      this.showValues();
    }

    // The numbers of the point that is drawn nearest to the cursor, or of the last one.
    showValues() {
      if (!this.panel || !this.where) return;
      const rows = this.legend.querySelectorAll(".row[data-group]");
      let shown = null;
      this.shown().forEach((group, n) => {
        const at = this.at === null ? group.x.length - 1 : nearest(group.x, this.at);
        if (at < 0 || !rows[n]) return;
        if (shown === null || group.x[at] > shown) shown = group.x[at];
        const low = (group.low_there || group.low || [])[at], high = (group.high_there || group.high || [])[at];
        const parts = [el("b", {}, number(group.center[at]))];
        if (group.low && low !== null) parts.push(el("span", { class: "edges" }, ` [${number(low)}, ${number(high)}]`));
        parts.push(el("span", { class: "n" }, ` n=${group.at[at]}`));
        rows[n].lastChild.replaceChildren(...parts);
        rows[n].dataset.x = group.x[at];
      });
      const most = this.perPixel();
      const about = `One pixel column stands for up to ${most} points. Statistics are over all lanes at every point; the smallest and the largest of a column are drawn. Zoom in for every point.`;
      this.where.replaceChildren(
        el("span", {}, shown === null ? "nothing yet" : `${this.panel.x === "wall" ? "time" : this.panel.x} ${place(this.panel.x, shown)}`),
        ...(most > 2 ? [el("span", { class: "density", title: about }, `up to ${most} points per pixel`)] : []));
    }

    showNotes() {
      const notes = [];
      for (const group of this.shown()) {
        const marked = group.marked || {};
        const names = (why) => listed((group.marks || []).filter((m) => m.why === why).map((m) => m.name));
        const who = this.panel.groups.length > 1 ? `${group.name}: ` : "";
        if (marked.nan) notes.push(`× ${who}${marked.nan} ${marked.nan > 1 ? "lanes" : "lane"} ended with NaN or infinity, left out there: ${names("nan")}`);
        if (marked.stopped) notes.push(`□ ${who}${marked.stopped} ${marked.stopped > 1 ? "lanes" : "lane"} ended before the others: ${names("stopped")}`);
        if (!marked.nan && group.lost) notes.push(`${who}up to ${group.lost} ${group.lost > 1 ? "lanes" : "lane"} NaN or infinite at a point, left out there`);
      }
      if (this.panel.problem) notes.push(this.panel.problem);
      this.notes.replaceChildren(...notes.map((text) => el("div", {}, text)));
    }

    // The most points of the curve that one bin, about a pixel wide, stands for.
    perPixel() {
      return Math.max(0, ...this.shown().map((group) => group.per_bin));
    }
  }

  // --- heat maps, for histograms over time ---

  const RAMP = [[68, 1, 84], [65, 68, 135], [42, 120, 142], [34, 168, 132], [122, 209, 81], [253, 231, 37]];
  const ramp = (t) => {
    const at = Math.min(Math.max(t, 0), 1) * (RAMP.length - 1), n = Math.min(Math.floor(at), RAMP.length - 2);
    return RAMP[n].map((c, i) => Math.round(c + (RAMP[n + 1][i] - c) * (at - n)));
  };

  // Draw counts (time, bin) on a canvas; darker is fewer, and a bin without any is empty. The scale is a square root.
  const heatmap = (canvas, data) => {
    const context = canvas.getContext("2d"), scale = devicePixelRatio;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    canvas.width = width * scale;
    canvas.height = height * scale;
    context.scale(scale, scale);
    const box = { left: 58, top: 6, width: width - 68, height: height - 34 };
    const columns = data.counts.length, bins = data.edges.length - 1;
    context.clearRect(0, 0, width, height);
    if (columns && bins > 0) {
      const most = Math.sqrt(Math.max(...data.counts.map((row) => Math.max(...row))));
      const image = new ImageData(columns, bins);
      data.counts.forEach((row, x) => row.forEach((count, y) => {
        if (count > 0) image.data.set([...ramp(Math.sqrt(count) / most), 255], 4 * ((bins - 1 - y) * columns + x));
      }));
      const small = document.createElement("canvas");
      small.width = columns;
      small.height = bins;
      small.getContext("2d").putImageData(image, 0, 0);
      context.imageSmoothingEnabled = false;
      context.drawImage(small, box.left, box.top, box.width, box.height);
    }
    context.fillStyle = css("--muted");
    context.strokeStyle = css("--grid");
    context.strokeRect(box.left + 0.5, box.top + 0.5, box.width, box.height);
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "right";
    context.textBaseline = "middle";
    const rows = Math.max(1, Math.min(6, Math.floor(box.height / 26), bins));
    for (let n = 0; n <= rows && bins > 0; n++) {
      const edge = Math.round((n * bins) / rows);
      context.fillText(short(data.edges[edge]), box.left - 6, box.top + box.height * (1 - edge / bins));
    }
    context.textBaseline = "top";
    const marks = Math.min(6, columns);
    for (let n = 0; n < marks; n++) {
      const column = marks > 1 ? Math.round((n * (columns - 1)) / (marks - 1)) : 0;
      context.textAlign = n === 0 ? "left" : n === marks - 1 ? "right" : "center";
      const x = box.left + (marks > 1 ? (n / (marks - 1)) * box.width : 0);
      context.fillText(short(data.places[column]), x, box.top + box.height + 8);
    }
  };

  // --- a file of its own ---

  const standalone = () => {
    const source = document.getElementById("lox-panels");
    if (!source) return;
    const { panels } = JSON.parse(source.textContent);
    const grid = document.getElementById("panels");
    const charts = panels.map((panel) => {
      const chips = [];
      if (panel.smooth) chips.push(el("span", { class: "chip smoothed" }, `smoothed ${panel.smooth}`));
      const root = el("div", { class: "body" });
      grid.append(el("section", { class: "panel" }, el("header", {}, el("h3", {}, panel.name), ...chips), root));
      const chart = new Chart(root, { sync: "lox", logX: panel.log_x, logY: panel.log_y, height: 260 });
      chart.set(panel);
      return chart;
    });
    const redraw = () => charts.forEach((chart) => chart.set(chart.panel));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  };
  document.addEventListener("DOMContentLoaded", standalone);

  return { Chart, heatmap, grown, el, number, seconds, place, color, theme, css, counted, short };
})();
