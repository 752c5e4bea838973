// Plots of the last ten minutes.
"use strict";

const hasLimits = () => state.samples.some((sample) => sum(sample.limited));
const RIGHT = 8; // px beside a plot
const narrow = matchMedia("(max-width: 46rem)");

function makePlots() {
  for (const plot of state.plots) plot.uplot.destroy();
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const font = "11px system-ui, sans-serif";
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 0.5 }, ticks: { show: false }, size: 38, font, gap: 3, space: 24 };
  const clocks = (plot, times) => times.map((time) => {
    const text = clock(time).slice(0, time % 60 ? 8 : 5);
    const { min, max } = plot.scales.x;
    const inner = plot.width - axis.size - RIGHT, at = ((time - min) / (max - min || 1)) * inner;
    // Else its left half is beside the 0 of the other axis, or its right half cut; a digit is 6 px wide.
    return Math.min(at, inner - at + RIGHT) < 3 * text.length ? "" : text;
  });
  const line = (label, name) => ({ label, stroke: colour(name), width: 1.5, points: { show: false } });
  const make = (id, series, values, now, { height = narrow.matches ? 80 : 104, whole = false, hooks = {} } = {}) => {
    const options = {
      width: byId(id).clientWidth || 300, height, legend: { show: false }, cursor: { show: false }, padding: [6, RIGHT, 0, 0],
      scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.15 : 1] } },
      axes: [{ ...axis, size: 20, space: 40, values: clocks, incrs: [10, 30, 60, 120, 300, 600] }, whole ? { ...axis, space: 15, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500] } : axis],
      series: [{}, ...series], hooks,
    };
    return { uplot: new uPlot(options, [[], ...series.map(() => [])], byId(id)), id, height, values, now };
  };
  const ms = (name) => (sample) => (sample[name] === null ? null : sample[name] * 1000);
  const rate = (name) => (sample) => sample[name] / sample.took_s;
  // Without limits every request that ended counts, and none is good or late.
  const outcomes = (sample) => (sum(sample.limited) || sample.ended) / sample.took_s;
  const outcome = (name) => (sample) => (sample.limited[name] ?? 0) / sample.took_s;
  const steps = (label, name) => ({ ...line(label, name), paths: uPlot.paths.stepped({ align: 1 }) });
  const size = (role) => (sample) => sample.sizes?.[role] ?? 0;
  const latest = (name) => {
    const last = state.samples.findLast((sample) => sample[`${name}_p50_s`] !== null);
    return last ? `${seconds(last[`${name}_p50_s`])}, ${seconds(last[`${name}_p99_s`])}` : "–";
  };
  const minute = (name) => total(since(LATELY_S), (sample) => sample[name]);
  const lines = [line("p50", "--leased"), line("p99", "--moving")];
  state.plots = [
    make("ttft", lines, [ms("ttft_p50_s"), ms("ttft_p99_s")], () => latest("ttft")),
    make("itl", lines, [ms("itl_p50_s"), ms("itl_p99_s")], () => latest("itl")),
    make("rate", [line("output", "--leased"), line("prompt", "--moving")],
      [rate("generated_tokens"), rate("prompt_tokens")],
      () => `${rate("generated_tokens")(state.samples.at(-1)).toFixed(0)}, ${rate("prompt_tokens")(state.samples.at(-1)).toFixed(0)}`),
    make("goodput", [line("all", "--moving"), line("good", "--good"), line("refused", "--bad")], [outcomes, outcome("good"), outcome("refused")],
      () => {
        const kept = attainment();
        return kept === null ? (hasLimits() ? "–" : "no latency limits") : `${Math.round(100 * kept)} % good`;
      }, { hooks: { draw: [drawMarks] } }),
    make("queue", [line("queued", "--moving"), line("running", "--leased")], [(sample) => sample.queued, (sample) => sample.running],
      () => `${state.samples.at(-1).queued}, ${state.samples.at(-1).running}`, { whole: true }),
    make("errors", [line("failed", "--bad"), line("refused", "--warn")], [(sample) => sample.errors ?? 0, (sample) => sample.refused ?? 0],
      () => `${minute("errors")}, ${minute("refused")} a minute`, { whole: true }),
    make("sizes", [steps("prefill", "--leased"), { ...steps("decode", "--moving"), dash: [6, 4] }], [size("prefill"), size("decode")],
      () => `${splitText(state.samples.at(-1).sizes)} now`, { height: 90, whole: true }),
  ];
}

function showPlots() {
  if (!state.samples.length) return;
  const times = state.samples.map((sample) => sample.at_s);
  const section = byId("planner-section");
  if (section.hidden && hasLimits()) {
    section.hidden = false;
    makePlots(); // its width is known now
  }
  for (const plot of state.plots) {
    plot.uplot.setData([times, ...plot.values.map((value) => state.samples.map(value))]);
    setText(`${plot.id}-now`, plot.now());
  }
}

function startPlots() {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { makePlots(); showPlots(); });
  narrow.addEventListener("change", () => { makePlots(); showPlots(); });
  addEventListener("resize", () => {
    for (const plot of state.plots) plot.uplot.setSize({ width: byId(plot.id).clientWidth, height: plot.height });
  });
  makePlots();
}
