// Prepares pictures with the modules of examples/browser: node prepare.mjs FOLDER DTYPE [[HEIGHT, WIDTH], ...]
// reads FOLDER/model and FOLDER/pixels (all pictures, four bytes a pixel), and writes FOLDER/prepared.
import { readFileSync, writeFileSync } from "node:fs";
import { prepare } from "../../examples/browser/image.js";
import { preprocessing } from "../../examples/browser/metadata.js";

const [folder, dtype, sizes] = process.argv.slice(2);
const { image_size, ...fields } = preprocessing(new Uint8Array(readFileSync(`${folder}/model`)));
const input = { height: image_size[0], width: image_size[1], dtype, ...fields };
const pixels = new Uint8ClampedArray(readFileSync(`${folder}/pixels`));
let start = 0;
const prepared = JSON.parse(sizes).map(([height, width]) => {
  const data = pixels.subarray(start, (start += 4 * height * width));
  return Buffer.from(prepare({ data, width, height }, input).buffer);
});
writeFileSync(`${folder}/prepared`, Buffer.concat(prepared));
