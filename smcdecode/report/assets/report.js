// Draws one run from the JSON beside it. Texts become text nodes and attributes, never HTML; nothing is fetched.
"use strict";

// ---- the run

const data = JSON.parse(document.getElementById("data").textContent);
const { nodes, cycles } = data;
const ROOT = -1;
const roots = [];

nodes.forEach((node, i) => {
  node.id = i;
  node.children = [];
  node.last = node.first + node.pieces.length - 1;
  node.text = node.pieces.join("");
  (node.parent === ROOT ? roots : nodes[node.parent].children).push(node);
});
for (const node of [...nodes].reverse()) node.size = 1 + node.children.reduce((sum, child) => sum + child.size, 0);
const leaves = nodes.filter((node) => !node.children.length);

const path = (node) => (node.parent === ROOT ? [node] : [...path(nodes[node.parent]), node]);
const wholeText = (node) => path(node).map((each) => each.text).join("");
const subtree = (node) => nodes.slice(node.id, node.id + node.size);

// Colours: seven bins of the log weight increment over the mean of its cycle, from one end of what 95% of the weight saw
// to the other.
const SCALE = quantile(0.95, nodes.flatMap((node) => node.gain.map((g, k) => [Math.abs(g), node.weight[k]])));
const bin = (gain) => (gain === null ? -3 : SCALE < 1e-6 ? 0 : Math.max(-3, Math.min(3, Math.round((3 * gain) / SCALE))));

/** The least value below which lies a share of the weight: pairs of value and weight. */
function quantile(share, pairs) {
  const sorted = pairs.sort((a, b) => a[0] - b[0]);
  let left = share * sorted.reduce((sum, [, weight]) => sum + weight, 0);
  return sorted.find(([, weight]) => (left -= weight) <= 0)?.[0] ?? 0;
}

// ---- small tools

const byId = (id) => document.getElementById(id);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}
const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const number = (x, digits = 3) => (x === null ? "−∞" : x.toFixed(digits).replace("-", "−"));
const signed = (x) => (x === null ? "−∞" : (x < 0 ? "−" : "+") + Math.abs(x).toFixed(2));
const percent = (x) => (x >= 0.0005 || x === 0 ? x.toFixed(3) : "<0.001");
const span = (node) => (node.first === node.last ? `${node.first + 1}` : `${node.first + 1}–${node.last + 1}`);
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

// Control characters and those that turn the direction of writing are named, so that a text cannot rearrange the page.
const visible = (text) =>
  text
    .replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
    .replace(/[\u007f-\u009f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]/g, (c) =>
      `‹${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}›`);
const oneLine = (text) => visible(text).replace(/\n/g, "↵").replace(/\t/g, "⇥");

/** Text with what matches the filter marked. */
function marked(text, query) {
  const low = text.toLowerCase();
  const parts = [];
  let from = 0;
  for (let at; query && low.length === text.length && (at = low.indexOf(query, from)) >= 0; from = at + query.length)
    parts.push(text.slice(from, at), h("mark", {}, text.slice(at, at + query.length)));
  return [...parts, text.slice(from)];
}

// ---- state: what is selected, expanded, zoomed, filtered

const heaviest = nodes.length ? leaves.reduce((best, leaf) => (leaf.mass > best.mass ? leaf : best)) : null;
const opened = () => new Set(heaviest ? path(heaviest).slice(0, -1) : []);
const state = { selected: heaviest, expanded: opened(), zoom: null, stretch: 1, query: "", kind: "all", shown: null, answers: 12 };

// ---- the head, the answers, the facts

function drawHead() {
  byId("target").textContent = visible(data.target);
  document.title = `${visible(data.target)} · smcdecode`;
  byId("prompt").textContent = visible(data.prompt);
  for (const [name, value, of] of data.numbers)
    byId("numbers").append(
      h("div", {}, h("dt", {}, name), h("dd", { class: "value" }, value.replace("-", "−")), h("dd", { class: "of" }, of)));
  for (const [list, facts] of [["trust", data.trust], ["run", data.run]])
    byId(list).append(...facts.map(([name, fact]) => h("div", {}, h("dt", {}, name),
      h("dd", { class: name === "target" || name === "method" ? "code" : null }, visible(fact)))));
  if (!SCALE || SCALE < 1e-6) byId("legend").append("no weight moved against the others");
  else
    byId("legend").append(
      signed(-SCALE),
      h("span", { class: "swatches" }, ...[-3, -2, -1, 0, 1, 2, 3].map((b) => h("i", { class: `f${b}` }))),
      `${signed(SCALE)} log weight increment`);
}

