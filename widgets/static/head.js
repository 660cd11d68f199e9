// Model, device, number format. An entry that cannot be chosen says why, or how to get it.
function render({ model, el: host }) {
  const id = `iwb-${Math.random().toString(36).slice(2, 8)}`;
  const menus = {};
  const menu = (name, title) => {
    const select = el("select", { id: `${id}-${name}`, class: "iwb-select",
      onchange: () => model.send({ do: "open", [name]: select.value }),
      onfocus: () => model.send({ do: "look" }) });  // a model may have been fetched since
    menus[name] = select;
    return el("label", { class: `iwb-field iwb-${name}`, for: select.id }, el("span", { text: title }), select);
  };
  const message = el("p", { class: "iwb-opening", role: "status", hidden: true });
  const detail = el("p", { class: "iwb-label" });
  const root = el("div", { class: "iwb-where", "data-lm-suppress-shortcuts": "true" },
    menu("model", "model"), menu("device", "device"), menu("dtype", "number format"), message, detail);
  root.addEventListener("keydown", (event) => event.stopPropagation());
  host.append(root);
  const drawn = {};
  const update = () => {
    const where = model.get("where");
    for (const [name, select] of Object.entries(menus)) {
      const { value, entries } = where[name] || { value: "", entries: [] };
      const key = JSON.stringify(entries);
      if (drawn[name] !== key) {
        drawn[name] = key;
        select.replaceChildren(...entries.map(([entry, against]) =>
          el("option", { value: entry, disabled: !!against, text: against ? `${entry} – ${against}` : entry })));
      }
      select.value = value;
      select.title = value;
    }
    setText(message, where.message || "");
    show(message, !!where.message);
    setText(detail, where.detail || "");
  };
  model.on("change:where", update);
  update();
  return () => model.off("change:where", update);
}

export default { initialize, render };
