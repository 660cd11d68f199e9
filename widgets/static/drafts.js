// The tab of drafts: the tree of a round with a slider over the latest ones, and bars over all of them.
function barsFigure(title) {
  const picture = svg("svg", { role: "img", class: "iwb-columns" });
  const legend = el("div", { class: "iwb-legend" }), note = el("span", { class: "iwb-note" });
  const node = el("figure", { class: "iwb-chart" }, el("figcaption", {}, el("span", { text: title }), note), picture, legend);
  // columns: [label, [[value, class, words] from below], mark]; rule: a dashed line at a value
  let latest = null;
  const draw = (columns, options) => {
    latest = [columns, options];
    const { top, words, key = [], said = "", rule = null } = options;
    const width = picture.clientWidth || 240, n = Math.max(columns.length, 6), high = 72, foot = 14, unit = width / n;
    const edge = Math.min(2, unit / 8);
    picture.setAttribute("viewBox", `0 0 ${width} ${high + foot}`);
    picture.setAttribute("aria-label", `${title}: ${words}`);
    setText(note, said);
    const drawn = [];
    columns.forEach(([label, parts, mark], i) => {
      let y = high;
      for (const [value, cls, hover] of parts) {
        const h = Math.min((high * value) / top, y);
        y -= h;
        if (h > 0.2) drawn.push(svg("rect", { x: i * unit + edge, y, width: unit - 2 * edge, height: h, class: cls }, hover));
      }
      if (mark !== undefined && mark !== null) {
        const cy = high - Math.min((high * mark[0]) / top, high - 4), x = i * unit + unit / 2;
        drawn.push(svg("path", { d: `M${x - 4},${cy} ${x},${cy - 4} ${x + 4},${cy} ${x},${cy + 4} Z`, class: "iwb-mark" }, mark[1]));
      }
      if (label && (unit > 12 || i % 4 === 0)) {
        const text = svg("text", { x: i * unit + unit / 2, y: high + 11, "text-anchor": "middle", class: "iwb-axis" });
        text.textContent = label;
        drawn.push(text);
      }
    });
    if (rule) drawn.push(svg("line", { x1: 0, x2: n * unit, y1: high - (high * rule[0]) / top, y2: high - (high * rule[0]) / top, class: "iwb-rule" }, rule[1]));
    picture.replaceChildren(...drawn);
    legend.replaceChildren(...key.map(([cls, text]) => el("span", { class: "iwb-key" }, el("i", { class: `iwb-swatch ${cls}`, "aria-hidden": "true" }), el("span", { text }))));
  };
  new ResizeObserver(() => { if (latest) draw(...latest); }).observe(picture);
  return { node, draw };
}

const PART_CLASSES = { draft: "iwb-phase-draft", verification: "iwb-phase-forward", overhead: "iwb-phase-schedule" };

function draftsRegion() {
  const region = treeRegion(), by = barsFigure("kept, by draft position"), lengths = barsFigure("rounds, by kept tokens"), times = barsFigure("ms a round");
  let d = {}, wanted = null; // the round to show; null: the latest
  const step = stepper("round", (at) => { wanted = at >= d.rounds.length - 1 ? null : d.first + at; drawRound(); });
  const badge = el("span", { class: "iwb-badge" }), judged = el("span", { class: "iwb-note" });
  const list = el("ul"), tables = el("div");
  const asText = el("details", { class: "iwb-lanes-text" }, el("summary", { text: "all of this as text" }), list, tables);
  const full = el("div", { class: "iwb-drafts" }, el("div", { class: "iwb-actions" }, badge, judged), step.controls, step.words, region.node, region.legend,
    el("div", { class: "iwb-charts" }, by.node, lengths.node, times.node), asText);
  const empty = el("p", { class: "iwb-empty", text: "What a drafter proposes, round by round: switch one on and run a prompt." });
  const node = el("div", {}, empty, full);
  const drawRound = () => {
    const last = d.rounds.length - 1, at = wanted === null ? last : Math.min(Math.max(wanted - d.first, 0), last), round = d.rounds[at];
    step.show(at, last, round.words);
    region.draw(round);
    if (asText.open) list.replaceChildren(...region.lines(round).map((text) => el("li", { text })));
  };
  asText.addEventListener("toggle", () => { if (d.rounds) drawRound(); });
  const percent = (x) => `${(100 * x).toFixed(0)}%`;
  return {
    node,
    draw(next) {
      d = next;
      const there = !!(d.rounds && d.rounds.length);
      show(empty, !there);
      show(full, there);
      if (!there) { wanted = null; return; }
      setText(badge, d.kind);
      badge.className = `iwb-badge iwb-badge-${d.kind}`;
      setText(judged, d.rule ? `judged by rule ${d.rule}` : "");
      drawRound();
      by.draw(d.survival.map((s, i) => [String(i + 1), [[s, "iwb-col-kept", `position ${i + 1}: ${percent(s)} of drafts`]],
        d.conditional[i] === undefined ? null : [d.conditional[i], `position ${i + 1}: ${percent(d.conditional[i])} given the one before`]]),
        { top: 1, words: d.survival.map((s, i) => `position ${i + 1} ${percent(s)}`).join(", "), key: [["iwb-col-kept", "of all drafts"], ["iwb-mark-key", "given the one before"]] });
      const most = Math.max(...d.lengths.map(([r, w]) => r + w), 1);
      lengths.draw(d.lengths.map(([rejected, whole], n) => [String(n), [[whole, "iwb-col-kept", `${whole} rounds kept all ${n}`], [rejected, "iwb-col-rejected", `${rejected} rounds kept ${n}, then a rejection`]]]),
        { top: most, words: d.lengths.map(([r, w], n) => `${n} kept in ${r + w} rounds`).join(", "), said: `0 to ${most}`, key: [["iwb-col-kept", "the whole draft"], ["iwb-col-rejected", "up to a rejection"]] });
      const totals = d.times.map((t) => t[0] + t[1] + t[2]), sorted = [...totals].sort((a, b) => a - b);
      const top = Math.max(1.5 * (sorted[Math.floor(0.9 * (sorted.length - 1))] || 1), d.plain_ms || 0);
      times.draw(d.times.map((t) => ["", d.parts.map((part, i) => [t[i], PART_CLASSES[part], `${part} ${t[i].toFixed(2)} ms; ${t[3]} drafted, ${t[4]} gained`])]),
        { top, words: `${d.times.length} rounds, median ${num(sorted[Math.floor(sorted.length / 2)], "ms")}`, said: `0 to ${num(top)}`, key: d.parts.map((part) => [PART_CLASSES[part], part]),
          rule: d.plain_ms ? [d.plain_ms, `a step without a draft: ${num(d.plain_ms, "ms")}`] : null });
      tables.replaceChildren(tableOf(d.table, ""));
    },
  };
}