function drawAnswers() {
  const found = data.answers.filter(([text]) => text.toLowerCase().includes(state.query));
  const rows = found.slice(0, state.answers).map(([text, weight, copies]) =>
    h("div", { class: "answer" },
      h("div", { class: "p" }, percent(weight), h("small", { title: plural(copies, "particle") }, `×${copies}`),
        h("div", { class: "bar" }, h("i", { style: `width:${100 * weight}%` }))),
      h("div", { class: "text", dir: "auto", tabindex: text.length > 600 ? 0 : null },
        ...(text ? marked(visible(text), state.query) : [h("span", { class: "newline" }, "(the empty text)")]))));
  const rest = found.slice(state.answers);
  if (data.epitaph) rows.push(h("p", { class: "epitaph" }, visible(data.epitaph)));
  else if (!found.length) rows.push(h("p", { class: "empty" }, "No answer matches the filter."));
  if (rest.length)
    rows.push(h("p", { class: "more" },
      h("button", { onclick: () => { state.answers = Infinity; drawAnswers(); } },
        `Show ${rest.length} more, of weight ${percent(rest.reduce((sum, [, weight]) => sum + weight, 0))}`)));
  byId("answers").replaceChildren(...rows);
}

// ---- the chart: ESS, log Ẑ and the bands, over the same cycles

const LEFT = 54, RIGHT = 14, LINES = 84, BANDS = 430, GAP = 38;

/** Where every cell of the zoomed lineages lies: node.bands[k] = [top, bottom] in 0…1, node.inlet the same before it. */
function layout() {
  const among = state.zoom ? subtree(state.zoom) : nodes;
  const total = new Array(cycles.length).fill(0), used = new Array(cycles.length).fill(0);
  for (const node of among) node.weight.forEach((w, k) => (total[node.first + k] += w));
  for (const node of among)
    node.bands = node.weight.map((w, k) => {
      const c = node.first + k, top = used[c];
      used[c] += total[c] ? w / total[c] : 0;
      return [top, used[c]];
    });
  const split = (children, [top, bottom]) => {
    const whole = children.reduce((sum, child) => sum + child.share, 0);
    let at = top;
    for (const child of children) child.inlet = [at, (at += whole ? ((bottom - top) * child.share) / whole : 0)];
  };
  split(state.zoom ? [state.zoom] : roots, [0, 1]);
  for (const node of among) split(node.children, node.bands.at(-1));
  const first = state.zoom ? state.zoom.first : 0;
  return { among, first, last: Math.max(...among.map((node) => node.last), first) };
}

function drawCharts() {
  const figure = byId("charts");
  if (!cycles.length) return figure.replaceChildren(h("p", { class: "empty" }, "This run has no cycles to show."));
  const { among, first, last } = layout();
  const width = Math.max(320, figure.clientWidth) * state.stretch, column = (width - LEFT - RIGHT) / (last - first + 1);
  const x = (c) => LEFT + (c - first) * column;
  const frame = { first, last, x, column, width };
  const top = GAP - 12, middle = top + LINES + GAP, low = middle + LINES + GAP, height = low + BANDS + 30;
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" });
  svg.append(
    ...resamplings(frame, top, low + BANDS),
    ...panel(frame, "Effective particles, before resampling", top, (cycle) => cycle.ess, [0, data.particles], true),
    ...panel(frame, "log Ẑ so far", middle, (cycle) => cycle.log_z, null, false),
    s("text", { class: "title", x: LEFT, y: low - 10 }, state.zoom ? "Texts below the zoomed one, by weight" : "Texts, by weight"),
    ...bands(frame, among, low),
    ...ticks(frame, low + BANDS));
  const cursor = s("line", { class: "cursor", y1: top, y2: low + BANDS, visibility: "hidden" });
  svg.append(cursor);
  svg.addEventListener("mousemove", (event) => hover(event, svg, frame, cursor));
  svg.addEventListener("mouseleave", () => { byId("tip").hidden = true; cursor.setAttribute("visibility", "hidden"); });
  svg.addEventListener("click", (event) => { const node = under(event); if (node) select(node, true); });
  svg.addEventListener("dblclick", (event) => { const node = under(event); if (node) zoom(node); });
  figure.replaceChildren(svg);
  drawChosen();
}

