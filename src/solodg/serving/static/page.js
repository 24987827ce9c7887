import { acceptImages, element, modelText } from "./results.js";

let token = "";
let explains = false;

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

async function explain(file, article) {
  if (!explains) return;
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
  element("model").textContent = modelText(name, model);
  showScores(rest.scores);
}

acceptImages(predict, explain);
element("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token = element("token").value;
  element("token-form").hidden = true;
  describeModel();
});
describeModel();
