// The middle: prompt, sampling, run and stop, the streaming text, the draft, the steps.
const SAMPLING = [
  { name: "temperature", label: "temperature", min: 0, max: 5, step: 0.1, start: 0, help: "0 is greedy" },
  { name: "top_p", label: "top-p", min: 0.01, max: 1, step: 0.01, start: 1, help: "1 is off" },
  { name: "max_tokens", label: "max tokens", min: 1, max: 4096, step: 1, start: 128, help: "length of the output" },
  { name: "n", label: "samples", min: 1, max: 16, step: 1, start: 1, help: "outputs of one prompt; the first is shown" },
  { name: "seed", label: "seed", min: 0, max: 4294967295, step: 1, start: 0, help: "same seed, same text" },
];
const ALTERNATIVES = 4; // of one draft position
const SOURCE_WORDS = {
  plain: "plain: sampled without a draft",
  accepted: "accepted: drafted and kept",
  bonus: "bonus: sampled after a fully accepted draft",
  corrected: "corrected: sampled where a draft was rejected",
};

function runRegion(send) {
  const id = `iwb-${Math.random().toString(36).slice(2, 8)}`;
  const prompt = el("textarea", { id: `${id}-prompt`, rows: "2", spellcheck: "false", class: "iwb-prompt",
    onchange: () => send({ do: "prompt", text: prompt.value }) });
  const example = el("select", { id: `${id}-example`, class: "iwb-select", "aria-label": "prompt to start from",
    onchange: () => { if (example.value) send({ do: "example", name: example.value }); } });
  const chat = el("input", { type: "checkbox", id: `${id}-chat`, onchange: () => send({ do: "chat", on: chat.checked }) });
  const chatLabel = el("label", { class: "iwb-chat", for: chat.id, title: "through the model's chat template; otherwise the text is continued as it stands" },
    chat, el("span", { text: "chat message" }));
  const fields = {};
  const sampling = SAMPLING.map((s) => {
    const input = el("input", { type: "number", id: `${id}-${s.name}`, min: s.min, max: s.max, step: s.step, title: s.help,
      onchange: () => send({ do: "sampling", name: s.name, value: input.valueAsNumber }) });
    fields[s.name] = input;
    return el("label", { class: "iwb-field", for: input.id }, el("span", { text: s.label }), input);
  });
  const start = () => send({ do: "run", prompt: prompt.value });
  const run = el("button", { class: "iwb-button iwb-primary", type: "button", onclick: start, title: "Ctrl+Enter in the prompt" },
    el("span", { "aria-hidden": "true", text: "▶ " }), el("span", { text: "Run" }));
  const stop = el("button", { class: "iwb-button", type: "button", onclick: () => send({ do: "stop" }), title: "Esc" },
    el("span", { "aria-hidden": "true", text: "■ " }), el("span", { text: "Stop" }));
  const bar = el("progress", { max: "1", value: "0", "aria-label": "tokens generated" });
  const count = el("span", { class: "iwb-count" });
  const problem = el("div", { class: "iwb-problem", role: "alert", hidden: true });
  const stale = el("span", { class: "iwb-stale", hidden: true });
  const text = el("div", { class: "iwb-text", role: "region", "aria-label": "generated text", tabindex: "0" });
  const draft = el("div", { class: "iwb-draft", hidden: true });
  const strip = svg("svg", { class: "iwb-strip", role: "img", preserveAspectRatio: "none" });
  const phases = el("div", { class: "iwb-legend" });
  const scale = el("span", { class: "iwb-note" });
  const stepsBox = el("div", { class: "iwb-steps", hidden: true },
    el("h4", {}, el("span", { text: "time per step" }), scale), strip, phases);
  const legend = el("div", { class: "iwb-legend", "aria-label": "legend of the text" },
    ...["plain", "drafted", "accepted", "corrected", "rejected"].map((s) => el("span", { class: `iwb-tok iwb-${s}`, text: s })));
  const node = el("section", { class: "iwb-run", "aria-label": "Run" },
    el("div", { class: "iwb-asking" }, el("label", { class: "iwb-label", for: prompt.id, text: "Prompt" }), example, chatLabel), prompt,
    el("div", { class: "iwb-sampling" }, ...sampling),
    el("div", { class: "iwb-actions" }, run, stop, bar, count, stale),
    problem, text, legend, draft, stepsBox);
  node.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); start(); }
    if (event.key === "Escape") send({ do: "stop" });
  });
  const drawn = { run: null, n: 0, examples: "" };
  return {
    node,
    inputs(v) {
      if (document.activeElement !== prompt) prompt.value = v.prompt ?? "";
      drawExamples(example, v, drawn);
      chat.checked = !!v.chat;
      chatLabel.title = v.template ? "through the model's chat template; otherwise the text is continued as it stands"
        : "this model has no chat template: a message is written as plain 'User:' and 'Assistant:' text";
      for (const s of SAMPLING) {
        if (document.activeElement !== fields[s.name]) fields[s.name].value = String((v.sampling || {})[s.name] ?? s.start);
      }
    },
    status(s) {
      const working = s.state !== "idle";
      run.disabled = false;
      stop.disabled = !working;
      node.classList.toggle("iwb-busy", working);
      bar.value = s.total ? s.done / s.total : 0;
      bar.classList.toggle("iwb-moving", working);
      const words = s.state === "switching" ? s.message || "switching" : s.state === "running" && !s.done ? "reading the prompt" : "";
      const end = s.ended === "cancelled" ? " · stopped" : s.ended === "failed" ? " · failed" : "";
      setText(count, words || (s.total ? `${s.done} / ${s.total} tokens · ${s.seconds.toFixed(1)} s${end}` : ""));
      setText(stale, s.stale);
      show(stale, !!s.stale);
      drawProblem(problem, s.problem, send);
    },
    text(t) { drawText(text, t, drawn); },
    meters(m) { drawDraft(draft, m.draft); drawStrip(stepsBox, strip, phases, scale, m); },
  };
}

