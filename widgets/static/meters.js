// The right: memory, speed, acceptance, quality, path. The pinned run stays behind as a ghost.
const CATEGORIES = [
  ["kv_payload", "KV payload"], ["kv_meta", "KV metadata"], ["fragmentation", "fragmentation"],
  ["draft", "draft"], ["workspace", "workspace"], ["kv_cached", "KV cached"],
  ["kv_cold", "KV cold"],
];
const SPEEDS = [["decode_speed", "decode", "tok/s"], ["ttft", "TTFT", "ms"], ["tpot", "TPOT", "ms"]];

function metersRegion(send) {
  const block = (title) => {
    const value = el("span", { class: "iwb-value" });
    const body = el("div", { class: "iwb-body" });
    return { value, body, node: el("div", { class: "iwb-meter" }, el("h4", {}, el("span", { text: title }), value), body) };
  };
  const memory = block("memory"), speed = block("speed"), accept = block("acceptance"), quality = block("quality"), path = block("path");
  const measure = el("button", { class: "iwb-button iwb-small", type: "button", text: "Measure",
    title: "KL, top-1 agreement and perplexity against plain, on held-out text", onclick: () => send({ do: "measure" }) });
  const unmeasure = el("button", { class: "iwb-button iwb-small", type: "button", text: "Cancel", onclick: () => send({ do: "unmeasure" }) });
  const measured = el("progress", { max: "1", value: "0", "aria-label": "quality measured" });
  const measuring = el("p", { class: "iwb-note", hidden: true });
  const words = el("div", { class: "iwb-body" });
  quality.body.append(words, el("div", { class: "iwb-actions" }, measure, unmeasure, measured), measuring);
  const delta = el("p", { class: "iwb-delta", hidden: true });
  const pin = el("button", { class: "iwb-button", type: "button", text: "Pin as A", onclick: () => send({ do: "pin" }) });
  const save = el("button", { class: "iwb-button", type: "button", text: "Save", onclick: () => send({ do: "save" }) });
  const tag = el("p", { class: "iwb-note" });
  const warned = el("div", { class: "iwb-warned", role: "status" });
  const node = el("aside", { class: "iwb-meters", "aria-label": "Meters" },
    delta, memory.node, speed.node, accept.node, quality.node, path.node, warned, tag, el("div", { class: "iwb-actions" }, pin, save));
  return {
    node,
    status(s) {
      node.classList.toggle("iwb-dim", !!s.stale);
      pin.disabled = save.disabled = !s.can_pin;
      setText(pin, s.pinned ? "Pin again" : "Pin as A");
      node.title = s.stale ? `${s.stale}: these numbers are of the one before` : "";
      const m = s.measuring;
      show(measure, !m); show(unmeasure, !!m); show(measured, !!m); show(measuring, !!m);
      measured.value = m && m.total ? m.done / m.total : 0;
      setText(measuring, m ? (m.total ? `window ${Math.min(m.total, Math.floor(m.done) + 1)} of ${m.total}: ${m.message}` : m.message) : "");
    },
    meters(m) {
      setText(delta, m.delta || "");
      show(delta, !!m.delta);
      drawMemory(memory, m);
      drawSpeed(speed, m);
      drawAcceptance(accept, m);
      setText(quality.value, m.kind || "");
      words.replaceChildren(...(m.quality?.length ? m.quality : [m.kind === "exact" ?
        "exact: the output law is that of the plain engine" : "not measured yet"])
        .map((q) => el("p", { text: q })));
      path.body.replaceChildren(el("ul", { class: "iwb-path", title: (m.keys || []).join("\n") },
        ...(m.path?.length ? m.path : ["–"]).map((part) => el("li", { text: part }))));
      warned.replaceChildren(...(m.warnings || []).map((w) => el("p", { class: "iwb-note", text: w })));
      setText(tag, m.tag || "");
    },
  };
}

