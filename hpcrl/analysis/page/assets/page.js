"use strict";
// Draws the plots and the rollouts of a page. Texts of others are only ever given to textContent, or to `plain`.
(async function () {
  let data = JSON.parse(document.getElementById("data").textContent);
  const darkness = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)").matches;
  const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07d00", "#56b4e9", "#6b6b6b", "#7b4fa0"];
  const DARK = ["#56b4e9", "#e8853c", "#2bc39a", "#e39bc4", "#f0c24b", "#a9d8f5", "#bbbbbb", "#b99be0"];
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
  const MARKS = { fault: 1, end: 1, restart: 4 };
  const SPANS = { ready: 2, starting: 4, restarting: 1, stopping: 6, waiting: 4, "forward+backward": 0, optimizer: 5,
    publish: 3, checkpoint: 7, other: 6, "weight update": 6, evaluation: 3, away: 1 };
  const several = data.runs.length > 1;

  const palette = (index) => (darkness.matches ? DARK : LIGHT)[index % LIGHT.length];
  const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // Plotly takes texts as a small part of HTML
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const faded = (colour, alpha) => colour + Math.round(alpha * 255).toString(16).padStart(2, "0");
  const made = (name, className, text) => {
    const element = document.createElement(name);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  async function loadPlotly() {
    // a page that a server gives has it as a program of its own
    if (window.Plotly || !drawings.length) return;
    const packed = document.getElementById("plotly").textContent.trim();
    let bytes;
    if (Uint8Array.fromBase64) {
      bytes = Uint8Array.fromBase64(packed);
    } else {
      const letters = atob(packed);
      bytes = new Uint8Array(letters.length);
      for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
    }
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }

  function layoutOf(title) {
    const ink = colourOf("--ink"), rule = colourOf("--rule"), soft = colourOf("--soft");
    const axis = { gridcolor: rule, zerolinecolor: rule, linecolor: rule, exponentformat: "e" };
    return {
      height: window.innerWidth < 600 ? 240 : 290,
      margin: { l: 48, r: 12, t: 10, b: 38 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: ink, size: 12 },
      uirevision: "kept",  // a zoom outlives new points
      hovermode: "x unified",
      hoverlabel: { bgcolor: colourOf("--raised"), bordercolor: soft, font: { color: ink } },
      legend: { orientation: "h", y: -0.22, yanchor: "top", x: 0, font: { size: 11 } },
      dragmode: coarse ? false : "zoom",
      xaxis: { ...axis, title: { text: title, standoff: 6 } },
      yaxis: { ...axis, automargin: true },
    };
  }

  // lines of marks are traces: a shape of its own for each would take most of the time of a plot
  function addMarks(layout, traces, marks) {
    if (!marks.length) return;
    const colour = (mark) => (several ? palette(mark.run) : palette(MARKS[mark.kind] ?? 6));
    const dash = (mark) => (mark.kind === "restart" ? "dash" : "dot");
    layout.yaxis9 = { overlaying: "y", range: [0, 1], visible: false, fixedrange: true };
    const looks = new Map();
    for (const mark of marks) {
      const look = `${colour(mark)} ${dash(mark)}`;
      if (!looks.has(look)) looks.set(look, []);
      looks.get(look).push(mark);
    }
    for (const own of looks.values()) {
      traces.push({
        x: own.flatMap((mark) => [mark.x, mark.x, null]), y: own.flatMap(() => [0, 1, null]), yaxis: "y9",
        mode: "lines", type: "scatter", line: { color: colour(own[0]), width: 1, dash: dash(own[0]) },
        hoverinfo: "skip", showlegend: false, meta: "marks",
      });
    }
    traces.push({
      x: marks.map((mark) => mark.x), y: marks.map(() => 0.97), yaxis: "y9", mode: "markers", type: "scatter",
      marker: { symbol: "triangle-down", size: 9, color: marks.map(colour) }, name: "faults and restarts",
      text: marks.map((mark) => plain(mark.what)), hovertemplate: "%{text}<extra></extra>", showlegend: false,
    });
  }

  const plotMarks = () => data.runs.flatMap((run, number) =>
    run.marks.map((mark) => ({ run: number, x: mark.step, kind: mark.kind, what: mark.what })));

  function plotOf(plot) {
    const traces = [], labels = [...new Set(plot.lines.map((line) => line.label))];
    const plainLabels = [...new Set(plot.lines.filter((line) => line.style !== "faint").map((line) => line.label))];
    const legends = new Set();
    for (const line of plot.lines) {
      const own = plainLabels.indexOf(line.label);
      const colour = palette(several ? line.run : line.style === "faint" ? 0 : own);
      const dash = plot.kind === "stack" ? "solid" : DASHES[(several || line.style === "faint" && own < 0
        ? labels.indexOf(line.label) : 0) % DASHES.length];
      const run = several ? data.runs[line.run].name : "";
      const name = plain([run, line.label].filter(Boolean).join(" · ") || plot.title);
      const twin = plot.lines.some((other) => other !== line && other.run === line.run && other.label === line.label
        && other.style !== "faint");
      const shown = !legends.has(name) && !(line.style === "faint" && twin);
      if (shown) legends.add(name);
      if (line.low) {
        const band = { x: line.x, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false,
          type: "scatter", legendgroup: name, meta: "band" };
        traces.push({ ...band, y: line.low });
        traces.push({ ...band, y: line.high, fill: "tonexty", fillcolor: faded(colour, 0.18) });
      }
      const trace = { x: line.x, y: line.y, name, legendgroup: name, showlegend: shown, type: "scatter" };
      if (plot.kind === "stack") {
        Object.assign(trace, { stackgroup: "one", mode: "lines", line: { width: 0.5, color: colour },
          fillcolor: faded(colour, 0.75) });
      } else {
        const points = line.style === "points" || line.x.length === 1;
        Object.assign(trace, { mode: points ? "lines+markers" : "lines", marker: { size: 6, color: colour },
          line: { color: line.style === "faint" ? faded(colour, 0.5) : colour, dash,
            width: line.style === "bold" ? 2.5 : line.style === "faint" ? 1 : 1.5 } });
      }
      traces.push(trace);
    }
    const layout = layoutOf("optimizer step");
    layout.yaxis.type = plot.log ? "log" : "linear";
    if (plot.kind === "stack") layout.yaxis.rangemode = "tozero";
    layout.showlegend = legends.size > 1;
    layout.shapes = plot.levels.map((level) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: level.y, y1: level.y,
      name: "level", line: { color: colourOf("--soft"), width: 1, dash: "dash" },
      label: { text: plain(level.label), textposition: "end", yanchor: "top",
        font: { size: 10, color: colourOf("--soft") } } }));
    addMarks(layout, traces, plotMarks());
    return { traces, layout };
  }

  const heightOf = (timeline) => Math.min(900, 130 + 34 * timeline.lanes.length);

  function timelineOf(timeline) {
    const traces = timeline.whats.map((what, index) => {
      const bars = timeline.bars.filter((bar) => bar[3] === what);
      return { type: "bar", orientation: "h", name: plain(what), y: bars.map((bar) => plain(bar[0])),
        base: bars.map((bar) => bar[1]), x: bars.map((bar) => bar[2]), marker: { color: palette(SPANS[what] ?? index) },
        width: 0.7,
        text: bars.map((bar) => plain(bar[4])), textposition: "none",
        hovertemplate: plain(what) + " %{x:.2f} s<br>%{text}<extra></extra>" };
    });
    const layout = layoutOf("seconds");
    layout.barmode = "overlay";
    layout.hovermode = "closest";
    layout.height = heightOf(timeline);
    layout.yaxis.categoryorder = "array";
    layout.yaxis.categoryarray = timeline.lanes.map(plain).reverse();
    layout.showlegend = true;
    addMarks(layout, traces, timeline.marks.map((mark) => ({ ...mark, run: 0 })));
    return { traces, layout };
  }

  const allDrawings = () => [
    ...data.plots.map((plot) => ({ id: plot.id, of: () => plotOf(plot), plot })),
    ...data.timelines.map((timeline) => ({ id: timeline.id, of: () => timelineOf(timeline), height: heightOf(timeline) })),
  ].map((each) => ({ ...each, canvas: document.getElementById("canvas-" + each.id) })).filter((each) => each.canvas)
    .sort((a, b) => a.canvas.compareDocumentPosition(b.canvas) & Node.DOCUMENT_POSITION_FOLLOWING ? -1 : 1);
  let drawings = allDrawings();
  // those whose canvas does not show the newest data
  let stale = new Set(drawings);

  async function draw(drawing) {
    const { traces, layout } = drawing.of();
    await Plotly.react(drawing.canvas, traces, layout, { responsive: true, displayModeBar: false });
    const known = (trace) => trace.y.filter((value) => value !== null).length;
    const { dataset } = drawing.canvas;
    dataset.points = traces.filter((trace) => trace.yaxis !== "y9" && trace.meta !== "band")
      .reduce((sum, trace) => sum + known(trace), 0);
    dataset.bands = traces.filter((trace) => trace.meta === "band").length / 2;
    dataset.marks = traces.filter((trace) => trace.meta === "marks").reduce((sum, trace) => sum + known(trace) / 2, 0);
  }

  // whether a canvas is in the window, or at most this many heights of the window away
  function isNear(canvas, heights) {
    const box = canvas.getBoundingClientRect(), more = heights * window.innerHeight + 1;
    return box.bottom >= -more && box.top <= window.innerHeight + more;
  }

  const mark = (name) => performance.getEntriesByName(name).length || performance.mark(name);

  async function drawNear() {
    for (const [heights, name] of [[0, "hpcrl-seen"], [1, "hpcrl-drawn"]]) {
      for (const drawing of drawings) {
        if (!stale.has(drawing) || !isNear(drawing.canvas, heights)) continue;
        stale.delete(drawing);
        await draw(drawing);
        await new Promise((resolve) => setTimeout(resolve));
      }
      mark(name);
    }
  }

  // a printer does not wait: plots are drawn before this returns
  function drawWhole() {
    for (const drawing of drawings) if (stale.delete(drawing)) draw(drawing);
  }

  // numbers of a plot, as a table for readers of screens and for the keyboard
  function numbers(details) {
    const plot = data.plots.find((each) => "numbers-" + each.id === details.id);
    if (!plot || !details.open) return;
    const box = details.querySelector(".scroll") || made("div", "scroll tall"), table = made("table"), lines = plot.lines;
    box.tabIndex = 0;
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", "Numbers of " + plot.title);
    const head = table.createTHead().insertRow();
    const names = lines.map((line) => [several ? data.runs[line.run].name : "", line.label].filter(Boolean).join(" "));
    for (const name of ["step", ...names]) head.append(made("th", "", name || plot.title));
    const steps = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    const places = lines.map((line) => new Map(line.x.map((x, index) => [x, line.y[index]])));
    const body = table.createTBody();
    for (const step of steps) {
      const row = body.insertRow();
      for (const value of [step, ...places.map((place) => place.get(step))]) row.insertCell().textContent = value ?? "";
    }
    box.replaceChildren(table);
    details.append(box);
  }
  document.addEventListener("toggle", (event) => {
    if (event.target.id?.startsWith("numbers-")) numbers(event.target);
  }, true);  // such events do not rise from the element

  function pieces(box, list) {
    for (const [kind, text] of list) {
      const piece = made("div", "piece");
      piece.dataset.kind = kind;
      piece.append(made("span", "kind", kind), made("div", "text", text));
      box.append(piece);
    }
  }

  function tokens(box, turn, mode) {
    const versions = [...new Set(turn.tokens.map((token) => token[2]))].sort((a, b) => a - b);
    const line = made("div", "token-text");
    for (const [text, logprob, version, ratio] of turn.tokens) {
      const token = made("span", "", text);
      token.title = `log-probability ${logprob === null ? "unknown" : logprob}, version ${version}`;
      if (ratio != null) token.title += `, trainer minus engine ${ratio}`;
      if (mode === "mismatch") {
        // faint at 0.0001, strong at 1, by powers of ten
        const strength = ratio ? Math.max(0, Math.min(1, (Math.log10(Math.abs(ratio)) + 4) / 4)) : 0;
        if (strength) token.style.background = faded(palette(ratio > 0 ? 0 : 1), 0.08 + 0.5 * strength);
      } else if (mode === "version") token.style.background = faded(palette(versions.indexOf(version)), 0.28);
      else if (logprob !== null) {
        token.style.background = `rgba(var(--hot), ${Math.min(0.5, -logprob / 10).toFixed(3)})`;
      }
      line.append(token);
    }
    box.append(line);
    if (turn.left_out) box.append(made("p", "notes", `${turn.left_out} tokens of the middle are left out.`));
    if (mode === "mismatch") {
      const legend = made("p", "notes");
      const recorded = turn.tokens.some((token) => token[3] != null);
      if (!recorded) legend.append("The trainer's log-probabilities of this turn are not recorded.");
      const meanings = ["more probable for the trainer than for the engine ", "less probable"];
      if (recorded) meanings.forEach((words, index) => {
        const swatch = made("span", "swatch");
        swatch.style.background = faded(palette(index), 0.6);
        legend.append(swatch, words);
      });
      box.append(legend);
    }
    if (mode === "version") {
      const legend = made("p", "notes", "versions ");
      versions.forEach((version, index) => {
        const swatch = made("span", "swatch");
        swatch.style.background = faded(palette(index), 0.6);
        legend.append(swatch, `${version} `);
      });
      box.append(legend);
    }
  }

  function fill(details) {
    const rollout = data.runs[+details.dataset.run].rollouts[+details.dataset.index];
    const mode = document.getElementById("colour").value, box = details.querySelector(".turns");
    box.replaceChildren();
    const ends = rollout.turns_left_out ? rollout.turns.length / 2 : 0;
    rollout.turns.forEach((turn, place) => {
      if (ends && place === ends) box.append(made("p", "notes", `${rollout.turns_left_out} turns are left out.`));
      const index = ends && place >= ends ? place + rollout.turns_left_out : place;
      const part = made("div", "turn");
      const wait = index ? `, after ${turn.wait_s} s` : "";
      part.append(made("h3", "", `Turn ${index + 1}: ${turn.count} tokens in ${turn.seconds} s${wait}`));
      pieces(part, turn.said);
      if (mode === "kind") pieces(part, turn.sampled);
      else tokens(part, turn, mode);
      box.append(part);
    });
    if (rollout.text) box.append(made("div", "token-text", rollout.text));
    details.dataset.mode = mode;
  }

  const rollouts = [...document.querySelectorAll("details.rollout")];
  for (const details of rollouts) {
    details.addEventListener("toggle", () => details.open && fill(details));
    if (details.open) fill(details);
  }
  document.getElementById("colour")?.addEventListener("change", () => rollouts.filter((each) => each.open).forEach(fill));

  let drawing = Promise.resolve(), waiting = 0;
  function drawMore() {
    const root = document.documentElement;
    waiting += 1;
    root.dataset.state = "drawing";
    drawing = drawing.then(drawNear).catch((error) => console.error(error)).then(() => {
      waiting -= 1;
      if (!waiting) root.dataset.state = "drawn";
    });
    return drawing;
  }
  const redraw = () => {
    stale = new Set(drawings);
    return drawMore();
  };
  // other plots are drawn when they come near to what the window shows
  const watcher = new IntersectionObserver((entries) => {
    const found = new Set(entries.filter((entry) => entry.isIntersecting).map((entry) => entry.target));
    if (drawings.some((each) => found.has(each.canvas) && stale.has(each))) drawMore();
  }, { rootMargin: "100% 0px" });
  function watch() {
    for (const { canvas, height } of drawings) {
      if (height) canvas.style.minHeight = `${height}px`;  // places of sections do not change when it is drawn
      watcher.observe(canvas);
    }
  }

  await loadPlotly();
  darkness.addEventListener("change", redraw);
  document.addEventListener("hpcrl-data", (event) => {
    data = event.detail;
    drawings = allDrawings();
    document.querySelectorAll("details[id^=numbers-]").forEach(numbers);
    watch();
    redraw();
  });
  window.addEventListener("beforeprint", drawWhole);
  watch();
  await redraw();
})();