function drawExamples(select, v, drawn) {
  const key = JSON.stringify(v.examples || []);
  if (drawn.examples !== key) {
    drawn.examples = key;
    const groups = {};
    for (const [group, name, label] of v.examples || []) {
      (groups[group] ||= el("optgroup", { label: group })).append(el("option", { value: name, text: label }));
    }
    select.replaceChildren(el("option", { value: "", text: "own prompt" }), ...Object.values(groups));
  }
  select.value = v.example || "";
}

function drawText(node, t, drawn) {
  const pieces = t.pieces || [];
  if (t.run !== drawn.run || pieces.length < drawn.n) { node.replaceChildren(); drawn.run = t.run; drawn.n = 0; }
  if (!pieces.length && !node.childNodes.length) {
    node.append(el("span", { class: "iwb-empty", text: t.run ? "…" : "Nothing has been run yet. Press Run." }));
    return;
  }
  if (pieces.length && drawn.n === 0) node.replaceChildren();
  for (const [text, source, step, logprob] of pieces.slice(drawn.n)) {
    const hover = `step ${step} · ${SOURCE_WORDS[source] || source}` + (logprob === null ? "" : ` · log-probability ${logprob.toFixed(3)}`);
    node.append(el("span", { class: `iwb-tok iwb-${source === "bonus" ? "plain" : source} iwb-new`, title: hover, text }));
  }
  if (pieces.length > drawn.n) node.scrollTop = node.scrollHeight;
  drawn.n = pieces.length;
}