function resamplings({ first, last, x }, top, bottom) {
  return cycles.map((cycle, c) => [cycle, c]).filter(([cycle, c]) => cycle.resampled && c >= first && c < last)
    .map(([, c]) => s("line", { class: "resampling", x1: x(c + 1), x2: x(c + 1), y1: top, y2: bottom }));
}

/** A line over cycles; with dots where particles were resampled, if asked. */
function panel({ first, last, x, column, width }, title, top, value, range, dots) {
  const those = cycles.slice(first, last + 1).map(value);
  const finite = those.filter((v) => v !== null);
  let [low, high] = range ?? [Math.min(...finite, 0), Math.max(...finite, 0)];
  if (!(high > low)) [low, high] = [low - 1, high + 1];
  const y = (v) => top + LINES * (1 - (v - low) / (high - low));
  const points = those.map((v, i) => (v === null ? null : [x(first + i) + column / 2, y(v)])).filter(Boolean);
  const threshold = dots && data.threshold > 0 && data.threshold < 1 ? data.threshold * data.particles : null;
  const name = (v) => (Number.isInteger(v) ? `${v}` : number(v, 1)).replace("-", "−");
  return [
    s("text", { class: "title", x: LEFT, y: top - 10 }, title),
    s("path", { class: "axis", d: `M${LEFT},${top}V${top + LINES}H${width - RIGHT}` }),
    s("text", { x: LEFT - 7, y: top + 4, "text-anchor": "end" }, name(high)),
    s("text", { x: LEFT - 7, y: top + LINES + 3, "text-anchor": "end" }, name(low)),
    ...(threshold === null ? [] : [s("line", { class: "threshold", x1: LEFT, x2: width - RIGHT, y1: y(threshold), y2: y(threshold) }),
      s("text", { x: LEFT - 7, y: y(threshold) + 3, "text-anchor": "end" }, name(threshold))]),
    s("polyline", { class: "line", points: points.map((p) => p.map((v) => v.toFixed(1)).join(",")).join(" ") }),
    ...(dots || points.length === 1 ? points.filter((_, i) => points.length === 1 || cycles[first + i].resampled)
      .map(([cx, cy]) => s("circle", { class: "dot", cx, cy, r: Math.min(3.5, Math.max(2, column / 3)) })) : []),
  ];
}

function ticks({ first, last, x, column }, bottom) {
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500].find((n) => n * column >= 34) ?? 1000;
  const marks = [];
  for (let c = Math.ceil((first + 1) / step) * step - 1; c <= last; c += step)
    marks.push(s("text", { x: x(c) + column / 2, y: bottom + 16, "text-anchor": "middle" }, `${c + 1}`));
  return [s("text", { x: LEFT - 7, y: bottom + 16, "text-anchor": "end" }, "cycle"), ...marks];
}

function bands(frame, among, top) {
  const shapes = [], crosses = [], labels = [];
  for (const node of among) {
    const cells = cellsOf(node, frame, top);
    shapes.push(...ribbons(node, cells));
    if (node.end === "replaced") shapes.push(...point(node, cells.at(-1), frame));
    if (node.end === "died") crosses.push(cross(cells.at(-1)));
    labels.push(...labelled(node, cells));
  }
  return [...shapes, ...crosses, ...labels];
}

