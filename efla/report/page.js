"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("charts").textContent);
  const root = document.documentElement;
  const markers = [["circle", 4], ["rect", 5.5], ["rectRot", 5.5], ["triangle", 5]];  // of about the same area
  const percentText = (share) => (100 * share).toFixed(1) + "\u00a0%";

  // 0.003, 1200, 2.5 M
  function numberText(value) {
    for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"]]) {
      if (Math.abs(value) >= size) return +(value / size).toPrecision(6) + "\u00a0" + unit;
    }
    return String(+value.toPrecision(6));
  }

  function css(name) {
    return getComputedStyle(root).getPropertyValue(name).trim();
  }

  // #rrggbb with an opacity, for the bands.
  function faded(color, opacity) {
    return color + Math.round(255 * opacity).toString(16).padStart(2, "0");
  }

  // A line takes three datasets: the band's lower edge, its upper edge filled down to the lower, and the mean.
  function datasets(series) {
    const color = css(series.color);
    const [pointStyle, radius] = markers[series.marker % markers.length];
    const edge = { borderWidth: 0, pointRadius: 0, pointHitRadius: 0, isBand: true };
    const column = (index) => series.points.map((p) => ({ x: p[0], y: p[index] }));
    return [
      { ...edge, data: column(2), fill: false },
      { ...edge, data: column(3), fill: "-1", backgroundColor: faded(color, 0.16) },
      {
        label: series.label,
        data: series.points.map((p) => ({ x: p[0], y: p[1], low: p[2], high: p[3] })),
        borderColor: color,
        borderWidth: 2,
        borderDash: series.dashed ? [6, 4] : [],
        backgroundColor: color,
        pointStyle,
        pointRadius: series.points.length > 24 ? 0 : radius,
        pointHoverRadius: radius + 1,
        pointBorderColor: css("--page"),
        fill: false,
      },
    ];
  }

  function levels(figure) {
    const all = figure.series.flatMap((s) => s.points.map((p) => p[0]));
    return [...new Set(all)].sort((a, b) => a - b);
  }

  function chanceLine(x, chance) {
    return {
      data: [{ x: x[0], y: chance }, { x: x[x.length - 1], y: chance }],
      borderColor: css("--quiet"), borderWidth: 1, borderDash: [2, 3], pointRadius: 0, pointHitRadius: 0, isBand: true,
    };
  }

  // The levels whose labels have room beside one another on an axis of this many pixels, with the first and the last.
  function roomy(x, place, pixels) {
    const last = x[x.length - 1], scale = pixels / (place(last) - place(x[0]));
    const half = (value) => 3.75 * numberText(value).length + 3;  // of a label's width
    const apart = (a, b) => (place(b) - place(a)) * scale >= half(a) + half(b);
    const kept = [x[0]];
    for (const value of x.slice(1, -1)) {
      if (apart(kept[kept.length - 1], value) && apart(value, last)) kept.push(value);
    }
    return x.length > 1 ? [...kept, last] : kept;
  }

  function xAxis(figure, x) {
    const logarithmic = figure.logX && x[0] > 0 && x[x.length - 1] / x[0] >= 4;
    const axis = {
      type: logarithmic ? "logarithmic" : "linear",
      min: x[0],
      max: x[x.length - 1],
      title: { display: true, text: figure.xLabel, color: css("--quiet") },
      grid: { color: css("--grid"), borderColor: css("--rule") },
      ticks: { color: css("--quiet"), maxRotation: 0, callback: numberText },
    };
    if (x[0] === x[x.length - 1]) {  // a single point: leave room on both sides
      delete axis.min;
      delete axis.max;
    }
    if (x.length <= 10) {
      axis.ticks.autoSkip = false;
      axis.afterBuildTicks = (scale) => {
        const kept = roomy(x, logarithmic ? Math.log : Number, scale.chart.width - 60);  // without the other axis
        scale.ticks = kept.map((value) => ({ value }));
      };
    }
    return axis;
  }

  function yAxis(figure) {
    const values = figure.series.flatMap((s) => s.points.map((p) => p[2]));
    const highest = Math.max(...figure.series.flatMap((s) => s.points.map((p) => p[3])));
    const logarithmic = figure.logY && Math.min(...values) > 0;
    const axis = {
      type: logarithmic ? "logarithmic" : "linear",
      grid: { color: css("--grid"), borderColor: css("--rule") },
      ticks: { color: css("--quiet"), maxTicksLimit: 6 },
    };
    if (figure.accuracy) axis.ticks.callback = (value) => +(100 * value).toFixed(1) + "\u00a0%";
    // Around equal values Chart.js would choose an axis that goes below 0 % and above 100 %.
    const flat = figure.accuracy && Math.min(...values) === highest;
    if (figure.chance !== null || flat) Object.assign(axis, { min: 0, max: 1 });
    if (logarithmic) {
      axis.min = 0.9 * Math.min(...values);
      axis.ticks.maxTicksLimit = 100;
      axis.ticks.callback = (value) => (/^[125]/.test(value.toExponential()) ? String(+value.toPrecision(2)) : null);
    }
    return axis;
  }

  function tooltip(figure) {
    const text = figure.accuracy ? percentText : (value) => value.toFixed(3);
    return {
      filter: (item) => !item.dataset.isBand,
      callbacks: {
        title: (items) => (items.length ? figure.xLabel + " " + numberText(items[0].parsed.x) : ""),
        label: (item) => {
          const { y, low, high } = item.raw;
          const range = low < high ? ` (${text(low)} to ${text(high)})` : "";
          return ` ${item.dataset.label} ${text(y)}${range}`;
        },
      },
      usePointStyle: true,
    };
  }

  function draw(figure) {
    const x = levels(figure);
    const sets = figure.series.flatMap(datasets);
    if (figure.chance !== null) sets.push(chanceLine(x, figure.chance));
    return new Chart(document.getElementById(figure.id), {
      type: "line",
      data: { datasets: sets },
      options: {
        animation: false,
        maintainAspectRatio: false,
        clip: 6,
        interaction: { mode: "index", axis: "x", intersect: false },
        scales: { x: xAxis(figure, x), y: yAxis(figure) },
        plugins: { legend: { display: false }, tooltip: tooltip(figure) },
      },
    });
  }

  let charts = [];
  function drawAll() {
    charts.forEach((chart) => chart.destroy());
    Chart.defaults.font.family = getComputedStyle(document.body).fontFamily;
    charts = figures.map(draw);
  }

  function restyle(printing) {
    root.classList.toggle("print", printing);
    drawAll();
  }

  drawAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  addEventListener("beforeprint", () => restyle(true));
  addEventListener("afterprint", () => restyle(false));
  requestAnimationFrame(() => { root.dataset.charts = String(charts.length); });
})();
