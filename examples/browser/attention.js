/** The class token's attention as heat maps, one pixel a patch; the style sheet stretches them. */

// Points of the colour map, dark to bright in even steps of lightness (matplotlib's inferno).
const COLOURS = ["000004", "280b54", "65156e", "9f2a63", "d44842", "f57d15", "fac127", "fcffa4"].map(fromHex);

/**
 * @param {{heads: number, patches: number, values: Float32Array}} attention
 * @param {number | "mean"} head
 * @returns {Float32Array} of each patch, in rows; the largest is 1
 */
export function weights({ heads, patches, values }, head) {
  const chosen = head === "mean" ? [...Array(heads).keys()] : [head];
  const sums = new Float32Array(patches);
  for (const each of chosen) for (let i = 0; i < patches; i++) sums[i] += values[each * patches + i];
  const largest = sums.reduce((a, b) => Math.max(a, b)) || 1;
  return sums.map((sum) => sum / largest);
}

/**
 * @param {HTMLCanvasElement} canvas
 * @param {Float32Array} map of `weights`
 * @param {{height: number, width: number}} input whose proportions the grid of patches has
 * @param {boolean} clear whether patches of little weight let through what is below
 */
export function draw(canvas, map, { height, width }, clear = false) {
  canvas.height = Math.round(Math.sqrt((map.length * height) / width));
  canvas.width = map.length / canvas.height;
  const picture = new ImageData(canvas.width, canvas.height);
  map.forEach((value, i) => picture.data.set([...colour(value), clear ? 255 * value : 255], 4 * i));
  canvas.getContext("2d").putImageData(picture, 0, 0);
}

function colour(value) {
  const position = value * (COLOURS.length - 1);
  const low = Math.min(Math.floor(position), COLOURS.length - 2);
  return COLOURS[low].map((from, i) => from + (COLOURS[low + 1][i] - from) * (position - low));
}

function fromHex(text) {
  const number = parseInt(text, 16);
  return [number >> 16, (number >> 8) & 255, number & 255];
}
