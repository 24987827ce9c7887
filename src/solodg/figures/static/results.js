// The list of images and their classes, on the page of the server and on that of `export --web`.

const SHOWN_CLASSES = 12;
export const element = (id) => document.getElementById(id);
let queue = Promise.resolve();

const RESULT = document.createElement("template");
RESULT.innerHTML = `
  <article>
    <div class="head">
      <img class="preview" alt="">
      <div>
        <h2 class="class"></h2>
        <p class="name"></p>
        <p class="certainty"></p>
        <p class="problem" role="alert" hidden></p>
      </div>
    </div>
    <table class="bars">
      <thead><tr><th scope="col">class</th><th scope="col" class="before">before adapting</th>
      <th scope="col">adapted to this image</th></tr></thead>
      <tbody></tbody>
    </table>
    <div class="figure"></div>
  </article>`;

function bar(probability, kind) {
  const cell = document.createElement("td");
  cell.title = probability.toFixed(6);
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
    (prediction.novelty == null ? "" : `, novelty ${prediction.novelty.toFixed(2)}`);
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
  const article = RESULT.content.firstElementChild.cloneNode(true);
  article.querySelector(".bars").hidden = true;
  article.querySelector(".name").textContent = file.name;
  const preview = article.querySelector(".preview");
  preview.alt = file.name;
  preview.src = URL.createObjectURL(file);
  preview.onload = preview.onerror = () => URL.revokeObjectURL(preview.src);
  element("results").prepend(article);
  return article;
}

async function process(file, article, predict, afterwards) {
  try {
    show(article, await predict(file, article));
    await afterwards(file, article);
  } catch (error) {
    const problem = article.querySelector(".problem");
    problem.textContent = error.message;
    problem.hidden = false;
  }
}

// Predicts images that are chosen or dropped, one after another: a broken file stops no other.
export function acceptImages(predict, afterwards = async () => {}) {
  function add(files) {
    const added = [...files].map((file) => [file, begin(file)]);
    if (!added.length) return;
    queue = queue.then(async () => {
      element("status").textContent = "Predicting...";
      for (const [file, article] of added) await process(file, article, predict, afterwards);
      element("status").textContent = `${added.length} ${added.length === 1 ? "image" : "images"} done`;
    });
  }
  element("files").addEventListener("change", (event) => {
    add(event.target.files);
    event.target.value = ""; // the same file may be chosen again
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
}

export function modelText(name, model) {
  return `${name}: ${model.algorithm} on ${model.backbone}, ` +
    `trained on ${model.source_domains.join(", ")}; ${model.classes.length} classes. ` +
    "Each image is classified on its own.";
}
