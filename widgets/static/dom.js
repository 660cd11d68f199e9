// Building blocks: elements from data. Text is only ever set as textContent, never as markup.
const SVG = "http://www.w3.org/2000/svg";

function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter(Boolean));
  return node;
}

function svg(tag, props = {}, title = "") {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props)) node.setAttribute(name, value);
  if (title) {
    const hover = document.createElementNS(SVG, "title");
    hover.textContent = title;
    node.append(hover);
  }
  return node;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function show(node, visible) {
  node.hidden = !visible;
}

function bytes(n) {
  let unit = "B";
  for (const larger of ["KiB", "MiB", "GiB"]) {
    if (n < 1000) break;
    n /= 1024;
    unit = larger;
  }
  return unit === "B" ? `${Math.round(n)} B` : `${n >= 100 ? n.toFixed(0) : n >= 10 ? n.toFixed(1) : n.toFixed(2)} ${unit}`;
}

function num(value, unit = "") {
  if (value === null || value === undefined) return "–";
  const text = value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
  return unit ? `${text} ${unit}` : text;
}

function tableOf(data, empty) {
  if (!data || !data.rows || !data.rows.length) return el("p", { class: "iwb-empty", text: empty });
  const head = el("tr", {}, ...data.columns.map((c) => el("th", { scope: "col", text: c })));
  const body = data.rows.map((row) =>
    el("tr", {}, ...row.map((v, i) => el(i === 0 ? "th" : "td", i === 0 ? { scope: "row", text: v } : { text: v }))));
  const table = el("table", { class: "iwb-table" }, el("thead", {}, head), el("tbody", {}, ...body));
  return el("div", { class: "iwb-scroll", tabindex: "0" }, table, data.note && el("p", { class: "iwb-note", text: data.note }));
}
