/**
 * From an image file to a model's input, as keras_vit's `preprocess` does by default: both sides resized to the model's
 * size, bilinear without antialias. Drawing on a canvas of that size would smooth in the browser's own way instead.
 */

/**
 * Decodes an image file. An EXIF mark turns the picture upright; colour profiles are ignored, as in Python.
 * @param {Blob} file
 * @param {string} name for the message where it is no image
 * @returns {Promise<ImageData>} its pixels, transparent ones over black
 */
export async function decode(file, name) {
  const bitmap = await createImageBitmap(file, { colorSpaceConversion: "none" }).catch(() => {
    throw new Error(`“${name}” is not an image this browser can read. Choose a JPEG, PNG or WebP file.`);
  });
  const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
  const context = canvas.getContext("2d", { alpha: false, willReadFrequently: true });
  context.drawImage(bitmap, 0, 0);
  bitmap.close();
  return context.getImageData(0, 0, canvas.width, canvas.height);
}

/**
 * @typedef {object} Input what a model takes
 * @property {number} height
 * @property {number} width
 * @property {"float32" | "uint8"} dtype
 * @property {number[]} mean of each channel, subtracted from pixels 0..255 where dtype is float32
 * @property {number[]} std of each channel, divided by
 */

/**
 * Resizes the pixels and, for a float32 input, normalises them.
 * @param {ImageData} pixels
 * @param {Input} input
 * @returns {Float32Array | Uint8Array} height x width x 3
 */
export function prepare({ data, width, height }, input) {
  const rows = neighbours(height, input.height);
  const columns = neighbours(width, input.width);
  const values = new Float32Array(input.height * input.width * 3);
  let next = 0;
  for (const row of rows) {
    for (const column of columns) {
      for (let channel = 0; channel < 3; channel++) {
        const at = (y, x) => data[4 * (y * width + x) + channel];
        const top = mix(at(row.low, column.low), at(row.low, column.high), column.part);
        const bottom = mix(at(row.high, column.low), at(row.high, column.high), column.part);
        values[next++] = mix(top, bottom, row.part);
      }
    }
  }
  if (input.dtype === "uint8") return Uint8Array.from(values, Math.round);
  return values.map((value, i) => (value - input.mean[i % 3]) / input.std[i % 3]);
}

const mix = (from, to, part) => from + (to - from) * part;

/**
 * For each of `target` places along a side, the two of `source` it lies between. Pixels have their centre at a half,
 * and positions are float32, as in TensorFlow's ResizeBilinear (core/kernels/image/resize_bilinear_op.cc).
 */
function neighbours(source, target) {
  const scale = Math.fround(source / target);
  return Array.from({ length: target }, (_, i) => {
    const position = Math.fround(Math.fround((i + 0.5) * scale) - 0.5);
    const low = Math.floor(position);
    return { low: Math.max(low, 0), high: Math.min(low + 1, source - 1), part: Math.fround(position - low) };
  });
}
