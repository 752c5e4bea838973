// Plots of a lab's report.html. Data comes from the element #data; colours follow light and dark mode.
"use strict";
(() => {
  const plots = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const drawn = [];
  const plain = v => v == null ? "–" : Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : +v.toPrecision(3) + "";

  function draw(plot, index) {
    const element = document.getElementById(`plot-${index}`);
    const style = getComputedStyle(document.documentElement);
    const colour = name => style.getPropertyValue(name).trim();
    const lines = dark.matches ? ["#6cb2ff", "#ffb86b", "#7ee2a8", "#ff8a80"] : ["#1f6fc4", "#c96a00", "#1a7f4b", "#b3261e"];
    const at = v => plot.labels.length ? plot.labels[v] ?? "" : plain(v);
    const axis = (label, values) => ({
      label, stroke: colour("--ink"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") },
      font: "12px system-ui, sans-serif", size: 52, values: (_, ticks) => ticks.map(values),
    });
    const low = plot.labels.length ? -0.4 : Math.min(0, ...plot.x), high = Math.max(...plot.x) + (plot.labels.length ? 0.4 : 0);
    element.replaceChildren();
    const options = {
      width: element.clientWidth || 520, height: 300,
      scales: { x: { time: false, range: [low, high * 1.02 || 1] }, y: { range: (_, least, most) => [Math.min(0, least), 1.1 * most || 1] } },
      axes: [{ ...axis(plot.x_label, at), ...(plot.labels.length ? { splits: plot.x } : {}) }, axis(plot.y_label, plain)],
      series: [{ label: plot.x_label, value: (_, v) => v == null ? "–" : at(v) },
        ...plot.series.map((line, i) => ({
          label: line.name, stroke: lines[i % lines.length], width: 2, spanGaps: true, value: (_, v) => plain(v),
          points: { show: true, size: plot.labels.length ? 11 : 7, fill: lines[i % lines.length] },
          ...(plot.labels.length ? { paths: () => null } : {}),
        }))],
    };
    drawn.push([element, new uPlot(options, [plot.x, ...plot.series.map(line => line.y)], element)]);
  }

  function drawAll() {
    drawn.splice(0).forEach(([, plot]) => plot.destroy());
    plots.forEach(draw);
  }

  drawAll();
  dark.addEventListener("change", drawAll);
  addEventListener("resize", () => drawn.forEach(([element, plot]) => plot.setSize({ width: element.clientWidth, height: 300 })));
})();
