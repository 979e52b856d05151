/**
 * From an image file to a model's input, as the model's `preprocess` does. Drawing on a canvas of that size would smooth
 * in the browser's own way instead.
 */

// Interpolation -> kernel, and the distance at which it ends.
const KERNELS = {
  bilinear: [(x) => Math.max(1 - x, 0), 1],
  bicubic: [(x) => (x < 1 ? (1.5 * x - 2.5) * x * x + 1 : x < 2 ? ((2.5 - 0.5 * x) * x - 4) * x + 2 : 0), 2],
};
const ONE = 2 ** 22; // Pillow's weights are whole numbers of this fraction

/**
 * Decodes an image file. An EXIF mark turns the picture upright; colour profiles are ignored, as in Python.
 * @param {Blob} file
 * @param {string} name for the message where it is no image
 * @returns {Promise<ImageData>} its pixels, transparent ones on white
 */
export async function decode(file, name) {
  const bitmap = await createImageBitmap(file, { colorSpaceConversion: "none" }).catch(() => {
    throw new Error(`“${name}” is not an image this browser can read. Choose a JPEG, PNG or WebP file.`);
  });
  const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
  const context = canvas.getContext("2d", { alpha: false, willReadFrequently: true });
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0);
  bitmap.close();
  return context.getImageData(0, 0, canvas.width, canvas.height);
}

/**
 * @typedef {object} Input what a model takes; all but the first three are fields of keras_vit's Preprocessing
 * @property {number} height
 * @property {number} width
 * @property {"float32" | "uint8"} dtype
 * @property {"squash" | "crop"} resize
 * @property {string} interpolation
 * @property {boolean} antialias
 * @property {number} crop_fraction
 * @property {"nearest" | "down" | "half_even"} crop_rounding
 * @property {boolean} round_pixels
 * @property {number[]} mean
 * @property {number[]} std
 */

/**
 * Resizes the pixels, cuts the middle out and normalises it.
 * @param {ImageData} pixels
 * @param {Input} input
 * @returns {Float32Array | Uint8Array} height x width x 3
 */
export function prepare({ data, width, height }, input) {
  if (!KERNELS[input.interpolation]) throw new Error(`no resize is written for “${input.interpolation}”.`);
  const [source, target] = [[height, width], [input.height, input.width]];
  const size = sizeBeforeCut(source, target, input);
  const cut = (margin) => (input.crop_rounding === "half_even" ? halfToEven(margin / 2) : Math.floor(margin / 2));
  const [rows, columns] = [0, 1].map((side) => {
    const start = cut(size[side] - target[side]);
    return Array.from({ length: target[side] }, (_, i) => neighbours(source[side], size[side], start + i, input));
  });
  const removed = source.map((side, i) => side - size[i]);
  const isHeightFirst = input.antialias && input.round_pixels && removed[0] > Math.max(0, 2 * removed[1]); // Pillow 13
  const colours = data.filter((_, i) => i % 4 < 3);
  const resizeRows = (pixels, across) => resized(pixels, 1, height, 3 * across, rows, input.round_pixels);
  const resizeColumns = (pixels, down) => resized(pixels, down, width, 3, columns, input.round_pixels);
  const values = isHeightFirst
    ? resizeColumns(resizeRows(colours, width), input.height)
    : resizeRows(resizeColumns(colours, height), input.width);
  if (input.dtype === "uint8") return Uint8Array.from(values, Math.round);
  const [mean, std] = [input.mean, input.std].map((each) => [0, 1, 2].map((i) => 255 * (each[i] ?? each[0])));
  return values.map((value, i) => (value - mean[i % 3]) / std[i % 3]);
}

/** The size [height, width] to resize to, of which the middle is kept. */
function sizeBeforeCut(source, target, { resize, crop_fraction, crop_rounding }) {
  const size = target.map((side) => Math.floor(side / crop_fraction + 1e-6));
  if (resize !== "crop") return size;
  const ratios = size.map((side, i) => Math.fround(side / source[i]));
  const side = ratios[1] > ratios[0] ? 1 : 0;
  return source.map((old, i) => {
    const isNearest = crop_rounding === "nearest";
    const share = (old * size[side]) / source[side];
    const scaled = isNearest ? halfToEven(Math.fround(old * ratios[side])) : Math.floor(share);
    return Math.max(scaled, target[i]);
  });
}

function halfToEven(number) {
  const rounded = Math.round(number);
  return rounded - number === 0.5 && rounded % 2 ? rounded - 1 : rounded;
}

/** The first of `old` pixels that the pixel `place` of `size` is computed from, and the weights from there on. */
function neighbours(old, size, place, { interpolation, antialias }) {
  const [kernel, reach] = KERNELS[interpolation];
  const scale = old / size;
  const widening = antialias ? Math.max(scale, 1) : 1;
  const centre = (place + 0.5) * scale;
  const first = Math.max(Math.trunc(centre - reach * widening + 0.5), 0);
  const last = Math.min(Math.trunc(centre + reach * widening + 0.5), old);
  const weights = Array.from({ length: last - first }, (_, i) => kernel(Math.abs(first + i + 0.5 - centre) / widening));
  const sum = weights.reduce((a, b) => a + b);
  return { first, weights: weights.map((weight) => Math.floor((weight / sum) * ONE + 0.5) / ONE) };
}

/** Resizes one side of an array (outer, old, inner), for each of `places` of `neighbours`. */
function resized(pixels, outer, old, inner, places, isRounded) {
  const result = new Float32Array(outer * places.length * inner);
  places.forEach(({ first, weights }, place) => {
    for (let row = 0; row < outer; row++) {
      for (let column = 0; column < inner; column++) {
        const start = (row * old + first) * inner + column;
        let total = 0;
        for (let i = 0; i < weights.length; i++) total += weights[i] * pixels[start + i * inner];
        const value = isRounded ? Math.floor(total + 0.5) : total;
        result[(row * places.length + place) * inner + column] = Math.min(Math.max(value, 0), 255);
      }
    }
  });
  return result;
}
