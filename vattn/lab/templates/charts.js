"use strict";
const theme = document.getElementById("theme");
const dark = () =>
  (document.documentElement.dataset.theme ||
    (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const nameTheme = () => { theme.textContent = dark() ? "Light colours" : "Dark colours"; };
theme.hidden = false;
theme.addEventListener("click", () => {
  document.documentElement.dataset.theme = dark() ? "light" : "dark";
  nameTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", nameTheme);
nameTheme();

// What is folded is printed unfolded.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => { d.open = true; }));

// Of a narrow and a wide drawing the one that is shown: its axes in pixels, and from a value to a pixel and back.
function axesOf(shell) {
  const svg = [...shell.querySelectorAll("svg.chart")].find((s) => s.getBoundingClientRect().width);
  const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  const [left, top, right, bottom] = svg.dataset.plot.split(" ").map((v) => v * scale);
  const [low, high] = svg.dataset.x.split(" ").map(Number);
  return {
    svg, top, bottom,
    pixel: (x) => left + (x - low) / (high - low) * (right - left),
    value: (pixel) => low + (pixel - left) / (right - left) * (high - low),
  };
}

// Puts a vertical line at a value.
function placeLine(line, axes, x) {
  const style = { left: `${axes.pixel(x)}px`, top: `${axes.top}px`, height: `${axes.bottom - axes.top}px` };
  Object.assign(line.style, style);
}

// Charts with a readout: a line under the pointer, and the figures of that moment.
for (const source of document.querySelectorAll("script.readout")) {
  const shell = source.parentElement, data = JSON.parse(source.textContent);
  const cross = Object.assign(document.createElement("div"), { className: "cross", hidden: true });
  const tip = Object.assign(document.createElement("div"), { className: "tip", hidden: true });
  const longest = Math.max(...data.rows.map((row) => row.name.length));
  shell.append(cross, tip);
  const leave = () => { cross.hidden = tip.hidden = true; };
  shell.addEventListener("pointerleave", leave);
  shell.addEventListener("pointermove", (event) => {
    const box = shell.getBoundingClientRect(), axes = axesOf(shell);
    const x = axes.value(event.clientX - box.left);
    if (x < data.x[0]) { leave(); return; }
    let at = 0;
    while (at + 1 < data.x.length && data.x[at + 1] <= x) at++;
    cross.hidden = tip.hidden = false;
    placeLine(cross, axes, data.x[at]);
    tip.textContent = [
      `${data.x[at].toFixed(3)} s`, ...data.rows.map((row) => `${row.name.padEnd(longest)}  ${row.values[at]}`),
    ].join("\n");
    const left = axes.pixel(data.x[at]), turned = left + 14 + tip.offsetWidth > box.width;
    const place = turned ? Math.max(0, left - tip.offsetWidth - 12) : left + 12;
    Object.assign(tip.style, { left: `${place}px`, top: `${axes.top + 6}px` });
  });
}
