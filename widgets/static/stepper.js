// A slider over numbered pictures with buttons on both sides; all of it works with the keyboard.
function stepper(knob, move) {
  const words = el("output", { class: "iwb-lanes-words", "aria-live": "polite" });
  const slider = el("input", { type: "range", min: "0", step: "1", "aria-label": knob, class: "iwb-lanes-slider" });
  const to = (at) => move(Math.min(Math.max(at, 0), Number(slider.max)));
  const back = el("button", { type: "button", class: "iwb-button iwb-small", text: "◀", "aria-label": `${knob}: one back`, onclick: () => to(Number(slider.value) - 1) });
  const on = el("button", { type: "button", class: "iwb-button iwb-small", text: "▶", "aria-label": `${knob}: one on`, onclick: () => to(Number(slider.value) + 1) });
  slider.addEventListener("input", () => to(Number(slider.value)));
  const controls = el("div", { class: "iwb-actions" }, back, slider, on);
  return {
    controls, words,
    show(at, last, text) {
      slider.max = String(last);
      slider.value = String(at);
      slider.setAttribute("aria-valuetext", text);
      setText(words, text);
      back.disabled = at <= 0;
      on.disabled = at >= last;
      show(controls, last > 0);
    },
  };
}

// JupyterLab would take the arrow keys; what is told by boxes can be read as a list.
function pictureRegion(p, knob, move, ...drawn) {
  const step = stepper(knob, move), list = el("ul");
  const asText = el("details", { class: "iwb-lanes-text" }, el("summary", { text: "this picture as text" }), list);
  const all = el("section", { class: "iwb-root iwb-lanes", "data-lm-suppress-shortcuts": "true", "aria-label": p.title },
    el("h4", { text: p.title }), step.controls, step.words, ...drawn, p.note && el("p", { class: "iwb-note", text: p.note }), asText);
  all.addEventListener("keydown", (event) => event.stopPropagation());
  return { all, step, asText, tell(lines) { if (asText.open) list.replaceChildren(...lines.map((text) => el("li", { text }))); } };
}
