// Plots of report.html. Data comes from the element #data; colours follow light and dark mode.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const plots = [];
  let colours;

  function palette() {
    const style = getComputedStyle(document.documentElement);
    colours = {
      ink: style.getPropertyValue("--ink").trim(),
      line: style.getPropertyValue("--line").trim(),
      bad: style.getPropertyValue("--bad").trim(),
      series: dark.matches ? ["#6cb2ff", "#ffb86b", "#7ee2a8"] : ["#1f6fc4", "#c96a00", "#1a7f4b"],
    };
  }

  const seconds = v => v == null ? "–" : v >= 1 ? v.toFixed(2) + " s" : (1e3 * v).toFixed(1) + " ms";
  const short = v => v >= 1 ? +v.toPrecision(3) + " s" : +(1e3 * v).toPrecision(3) + " ms";
  const plain = v => v == null ? "–" : +v.toPrecision(3) + "";
  const axis = (values, extra = {}) => ({
    stroke: colours.ink, grid: { stroke: colours.line, width: 1 }, ticks: { stroke: colours.line },
    font: "12px system-ui, sans-serif", size: 58, values: (_, ticks) => ticks.map(t => t == null ? "" : values(t)),
    ...extra,
  });
  const line = (label, colour, value, extra = {}) => ({
    label, stroke: colour, width: 2, value: (_, v) => value(v), points: { show: false }, spanGaps: true, ...extra,
  });
  const dots = (label, colour, value, extra = {}) => line(label, colour, value, {
    paths: () => null, points: { show: true, size: 5, fill: colour, width: 0 }, ...extra,
  });

  function draw(id, columns, options) {
    const element = document.getElementById(id);
    if (!element || !columns[0].length) return;
    element.replaceChildren();
    const width = element.clientWidth || 520;
    plots.push([element, new uPlot({ width, height: 280, ...options }, columns, element)]);
  }

  // CDFs with different x values are joined by uPlot.
  function cdf(id, names) {
    const found = names.filter(([name]) => data.cdfs[name][0].length);
    if (!found.length) return;
    const columns = uPlot.join(found.map(([name]) => unique(data.cdfs[name])));
    draw(id, columns, {
      scales: { x: { time: false, distr: 3 }, y: { range: [0, 1] } },
      axes: [axis(short), axis(v => Math.round(100 * v) + " %")],
      series: [{ label: "at", value: (_, v) => seconds(v) },
        ...found.map(([, label], i) => line(label, colours.series[i], v => v == null ? "–" : (100 * v).toFixed(1) + " %"))],
    });
  }

  // Keeps the highest share of equal values; a logarithmic axis has no zero.
  function unique([values, shares]) {
    const best = new Map();
    values.forEach((value, i) => best.set(Math.max(value, 1e-5), shares[i]));
    return [[...best.keys()], [...best.values()]];
  }

  function drawAll() {
    palette();
    plots.splice(0).forEach(([, plot]) => plot.destroy());
    const [x, [ttft, gap, failed]] = data.latency;
    const floor = Math.min(...[...ttft, ...gap].filter(v => v > 0), 1);
    draw("latency", [x, ttft, gap.map(v => v > 0 ? v : null), failed.map(v => v == null ? null : floor)], {
      scales: { x: { time: false }, y: { distr: 3 } },
      axes: [axis(v => v + " s"), axis(short)],
      series: [{ label: "at", value: (_, v) => seconds(v) }, dots("TTFT", colours.series[0], seconds),
        dots("longest ITL", colours.series[1], seconds), dots("failed", colours.bad, v => v == null ? "–" : "failed")],
    });
    const [t, [chunks, underWay, sent, good]] = data.rates;
    draw("goodput", [t, sent, good], {
      scales: { x: { time: false }, y: { range: (u, low, high) => [0, 1.1 * high || 1] } },
      axes: [axis(v => v + " s"), axis(plain)],
      series: [{ label: "at", value: (_, v) => seconds(v) }, line("sent/s", colours.series[1], plain), line("good/s", colours.series[2], plain)],
    });
    draw("throughput", [t, chunks, underWay], {
      scales: { x: { time: false }, y: { range: (u, low, high) => [0, 1.1 * high || 1] }, n: { range: (u, low, high) => [0, 1.1 * high || 1] } },
      axes: [axis(v => v + " s"), axis(plain), axis(plain, { scale: "n", side: 1, grid: { show: false } })],
      series: [{ label: "at", value: (_, v) => seconds(v) }, line("chunks/s", colours.series[0], plain),
        line("running", colours.series[1], plain, { scale: "n" })],
    });
    if (data.search.length) {
      const column = i => data.search.map(point => point[i]);
      draw("search", [column(0), column(1), column(0).map(() => data.slo.quantile)], {
        scales: { x: { time: false }, y: { range: [0, 1] } },
        axes: [axis(v => v + "/s"), axis(v => Math.round(100 * v) + " %")],
        series: [{ label: "at", value: (_, v) => v == null ? "–" : plain(v) + "/s" },
          line("good", colours.series[0], v => v == null ? "–" : (100 * v).toFixed(1) + " %", { points: { show: true, size: 7 } }),
          line("required", colours.bad, v => v == null ? "–" : (100 * v).toFixed(0) + " %", { dash: [6, 4], width: 1 })],
      });
    }
    cdf("cdf-slow", [["ttft_s", "TTFT"], ["second_token_s", "second token"], ["e2e_s", "E2E"]]);
    cdf("cdf-fast", [["itl_s", "ITL"], ["tpot_s", "TPOT"]]);
  }

  drawAll();
  dark.addEventListener("change", drawAll);
  addEventListener("resize", () => plots.forEach(([element, plot]) => plot.setSize({ width: element.clientWidth, height: 280 })));
})();