/** The corners of each cell: from x0, where the band before it ends, over x1, where its own height is reached, to x2. */
function cellsOf(node, { x, column }, top) {
  const at = ([a, b]) => [top + a * BANDS, top + b * BANDS];
  return node.bands.map((own, k) => ({
    x0: x(node.first + k), x1: x(node.first + k) + bend(column), x2: x(node.first + k + 1),
    before: at(k ? node.bands[k - 1] : node.inlet), own: at(own), done: node.counts[k] === 0, bin: bin(node.gain[k]),
  }));
}

/** One path for each stretch of cells of one colour. */
function ribbons(node, cells) {
  const runs = [];
  for (const cell of cells) {
    if (Math.max(cell.before[1] - cell.before[0], cell.own[1] - cell.own[0]) < 0.25) continue;
    const run = runs.at(-1);
    if (run && run[0].bin === cell.bin && run[0].done === cell.done && run.at(-1).x2 === cell.x0) run.push(cell);
    else runs.push([cell]);
  }
  return runs.map((run) => {
    const there = run.map((c) => `C${mid(c)},${px(c.before[0])} ${mid(c)},${px(c.own[0])} ${px(c.x1)},${px(c.own[0])}H${px(c.x2)}`);
    const back = [...run].reverse().map((c) =>
      `L${px(c.x2)},${px(c.own[1])}H${px(c.x1)}C${mid(c)},${px(c.own[1])} ${mid(c)},${px(c.before[1])} ${px(c.x0)},${px(c.before[1])}`);
    const d = `M${px(run[0].x0)},${px(run[0].before[0])}${there.join("")}${back.join("")}Z`;
    return s("path", { class: `band f${run[0].bin}${run[0].done ? " done" : ""}`, d, "data-node": node.id });
  });
}
const bend = (column) => Math.min(0.4 * column, 28); // over which a band changes its height
const px = (v) => v.toFixed(1);
const mid = (cell) => px((cell.x0 + cell.x1) / 2);

function point(node, cell, { column }) {
  const [top, bottom] = cell.own;
  if (bottom - top < 0.25) return [];
  const d = `M${px(cell.x2)},${px(top)}L${px(cell.x2 + bend(column))},${px((top + bottom) / 2)}L${px(cell.x2)},${px(bottom)}Z`;
  return [s("path", { class: `band replaced f${cell.bin}`, d, "data-node": node.id })];
}

function cross(cell) {
  const y = cell.own[0], r = 3.5;
  const d = `M${px(cell.x1 - r)},${px(y - r)}l${2 * r},${2 * r}m0,${-2 * r}l${-2 * r},${2 * r}`;
  return s("path", { class: "cross", d });
}

/** Texts where a band is high and long enough for them. */
function labelled(node, cells) {
  const found = [];
  for (let k = 0; k < cells.length; ) {
    let [top, bottom] = cells[k].own, end = k, text = node.pieces[k];
    while (end + 1 < cells.length) {
      const [a, b] = cells[end + 1].own;
      if (Math.min(bottom, b) - Math.max(top, a) < 13) break;
      [top, bottom] = [Math.max(top, a), Math.min(bottom, b)];
      text += node.pieces[++end];
    }
    const fitted = bottom - top < 13 ? "" : fit(oneLine(text).trimStart(), cells[end].x2 - cells[k].x1 - 6);
    if (fitted) found.push(s("text", { class: "label", x: cells[k].x1 + 3, y: (top + bottom) / 2 + 4 }, fitted));
    k = end + 1;
  }
  return found;
}

/** As much of a text as fits a width, if that is worth showing. */
function fit(text, width) {
  const wide = (c) => (c.codePointAt(0) > 0x1100 ? 12.5 : /[mwMW@%–—]/.test(c) ? 9.5 : /[A-Z0-9]/.test(c) ? 7.6 : 6.4);
  const characters = [...text];
  let used = 0, n = 0;
  while (n < characters.length && (used += wide(characters[n])) <= width) n += 1;
  if (n === characters.length) return text;
  return n < 4 ? "" : `${characters.slice(0, n - 1).join("")}…`;
}

