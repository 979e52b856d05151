/** An exported model, run by LiteRT.js on the processor (WebAssembly) or the graphics card (WebGPU). */

import { prepare } from "./image.js";
import { isModel, labels, preprocessing } from "./metadata.js";

const WASM_FOLDER = new URL("./node_modules/@litertjs/core/wasm/", import.meta.url).href;
const OUTPUTS = ["logits", "probabilities"];
let runtime; // of the page, loaded with the first model

/**
 * @typedef {object} Result
 * @property {Float32Array} logits of each class; absent where the file gives probabilities
 * @property {Float32Array} probabilities of each class
 * @property {{heads: number, patches: number, values: Float32Array} | null} attention of the class token to each patch
 * @property {{prepare: number, run: number}} milliseconds
 */

export class Classifier {
  /**
   * Loads a model and runs it once, so that the next run is not the slow first one.
   * @param {Uint8Array} bytes of a .tflite file
   * @param {string} name for messages
   * @param {"wasm" | "webgpu"} backend
   */
  static async load(bytes, name, backend = "wasm") {
    if (!isModel(bytes)) throw new Error(`“${name}” is not a LiteRT model. Choose a .tflite file.`);
    runtime ??= await startRuntime();
    const made = new Classifier();
    try {
      made.model = await runtime.loadAndCompile(bytes, { accelerator: backend });
    } catch (error) {
      throw new Error(`LiteRT cannot run “${name}” here: ${error.message}`);
    }
    try {
      [made.imageName, made.input] = inputOf(made.model, bytes);
      made.labels = await labels(bytes);
      await made.run(new ImageData(1, 1));
    } catch (error) {
      made.delete();
      throw new Error(`“${name}” does not fit this page: ${error.message}`);
    }
    return made;
  }

  /** Where it really runs: a model that WebGPU cannot run whole goes back to WebAssembly. */
  get backend() {
    return this.model.options.accelerator;
  }

  /**
   * @param {ImageData} pixels of an image of any size
   * @returns {Promise<Result>}
   */
  async run(pixels) {
    const begin = performance.now();
    const values = prepare(pixels, this.input);
    const prepared = performance.now();
    const outputs = await this.#compute(values);
    const milliseconds = { prepare: prepared - begin, run: performance.now() - prepared };
    const { logits, attention } = outputs;
    const probabilities = outputs.probabilities?.values ?? softmax(logits.values);
    const [, heads, patches] = attention?.shape ?? [];
    return {
      logits: logits?.values,
      probabilities,
      attention: attention ? { heads, patches, values: attention.values } : null,
      milliseconds,
    };
  }

  /** The class's name, or its number where the file has no names. */
  label = (number) => this.labels?.[number] ?? `class ${number}`;

  /** Gives back the memory outside of JavaScript. */
  delete() {
    this.model.delete();
  }

  async #compute(values) {
    const { height, width } = this.input;
    const image = new runtime.Tensor(values, [1, height, width, 3]);
    const tensors = [image];
    try {
      const results = await this.model.run({ [this.imageName]: image });
      tensors.push(...Object.values(results));
      const outputs = {};
      for (const [name, tensor] of Object.entries(results)) {
        outputs[name] = { shape: [...tensor.type.layout.dimensions], values: (await tensor.data()).slice() };
      }
      return outputs;
    } finally {
      for (const tensor of tensors) if (!tensor.deleted) tensor.delete();
    }
  }
}

/** Whether this browser has a graphics card that WebGPU may use. */
export const hasWebGpu = async () => Boolean(await navigator.gpu?.requestAdapter().catch(() => null));

/** The k best classes of a result, best first, as {label, probability}. */
export function best(classifier, { probabilities }, k = 5) {
  const order = [...probabilities.keys()].sort((a, b) => probabilities[b] - probabilities[a]);
  return order.slice(0, k).map((number) => ({ label: classifier.label(number), probability: probabilities[number] }));
}

async function startRuntime() {
  if (typeof WebAssembly === "undefined") {
    throw new Error("This browser has no WebAssembly, which LiteRT needs. Try a current Chrome, Firefox or Safari.");
  }
  const library = await import("@litertjs/core").catch(() => {
    throw new Error("LiteRT.js is missing. Run “npm ci” in this page's folder, then reload.");
  });
  try {
    // WebGPU shares a model with the processor, and is read back, only where WebAssembly can wait for JavaScript.
    const jspi = (await hasWebGpu()) && (await library.supportsFeature("jspi"));
    await library.loadLiteRt(WASM_FOLDER, { jspi });
  } catch (error) {
    throw new Error(`LiteRT.js could not start: ${error.message ?? "its WebAssembly file did not load"}`);
  }
  return library;
}

/** The name of the model's input and what it takes. */
function inputOf(model, bytes) {
  const [{ name, shape, dtype }, ...others] = model.getInputDetails();
  const [batch, height, width, channels] = shape;
  const sizes = `${dtype} ${[...shape].join("×")}`;
  if (others.length || shape.length !== 4 || batch !== 1 || channels !== 3 || height < 1 || width < 1) {
    throw new Error(`it needs one input of one colour image, such as float32 1×224×224×3. Its input is ${sizes}.`);
  }
  const outputs = model.getOutputDetails().map((output) => output.name);
  if (!outputs.some((output) => OUTPUTS.includes(output))) {
    throw new Error(`it needs an output “logits” or “probabilities”. It has ${outputs.join(", ")}.`);
  }
  return [name, { height, width, dtype, ...preprocessing(bytes) }];
}

function softmax(logits) {
  const largest = logits.reduce((a, b) => Math.max(a, b));
  const powers = logits.map((logit) => Math.exp(logit - largest));
  const sum = powers.reduce((a, b) => a + b);
  return powers.map((power) => power / sum);
}
