/**
 * What a .tflite file says about itself: the class names in the zip archive at its end, and how its input is normalised
 * (TFLite Metadata, https://ai.google.dev/edge/litert/conversion/tensorflow/metadata).
 */

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
 * @returns {{mean: number[], std: number[]}} of the three channels, for pixels 0..255; -1..1 where nothing is said
 */
export function normalization(bytes) {
  const model = Table.root(bytes);
  const named = model.tables(6).find((row) => row.string(0) === "TFLITE_METADATA");
  // ModelMetadata > SubGraphMetadata > TensorMetadata of the first input > ProcessUnits; 1 is NormalizationOptions.
  const input = named && Table.root(content(bytes, model.tables(4)[named.number(1)])).tables(3)[0]?.tables(2)[0];
  const options = input?.tables(4).find((unit) => unit.byte(0) === 1)?.table(1);
  const three = (values, otherwise) => [0, 1, 2].map((i) => values?.[i] ?? values?.[0] ?? otherwise);
  return { mean: three(options?.floats(0), 127.5), std: three(options?.floats(1), 127.5) };
}

const text = (bytes) => new TextDecoder().decode(bytes);
const viewOf = (bytes) => new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);

/** What a buffer holds: bytes within the flatbuffer, or behind it at an offset from the file's start. */
function content(file, buffer) {
  const offset = buffer.number(1);
  return offset ? file.subarray(offset, offset + buffer.number(2)) : buffer.bytes(0);
}

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

/** A flatbuffers table, its fields by their number in the schema. */
class Table {
  constructor(whole, at) {
    this.whole = whole;
    this.view = viewOf(whole);
    this.at = at;
  }

  static root = (bytes) => new Table(bytes, viewOf(bytes).getUint32(0, true));

  /** Where a field lies; 0 where it is left out. */
  place(field) {
    const list = this.at - this.view.getInt32(this.at, true);
    const entry = 4 + 2 * field;
    const offset = entry < this.view.getUint16(list, true) ? this.view.getUint16(list + entry, true) : 0;
    return offset && this.at + offset;
  }

  target = (place) => place + this.view.getUint32(place, true);
  byte = (field) => (this.place(field) ? this.view.getUint8(this.place(field)) : 0);
  number = (field) => (this.place(field) ? this.view.getUint32(this.place(field), true) : 0);
  table = (field) => new Table(this.whole, this.target(this.place(field)));
  string = (field) => text(this.bytes(field));
  tables = (field) => this.vector(field, 4, (place) => new Table(this.whole, this.target(place)));
  floats = (field) => this.vector(field, 4, (place) => this.view.getFloat32(place, true));

  bytes(field) {
    if (!this.place(field)) return new Uint8Array();
    const start = this.target(this.place(field));
    return this.whole.subarray(start + 4, start + 4 + this.view.getUint32(start, true));
  }

  vector(field, size, read) {
    if (!this.place(field)) return [];
    const start = this.target(this.place(field));
    return Array.from({ length: this.view.getUint32(start, true) }, (_, i) => read(start + 4 + size * i));
  }
}