/** Wider or narrower columns; the middle of what is seen stays there. */
function stretch(factor) {
  const figure = byId("charts"), middle = (figure.scrollLeft + figure.clientWidth / 2) / figure.scrollWidth;
  state.stretch = Math.max(1, Math.min(64, state.stretch * factor));
  drawCharts();
  figure.scrollLeft = middle * figure.scrollWidth - figure.clientWidth / 2;
}

const under = (event) => (event.target.dataset.node === undefined ? null : nodes[event.target.dataset.node]);

function hover(event, svg, { first, last, x, column }, cursor) {
  const box = svg.getBoundingClientRect(), tip = byId("tip");
  const at = ((event.clientX - box.left) * svg.viewBox.baseVal.width) / box.width;
  const c = first + Math.floor((at - LEFT) / column);
  tip.hidden = c < first || c > last;
  if (tip.hidden) return cursor.setAttribute("visibility", "hidden");
  for (const [name, value] of [["x1", x(c) + column / 2], ["x2", x(c) + column / 2], ["visibility", "visible"]])
    cursor.setAttribute(name, value);
  tip.replaceChildren(...about(c, under(event)));
  tip.style.left = `${Math.max(8, Math.min(event.clientX + 16, innerWidth - tip.offsetWidth - 12))}px`;
  tip.style.top = `${Math.max(8, Math.min(event.clientY + 18, innerHeight - tip.offsetHeight - 8))}px`;
}

function about(c, node) {
  const cycle = cycles[c];
  const lines = [`cycle ${c + 1}: ESS ${number(cycle.ess, 2)}, log Ẑ ${number(cycle.log_z, 2)}${cycle.resampled ? ", resampled" : ""}`];
  if (!node) return lines.map((line) => h("div", { class: "meta" }, line));
  const k = Math.max(0, Math.min(node.pieces.length - 1, c - node.first));
  const text = path(node).slice(0, -1).map((each) => each.text).join("") + node.pieces.slice(0, k + 1).join("");
  lines.push(`weight ${number(node.weight[k])} of ${plural(node.particles[k], "particle")}, increment ${signed(node.gain[k])}`);
  return [h("div", { class: "text", dir: "auto" }, (text.length > 160 ? "…" : "") + visible(text.slice(-160))),
    ...lines.map((line) => h("div", { class: "meta" }, line))];
}

/** An outline around the bands of the selected text. */
function drawChosen() {
  const svg = byId("charts").querySelector("svg");
  if (!svg || !state.selected) return;
  svg.querySelectorAll(".chosen").forEach((old) => old.remove());
  for (const band of svg.querySelectorAll(`.band[data-node="${state.selected.id}"]`))
    svg.append(s("path", { class: "chosen", d: band.getAttribute("d") }));
}

function zoom(node) {
  state.zoom = node;
  const above = node ? path(node) : [];
  byId("crumbs").replaceChildren(
    ...(node ? [h("button", { onclick: () => zoom(null) }, "All texts")] : []),
    ...above.flatMap((each) => [" ▸ ", h("button", { onclick: () => zoom(each) }, oneLine(each.text).trim() || "…")]));
  drawCharts();
}

// ---- the tree

const full = new Map(leaves.map((leaf) => [leaf, wholeText(leaf).toLowerCase()]));
const words = (node) => node.deaths.map((d) => `${data.deaths[d].cause} ${data.deaths[d].why ?? ""}`).join(" ").toLowerCase();

function filter() {
  state.query = byId("filter").value.toLowerCase();
  state.kind = byId("kind").value;
  const found = leaves.filter((leaf) => (state.kind === "all" || leaf.end === state.kind)
    && (full.get(leaf).includes(state.query) || path(leaf).some((node) => words(node).includes(state.query))));
  const every = state.query === "" && state.kind === "all";
  state.shown = every ? null : new Set(found.flatMap(path));
  state.expanded = every ? opened() : new Set([...state.shown].filter((node) =>
    node.children.length && (state.query === "" || !wholeText(node).toLowerCase().includes(state.query))));
  byId("found").textContent = every ? plural(leaves.length, "lineage") : `${found.length} of ${plural(leaves.length, "lineage")}`;
  const rows = visibleRows();
  if (rows.length && !rows.some((row) => row.node === state.selected)) select(rows[0].node, false);
  drawTree();
  drawAnswers();
}

