/** The page: what is chosen goes to the classifier, what comes back is shown. */

import * as attention from "./attention.js";
import { best, Classifier, hasWebGpu } from "./classifier.js";
import { decode } from "./image.js";

const $ = (id) => document.getElementById(id);
const LARGEST_SIDE = 1024; // of the picture shown; the model gets all pixels
const FEW_PIXELS = 64; // below, the pixels themselves are shown

/** What is on the page: the model's file, the model, the image and what the model made of it. */
export const page = { file: null, classifier: null, pixels: null, result: null };

// One thing at a time, in the order in which it was asked for; whatever fails is said in a sentence.
let queue = Promise.resolve();
function perform(doing, action) {
  queue = queue.then(async () => {
    say(doing);
    await new Promise((painted) => setTimeout(painted, 20)); // WebAssembly holds the page still while it computes
    try {
      await action();
    } catch (error) {
      say(error.message, "error");
    }
  });
  return queue;
}

function say(sentence, kind = "") {
  $("status").textContent = sentence;
  $("status").className = kind;
}

async function openModel(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  const wanted = $("backend").value;
  $("backend").value = page.classifier?.backend ?? "wasm"; // should it fail, what was there stays
  const classifier = await Classifier.load(bytes, file.name, wanted);
  page.classifier?.delete();
  Object.assign(page, { file, classifier });
  const { height, width, dtype } = classifier.input;
  $("model-name").textContent = file.name;
  $("model-size").textContent = `${(bytes.length / 1e6).toFixed(1)} MB`;
  $("model-input").textContent = `${width} × ${height} pixels, ${dtype}`;
  $("backend").value = classifier.backend;
  await classify();
}

async function openImage(blob, name) {
  page.pixels = await decode(blob, name);
  showImage(page.pixels, name);
  await classify();
}

async function classify() {
  const { classifier, pixels } = page;
  if (!classifier) return say("No model yet: put model.tflite beside this page, or choose a .tflite file.");
  if (!pixels) return say("Ready. Choose an image.");
  page.result = await classifier.run(pixels);
  showBest();
  showTimes(page.result.milliseconds.run);
  showHeads();
  const [first] = best(classifier, page.result, 1);
  say(`${first.label}, ${percent(first.probability)}`, "done");
}

async function measure() {
  const times = [];
  for (let i = 0; i < 20; i++) times.push((await page.classifier.run(page.pixels)).milliseconds.run);
  times.sort((a, b) => a - b);
  showTimes((times[9] + times[10]) / 2);
  say(`Median of 20 runs; the fastest took ${milliseconds(times[0])}.`, "done");
}

const percent = (part) => `${(100 * part).toFixed(1)}\u00a0%`;
const milliseconds = (time) => `${time < 10 ? time.toFixed(1) : Math.round(time)}\u00a0ms`;

function showImage(pixels, name) {
  const shrink = Math.min(1, LARGEST_SIDE / Math.max(pixels.width, pixels.height));
  const whole = new OffscreenCanvas(pixels.width, pixels.height);
  whole.getContext("2d").putImageData(pixels, 0, 0);
  const canvas = $("image");
  canvas.width = Math.ceil(pixels.width * shrink);
  canvas.height = Math.ceil(pixels.height * shrink);
  canvas.getContext("2d").drawImage(whole, 0, 0, canvas.width, canvas.height);
  canvas.setAttribute("aria-label", name);
  $("stage").className = Math.max(pixels.width, pixels.height) < FEW_PIXELS ? "few-pixels" : "";
  $("stage").style.setProperty("--ratio", pixels.width / pixels.height);
}

function showBest() {
  const rows = best(page.classifier, page.result).map(({ label, probability }) => {
    const row = document.createElement("li");
    const [name, number, bar] = ["span", "span", "div"].map((tag) => document.createElement(tag));
    [name.textContent, number.textContent] = [label, percent(probability)];
    bar.style.setProperty("--part", probability);
    row.append(name, number, bar);
    return row;
  });
  $("best").replaceChildren(...rows);
  $("best-empty").hidden = true;
}

function showTimes(run) {
  $("time-run").textContent = milliseconds(run);
  $("time-prepare").textContent = milliseconds(page.result.milliseconds.prepare);
  $("time-backend").textContent = page.classifier.backend === "webgpu" ? "WebGPU" : "WebAssembly";
  $("times").hidden = $("measure").hidden = false;
}

/** A small heat map of every head, each a choice; the one chosen lies over the image. */
function showHeads() {
  const maps = page.result.attention;
  $("attention").hidden = $("heat").hidden = !maps;
  if (!maps) return;
  const chosen = $("heads").querySelector(":checked")?.value ?? "mean";
  const heads = ["mean", ...Array(maps.heads).keys()].map((head) => {
    const [label, radio, canvas] = ["label", "input", "canvas"].map((tag) => document.createElement(tag));
    Object.assign(radio, { type: "radio", name: "head", value: head, checked: String(head) === chosen });
    attention.draw(canvas, attention.weights(maps, head), page.classifier.input);
    label.append(radio, canvas, head === "mean" ? "Mean" : `${head + 1}`);
    return label;
  });
  if (!heads.some((label) => label.firstChild.checked)) heads[0].firstChild.checked = true;
  $("heads").replaceChildren(...heads);
  showHeat();
}

function showHeat() {
  const head = $("heads").querySelector(":checked").value;
  const map = attention.weights(page.result.attention, head === "mean" ? head : Number(head));
  attention.draw($("heat"), map, page.classifier.input, true);
}

/** Files that were dropped, pasted or chosen: models and images by their name. */
function openFiles(files) {
  for (const file of files) {
    if (file.name.endsWith(".tflite")) perform(`Loading ${file.name} …`, () => openModel(file));
    else perform(`Looking at ${file.name} …`, () => openImage(file, file.name));
  }
}

function chosen(event, open) {
  const [file] = event.target.files;
  event.target.value = ""; // the same file may be chosen again
  if (file) open(file);
}

async function openSample() {
  const response = await fetch("sample.png");
  if (!response.ok) throw new Error("sample.png is missing beside this page.");
  await openImage(await response.blob(), "sample.png");
}

/** The model beside the page, `model.tflite` or what the address names after ?model=. */
async function openDefault() {
  const name = new URLSearchParams(location.search).get("model") ?? "model.tflite";
  const response = await fetch(name);
  if (response.ok) await openModel(new File([await response.blob()], name));
  else await classify(); // says that there is none
  $("backend").options[1].disabled = !(await hasWebGpu());
}

$("image-file").addEventListener("change", (event) => chosen(event, (file) => openFiles([file])));
$("model-file").addEventListener("change", (event) =>
  chosen(event, (file) => perform(`Loading ${file.name} …`, () => openModel(file))),
);
$("sample").addEventListener("click", () => perform("Looking at the sample …", openSample));
$("measure").addEventListener("click", () => perform("Measuring 20 runs …", measure));
$("backend").addEventListener("change", () => {
  if (page.file) perform("Changing the backend …", () => openModel(page.file));
});
$("heads").addEventListener("change", showHeat);
$("strength").addEventListener("input", () => $("heat").style.setProperty("opacity", $("strength").value / 100));
addEventListener("paste", (event) => openFiles(event.clipboardData.files));
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  openFiles(event.dataTransfer.files);
});

perform("Loading the model …", openDefault);