function drawDraft(node, draft) {
  const tokens = (draft && draft.tokens) || [];
  show(node, tokens.length > 0);
  const shown = (text) => text.replace(/\n/g, "⏎") || "␣";
  const depths = []; // alternatives for one position stand below each other, what was kept on top
  for (const token of tokens) (depths[token[2] || 0] ||= []).push(token);
  const column = (found) => {
    const sorted = [...found.filter((t) => t[1]), ...found.filter((t) => !t[1])], rest = sorted.splice(ALTERNATIVES);
    return el("span", { class: "iwb-depth" },
      ...sorted.map(([text, kept, , before]) => el("span", { class: `iwb-tok ${kept ? "iwb-accepted" : "iwb-rejected"}`,
        title: `${kept ? "accepted" : "rejected"}${before ? `, drafted behind ${shown(before)}` : ""}`, text: shown(text) })),
      rest.length > 0 && el("span", { class: "iwb-note", text: `+${rest.length}`, title: `${rest.length} more, all rejected: ${rest.map((t) => shown(t[0])).join(" ")}` }));
  };
  node.replaceChildren(el("span", { class: "iwb-label", text: `last draft (${draft?.source || ""}${draft?.rule ? `, rule ${draft.rule}` : ""})` }),
    draft?.kind ? el("span", { class: `iwb-badge iwb-badge-${draft.kind}`, text: draft.kind }) : "",
    ...depths.filter(Boolean).map(column));
}

// A prompt is read in one or a few long steps; they are cut where they would flatten all others, and that is said.
function drawStrip(box, node, legend, scale, m) {
  const steps = m.strip || [];
  show(box, steps.length > 0);
  const totals = steps.map((s) => s.ms.reduce((a, b) => a + b, 0));
  const longest = Math.max(1e-9, ...totals), sorted = [...totals].sort((a, b) => a - b);
  const usual = Math.max(1e-9, sorted[Math.floor(0.9 * (sorted.length - 1))] || 0);
  const cut = longest > 3 * usual, top = cut ? 1.5 * usual : longest;
  setText(scale, steps.length ? `0 to ${num(top)} ms${cut ? `; the longest, ${num(longest)} ms, is cut` : ""}` : "");
  node.setAttribute("viewBox", `0 0 ${Math.max(steps.length, 40)} 100`);
  node.setAttribute("aria-label", `milliseconds per engine step, ${steps.length} steps, longest ${longest.toFixed(1)} ms`);
  const used = m.phases.map((_, p) => steps.reduce((a, s) => a + s.ms[p], 0));
  const bars = [];
  steps.forEach((s, x) => {
    let y = 100;
    m.phases.forEach((phase, p) => {
      const h = Math.min((100 * s.ms[p]) / top, y);
      if (h < 0.2) return;
      y -= h;
      bars.push(svg("rect", { x: x + 0.08, y, width: 0.84, height: h, class: `iwb-phase-${phase}` },
        `step ${s.step}: ${phase} ${s.ms[p].toFixed(2)} ms, ${s.rows} rows`));
    });
  });
  node.replaceChildren(...bars);
  const total = used.reduce((a, b) => a + b, 0) || 1;
  legend.replaceChildren(...m.phases.flatMap((phase, p) => used[p] / total < 0.005 ? [] :
    [el("span", { class: "iwb-key" }, el("i", { class: `iwb-swatch iwb-phase-${phase}`, "aria-hidden": "true" }),
      el("span", { text: `${phase} ${((100 * used[p]) / total).toFixed(0)}%` }))]));
}

function drawProblem(node, problem, send) {
  show(node, !!problem);
  if (!problem) { node.replaceChildren(); return; }
  if (node.dataset.details === problem.details + problem.message && node.childNodes.length) return;
  node.dataset.details = problem.details + problem.message;
  const copy = el("button", { class: "iwb-button iwb-small", type: "button", text: "copy details",
    onclick: () => copyText(`${problem.kind}: ${problem.message}\n${problem.hint}\n${problem.details}`, copy) });
  const close = el("button", { class: "iwb-button iwb-small", type: "button", text: "dismiss", onclick: () => send({ do: "dismiss" }) });
  node.replaceChildren(
    el("strong", { text: problem.where ? `${problem.kind} while ${problem.where}` : problem.kind }),
    el("p", { text: problem.message }),
    problem.hint && el("p", { class: "iwb-hint", text: problem.hint }),
    el("div", { class: "iwb-actions" }, copy, close));
}

function copyText(text, button) {
  const done = () => { const was = button.textContent; button.textContent = "copied"; setTimeout(() => { button.textContent = was; }, 1200); };
  if (navigator.clipboard) navigator.clipboard.writeText(text).then(done, () => { button.textContent = "copying is not allowed here"; });
  else button.textContent = "copying is not allowed here";
}