function stack(memory, scale, ghost) {
  const bar = el("div", { class: ghost ? "iwb-stack iwb-ghost" : "iwb-stack" });
  for (const [key, name] of CATEGORIES) {
    const n = memory[key] || 0;
    if (n) bar.append(el("span", { class: `iwb-mem-${key}`, style: `width:${(100 * n) / scale}%`, title: `${name} ${bytes(n)}` }));
  }
  return bar;
}

function drawMemory(block, m) {
  const now = m.memory || {}, before = m.pinned?.memory;
  const sum = (x) => CATEGORIES.reduce((a, [k]) => a + (x?.[k] || 0), 0);
  const scale = Math.max(sum(now), sum(before), 1);
  setText(block.value, sum(now) ? bytes(sum(now)) : "–");
  if (!sum(now)) { block.body.replaceChildren(el("p", { class: "iwb-empty", text: "shown while a prompt runs" })); return; }
  const keys = CATEGORIES.filter(([k]) => now[k]).map(([k, name]) => el("span", { class: "iwb-key" },
    el("i", { class: `iwb-swatch iwb-mem-${k}`, "aria-hidden": "true" }), el("span", { text: `${name} ${bytes(now[k])}` })));
  block.body.replaceChildren(...[stack(now, scale, false),
    before && stack(before, scale, true),
    before && el("p", { class: "iwb-note", text: `A: ${bytes(sum(before))}` }),
    kvLine(m.kv_line || []),
    el("div", { class: "iwb-legend" }, ...keys),
    el("p", { class: "iwb-note", text: `beside ${bytes(now.weights || 0)} of weights` + (now.kv_free ? `, ${bytes(now.kv_free)} reserved and free` : "") }),
  ].filter(Boolean));
}

function kvLine(values) {
  if (values.length < 3) return null;
  const top = Math.max(...values, 1);
  const points = values.map((v, i) => `${(100 * i) / (values.length - 1)},${28 - (26 * v) / top}`).join(" ");
  const node = svg("svg", { class: "iwb-line", viewBox: "0 0 100 30", preserveAspectRatio: "none", role: "img",
    "aria-label": `KV in use over the run, from ${bytes(values[0])} to ${bytes(values[values.length - 1])}` });
  node.append(svg("polygon", { points: `0,30 ${points} 100,30`, class: "iwb-line-area" }),
    svg("polyline", { points, class: "iwb-line-kv" }, "KV in use over the run"));
  return node;
}

function drawSpeed(block, m) {
  const now = m.latency || {}, before = m.pinned?.latency;
  setText(block.value, now.decode_speed ? num(now.decode_speed, "tok/s") : "–");
  block.body.replaceChildren(el("div", { class: "iwb-speeds" }, ...SPEEDS.slice(1).flatMap(([key, name, unit]) => [
    el("span", { class: "iwb-note", text: name }),
    el("span", { class: "iwb-of", text: num(now[key], now[key] === undefined ? "" : unit) }),
    el("span", { class: "iwb-note", text: before?.[key] === undefined ? "" : `A ${num(before[key], unit)}` })])));
}

function drawAcceptance(block, m) {
  const a = m.acceptance || {}, ghost = m.pinned?.survival || [];
  setText(block.value, a.tau ? `τ ${num(a.tau)}` : "–");
  if (!a.survival) { block.body.replaceChildren(el("p", { class: "iwb-empty", text: "nothing is drafted" })); return; }
  const bars = a.survival.map((s, i) => el("div", { class: "iwb-bar", title: `position ${i + 1}: ${(100 * s).toFixed(0)}% of drafts` },
    ghost[i] !== undefined && el("b", { style: `height:${100 * ghost[i]}%`, class: "iwb-ghostbar" }),
    el("b", { style: `height:${Math.max(2, 100 * s)}%` }), el("small", { text: String(i + 1) })));
  block.body.replaceChildren(
    el("div", { class: "iwb-bars", role: "img", "aria-label": a.survival.map((s, i) => `position ${i + 1} ${(100 * s).toFixed(0)}%`).join(", ") }, ...bars),
    el("p", { class: "iwb-note", text: `share accepted by draft position · ${a.steps} drafts` }));
}
