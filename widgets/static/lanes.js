// Boxes on lanes with a slider over frames. Text is only ever set as text, never as markup.
const ROW = 30, TOP = 4, AXIS = 34;

function hatching(kind, id) {
  const pattern = svg("pattern", { id, width: 8, height: 8, patternUnits: "userSpaceOnUse" });
  pattern.append(svg("rect", { width: 8, height: 8, fill: kind.hollow ? "none" : kind.colour }));
  const ink = kind.hollow ? kind.colour : "rgba(255,255,255,0.85)";
  const lines = { "/": "M-2,2 2,-2 M-1,9 9,-1 M6,10 10,6", "\\": "M-2,6 2,10 M-1,-1 9,9 M6,-2 10,2", "x": "M0,0 8,8 M8,0 0,8", "-": "M0,4 8,4", "|": "M4,0 4,8", "+": "M4,0 4,8 M0,4 8,4" };
  if (kind.hatch === ".") pattern.append(svg("circle", { cx: 4, cy: 4, r: 1.1, fill: ink }));
  else pattern.append(svg("path", { d: lines[kind.hatch], stroke: ink, "stroke-width": 1.4, fill: "none" }));
  return pattern;
}

function paint(kind, id) {
  if (kind.hatch) return `url(#${id})`;
  return kind.hollow ? "none" : kind.colour;
}

function ticksOf(end, room) {
  const rough = end / Math.max(Math.floor(room / 90), 1), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((s) => s >= rough);
  return Array.from({ length: Math.floor(end / step + 1e-9) + 1 }, (_, i) => i * step);
}

function drawLanes(canvas, p, frame, ids, width) {
  const left = Math.min(8 + 7 * Math.max(...p.lanes.map((l) => l.length)), width * 0.3), right = 12;
  const high = TOP + ROW * p.lanes.length, scale = (width - left - right) / p.end;
  const at = (x) => left + x * scale;
  canvas.replaceChildren();
  canvas.setAttribute("viewBox", `0 0 ${width} ${high + AXIS}`);
  canvas.setAttribute("height", high + AXIS);
  canvas.setAttribute("aria-label", `${p.title}. ${frame.words}`);
  const defs = svg("defs");
  p.kinds.forEach((kind, i) => { if (kind.hatch) defs.append(hatching(kind, ids[i])); });
  canvas.append(defs);
  p.lanes.forEach((name, i) => {
    const text = svg("text", { x: left - 8, y: TOP + ROW * i + ROW / 2 + 4, "text-anchor": "end", class: "iwb-lane" });
    text.textContent = name;
    canvas.append(text, svg("line", { x1: left, x2: width - right, y1: TOP + ROW * (i + 1), y2: TOP + ROW * (i + 1), class: "iwb-lane-rule" }));
  });
  for (const [lane, start, end, number, label, words] of frame.boxes) {
    const kind = p.kinds[number], wide = Math.max((end - start) * scale, 1);
    const box = svg("g", { class: "iwb-box" }, words);
    box.append(svg("rect", { x: at(start), y: TOP + ROW * lane + 3, width: wide, height: ROW - 6, rx: Math.min(3, wide / 4), fill: paint(kind, ids[number]),
      stroke: kind.hollow ? kind.colour : "var(--iwb-page)", "stroke-width": 1, "stroke-dasharray": kind.dash ? "4 3" : "none" }));
    if (label && wide > 7 * label.length + 2) {
      const text = svg("text", { x: at(start) + wide / 2, y: TOP + ROW * lane + ROW / 2 + 4, "text-anchor": "middle", class: kind.hollow ? "iwb-lane" : `iwb-in-box${kind.hatch ? " iwb-on-hatch" : ""}` });
      text.textContent = label;
      box.append(text);
    }
    canvas.append(box);
  }
  for (const [x, words] of frame.rules) {
    canvas.append(svg("line", { x1: at(x), x2: at(x), y1: 0, y2: high, class: "iwb-rule" }, words));
    const before = at(x) > width / 2;
    const text = svg("text", { x: at(x) + (before ? -4 : 4), y: high - 4, "text-anchor": before ? "end" : "start", class: "iwb-lane" });
    text.textContent = words;
    canvas.append(text);
  }
  for (const tick of ticksOf(p.end, width - left - right)) {
    const text = svg("text", { x: at(tick), y: high + 14, "text-anchor": "middle", class: "iwb-lane" });
    text.textContent = Number(tick.toPrecision(6)).toLocaleString("en-US");
    canvas.append(svg("line", { x1: at(tick), x2: at(tick), y1: high, y2: high + 3, class: "iwb-rule" }), text);
  }
  const title = svg("text", { x: left, y: high + 29, class: "iwb-lane" });
  title.textContent = p.x;
  canvas.append(title);
}

function render({ model, el: root }) {
  const p = model.get("picture"), id = `iwb-${Math.random().toString(36).slice(2, 8)}`;
  const ids = p.kinds.map((_, i) => `${id}-${i}`), last = p.frames.length - 1;
  const canvas = svg("svg", { role: "img", width: "100%", class: "iwb-lanes-canvas" });
  const legend = el("div", { class: "iwb-legend" }, ...p.kinds.map((kind, i) => {
    const swatch = svg("svg", { width: 16, height: 12, "aria-hidden": "true" });
    swatch.append(svg("rect", { x: 0.5, y: 0.5, width: 15, height: 11, rx: 2, fill: paint(kind, ids[i]), stroke: kind.colour, "stroke-dasharray": kind.dash ? "3 2" : "none" }));
    return el("span", { class: "iwb-key" }, swatch, el("span", { text: kind.name }));
  }));
  const region = pictureRegion(p, p.knob, (at) => { model.set("at", at); model.save_changes(); }, canvas, legend);
  const draw = () => {
    const at = Math.min(Math.max(model.get("at"), 0), last), now = p.frames[at];
    region.step.show(at, last, now.words);
    drawLanes(canvas, p, now, ids, Math.max(canvas.clientWidth || root.clientWidth, 320));
    region.tell(now.boxes.map((b) => `${p.lanes[b[0]]}: ${b[5] || `${p.kinds[b[3]].name} ${b[4]}`}`));
  };
  region.asText.addEventListener("toggle", draw);
  root.append(region.all);
  model.on("change:at", draw);
  const watch = new ResizeObserver(draw);
  watch.observe(root);
  draw();
  return () => { watch.disconnect(); model.off("change:at", draw); };
}

export default { render };
