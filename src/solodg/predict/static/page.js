// Images are decoded and classified here, on the reader's machine. The one thing that is fetched is
// the model. There is no worker: the Content-Security-Policy of a page does not hold in it.

import * as ort from "./onnxruntime/ort.js";
import { checkCanvas, decode } from "./pixels.js";
import { acceptImages, element, modelText } from "./results.js";

ort.env.wasm.numThreads = 1;
ort.env.wasm.wasmPaths = { wasm: new URL("./onnxruntime/ort.wasm", import.meta.url).href };

async function fetched(path) {
  const response = await fetch(path);
  if (!response.ok) throw new Error(`cannot load ${path}: the server answers ${response.status}`);
  return response;
}

async function load() {
  checkCanvas();
  const { name, model } = await (await fetched("model.json")).json();
  const content = await (await fetched("model.onnx")).arrayBuffer();
  const session = await ort.InferenceSession.create(content, { executionProviders: ["wasm"] });
  element("model").textContent = modelText(name, model);
  element("status").textContent = "Ready.";
  return { model, session };
}

function uncertainty(probabilities) {
  const entropy = probabilities.map((p) => Math.max(p, 1e-12)).reduce(
    (sum, p) => sum - p * Math.log(p), 0);
  return entropy / Math.log(probabilities.length);
}

async function predict(file, article) {
  const { model, session } = await loaded;
  const started = performance.now();
  const { pixels, guessed } = await decode(file, model);
  const shape = [1, model.channels, model.image_size, model.image_size];
  const found = await session.run({ pixels: new ort.Tensor("uint8", pixels, shape) });
  const seconds = (performance.now() - started) / 1000;
  const after = [...found.probabilities.data];
  const before = found.before ? [...found.before.data] : null;
  if (![...after, ...before ?? []].every(Number.isFinite)) {
    throw new Error("the class probabilities are not finite (NaN): the model cannot be trusted");
  }
  const name = article.querySelector(".name");
  name.textContent = `${file.name}, ${seconds.toFixed(2)} s`;
  if (guessed) name.textContent += "; the range of its values was guessed from the largest";
  const best = after.indexOf(Math.max(...after));
  const named = (values) => Object.fromEntries(model.classes.map((c, i) => [c, values[i]]));
  return {
    class: model.classes[best],
    probability: after[best],
    uncertainty: uncertainty(after),
    novelty: found.novelty ? found.novelty.data[0] : null,
    probabilities: named(after),
    before: before && named(before),
  };
}

element("unserved").hidden = true;
const loaded = load();
loaded.catch((error) => { element("status").textContent = `Error: ${error.message}.`; });
acceptImages(predict);
