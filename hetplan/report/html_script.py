"""What makes a page's timeline zoom; without scripts the whole step stays in view.

All lanes share one window [from, from + width) of the step, kept as the viewBox of each drawing.
"""

from __future__ import annotations

SCRIPT = """
"use strict";
for (const figure of document.querySelectorAll(".timeline")) {
  const span = Number(figure.dataset.span), seconds = Number(figure.dataset.seconds);
  const lanes = [...figure.querySelectorAll(".lane svg")], axis = figure.querySelector(".axis");
  const smallest = span / 2000;
  let from = 0, width = span, held = null;
  const units = [[1, "s"], [1e-3, "ms"], [1e-6, "us"]];
  const label = (s, step) => {
    const [size, unit] = units.find(([size]) => Math.max(Math.abs(s), step) >= size) || units[2];
    const digits = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9));
    return s === 0 ? "0" : (s / size).toFixed(Math.min(digits, 9)) + " " + unit;
  };
  const ticks = () => {
    const room = Math.max(2, Math.floor(axis.clientWidth / 90)), shown = width / span * seconds;
    const rough = shown / room, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * ([1, 2, 5, 10].find(n => n * power >= rough) || 10);
    const first = from / span * seconds;
    axis.replaceChildren();
    for (let i = Math.ceil(first / step - 1e-9); i * step < first + shown * 0.94; i++) {
      const mark = document.createElement("span");
      mark.textContent = label(i * step, step);
      mark.style.left = (100 * (i * step - first) / shown).toFixed(3) + "%";
      axis.append(mark);
    }
  };
  const draw = () => {
    width = Math.min(span, Math.max(smallest, width));
    from = Math.min(span - width, Math.max(0, from));
    for (const lane of lanes) lane.setAttribute("viewBox", from + " 0 " + width + " 12.4");
    ticks();
  };
  const zoom = (factor, at) => {
    const before = width;
    width = Math.min(span, Math.max(smallest, width * factor));
    from += (before - width) * at;
    draw();
  };
  const place = event => {
    const box = axis.getBoundingClientRect();
    return Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  };
  const actions = {
    in: () => zoom(1 / 2, 0.5), out: () => zoom(2, 0.5),
    all: () => { from = 0; width = span; draw(); },
    start: () => { width = Math.min(width, span / 8); from = 0; draw(); },
    end: () => { width = Math.min(width, span / 8); from = span; draw(); },
    left: () => { from -= width / 5; draw(); }, right: () => { from += width / 5; draw(); }
  };
  const keys = { "+": "in", "=": "in", "-": "out", "0": "all", ArrowLeft: "left", ArrowRight: "right" };
  figure.addEventListener("click", event => { actions[event.target.dataset.do]?.(); });
  figure.addEventListener("keydown", event => {
    if (event.target !== figure || event.ctrlKey || event.metaKey || !keys[event.key]) return;
    event.preventDefault();
    actions[keys[event.key]]();
  });
  for (const lane of lanes) {
    lane.addEventListener("wheel", event => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, place(event));
    }, { passive: false });
    lane.addEventListener("dblclick", event => zoom(1 / 2, place(event)));
    lane.addEventListener("pointerdown", event => {
      held = { x: event.clientX, from };
      lane.setPointerCapture(event.pointerId);
    });
    lane.addEventListener("pointermove", event => {
      if (!held) return;
      from = held.from - (event.clientX - held.x) / axis.clientWidth * width;
      draw();
    });
    for (const end of ["pointerup", "pointercancel"]) lane.addEventListener(end, () => { held = null; });
  }
  figure.classList.add("live");
  axis.classList.add("live");
  new ResizeObserver(draw).observe(figure);
}
"""
