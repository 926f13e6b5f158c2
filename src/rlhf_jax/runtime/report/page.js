// Tabs, the settings of the charts, the sample table and the config of the page.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const settings = { over: "steps", smooth: false };
const views = new Map();
let current = "overview";

// What is chosen stands behind the # of the address, so that it outlives loading anew.
function remember() {
  const state = new URLSearchParams({ tab: current, over: settings.over });
  if (settings.smooth) state.set("smooth", "1");
  if (byId("reload")?.checked) state.set("reload", "1");
  history.replaceState(null, "", `#${state}`);
}

function select(name) {
  current = byId(name)?.matches("[role=tabpanel]") ? name : "overview";
  for (const panel of document.querySelectorAll("[role=tabpanel]")) panel.hidden = panel.id !== current;
  for (const tab of document.querySelectorAll("[role=tab]")) {
    tab.setAttribute("aria-selected", tab.dataset.tab === current);
    tab.tabIndex = tab.dataset.tab === current ? 0 : -1;
  }
  remember();
  redraw();
}

function redraw() {
  for (const view of views.get(current) || []) view.draw();
}

function prepareTabs() {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  for (const tab of tabs) {
    tab.setAttribute("aria-controls", tab.dataset.tab);
    tab.addEventListener("click", () => select(tab.dataset.tab));
    tab.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      const next = tabs[(tabs.indexOf(tab) + move + tabs.length) % tabs.length];
      next.focus();
      select(next.dataset.tab);
    });
  }
}

function prepareStage(name, stage) {
  const panel = byId(name), others = panel.querySelector(".others");
  const make = (charts, grid) => charts.map((chart) => {
    const view = new ChartView(chart, stage, settings);
    grid.append(view.figure);
    return view;
  });
  const list = make(stage.charts, panel.querySelector(".known"));
  list.push(...make(stage.others, others.querySelector(".grid")));
  views.set(name, list);
  others.hidden = !stage.others.length;
  others.addEventListener("toggle", redraw);
  if (stage.every > 1) {
    panel.querySelector(".thinned").textContent = `one of every ${stage.every} rows is drawn, of ${stage.rows}`;
  }
  panel.querySelector(".smooth").addEventListener("change", (event) => {
    settings.smooth = event.target.checked;
    showSettings();
  });
  panel.querySelector(".over").addEventListener("change", (event) => {
    settings.over = event.target.value;
    showSettings();
  });
}

// The settings are the same in all stages.
function showSettings() {
  for (const box of document.querySelectorAll(".smooth")) box.checked = settings.smooth;
  for (const box of document.querySelectorAll(".over")) box.value = settings.over;
  remember();
  redraw();
}

const isNumber = (value) => typeof value === "number";
const gain = (row) => (isNumber(row.score) && isNumber(row.score_before) ? row.score - row.score_before : null);
const longer = (row) => (row.answer_before == null ? 0 : row.answer.length - row.answer_before.length);

const FILTERS = {
  all: () => true,
  up: (row) => gain(row) > 0,
  down: (row) => gain(row) !== null && gain(row) < 0,
  changed: (row) => row.answer_before != null && row.answer !== row.answer_before,
  same: (row) => row.answer === row.answer_before,
};
const ORDERS = {
  order: () => 0,
  gain: (row) => -(gain(row) ?? -Infinity),
  loss: (row) => gain(row) ?? Infinity,
  score: (row) => -(row.score ?? -Infinity),
  longer: (row) => -longer(row),
};

function samplesOfStep() {
  const rows = data.samples[byId("sample-stage").value] || [];
  return rows.filter((row) => row.step === Number(byId("sample-step").value));
}

// Text with what was searched for marked; never read as HTML.
function textBox(text, wanted) {
  const box = element("div", { class: "text" });
  const low = text.toLowerCase();
  let at = 0;
  for (let n = wanted ? low.indexOf(wanted) : -1; n >= 0; n = low.indexOf(wanted, at)) {
    box.append(text.slice(at, n), element("mark", {}, text.slice(n, n + wanted.length)));
    at = n + wanted.length;
  }
  box.append(text.slice(at));
  return box;
}

