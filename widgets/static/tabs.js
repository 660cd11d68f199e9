// Below: pages, drafts, history, comparison, code. A tab list as the ARIA practices describe it.
function drawPages(pane, p) {
  const groups = p.groups || [];
  if (!groups.length) {
    pane.replaceChildren(el("p", { class: "iwb-empty", text: "Which sequence holds which page of the KV cache, while a prompt runs." }));
    return;
  }
  const legend = el("div", { class: "iwb-legend" }, ...[["held", "held, by sequence"], ["shared", "shared"], ["open", "open: full precision until full"],
    ["copied", "made by copy-on-write"], ["cached", "cached prefix"], ["free", "free"]].map(([kind, words]) => el("span", { class: "iwb-key" },
    el("i", { class: `iwb-page iwb-page-key iwb-page-${kind}`, "aria-hidden": "true" }), el("span", { text: words }))));
  const maps = groups.flatMap((g, i) => [
    el("p", { class: "iwb-note", text: `${groups.length > 1 ? `KV group ${i}: ` : ""}${g.summary}${g.more ? `; ${g.more} more pages are not drawn` : ""}` }),
    el("div", { class: "iwb-pagemap", role: "img", "aria-label": `pages after step ${p.step}: ${g.summary}` },
      ...g.cells.map(([state, label, filled, open, owners, words, copied]) => el("span", { title: words, text: label,
        class: `iwb-page iwb-page-${state}${open ? " iwb-page-open" : ""}${owners > 1 ? " iwb-page-shared" : ""}${copied ? " iwb-page-copied" : ""}`,
        style: `--iwb-filled:${Math.round(100 * filled)}%` })))]);
  const told = (p.changes || []).length && el("ol", { class: "iwb-told", "aria-label": "what happened to pages, the latest first" }, ...p.changes.map((text) => el("li", { text })));
  pane.replaceChildren(...[legend, ...maps, told, tableOf(p.table, "")].filter(Boolean));
}

function tabsRegion() {
  const id = `iwb-${Math.random().toString(36).slice(2, 8)}`;
  const names = [["pages", "Pages"], ["drafts", "Drafts"], ["history", "History"], ["compare", "Compare"], ["code", "Code"]];
  const panes = {}, tabs = {};
  const select = (name, focus) => {
    for (const [n] of names) {
      tabs[n].setAttribute("aria-selected", String(n === name));
      tabs[n].tabIndex = n === name ? 0 : -1;
      show(panes[n], n === name);
    }
    if (focus) tabs[name].focus();
  };
  for (const [name, title] of names) {
    panes[name] = el("div", { role: "tabpanel", id: `${id}-${name}`, "aria-labelledby": `${id}-tab-${name}`, class: `iwb-pane iwb-${name}` });
    tabs[name] = el("button", { role: "tab", type: "button", id: `${id}-tab-${name}`, "aria-controls": `${id}-${name}`, text: title,
      onclick: () => select(name, false) });
  }
  const list = el("div", { role: "tablist", class: "iwb-tablist", "aria-label": "Runs and code" }, ...names.map(([n]) => tabs[n]));
  list.addEventListener("keydown", (event) => {
    const at = names.findIndex(([n]) => tabs[n] === document.activeElement);
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (at >= 0 && step) { event.preventDefault(); select(names[(at + step + names.length) % names.length][0], true); }
  });
  select("pages", false);
  const drafts = draftsRegion();
  panes.drafts.append(drafts.node);
  return {
    node: el("section", { class: "iwb-tabs", "aria-label": "Details" }, list, ...names.map(([n]) => panes[n])),
    pages(p) { drawPages(panes.pages, p); },
    drafts(d) { drafts.draw(d); },
    tables(t) {
      panes.history.replaceChildren(tableOf(t.history, "Runs of this panel appear here."));
      panes.compare.replaceChildren(tableOf(t.compare, "Pin a run as A, change the recipe, run again: the difference appears here."));
      panes.code.replaceChildren(...Object.entries(t.code || {}).map(([form, code]) => {
        const copy = el("button", { class: "iwb-button iwb-small", type: "button", text: "copy", "aria-label": `copy as ${form}`,
          onclick: () => copyText(code, copy) });
        return el("div", { class: "iwb-form" }, el("div", { class: "iwb-actions" }, el("span", { class: "iwb-label", text: form }), copy),
          el("pre", { tabindex: "0", text: code }));
      }));
    },
  };
}
