// Time series and run-length histograms. `Plotly` is passed in, since it is unpacked at run time.

const ARM_COLOURS = ["#D55E00", "#56B4E9", "#009E73", "#CC79A7", "#0072B2", "#E69F00", "#8C6BD1", "#7f8a96"];
const ARM_DASHES = ["solid", "dash", "dashdot", "longdash"];

const PANELS = [
  { key: "coverage", title: "Page coverage (token-weighted)", axis: { tickformat: ".0%" } },
  { key: "mean_run", title: "Mean run, slots (log)", axis: { type: "log", dtick: 1 } },
  { key: "whole_free_share", title: "Free slots in whole free pages", axis: { tickformat: ".0%" } },
  { key: "moved_rows", title: "Moved rows since the start", axis: { rangemode: "tozero" } },
  { key: "live_share", title: "Live slots, share of pool", axis: { tickformat: ".0%", rangemode: "tozero" } },
  { key: "cached_share", title: "Cached slots, share of pool", axis: { tickformat: ".0%", rangemode: "tozero" } },
  { key: "reserved_share", title: "Reserved slots, share of pool", axis: { tickformat: ".2%", rangemode: "tozero" } },
  { key: "running", title: "Running requests", axis: { rangemode: "tozero" } },
];

const CONFIG = { responsive: true, displaylogo: false, showTips: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] };

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function armLine(index, bound) {
  const round = Math.floor(index / ARM_COLOURS.length);
  return { color: ARM_COLOURS[index % ARM_COLOURS.length], dash: bound ? "dot" : ARM_DASHES[round % ARM_DASHES.length], width: 1.6 };
}

// Escapes what Plotly would read as its own markup in names and hover texts.
function plain(text) {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

// Lays `count` charts out in a grid: axes, titles and a height for the element's present width.
function grid(count, columns, { rowHeight, top, gap, titles, xaxis, yaxes }) {
  const rows = Math.ceil(count / columns);
  const height = rows * rowHeight + top + 50;
  const inner = height - top - 50;
  const gapY = rows > 1 ? 62 / inner : 0;
  const layout = {
    height, margin: { l: 58, r: 16, t: top, b: 50 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: css("--ink"), family: "system-ui, sans-serif", size: 12 },
    hoverlabel: { bgcolor: css("--raised"), bordercolor: css("--line"), font: { color: css("--ink") }, namelength: -1 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--muted"), activecolor: css("--accent") },
    annotations: [],
  };
  const line = { gridcolor: css("--line"), zerolinecolor: css("--line"), linecolor: css("--line") };
  for (let i = 0; i < count; i++) {
    const column = i % columns, row = Math.floor(i / columns), n = i ? String(i + 1) : "";
    const width = (1 - gap * (columns - 1)) / columns, tall = (1 - gapY * (rows - 1)) / rows;
    const x0 = column * (width + gap), y1 = 1 - row * (tall + gapY);
    layout["xaxis" + n] = { ...line, ...xaxis, domain: [x0, x0 + width], anchor: "y" + n, ...(i && { matches: "x" }) };
    layout["yaxis" + n] = { ...line, domain: [Math.max(0, y1 - tall), y1], anchor: "x" + n, ...yaxes[i] };
    layout.annotations.push({
      text: `<b>${plain(titles[i])}</b>`, showarrow: false, xref: "paper", yref: "paper",
      x: x0, xanchor: "left", y: y1, yanchor: "bottom", yshift: 3, font: { size: 13 },
    });
  }
  return layout;
}

function seriesFigure(data, width) {
  const columns = width > 860 ? 2 : 1;
  const layout = grid(PANELS.length, columns, {
    rowHeight: 230, top: 96, gap: 0.09, titles: PANELS.map((panel) => panel.title),
    xaxis: { title: { text: "simulated time, s", standoff: 4, font: { size: 11 } } },
    yaxes: PANELS.map((panel) => panel.axis),
  });
  // Between the mode bar at the very top and the first titles.
  layout.legend = { orientation: "h", x: 0, y: 1 + 26 / (layout.height - 146), yref: "paper", yanchor: "bottom" };
  const traces = data.arms.flatMap((arm, index) => PANELS.map((panel, i) => ({
    type: "scatter", mode: arm.series.time_s.length > 2 ? "lines" : "lines+markers",
    x: arm.series.time_s, y: arm.series[panel.key] ?? [], name: plain(arm.name), legendgroup: arm.name,
    showlegend: i === 0, line: armLine(index, arm.name === data.bound),
    xaxis: "x" + (i ? i + 1 : ""), yaxis: "y" + (i ? i + 1 : ""),
  })));
  return { traces, layout };
}

function runsFigure(data, width) {
  const arms = data.arms.filter((arm) => arm.histogram.some((count) => count > 0));
  const last = Math.max(0, ...arms.map((arm) => arm.histogram.findLastIndex((count) => count > 0)));
  const edges = Array.from({ length: last + 1 }, (_, k) => 2 ** k);
  const show = (n) => (n >= 2 ** 20 ? n / 2 ** 20 + "M" : n >= 1024 ? n / 1024 + "k" : String(n));
  const columns = width > 1000 ? 4 : width > 560 ? 2 : 1;
  const layout = grid(arms.length, columns, {
    rowHeight: 210, top: 56, gap: 0.05, titles: arms.map((arm) => arm.name),
    xaxis: { title: { text: "run length from, slots", standoff: 4, font: { size: 11 } }, type: "category", tickangle: 0, nticks: 8 },
    yaxes: arms.map((_, i) => ({ tickformat: ".0%", rangemode: "tozero", ...(i && { matches: "y" }) })),
  });
  layout.showlegend = false;
  layout.bargap = 0.08;
  const traces = arms.map((arm, i) => {
    const total = arm.histogram.reduce((sum, count) => sum + count, 0);
    return {
      type: "bar", x: edges.map(show), y: edges.map((_, k) => arm.histogram[k] / total), name: plain(arm.name),
      marker: { color: armLine(data.arms.indexOf(arm)).color },
      customdata: edges.map((edge, k) => [arm.histogram[k], 2 * edge - 1]),
      hovertemplate: "%{x} to %{customdata[1]} slots: %{y:.1%} of runs (%{customdata[0]:,})<extra></extra>",
      xaxis: "x" + (i ? i + 1 : ""), yaxis: "y" + (i ? i + 1 : ""),
    };
  });
  return { traces, layout };
}

function drawCharts(Plotly, data) {
  const charts = [[document.getElementById("series"), seriesFigure], [document.getElementById("runs"), runsFigure]];
  const draw = () => charts.forEach(([element, figure]) => {
    const { traces, layout } = figure(data, element.clientWidth);
    // Keeps which arms are hidden when the theme or the width changes.
    (element.data ?? []).forEach((trace, i) => { if (traces[i]) traces[i].visible = trace.visible ?? true; });
    Plotly.react(element, traces, layout, CONFIG);
  });
  draw();
  const thinned = data.arms.filter((arm) => arm.samples > data.points).length;
  document.getElementById("series-note").textContent = thinned
    ? `Every arm is drawn with at most ${data.points.toLocaleString()} evenly picked samples; the tables use all of them.` : "";
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  let timer = 0;
  addEventListener("resize", () => { clearTimeout(timer); timer = setTimeout(draw, 200); });
}
