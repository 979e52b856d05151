/** What a .tflite file says about itself, in the zip archive at its end: class names and how to prepare images. */

/**
 * @param {Uint8Array} bytes a whole file
 * @returns {boolean} whether it is a LiteRT model
 */
export const isModel = (bytes) => text(bytes.subarray(4, 8)) === "TFL3";

/**
 * @param {Uint8Array} bytes a LiteRT model
 * @returns {Promise<string[] | null>} the class names in the order of the logits; null where there are none
 */
export async function labels(bytes) {
  const entry = zipEntries(bytes).find(({ name }) => name.endsWith(".txt"));
  if (!entry) return null;
  const stream = new Blob([entry.content]).stream();
  const inflated = entry.deflated ? stream.pipeThrough(new DecompressionStream("deflate-raw")) : stream;
  return (await new Response(inflated).text()).trimEnd().split(/\r?\n/);
}

/**
 * @param {Uint8Array} bytes a LiteRT model
 * @returns {object} fields of keras_vit's Preprocessing, for an image of any size
 */
export function preprocessing(bytes) {
  const entry = zipEntries(bytes).find(({ name }) => name === "preprocessing.json");
  if (entry) return JSON.parse(text(entry.content));
  throw new Error("it does not say how to prepare images. Write it again with export.tflite, without source_size.");
}

const text = (bytes) => new TextDecoder().decode(bytes);
const viewOf = (bytes) => new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);

/** The entries of a zip archive at the end of a file; none where there is no archive. */
function zipEntries(bytes) {
  const view = viewOf(bytes);
  const END = 0x06054b50; // of the central directory; 22 bytes long without a comment
  let end = bytes.length - 22;
  while (end >= 0 && end > bytes.length - 22 - 65536 && view.getUint32(end, true) !== END) end--;
  if (end < 0 || view.getUint32(end, true) !== END) return [];
  let at = end - view.getUint32(end + 12, true);
  const start = at - view.getUint32(end + 16, true); // offsets count from here: the file's start or the archive's
  return Array.from({ length: view.getUint16(end + 10, true) }, () => {
    const [nameLength, extraLength, commentLength] = [28, 30, 32].map((field) => view.getUint16(at + field, true));
    const local = start + view.getUint32(at + 42, true);
    const begin = local + 30 + view.getUint16(local + 26, true) + view.getUint16(local + 28, true);
    const entry = {
      name: text(bytes.subarray(at + 46, at + 46 + nameLength)),
      deflated: view.getUint16(at + 10, true) === 8,
      content: bytes.subarray(begin, begin + view.getUint32(at + 20, true)),
    };
    at += 46 + nameLength + extraLength + commentLength;
    return entry;
  });
}
