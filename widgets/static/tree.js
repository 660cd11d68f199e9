// A draft tree and its attention mask. Nodes: [text, parent, depth, line, state, chance, words], the root first.
const NODE = 24, LINE = 34, GAP = 22, CELL = 12;
const TREE_STATES = [["accepted", "accepted"], ["bonus", "bonus: the model's own, behind a fully accepted path"], ["corrected", "corrected: the model's own, where a draft was rejected"],
  ["rejected", "rejected"], ["untried", "never judged"], ["cut", "cut off where the request ended"]];
const ON_PATH = ["root", "accepted", "bonus", "corrected"];

function drawTree(canvas, round) {
  const wide = (text) => Math.max(28, 7.4 * [...text].length + 14);
  const columns = [];
  for (const n of round.nodes) columns[n[2]] = Math.max(columns[n[2]] || 0, wide(n[0]));
  const left = columns.map((_, i) => 6 + columns.slice(0, i).reduce((a, w) => a + w + GAP, 0));
  const width = left[left.length - 1] + columns[columns.length - 1] + 6;
  const height = 12 + LINE * (1 + Math.max(...round.nodes.map((n) => n[3]))) + 6;
  canvas.setAttribute("viewBox", `0 0 ${width} ${height}`);
  canvas.setAttribute("width", width);
  canvas.setAttribute("height", height);
  canvas.setAttribute("aria-label", round.words);
  const middle = (n) => 14 + LINE * n[3] + NODE / 2;
  const edges = [], boxes = [];
  round.nodes.forEach((n, i) => {
    const [text, parent, depth, , state, chance, words] = n, x = left[depth], y = middle(n), w = wide(text);
    if (parent >= 0) {
      const from = round.nodes[parent], x0 = left[from[2]] + wide(from[0]), y0 = middle(from);
      edges.push(svg("path", { d: `M${x0},${y0} C${x - GAP / 2},${y0} ${x - GAP / 2},${y} ${x},${y}`, class: `iwb-edge iwb-edge-${ON_PATH.includes(state) ? "kept" : "left"}` }));
    }
    const box = svg("g", { class: `iwb-node iwb-node-${state}` }, words);
    const label = svg("text", { x: x + w / 2, y: y + 4, "text-anchor": "middle", class: "iwb-node-text" });
    label.textContent = text;
    box.append(svg("rect", { x, y: y - NODE / 2, width: w, height: NODE, rx: 4 }), label);
    if (state === "rejected") box.append(svg("line", { x1: x + 5, x2: x + w - 5, y1: y, y2: y, class: "iwb-strike" }));
    if (chance !== null && chance !== undefined) {
      const small = svg("text", { x: x + w / 2, y: y - NODE / 2 - 3, "text-anchor": "middle", class: "iwb-node-chance" });
      small.textContent = chance >= 0.995 ? "1" : chance.toFixed(2).replace(/^0/, "");
      box.append(small);
    }
    boxes.push(box);
  });
  canvas.replaceChildren(...edges, ...boxes);
}

function drawMask(canvas, round) {
  const n = round.mask.length, size = Math.max(4, Math.min(CELL, Math.floor(240 / n))), at = size + 6;
  const side = at + size * n + 2;
  canvas.setAttribute("viewBox", `0 0 ${side} ${size * n + 2}`);
  canvas.setAttribute("width", side);
  canvas.setAttribute("height", size * n + 2);
  canvas.setAttribute("aria-label", `attention mask of ${n} rows: each sees the context, its ancestors and itself`);
  const cells = [];
  round.mask.forEach((row, i) => {
    const kept = ON_PATH.includes(round.nodes[i][4]) ? " iwb-cell-kept" : "";
    const cell = (x, seen, words) => cells.push(svg("rect", { x, y: 1 + size * i, width: size - 1, height: size - 1, class: `iwb-cell${seen ? ` iwb-cell-on${kept}` : ""}` }, words));
    cell(0, true, `row ${i}, ${round.nodes[i][0]}, sees all of the context`);
    [...row].forEach((seen, j) => cell(at + size * j, seen === "1", `row ${i}, ${round.nodes[i][0]}, ${seen === "1" ? "sees" : "does not see"} ${j ? round.nodes[j][0] : "the root"}`));
  });
  canvas.replaceChildren(...cells);
}

function treeRegion() {
  const tree = svg("svg", { role: "img", class: "iwb-tree-canvas" }), mask = svg("svg", { role: "img", class: "iwb-mask-canvas" });
  const legend = el("div", { class: "iwb-legend" });
  const node = el("div", { class: "iwb-tree" },
    el("div", { class: "iwb-tree-scroll", tabindex: "0", role: "group", "aria-label": "draft tree" }, tree),
    el("figure", { class: "iwb-mask" }, mask, el("figcaption", { class: "iwb-note", text: "who sees whom: left the context, then root and nodes in order" })));
  return {
    node, legend,
    draw(round) {
      drawTree(tree, round);
      drawMask(mask, round);
      const there = new Set(round.nodes.map((n) => n[4]));
      legend.replaceChildren(...TREE_STATES.filter(([state]) => there.has(state)).map(([state, words]) => el("span", { class: "iwb-key" },
        el("i", { class: `iwb-node-key iwb-node-key-${state}`, "aria-hidden": "true" }), el("span", { text: words }))),
        ...(round.nodes.some((n) => n[5] !== null && n[5] !== undefined) ? [el("span", { class: "iwb-key" }, el("span", { text: "above a box: what the drafter gave it" }))] : []));
    },
    lines: (round) => round.nodes.slice(1).map((n) => n[6]),
  };
}
