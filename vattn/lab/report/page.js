"use strict";
(() => {
  const root = document.documentElement, button = document.getElementById("theme");
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const name = () => { button.textContent = dark() ? "Light colours" : "Dark colours"; };
  button.hidden = false;
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);
  name();

  // What is folded is printed unfolded.
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => { d.open = true; }));

  // Charts with a readout: a line under the pointer, and the figures of that moment.
  for (const shell of document.querySelectorAll(".shell")) {
    const svg = shell.querySelector("svg.chart"), source = shell.querySelector("script.readout");
    if (!svg || !source) continue;
    const data = JSON.parse(source.textContent), [, top, , bottom] = svg.dataset.plot.split(" ").map(Number);
    const cross = Object.assign(document.createElement("div"), { className: "cross", hidden: true });
    const tip = Object.assign(document.createElement("div"), { className: "tip", hidden: true });
    shell.append(cross, tip);
    const leave = () => { cross.hidden = tip.hidden = true; };
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
      const x = (event.clientX - box.left) * scale;
      let at = 0;
      while (at + 1 < data.x.length && data.x[at + 1] <= x) at++;
      if (x < data.x[0]) return leave();
      const left = data.x[at] / scale;
      cross.hidden = tip.hidden = false;
      Object.assign(cross.style, { left: `${left}px`, top: `${top / scale}px`, height: `${(bottom - top) / scale}px` });
      const wide = Math.max(...data.rows.map((row) => row.name.length));
      tip.textContent = [`${data.at[at]} s`, ...data.rows.map((row) => `${row.name.padEnd(wide)}  ${row.values[at]}`)].join("\n");
      tip.style.font = "12px/1.5 ui-monospace, Menlo, Consolas, monospace";
      const right = left + 14 + tip.offsetWidth > box.width;
      Object.assign(tip.style, { left: `${right ? left - tip.offsetWidth - 12 : left + 12}px`, top: `${top / scale + 6}px` });
    });
  }
})();
