// The dashboard: a table of runs, and a chart for every key. What is shown is in the address, so that links and the back
// button work; the server says what grew, and only that is fetched, and only for charts that can be seen.
"use strict";

(() => {
  const { Chart, heatmap, grown, el, number, place, color, short } = lox;
  const $ = (id) => document.getElementById(id);
  const AT_ONCE = 4; // requests
  const MOST_ROWS = 3000; // of the table
  const HEIGHT = 220, BIG = 420;

  // --- the state, which is the address ---

  const DEFAULTS = {
    where: "", keys: "", by: "", x: "", band: "ci95", smooth: "0", lanes: "", logx: "", logy: "", from: "", to: "",
    big: "", table: "", hide: "", closed: "",
  };
  let state = { ...DEFAULTS };
  const LISTS = ["hide", "closed"];
  const list = (name) => (state[name] ? JSON.parse(state[name]) : []);

  const read = () => {
    const query = new URLSearchParams(location.hash.slice(1));
    const found = { ...DEFAULTS };
    for (const name of Object.keys(DEFAULTS)) if (query.has(name)) found[name] = query.get(name);
    for (const name of LISTS) { // an address may come from anywhere
      try {
        if (found[name] && !JSON.parse(found[name]).every((x) => typeof x === "string")) found[name] = "";
      } catch { found[name] = ""; }
    }
    return found;
  };
  const address = () => {
    const query = new URLSearchParams();
    for (const [name, value] of Object.entries(state)) if (value !== DEFAULTS[name]) query.set(name, value);
    return "#" + query.toString();
  };
  // With `quiet`, the change is part of the last one, as while somebody types.
  const change = (changes, quiet = false) => {
    const before = state;
    state = { ...state, ...changes };
    if (quiet) history.replaceState(null, "", address()); else history.pushState(null, "", address());
    apply(before);
  };
  window.addEventListener("popstate", () => {
    const before = state;
    state = read();
    apply(before);
  });

  // --- talking to the server ---

  const problem = (text) => {
    $("problems").textContent = text;
    $("problems").hidden = !text;
  };
  const ask = async (what, query, signal) => {
    const response = await fetch(`api/${what}?${query}`, { signal });
    const answer = await response.json().catch(() => ({ error: `the server says ${response.status}` }));
    if (answer.error) throw new Error(answer.error);
    return answer;
  };
  const waiting = [];
  let underWay = 0;
  const enqueue = (work) => {
    waiting.push(work);
    proceed();
  };
  const proceed = () => {
    while (underWay < AT_ONCE && waiting.length) {
      underWay += 1;
      waiting.shift()().finally(() => { underWay -= 1; proceed(); });
    }
  };

  const chosen = () => {
    const query = new URLSearchParams();
    if (state.where) query.set("where", state.where);
    if (state.by) query.set("by", state.by);
    return query;
  };

  // --- runs ---

  const runs = new Map();
  let keys = [], groups = [], version = "", lastQuery = null;

  const loadRuns = async () => {
    const query = chosen();
    const same = query.toString() === lastQuery;
    lastQuery = query.toString();
    if (version) query.set("since", version);
    let news;
    try {
      news = await ask("runs", query);
    } catch (error) {
      problem(error.message);
      return;
    }
    version = news.version;
    if (news.whole) runs.clear();
    for (const run of news.runs) runs.set(run.name, { ...run, config: new Map(run.config) });
    keys = news.keys;
    $("filter-problem").textContent = news.filter;
    $("filter-problem").hidden = !news.filter;
    problem(news.problems.join("\n"));
    document.title = `${news.directory} · lox`;
    $("directory").textContent = news.directory;
    $("directory").title = `${news.path} (lox ${news.lox})`;
    const before = JSON.stringify(groups);
    groups = news.groups;
    showControls();
    showGroups();
    showRuns();
    showPanels();
    if (!same || before !== JSON.stringify(groups)) reload();
  };

  const members = () => groups.flatMap((group) => group.runs);

  const showControls = () => {
    const names = new Set();
    for (const run of runs.values()) for (const name of run.config.keys()) names.add(name);
    options($("by"), [["", "config, vmap"], ...[...names].map((name) => [name, name])], state.by);
    const steps = new Set(keys.flatMap(([, , , own]) => own));
    steps.delete("step");
    options($("x"), [["", "step"], ...[...steps].map((name) => [name, name]), ["event", "event"], ["wall", "wall time"]], state.x);
  };
  const options = (select, pairs, value) => {
    const now = JSON.stringify([...select.options].map((option) => [option.value, option.textContent]));
    if (!pairs.some(([known]) => known === value)) pairs = [...pairs, [value, value]];
    if (now !== JSON.stringify(pairs)) select.replaceChildren(...pairs.map(([known, text]) => el("option", { value: known }, text)));
    select.value = value;
  };

  let shownGroups = "";
  const showGroups = () => {
    const hidden = new Set(list("hide"));
    // Only if something has changed: what is rebuilt under the mouse cannot be clicked.
    const wanted = JSON.stringify([groups, state.hide, lox.theme()]);
    if (wanted === shownGroups) return;
    shownGroups = wanted;
    $("groups").hidden = groups.length < 2;
    $("groups").replaceChildren(...groups.map((group, n) => {
      const swatch = el("span", { class: "swatch" });
      swatch.style.background = color(n);
      return el("button", {
        type: "button", "aria-pressed": String(!hidden.has(group.name)), title: `${group.name}: ${group.runs.slice(0, 20).join(", ")}`,
        onclick: (event) => toggleGroup(group.name, event.altKey || event.shiftKey),
      }, swatch, el("span", { class: "label" }, group.name), el("span", { class: "n" }, `${group.runs.length}`));
    }));
  };
  const toggleGroup = (name, alone) => {
    const hidden = new Set(list("hide"));
    if (alone) {
      const others = groups.map((group) => group.name).filter((other) => other !== name);
      const is = others.every((other) => hidden.has(other)) && !hidden.has(name);
      change({ hide: is ? "" : JSON.stringify(others) });
      return;
    }
    if (!hidden.delete(name)) hidden.add(name);
    change({ hide: hidden.size ? JSON.stringify([...hidden]) : "" });
  };

  // --- the table ---

  let order = { name: "", down: false };
  const text = (value) => (value === null || value === undefined ? "" : typeof value === "number" ? short(value)
    : typeof value === "string" ? value : JSON.stringify(value));
  const time = (seconds) => (seconds === null ? "" : new Date(seconds * 1000).toLocaleString());

  const columns = () => {
    const names = new Set();
    for (const run of runs.values()) for (const name of run.config.keys()) names.add(name);
    return [
      ["run", (run) => run.name], ["group", (run) => run.group],
      ...[...names].map((name) => [name, (run) => run.config.get(name)]),
      ["state", (run) => run.state], ["events", (run) => run.events], ["attempts", (run) => run.attempts],
      ["began", (run) => run.opened], ["last event", (run) => run.last],
    ];
  };
  const showRuns = () => {
    const shown = members();
    $("count").textContent = shown.length === runs.size ? `${runs.size} run${runs.size === 1 ? "" : "s"}` : `${shown.length} of ${runs.size} runs`;
    $("empty").hidden = runs.size > 0 && keys.length > 0;
    $("empty").textContent = runs.size ? "Nothing was logged yet." : "There are no runs yet. They appear here as soon as something is logged.";
    if (!state.table) return;
    const groupOf = new Map(groups.flatMap((group) => group.runs.map((name) => [name, group.name])));
    let rows = shown.map((name) => ({ ...runs.get(name), group: groupOf.get(name) })).filter((run) => run.name !== undefined);
    const all = columns();
    const by = all.find(([name]) => name === order.name);
    if (by) {
      const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : text(a).localeCompare(text(b), undefined, { numeric: true }));
      rows.sort((a, b) => (order.down ? -1 : 1) * compare(by[1](a), by[1](b)));
    }
    const more = rows.length - MOST_ROWS;
    rows = rows.slice(0, MOST_ROWS);
    const head = el("tr", {}, all.map(([name]) => el("th", {
      scope: "col", title: name, "aria-sort": order.name === name ? (order.down ? "descending" : "ascending") : null,
      onclick: () => { order = { name, down: order.name === name && !order.down }; showRuns(); },
    }, name)));
    const body = rows.map((run) => el("tr", {}, all.map(([name, value], n) => {
      const found = value(run);
      const shownAs = n >= all.length - 2 ? time(found) : text(found);
      const kind = n < all.length - 2 && typeof found === "number" ? "number" : name === "state" && n === all.length - 5 ? `state-${found}` : "";
      return el("td", { class: kind, title: shownAs }, shownAs);
    })));
    if (more > 0) body.push(el("tr", {}, el("td", { colspan: all.length }, `and ${more} more: use the filter`)));
    $("runs").replaceChildren(el("thead", {}, head), el("tbody", {}, body));
  };

  // --- panels ---

  const panels = new Map(); // by key
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const panel = entry.target.panel;
      panel.visible = entry.isIntersecting;
      if (panel.visible) panel.want();
    }
  }, { rootMargin: "300px" });

  const pattern = () => {
    try {
      return new RegExp(state.keys);
    } catch {
      return null;
    }
  };

  const showPanels = () => {
    const matching = pattern();
    $("keys").setAttribute("aria-invalid", String(matching === null));
    const shown = matching === null ? [] : keys.filter(([key]) => matching.test(key));
    const closed = new Set(list("closed"));
    const sections = new Map();
    for (const [key, kind] of shown) {
      const prefix = key.includes("/") ? key.slice(0, key.lastIndexOf("/")) : "";
      if (!sections.has(prefix)) sections.set(prefix, []);
      sections.get(prefix).push([key, kind]);
    }
    const nodes = [];
    const present = new Set();
    for (const [prefix, own] of [...sections].sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0))) {
      if (sections.size > 1 && prefix) {
        nodes.push(el("h2", { class: closed.has(prefix) ? "closed" : "", onclick: () => toggleSection(prefix) }, `${prefix} (${own.length})`));
      }
      for (const [key, kind] of closed.has(prefix) ? [] : own) {
        present.add(key);
        if (!panels.has(key)) panels.set(key, new Panel(key, kind));
        nodes.push(panels.get(key).root);
      }
    }
    for (const [key, panel] of panels) {
      if (!present.has(key)) { panel.destroy(); panels.delete(key); }
    }
    const main = $("panels");
    if (nodes.length !== main.children.length || nodes.some((node, n) => {
      const there = main.children[n];
      return node !== there && !(node.tagName === "H2" && there.tagName === "H2" && node.textContent === there.textContent && node.className === there.className);
    })) main.replaceChildren(...nodes);
    for (const panel of panels.values()) panel.root.classList.toggle("big", state.big === panel.key);
  };
  const toggleSection = (prefix) => {
    const closed = new Set(list("closed"));
    if (!closed.delete(prefix)) closed.add(prefix);
    change({ closed: closed.size ? JSON.stringify([...closed]) : "" });
  };

  // Everything of all panels anew, because the question has changed.
  const reload = () => {
    for (const panel of panels.values()) panel.restart();
  };

  class Panel {
    constructor(key, kind) {
      this.key = key;
      this.kind = kind;
      this.name = "";
      this.title = el("h3", { title: key }, key);
      this.choice = el("select", { hidden: true, "aria-label": "curve", onchange: () => { this.name = this.choice.value; this.restart(); } });
      this.smoothed = el("span", { class: "chip smoothed", hidden: true });
      this.enlarge = el("button", { type: "button", title: "larger", "aria-label": "larger", onclick: () => change({ big: state.big === key ? "" : key }) }, "⤢");
      this.compare = el("button", { type: "button", title: "compare groups", "aria-label": "compare groups", hidden: true, onclick: () => compare(key, this.name) }, "≷");
      this.body = el("div", { class: "body" });
      this.root = el("section", { class: "panel loading", data: { key } },
        el("header", {}, this.title, this.choice, this.smoothed, el("span", { class: "grow" }), this.compare, this.enlarge), this.body);
      this.root.panel = this;
      this.chart = null;
      this.data = null;
      this.visible = false;
      this.stale = true;
      this.busy = null;
      this.again = false;
      observer.observe(this.root);
    }

    destroy() {
      observer.unobserve(this.root);
      if (this.busy) this.busy.abort();
      if (this.chart) this.chart.destroy();
      this.chart = null;
    }

    // The question has changed: what is there is no longer to be grown.
    restart() {
      if (this.busy) this.busy.abort();
      this.busy = null;
      this.data = null;
      this.stale = true;
      this.want();
    }

    // There is more of it.
    grew() {
      this.stale = true;
      this.want();
    }

    want() {
      if (!this.visible || !this.stale) return;
      if (this.busy) { this.again = true; return; }
      const control = new AbortController();
      this.busy = control;
      this.stale = false;
      enqueue(async () => {
        if (control.signal.aborted) return;
        try {
          await this.load(control.signal);
          this.root.dataset.loaded = String(1 + Number(this.root.dataset.loaded || 0));
        } catch (error) {
          if (error.name !== "AbortError") this.fail(error.message);
        }
      });
    }

    query() {
      const query = chosen();
      query.set("key", this.key);
      if (this.name) query.set("name", this.name);
      for (const name of ["x", "band", "lanes", "from", "to"]) if (state[name]) query.set(name, state[name]);
      if (Number(state.smooth)) query.set("smooth", state.smooth);
      if (state.logx) query.set("log", "1");
      query.set("bins", String(Math.max(100, 64 * Math.round((this.body.clientWidth || 400) / 64))));
      return query;
    }

    async load(signal) {
      try {
        const query = this.query();
        if (this.data && this.data.token) query.set("since", this.data.token);
        const answer = await ask("panel", query, signal);
        if (signal.aborted) return;
        this.data = answer.grow && this.data ? grown(this.data, answer) : answer;
        this.kind = answer.kind;
        this.root.classList.remove("loading");
        this.chooser(answer);
        if (answer.kind === "histogram") await this.histogram(query, signal);
        else if (answer.kind === "image") await this.pictures(query, signal);
        else this.draw();
      } finally {
        if (this.busy && this.busy.signal === signal) this.busy = null;
        if (this.again || this.stale) { this.again = false; this.want(); }
      }
    }

    fail(message) {
      if (this.chart) { this.chart.destroy(); this.chart = null; }
      this.root.classList.remove("loading");
      this.body.replaceChildren(el("div", { class: "error" }, message));
      this.data = null;
    }

    chooser(answer) {
      const several = answer.names.length > 1;
      this.choice.hidden = !several;
      if (several) options(this.choice, answer.names.map(({ name }) => [name, name.startsWith(`${this.key}/`) ? name.slice(this.key.length + 1) : name]), answer.name);
    }

    draw() {
      if (!this.data || this.data.kind !== "number") return;
      if (!this.chart) {
        this.body.replaceChildren();
        this.chart = new Chart(this.body, { sync: "lox", onZoom: zoom });
      }
      const own = !state.x || this.data.x === state.x; // else the axis is another one, and the zoom means nothing
      this.chart.set(this.data, {
        logX: Boolean(state.logx), logY: Boolean(state.logy), hidden: new Set(list("hide")),
        range: own && state.from && state.to ? [Number(state.from), Number(state.to)] : null,
        height: state.big === this.key ? BIG : HEIGHT,
      });
      this.smoothed.hidden = !this.data.smooth;
      this.smoothed.textContent = `smoothed ${this.data.smooth}`;
      this.compare.hidden = this.data.groups.length < 2;
      this.title.title = `${this.key}\n${this.data.method}`;
    }

    async histogram(query, signal) {
      if (this.group) query.set("group", this.group);
      const answer = await ask("histogram", query, signal);
      if (!this.heat) {
        this.heat = el("canvas", { class: "heat" });
        this.which = el("select", { "aria-label": "group", onchange: () => { this.group = this.which.value; this.stale = true; this.want(); } });
        this.caption = el("span");
      }
      if (!this.body.contains(this.heat)) this.body.replaceChildren(this.heat, el("div", { class: "notes" }, this.which, " ", this.caption));
      options(this.which, answer.groups.map((name) => [name, name]), answer.group);
      this.which.hidden = answer.groups.length < 2;
      this.caption.textContent = `${answer.places.length} columns over ${answer.x}, ${answer.n} ${answer.n === 1 ? "lane" : "lanes"} added up; colour: square root of the count`
        + (answer.left_out ? `; ${answer.left_out} with other bins, or without this step, are left out` : "");
      this.drawn = answer;
      heatmap(this.heat, answer);
    }

    async pictures(query, signal) {
      const answer = await ask("pictures", query, signal);
      const known = new Set(members());
      const own = answer.runs.filter((run) => known.has(run.name));
      if (!this.image) {
        this.image = el("img", { alt: "" });
        this.slider = el("input", { type: "range", min: "0", "aria-label": "event", oninput: () => this.show() });
        this.of = el("select", { "aria-label": "run", onchange: () => this.show() });
        this.caption = el("span");
      }
      if (!this.body.contains(this.image)) {
        this.body.replaceChildren(el("div", { class: "picture" }, this.image, el("div", { class: "row" }, this.of, this.slider, this.caption)));
      }
      this.shots = { x: answer.x, runs: new Map(own.map((run) => [run.name, run.places])), name: answer.name };
      const atEnd = !this.seen || this.slider.value === this.slider.max; // then it stays there as more come
      this.seen = true;
      options(this.of, own.map((run) => [run.name, run.name]), this.shots.runs.has(this.of.value) ? this.of.value : own.length ? own[0].name : "");
      const count = (this.shots.runs.get(this.of.value) || []).length;
      this.slider.max = String(Math.max(0, count - 1));
      if (atEnd) this.slider.value = this.slider.max;
      this.show();
    }

    show() {
      const places = this.shots.runs.get(this.of.value) || [];
      this.slider.max = String(Math.max(0, places.length - 1));
      if (!places.length) { this.caption.textContent = "no pictures in these runs"; return; }
      const query = new URLSearchParams({ key: this.key, run: this.of.value, event: this.slider.value, name: this.shots.name });
      this.image.src = `api/picture?${query}`;
      this.image.alt = `${this.key}, ${this.of.value}`;
      this.caption.textContent = `${this.shots.x} ${number(places[Number(this.slider.value)])}`;
    }

    redraw() {
      if (this.chart && this.data) this.draw();
      if (this.heat && this.drawn) heatmap(this.heat, this.drawn);
    }
  }

  const zoom = (from, to) => change({ from: from === null ? "" : String(from), to: to === null ? "" : String(to) });

  let compared = null; // the key and the name of the curve that the dialog is about
  const compare = (key, name) => {
    compared = [key, name];
    $("better").value = /loss|err|nll|regret|perplex|cost/i.test(key) ? "lower" : "higher";
    if (!$("comparison").open) $("comparison").showModal();
    showComparison();
  };
  const showComparison = async () => {
    const [key, name] = compared;
    const query = chosen();
    query.set("key", key);
    if (name) query.set("name", name);
    query.set("at", $("at").value);
    query.set("better", $("better").value);
    if (state.x && state.x !== "wall") query.set("x", state.x);
    const asked = query.toString();
    const room = $("comparison").querySelector(".scroll");
    $("comparison").querySelector("h2").textContent = `${name || key}: groups compared`;
    $("comparison").dataset.asked = asked;
    room.replaceChildren("computing …");
    let shown;
    try {
      const answer = await ask("compare", query);
      shown = [...answer.tables.map((table) => el("table", {},
        el("thead", {}, el("tr", {}, table.columns.map((c) => el("th", {}, c)))),
        el("tbody", {}, table.rows.map((row) => el("tr", {}, row.map((cell) => el("td", { title: cell }, cell))))))),
      ...answer.notes.map((note) => el("p", { class: "notes" }, note))];
    } catch (error) {
      shown = [el("div", { class: "error" }, error.message)];
    }
    if ($("comparison").dataset.asked === asked) room.replaceChildren(...shown);
  };
  for (const name of ["at", "better"]) $(name).addEventListener("change", showComparison);

  // --- putting a state on the page ---

  const ASKED = ["where", "by", "x", "band", "smooth", "lanes", "logx", "from", "to"];

  const apply = (before) => {
    for (const name of ["where", "keys"]) if (document.activeElement !== $(name) || before === null) $(name).value = state[name];
    $("by").value = state.by;
    $("x").value = state.x;
    $("band").value = state.band;
    $("smooth").value = state.smooth;
    $("smooth-value").textContent = state.smooth;
    for (const name of ["lanes", "logx", "logy"]) $(name).checked = Boolean(state[name]);
    $("table").open = Boolean(state.table);
    $("reset").hidden = !(state.from && state.to);
    if (before === null) return;
    const differ = (...names) => names.some((name) => before[name] !== state[name]);
    if (differ("where", "by")) { loadRuns(); return; }
    if (differ("table")) showRuns();
    if (differ("hide")) showGroups();
    if (differ("keys", "closed", "big")) showPanels();
    if (differ(...ASKED)) reload();
    else if (differ("hide", "logy", "big")) for (const panel of panels.values()) panel.redraw();
  };

  const later = (work, delay) => {
    let timer = 0;
    return (...given) => { clearTimeout(timer); timer = setTimeout(() => work(...given), delay); };
  };
  // What is typed is one step back, however long it took.
  let typing = "";
  const typed = later((name) => { change({ [name]: $(name).value }, typing === name); typing = name; }, 250);
  for (const name of ["where", "keys"]) {
    $(name).addEventListener("input", () => typed(name));
    $(name).addEventListener("blur", () => { typing = ""; });
  }
  for (const name of ["by", "x", "band"]) {
    $(name).addEventListener("change", () => change(name === "x" ? { x: $("x").value, from: "", to: "" } : { [name]: $(name).value }));
  }
  const slid = later(() => change({ smooth: $("smooth").value }, true), 120);
  $("smooth").addEventListener("input", () => { $("smooth-value").textContent = $("smooth").value; slid(); });
  for (const name of ["lanes", "logx", "logy"]) $(name).addEventListener("change", () => change({ [name]: $(name).checked ? "1" : "" }));
  $("reset").addEventListener("click", () => zoom(null, null));
  $("table").addEventListener("toggle", () => {
    if ($("table").open !== Boolean(state.table)) change({ table: $("table").open ? "1" : "" });
  });

  const setTheme = (name) => {
    document.documentElement.dataset.theme = name;
    localStorage.setItem("lox-theme", name);
    redrawAll();
  };
  const redrawAll = () => {
    showGroups();
    for (const panel of panels.values()) panel.redraw();
  };
  $("theme").addEventListener("click", () => setTheme(lox.theme() === "dark" ? "light" : "dark"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
  window.addEventListener("resize", later(() => { for (const panel of panels.values()) if (panel.heat && panel.drawn) heatmap(panel.heat, panel.drawn); }, 150));

  // --- the keyboard ---

  const toggle = (name) => change({ [name]: state[name] ? "" : "1" });
  const BANDS = ["ci95", "std", "quantiles", "iqm", "minmax", "none"];
  const smoother = (by) => change({ smooth: String(Math.min(0.99, Math.max(0, +(Number(state.smooth) + by).toFixed(2)))) });
  const SHORTCUTS = new Map([
    ["/", ["filter runs", () => $("where").focus()]],
    ["k", ["filter keys", () => $("keys").focus()]],
    ["t", ["table of runs", () => toggle("table")]],
    ["l", ["single lanes", () => toggle("lanes")]],
    ["b", ["next kind of band", () => change({ band: BANDS[(BANDS.indexOf(state.band) + 1) % BANDS.length] })]],
    ["s", ["smoother", () => smoother(0.1)]],
    ["S", ["less smooth", () => smoother(-0.1)]],
    ["x", ["logarithmic x", () => toggle("logx")]],
    ["y", ["logarithmic y", () => toggle("logy")]],
    ["r", ["reset the zoom", () => zoom(null, null)]],
    ["d", ["dark or light", () => $("theme").click()]],
    ["?", ["this help", () => showHelp()]],
  ]);
  const showHelp = () => {
    const items = [...[...SHORTCUTS].map(([key, [what]]) => [key, what]), ["drag", "zoom into a part of the axis, in all charts"],
      ["double click", "everything again"], ["shift+click", "on a group: only this one, or all again"]];
    $("keyboard").querySelector("dl").replaceChildren(...items.flatMap(([key, what]) => [el("dt", {}, key), el("dd", {}, what)]));
    $("keyboard").showModal();
  };
  $("help").addEventListener("click", showHelp);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const field = event.target.closest("input[type=search], select");
    if (field) {
      if (event.key === "Escape") field.blur();
      return;
    }
    const found = SHORTCUTS.get(event.key);
    if (found) { event.preventDefault(); found[1](); }
  });

  // --- live ---

  const listen = () => {
    const source = new EventSource("api/events");
    const live = (on) => {
      $("live").classList.toggle("on", on);
      $("live").title = on ? "live: new events appear by themselves" : "not connected";
    };
    source.onopen = () => live(true);
    source.onerror = () => live(false);
    let known = null;
    source.onmessage = (message) => {
      const news = JSON.parse(message.data);
      if (news.problem) { problem(news.problem); return; }
      if (news.version !== known) { known = news.version; loadRuns(); }
      for (const [key] of news.keys) if (panels.has(key)) panels.get(key).grew();
    };
  };

  state = read();
  apply(null);
  loadRuns().then(listen);
})();
