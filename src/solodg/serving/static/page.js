"use strict";
// One request per image, one after another: a broken file rejects no other image.

const SHOWN_CLASSES = 12;
const element = (id) => document.getElementById(id);
let token = "";
let explains = false;
let queue = Promise.resolve();

async function send(path, options = {}) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const response = await fetch(path, { ...options, headers: { ...headers, ...options.headers } });
  if (response.status === 401) {
    element("token-form").hidden = false;
    element("token").focus();
  }
  return response;
}

async function reason(response) {
  try {
    return (await response.json()).error;
  } catch {
    return `the server responded ${response.status}`;
  }
}

async function predict(file) {
  const form = new FormData();
  form.append("images", file);
  for (;;) {
    const response = await send("predict", { method: "POST", body: form });
    if (response.ok) return (await response.json()).predictions[0];
    if (response.status !== 429) throw new Error(await reason(response));
    const seconds = Number(response.headers.get("Retry-After")) || 1;
    await new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
  }
}

function bar(probability, kind) {
  const cell = document.createElement("td");
  const line = document.createElement("div");
  line.className = `bar ${kind}`;
  const drawn = document.createElement("span");
  drawn.style.width = `${75 * probability}%`;
  const written = document.createElement("span");
  written.textContent = `${(100 * probability).toFixed(1)}%`;
  line.append(drawn, written);
  cell.append(line);
  if (kind === "earlier") cell.classList.add("before");
  return cell;
}

function show(article, prediction) {
  article.querySelector(".class").textContent = prediction.class;
  article.querySelector(".certainty").textContent =
    `probability ${prediction.probability.toFixed(3)}, uncertainty ${prediction.uncertainty.toFixed(3)}` +
    (prediction.novelty === null ? "" : `, novelty ${prediction.novelty.toFixed(2)}`);
  const table = article.querySelector(".bars");
  table.hidden = false;
  table.classList.toggle("no-before", prediction.before === null);
  const before = prediction.before ?? {};
  const order = Object.keys(prediction.probabilities).sort(
    (a, b) => prediction.probabilities[b] - prediction.probabilities[a]);
  for (const name of order.slice(0, SHOWN_CLASSES)) {
    const row = document.createElement("tr");
    row.classList.toggle("chosen", name === prediction.class);
    const head = document.createElement("th");
    head.scope = "row";
    head.textContent = name;
    row.append(head, bar(before[name] ?? 0, "earlier"), bar(prediction.probabilities[name], ""));
    table.tBodies[0].append(row);
  }
}

function begin(file) {
  const article = element("result").content.firstElementChild.cloneNode(true);
  article.querySelector(".bars").hidden = true;
  article.querySelector(".name").textContent = file.name;
  const preview = article.querySelector(".preview");
  preview.alt = file.name;
  preview.src = URL.createObjectURL(file);
  preview.onload = preview.onerror = () => URL.revokeObjectURL(preview.src);
  element("results").prepend(article);
  return article;
}

async function explain(file, article) {
  const form = new FormData();
  form.append("images", file);
  const response = await send("explain", { method: "POST", body: form });
  if (!response.ok) return; // the prediction stays, without its figure
  const figure = document.createElement("img");
  figure.alt = `The adaptation to ${file.name}: prototypes before and after, and probabilities`;
  figure.src = URL.createObjectURL(await response.blob());
  figure.onload = () => URL.revokeObjectURL(figure.src);
  article.querySelector(".figure").append(figure);
}

async function process(file, article) {
  try {
    show(article, await predict(file));
    if (explains) await explain(file, article);
  } catch (error) {
    const problem = article.querySelector(".problem");
    problem.textContent = error.message;
    problem.hidden = false;
  }
}

function add(files) {
  const added = [...files].map((file) => [file, begin(file)]);
  if (!added.length) return;
  queue = queue.then(async () => {
    element("status").textContent = "Predicting...";
    for (const [file, article] of added) await process(file, article);
    element("status").textContent = `${added.length} ${added.length === 1 ? "image" : "images"} done`;
  });
}

const OVERALL = { accuracy: "accuracy %", balanced_accuracy: "balanced accuracy %",
  macro_auc: "macro AUC", macro_f1: "macro F1", nll: "NLL", ece: "ECE %", brier: "Brier" };
const PER_CLASS = { sensitivity: "sensitivity %", specificity: "specificity %", auc: "AUC", f1: "F1" };
const ROLES = { target: "unseen", "new-site": "new site", "in-distribution": "seen, new images",
  "source-validation": "seen, validation" };

function metric(found, title) {
  if (!found) return "-";
  const written = (value) => title.endsWith("%") ? (100 * value).toFixed(1) : value.toFixed(3);
  const interval = found.low === null ? "" : ` (${written(found.low)}-${written(found.high)})`;
  return written(found.value) + interval;
}

function scoreTable(caption, first, titles, rows) {
  const table = document.createElement("table");
  table.createCaption().textContent = caption;
  const head = table.createTHead().insertRow();
  for (const text of [first, ...Object.values(titles), "images"]) {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.textContent = text;
    head.append(cell);
  }
  const body = table.createTBody();
  for (const [name, metrics, images] of rows) {
    const row = body.insertRow();
    const cell = document.createElement("th");
    cell.scope = "row";
    cell.textContent = name;
    row.append(cell);
    for (const [key, title] of Object.entries(titles)) {
      row.insertCell().textContent = metric(metrics[key], title);
    }
    row.insertCell().textContent = images;
  }
  return table;
}

function showScores(scores) {
  const box = element("scores");
  const named = (found) => `${found.domain} (${ROLES[found.role] ?? found.role})`;
  const place = box.querySelector(".wide");
  place.replaceChildren();
  box.hidden = false;
  const summary = box.querySelector("summary");
  if (!scores.length) {
    summary.textContent = "Scores: none are recorded";
    place.textContent = "Score the run with solodg evaluate, then serve or export it again.";
    return;
  }
  const first = scores.find((found) => ["new-site", "target"].includes(found.role)) ?? scores[0];
  summary.textContent = `Scores: accuracy ${metric(first.overall.accuracy, "%")}% on ${named(first)}`;
  place.append(scoreTable("With 95% intervals, where they were computed", "domain", OVERALL,
    scores.map((found) => [named(found), found.overall, found.images])));
  for (const found of scores) {
    const classes = Object.entries(found.classes);
    if (classes.length) {
      place.append(scoreTable(`${named(found)}: each class against the others`, "class", PER_CLASS,
        classes.map(([name, each]) => [name, each.metrics, each.images])));
    }
  }
}

async function describeModel() {
  const response = await send("model");
  if (!response.ok) return;
  const { name, model, ...rest } = await response.json();
  explains = rest.explains;
  showScores(rest.scores);
  element("model").textContent = `${name}: ${model.algorithm} on ${model.backbone}, ` +
    `trained on ${model.source_domains.join(", ")}; ${model.classes.length} classes. ` +
    "Each image is classified on its own.";
}

element("files").addEventListener("change", (event) => {
  add(event.target.files);
  event.target.value = ""; // the same file may be chosen again
});
element("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token = element("token").value;
  element("token-form").hidden = true;
  describeModel();
});
const drop = element("drop");
for (const kind of ["dragenter", "dragover"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    drop.classList.add("over");
  });
}
for (const kind of ["dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    drop.classList.remove("over");
  });
}
document.addEventListener("drop", (event) => add(event.dataTransfer.files));
describeModel();