/** The rows to show, in order: nodes with their level and place among their siblings. */
function visibleRows() {
  const rows = [], among = (siblings) => (state.shown ? siblings.filter((node) => state.shown.has(node)) : siblings);
  const visit = (siblings, level) => among(siblings).forEach((node, i, all) => {
    rows.push({ node, level, place: i + 1, size: all.length, open: state.expanded.has(node) && among(node.children).length > 0 });
    if (state.expanded.has(node)) visit(node.children, level + 1);
  });
  visit(roots, 1);
  return rows;
}

function drawTree() {
  const tree = byId("tree"), rows = visibleRows();
  if (!rows.length) return tree.replaceChildren(h("p", { class: "empty" }, "No lineage matches the filter."));
  tree.replaceChildren(...rows.map(drawRow));
}

function drawRow({ node, level, place, size, open }) {
  const selected = node === state.selected;
  const toggle = node.children.length ? (open ? "▾" : "▸") : "";
  return h("div", {
      class: `row${node.mass > 0 ? "" : " gone"}`, role: "treeitem", id: `n${node.id}`, tabindex: selected ? 0 : -1,
      "aria-level": level, "aria-posinset": place, "aria-setsize": size, "aria-selected": selected,
      "aria-expanded": node.children.length ? open : null,
      onclick: (event) => { select(node, false); if (event.target.classList.contains("toggle")) expand(node, !open); focusRow(); },
      ondblclick: () => expand(node, !open),
    },
    h("div", { class: "w" }, node.mass > 0 ? percent(node.mass) : "–",
      h("div", { class: "bar" }, h("i", { style: `width:${100 * node.mass}%` }))),
    h("div", { class: "what", style: `padding-left:${14 * Math.min(level - 1, 14)}px` },
      h("span", { class: "toggle", "aria-hidden": "true" }, toggle),
      h("span", { class: "line-of-text", dir: "auto" }, ...(node.text ? marked(oneLine(node.text), state.query) : [nothing(node)]))),
    h("div", { class: "meta" }, `${span(node)} `, fate(node)));
}

const nothing = (node) => h("span", { class: "newline" }, node.parent === ROOT ? "behind the prompt" : "no text");
const fate = (node) =>
  h("b", { class: `end-${node.end}` }, `· ${node.end === "branch" ? `${node.children.length} ways` : node.end}`);

function select(node, reveal) {
  const before = state.selected;
  state.selected = node;
  if (reveal) {
    if (state.shown && !state.shown.has(node)) { byId("filter").value = ""; byId("kind").value = "all"; filter(); }
    path(node).slice(0, -1).forEach((each) => state.expanded.add(each));
    drawTree();
    const row = byId(`n${node.id}`), tree = byId("tree");
    tree.scrollTop = row.offsetTop - tree.offsetTop - tree.clientHeight / 2;
  } else {
    for (const [each, on] of [[before, false], [node, true]]) {
      const row = each && byId(`n${each.id}`);
      if (row) fill(row, { "aria-selected": on, tabindex: on ? 0 : -1 }, []);
    }
  }
  drawReading();
  drawChosen();
}

function expand(node, open) {
  if (!node.children.length) return;
  if (open) state.expanded.add(node);
  else state.expanded.delete(node);
  drawTree();
}

const focusRow = () => byId(`n${state.selected.id}`)?.focus();

function treeKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const rows = visibleRows(), at = rows.findIndex((row) => row.node === state.selected);
  if (at < 0) return;
  const { node, open } = rows[at];
  const go = (row) => row && select(row.node, false);
  const keys = {
    ArrowDown: () => go(rows[at + 1]),
    ArrowUp: () => go(rows[at - 1]),
    Home: () => go(rows[0]),
    End: () => go(rows.at(-1)),
    ArrowRight: () => (open ? go(rows[at + 1]) : expand(node, true)),
    ArrowLeft: () => (open ? expand(node, false) : node.parent !== ROOT && select(nodes[node.parent], false)),
    Enter: () => expand(node, !open),
    " ": () => expand(node, !open),
    z: () => zoom(node),
  };
  if (!keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
  focusRow();
}

