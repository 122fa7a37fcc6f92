"use strict";
// Draws charts as they come into view, in the colours of the scheme; choosers show one panel and hide the others.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)").matches;
  const settings = { responsive: true, displayModeBar: false, scrollZoom: false };
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function template() {
    const axis = {
      gridcolor: style("--line"), zerolinecolor: style("--soft"), linecolor: style("--line"), automargin: false,
      // A finger that moves over a chart scrolls the page.
      fixedrange: coarse, title: { font: { size: 12 }, standoff: 8 }, tickfont: { size: 11 },
    };
    return {
      layout: {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", dragmode: coarse ? false : "zoom",
        font: { color: style("--text"), family: 'system-ui, "DejaVu Sans", sans-serif', size: 12 },
        hoverlabel: { bgcolor: style("--raised"), font: { color: style("--text") }, bordercolor: style("--line") },
        xaxis: axis, yaxis: axis,
      },
    };
  }

  function draw(div) {
    if (div.dataset.drawn) return null;
    div.dataset.drawn = "yes";
    const source = document.querySelector(`script[data-for="${div.id}"]`);
    const figure = JSON.parse(source.textContent);
    figure.layout.template = template();
    return Plotly.newPlot(div, figure.data, figure.layout, settings);
  }

  const isShown = (div) => div.offsetParent !== null;
  const plots = [...document.querySelectorAll(".plot")];
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      watcher.unobserve(entry.target);
      draw(entry.target);
    }
  }, { rootMargin: "400px" });
  plots.forEach((div) => watcher.observe(div));
  // For print and pictures: all charts that are not in a hidden panel.
  window.drawAll = () => Promise.all(plots.filter(isShown).map(draw));
  addEventListener("beforeprint", () => window.drawAll());
  dark.addEventListener("change", () => {
    plots.filter((div) => div.dataset.drawn).forEach((div) => Plotly.relayout(div, { template: template() }));
  });

  for (const input of document.querySelectorAll(".chooser input")) {
    input.addEventListener("change", () => {
      for (const panel of document.querySelectorAll(`[data-panel="${input.name}"]`)) {
        panel.hidden = panel.dataset.value !== input.value;
        if (panel.hidden) panel.dispatchEvent(new Event("leave"));
      }
      // A chart that was drawn in another width while its panel was shown last.
      plots.filter((div) => div.dataset.drawn && isShown(div)).forEach((div) => Plotly.Plots.resize(div));
    });
  }

  for (const episode of document.querySelectorAll(".episode")) {
    const slider = episode.querySelector(".player input");
    if (!slider) continue;
    const frames = [...episode.querySelectorAll(".frame")];
    const [stage, now, button] = [".stage", ".now", ".controls button"].map((name) => episode.querySelector(name));
    const plot = episode.querySelector(".plot");
    let timer = null;
    const show = (index) => {
      const frame = frames[index];
      slider.value = index;
      slider.setAttribute("aria-valuetext", frame.dataset.facts);
      stage.src = frame.querySelector("img").src;
      stage.style.borderColor = frame.style.getPropertyValue("--option");
      now.textContent = frame.dataset.facts;
      frames.forEach((each) => each.removeAttribute("aria-current"));
      frame.setAttribute("aria-current", "step");
      // Where the strip is wider than the screen, what is shown stays in sight.
      const scroller = frame.closest(".scroller");
      scroller.scrollLeft = frame.offsetLeft + frame.parentElement.offsetLeft - scroller.clientWidth / 2;
      if (plot.dataset.drawn && plot.layout) {
        const x = Number(frame.dataset.step);
        Plotly.relayout(plot, { shapes: [{
          type: "line", x0: x, x1: x, xref: "x", y0: 0, y1: 1, yref: "paper", line: { color: style("--text"), width: 1.5 },
        }] });
      }
    };
    const stop = () => { clearInterval(timer); timer = null; button.textContent = "Play"; };
    slider.addEventListener("input", () => { stop(); show(Number(slider.value)); });
    frames.forEach((frame, index) => frame.addEventListener("click", () => { stop(); show(index); }));
    button.addEventListener("click", () => {
      if (timer) { stop(); return; }
      button.textContent = "Stop";
      timer = setInterval(() => show((Number(slider.value) + 1) % frames.length), 350);
    });
    for (const panel of [episode, episode.closest('[data-panel^="moment"]'), episode.closest('[data-panel="run"]')]) {
      if (panel) panel.addEventListener("leave", stop);
    }
  }
})();