function cell(name, text, score, wanted) {
  const box = element("td", { "data-name": name });
  if (text != null) box.append(textBox(text, wanted));
  if (isNumber(score)) box.append(element("div", { class: "quiet" }, `score ${format(score)}`));
  return box;
}

function sampleRow(row, wanted) {
  const line = element("tr"), change = gain(row);
  line.append(
    cell("prompt", row.prompt, null, wanted),
    cell("answer before", row.answer_before, row.score_before, wanted),
    cell("answer at this step", row.answer, row.score, wanted),
  );
  const last = element("td", { "data-name": "gain" });
  if (change !== null) {
    const how = change > 0 ? "up" : change < 0 ? "down" : "quiet";
    last.append(element("span", { class: how }, (change > 0 ? "+" : "") + format(Number(change.toPrecision(3)))));
  }
  line.append(last);
  return line;
}

function mean(numbers) {
  return numbers.length ? format(numbers.reduce((a, b) => a + b, 0) / numbers.length) : "none";
}

function showSamples() {
  const wanted = byId("sample-search").value.trim().toLowerCase();
  const keep = FILTERS[byId("sample-filter").value], key = ORDERS[byId("sample-order").value];
  const found = (row) => [row.prompt, row.answer, row.answer_before].some((text) => text?.toLowerCase().includes(wanted));
  const all = samplesOfStep();
  const rows = all.filter((row) => keep(row) && found(row)).map((row) => [key(row), row]);
  rows.sort((a, b) => (a[0] < b[0] ? -1 : a[0] > b[0] ? 1 : 0));
  byId("sample-table").tBodies[0].replaceChildren(...rows.map(([, row]) => sampleRow(row, wanted)));
  const scores = (name) => rows.map(([, row]) => row[name]).filter(isNumber);
  const scored = scores("score").length
    ? `; mean score ${mean(scores("score_before"))} before, ${mean(scores("score"))} at this step` : "";
  byId("sample-count").textContent = `${rows.length} of ${all.length} samples${scored}`;
}

function showSteps() {
  const rows = data.samples[byId("sample-stage").value];
  const steps = [...new Set(rows.map((row) => row.step))];
  byId("sample-step").replaceChildren(...steps.map((step) => element("option", { value: step }, step)));
  byId("sample-step").value = steps[steps.length - 1];
  showSamples();
}

function prepareSamples() {
  const stages = Object.keys(data.samples);
  for (const control of document.querySelectorAll("#samples .tools")) control.hidden = !stages.length;
  if (!stages.length) return;
  byId("sample-table").hidden = false;
  byId("pick-stage").hidden = stages.length === 1;
  byId("sample-stage").append(...stages.map((name) => element("option", { value: name }, name)));
  byId("sample-stage").value = stages[stages.length - 1];
  byId("sample-stage").addEventListener("change", showSteps);
  for (const id of ["sample-step", "sample-filter", "sample-order"]) byId(id).addEventListener("change", showSamples);
  byId("sample-search").addEventListener("input", showSamples);
  showSteps();
}

function prepareConfig() {
  byId("only-changed")?.addEventListener("change", (event) => {
    byId("config").classList.toggle("only-changed", event.target.checked);
  });
}

function prepareReload() {
  byId("reload")?.addEventListener("change", remember);
  setInterval(() => byId("reload")?.checked && location.reload(), 30000);
}

function start() {
  const state = new URLSearchParams(location.hash.slice(1));
  settings.smooth = state.has("smooth");
  settings.over = state.get("over") === "minutes" ? "minutes" : "steps";
  if (byId("reload")) byId("reload").checked = state.has("reload");
  for (const part of document.querySelectorAll("[data-share]")) part.style.flexGrow = part.dataset.share;
  for (const [name, stage] of Object.entries(data.stages)) prepareStage(name, stage);
  prepareTabs();
  prepareSamples();
  prepareConfig();
  prepareReload();
  select(state.get("tab") || "overview");
  showSettings();
  new ResizeObserver(redraw).observe(document.querySelector("main"));
}

start();