function pageKey(event) {
  const typing = /^(INPUT|SELECT)$/.test(document.activeElement.tagName);
  if (event.key === "/" && !typing) {
    event.preventDefault();
    byId("filter").focus();
  } else if (event.key === "Escape" && (byId("filter").value || byId("kind").value !== "all")) {
    byId("filter").value = "";
    byId("kind").value = "all";
    filter();
  } else if (event.key === "Escape" && state.zoom) zoom(null);
}

// ---- the selected text

function drawReading() {
  const node = state.selected;
  if (!node) return byId("reading").replaceChildren(h("p", { class: "note" }, "There is nothing to read."));
  const above = path(node);
  const blocks = above.flatMap((each) => each.pieces.map((piece, k) => piece && h("span", {
    class: `block b${bin(each.gain[k])}${each === node ? "" : " before"}`,
    title: `cycle ${each.first + k + 1}: weight ${number(each.weight[k])}, increment ${signed(each.gain[k])}`,
  }, visible(piece))).filter(Boolean));
  const prompt = visible(data.prompt);
  byId("reading").replaceChildren(
    h("p", { class: "text", dir: "auto" }, h("span", { class: "given" }, (prompt.length > 240 ? "…" : "") + prompt.slice(-240)), ...blocks),
    h("dl", {}, ...details(node).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    ...node.deaths.map((d) => obituary(data.deaths[d])),
    h("button", { onclick: () => zoom(node) }, "Zoom the chart to this text"));
}

function details(node) {
  const particles = [...new Set(node.particles)];
  const gain = node.gain.includes(null) ? null : node.gain.reduce((sum, g) => sum + g, 0);
  return [
    ["cycles", span(node)],
    ["particles", particles.length > 1 ? `${node.particles[0]} → ${node.particles.at(-1)}` : `${particles[0]}`],
    ["weight", `${number(node.weight[0])}${node.weight.length > 1 ? ` → ${number(node.weight.at(-1))}` : ""}`],
    ["increments", `${signed(gain)} in all, over the mean of each cycle`],
    ["answers", node.mass > 0 ? `of weight ${number(node.mass)} descend from it` : "none descends from it"],
    ["end", ending(node)],
  ];
}

function ending(node) {
  const resampled = cycles[node.last].resampled ? ", at a resampling" : "";
  if (node.end === "branch") return `parts into ${node.children.length} texts after cycle ${node.last + 1}${resampled}`;
  if (node.end === "replaced") return `replaced after cycle ${node.last + 1}: the resampling drew no copy of it`;
  if (node.end === "died") return `died in cycle ${node.last + 1}`;
  const tokens = path(node).reduce((sum, each) => sum + each.counts.reduce((a, b) => a + b, 0), 0);
  return `an answer of ${plural(tokens, "token")}${tokens >= data.max_tokens ? ", cut at the cap" : ""}`;
}

function obituary({ cycle, particle, cause, why, text }) {
  return h("div", { class: "death" },
    h("strong", {}, visible(cause)), ` — particle ${particle + 1}, cycle ${cycle + 1}`,
    ...(why ? [h("div", {}, visible(why))] : []), h("div", { class: "newline" }, `after ${visible(text)}`));
}

// ---- begin

drawHead();
filter();
drawCharts();
if (state.selected) select(state.selected, true);
else drawReading();
byId("wider").addEventListener("click", () => stretch(2));
byId("narrower").addEventListener("click", () => stretch(1 / 2));
byId("filter").addEventListener("input", filter);
byId("kind").addEventListener("change", filter);
byId("tree").addEventListener("keydown", treeKey);
document.addEventListener("keydown", pageKey);
let drawnFor = byId("charts").clientWidth;
new ResizeObserver(() => {
  const width = byId("charts").clientWidth;
  if (width !== drawnFor) { drawnFor = width; drawCharts(); }
}).observe(byId("charts"));
