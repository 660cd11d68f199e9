// One widget: regions are made once, then each trait redraws its part.
function render({ model, el: host }) {
  const send = (message) => model.send(message);
  const run = runRegion(send), meters = metersRegion(send), tabs = tabsRegion();
  const spoken = el("div", { class: "iwb-spoken", role: "status", "aria-live": "polite" });
  const root = el("div", { class: "iwb-live", "data-lm-suppress-shortcuts": "true" }, run.node, meters.node, tabs.node, spoken);
  root.addEventListener("keydown", (event) => event.stopPropagation());
  host.classList.add("iwb-host");
  host.append(root);

  let said = "";
  const speak = (s) => {
    const words = s.problem ? `${s.problem.kind}: ${s.problem.message}` : s.stale && s.state === "idle" ? s.stale
      : s.state === "idle" ? (s.ended ? `${s.ended}, ${s.done} tokens` : "ready") : s.state;
    if (words !== said) { said = words; spoken.textContent = words; }
  };
  const redraw = {
    status: (s) => { run.status(s); meters.status(s); run.node.classList.toggle("iwb-old", !!s.stale); root.dataset.state = s.state; speak(s); },
    text: (t) => run.text(t),
    meters: (m) => { run.meters(m); meters.meters(m); },
    tables: (t) => tabs.tables(t),
    pages: (p) => tabs.pages(p),
    drafts: (d) => tabs.drafts(d),
    inputs: (v) => run.inputs(v),
  };
  const stops = Object.entries(redraw).map(([name, draw]) => {
    const update = () => draw(model.get(name));
    model.on(`change:${name}`, update);
    update();
    return () => model.off(`change:${name}`, update);
  });
  return () => stops.forEach((stop) => stop());
}

export default { initialize, render };
