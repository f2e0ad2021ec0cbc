const data = JSON.parse(document.getElementById("data").textContent);
const map = document.getElementById("map"), slider = document.getElementById("slider");
const tip = document.getElementById("tip"), play = document.getElementById("play");
const shell = document.querySelector(".shell"), now = document.getElementById("now");
shell.append(now);
addEventListener("resize", () => draw(Number(slider.value)));
const NS = "http://www.w3.org/2000/svg", HEIGHT = 18, GAP = 3;
const longest = Math.max(1, ...data.frames.flatMap(f => f.lines.map(l => Math.max(l.room, l.cells.length))));

function rect(x, y, width, kind) {
  const r = document.createElementNS(NS, "rect");
  r.setAttribute("x", x); r.setAttribute("y", y); r.setAttribute("width", Math.max(.5, width));
  r.setAttribute("height", HEIGHT); r.setAttribute("class", kind);
  map.appendChild(r);
  return r;
}
function label(x, y, words) {
  const t = document.createElementNS(NS, "text");
  t.setAttribute("x", x); t.setAttribute("y", y); t.textContent = words;
  map.appendChild(t);
}
function draw(index) {
  // In CSS pixels: words keep their size on a narrow page.
  const WIDTH = map.parentElement.clientWidth - 32, LABEL = Math.min(150, WIDTH * 0.32);
  const size = Math.max(.5, Math.min(data.unit === "row" ? WIDTH : 40, (WIDTH - LABEL) / longest));
  const frame = data.frames[index], gap = size > 6 ? 1 : 0, letters = Math.floor(LABEL / 7);
  map.replaceChildren();
  map.setAttribute("viewBox", `0 0 ${WIDTH} ${Math.max(1, frame.lines.length) * (HEIGHT + GAP)}`);
  frame.lines.forEach((line, at) => {
    const y = at * (HEIGHT + GAP), words = line.label;
    label(0, y + 13, words.length > letters ? words.slice(0, letters - 1) + "…" : words);
    if (line.room) rect(LABEL, y + .5, line.room * size - gap, "room").setAttribute("height", HEIGHT - 1);
    line.cells.forEach(([unit, state, fill], position) => {
      const x = LABEL + position * size, kind = "s-" + state;
      const cell = rect(x, y, size - gap, kind + (fill < 1 ? " dim" : ""));
      cell.dataset.unit = unit; cell.dataset.state = state; cell.dataset.position = position;
      if (fill < 1) rect(x, y, (size - gap) * fill, kind).style.pointerEvents = "none";
      if (state === "shared") rect(x, y, size - gap, "hatch");
      cell.dataset.fill = fill;
    });
  });
  document.getElementById("moment").textContent = frame.words;
  placeLine(now, axesOf(shell), frame.time_s);
  slider.value = index;
}
map.addEventListener("pointermove", event => {
  for (const old of map.querySelectorAll(".same")) old.classList.remove("same");
  const cell = event.target.closest("rect[data-unit]");
  tip.hidden = !cell;
  if (!cell) return;
  const {unit, state, position, fill} = cell.dataset, frame = data.frames[slider.value];
  const words = [unit >= 0 ? `${data.unit} ${unit}: ${data.meaning[state]}` : data.meaning[state]];
  for (const who of frame.owners[unit] || []) words.push("needed by " + who);
  if (fill < 1) words.push(`${Math.round(fill * 100)} % filled`);
  if (frame.cached.includes(Number(unit)) && state !== "cached") words.push("also in the prefix cache");
  tip.textContent = words.join("\n");
  tip.style.left = Math.min(event.clientX + 14, innerWidth - 350) + "px";
  tip.style.top = event.clientY + 16 + "px";
  if (unit >= 0) for (const c of map.querySelectorAll(`rect[data-unit="${unit}"]`)) c.classList.add("same");
});
map.addEventListener("pointerleave", () => { tip.hidden = true; });
slider.addEventListener("input", () => draw(Number(slider.value)));
let timer = null;
play.addEventListener("click", () => {
  if (timer) { clearInterval(timer); timer = null; play.textContent = "Play"; return; }
  play.textContent = "Pause";
  if (Number(slider.value) === data.frames.length - 1) draw(0);
  timer = setInterval(() => {
    const next = Number(slider.value) + 1;
    if (next >= data.frames.length) { play.click(); return; }
    draw(next);
  }, 120);
});
draw(Number(slider.value));
