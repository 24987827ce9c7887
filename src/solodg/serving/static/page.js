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

async function describeModel() {
  const response = await send("model");
  if (!response.ok) return;
  const { name, model, ...rest } = await response.json();
  explains = rest.explains;
  element("model").textContent = modelText(name, model);
}

acceptImages(predict, explain);
element("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token = element("token").value;
  element("token-form").hidden = true;
  describeModel();
});
describeModel();
