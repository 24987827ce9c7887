// From a file to the pixels that the model reads, as `solodg.pixels` makes them.

import { PlaneResizer, blockMeans } from "./resize.js";
import { readPng16 } from "./png16.js";

const MAX_PIXELS = 50_000_000;
const STRIP_PIXELS = 2 ** 20; // in memory at once as RGBA
const USUAL_RANGES = [255, 1023, 4095, 16383, 65535];

// Returns {pixels, guessed}: (channels, size, size) bytes, and whether a range had to be guessed.
export async function decode(file, model) {
  try {
    return await decoded(file, model);
  } catch (error) {
    throw new Error(`cannot read image ${file.name}: ${error.message}`);
  }
}

async function decoded(file, { channels, image_size: size, window }) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  const kind = format(bytes);
  if (!kind) throw new Error("not a JPEG, PNG, WebP, GIF or BMP file");
  const source = kind === "PNG" && bytes[24] === 16
    ? sixteenBits(await readPng16(bytes, checkSize), window)
    : await eightBits(file, kind === "JPEG" ? bytes : null, size);
  try {
    if (window && !source.wide) {
      throw new Error(`of 8 bits or in colour; the model reads grey values from ${window[0]} to ` +
        `${window[1]}, in a PNG of 16 bits`);
    }
    return { pixels: resized(source, channels, size), guessed: source.wide && !window };
  } finally {
    source.close();
  }
}

function format(bytes) {
  const text = String.fromCharCode(...bytes.subarray(0, 12));
  if (text.startsWith("\xff\xd8\xff")) return "JPEG";
  if (text.startsWith("\x89PNG\r\n\x1a\n")) return "PNG";
  if (text.startsWith("GIF8")) return "GIF";
  if (text.startsWith("BM")) return "BMP";
  if (text.startsWith("RIFF") && text.endsWith("WEBP")) return "WebP";
  return null;
}

// The browser's decoder: it applies the EXIF orientation, and here no colour profile. `jpeg` has the
// bytes of a JPEG file.
async function eightBits(file, jpeg, size) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file, {
      imageOrientation: "from-image", colorSpaceConversion: "none", premultiplyAlpha: "none",
    });
  } catch {
    throw new Error("damaged, or of a kind that this browser cannot read");
  }
  const { width, height } = bitmap;
  checkSize(width, height);
  const context = new OffscreenCanvas(width, Math.min(height, stripRows(width))).getContext(
    "2d", { willReadFrequently: true, colorSpace: "srgb" });
  const factor = jpeg ? draftFactor(width, height, size) : 1;
  // Blocks begin at the corner of the image as it is stored.
  const [fromRight, fromBottom] = factor > 1 ? mirrored(exifOrientation(jpeg)) : [false, false];
  const missing = (length) => (factor - length % factor) % factor;
  return {
    width, height, factor,
    left: fromRight ? missing(width) : 0,
    above: fromBottom ? missing(height) : 0,
    rows(top, count) {
      context.fillStyle = "white"; // transparent images lie on white
      context.fillRect(0, 0, width, count);
      context.drawImage(bitmap, 0, -top);
      return planes(context.getImageData(0, 0, width, count).data);
    },
    close: () => bitmap.close(),
  };
}

function checkSize(width, height) {
  if (width * height > MAX_PIXELS) {
    throw new Error(`${width} x ${height} pixels; at most ${MAX_PIXELS} are allowed`);
  }
}

// How many times smaller `predict` decodes a JPEG: each pixel is then about the mean of a block.
function draftFactor(width, height, size) {
  const scale = Math.min(Math.floor(width / (2 * size)), Math.floor(height / (2 * size)));
  return [8, 4, 2, 1].find((factor) => scale >= factor) ?? 1;
}

// Returns whether the orientation of a JPEG puts its first column right, and its first row below.
function mirrored(orientation) {
  return [[2, 3, 6, 7].includes(orientation), [3, 4, 7, 8].includes(orientation)];
}

// Returns the EXIF orientation of a JPEG file; 1, upright, where it has none.
function exifOrientation(bytes) {
  const view = new DataView(bytes.buffer);
  for (let at = 2; at + 20 < bytes.length && bytes[at] === 0xff && bytes[at + 1] !== 0xda;) {
    if (bytes[at + 1] === 0xe1 && view.getUint32(at + 4) === 0x45786966) { // "Exif"
      const tiff = at + 10;
      const little = bytes[tiff] === 0x49;
      const directory = tiff + view.getUint32(tiff + 4, little);
      for (let i = 0; i < view.getUint16(directory, little); i++) {
        const entry = directory + 2 + 12 * i;
        if (view.getUint16(entry, little) === 0x0112) return view.getUint16(entry + 8, little);
      }
    }
    at += 2 + view.getUint16(at + 2);
  }
  return 1;
}

function sixteenBits({ width, height, channels, values }, window) {
  const wide = channels === 1;
  const reduce = wide ? toEightBits(values, window) : (value) => value >> 8;
  return {
    width, height, wide, factor: 1, left: 0, above: 0,
    rows(top, count) {
      const out = [0, 1, 2].map(() => new Uint8Array(width * count));
      const colours = channels > 2 ? [0, 1, 2] : [0, 0, 0];
      for (let i = 0; i < width * count; i++) {
        const start = (top * width + i) * channels;
        const alpha = channels % 2 ? 255 : values[start + channels - 1] >> 8;
        colours.forEach((colour, plane) => {
          const value = reduce(values[start + colour]);
          out[plane][i] = Math.round((value * alpha + 255 * (255 - alpha)) / 255);
        });
      }
      return out;
    },
    close() {},
  };
}

// Maps grey values by the window, or by the smallest usual range that holds those of the image.
function toEightBits(values, window) {
  const largest = window ? 0 : values.reduce((a, b) => Math.max(a, b), 0);
  const [low, high] = window ?? [0, USUAL_RANGES.find((limit) => largest <= limit)];
  const factor = Math.fround(255 / (high - low));
  return (value) => halfToEven(
    Math.min(255, Math.max(0, Math.fround(Math.fround(value - Math.fround(low)) * factor))));
}

function halfToEven(value) {
  const below = Math.floor(value);
  if (value - below !== 0.5) return Math.round(value);
  return below % 2 ? below + 1 : below;
}

function planes(rgba) {
  const out = [0, 1, 2].map(() => new Uint8Array(rgba.length / 4));
  for (let i = 0; i < rgba.length / 4; i++) {
    for (let plane = 0; plane < 3; plane++) out[plane][i] = rgba[4 * i + plane];
  }
  return out;
}

// Luma in the integers of Pillow; where red, green and blue are equal, it is their value.
function grey([red, green, blue]) {
  return red.map((value, i) => (value * 19595 + green[i] * 38470 + blue[i] * 7471 + 0x8000) >> 16);
}

function stripRows(width) {
  return 8 * Math.max(1, Math.floor(STRIP_PIXELS / (8 * width))); // whole blocks of a JPEG
}

function resized(source, channels, size) {
  const { width, height, factor, left, above } = source;
  const resizers = Array.from({ length: channels }, () =>
    new PlaneResizer(Math.ceil(width / factor), Math.ceil(height / factor), size));
  for (let top = 0, count; top < height; top += count) {
    const lacking = top ? 0 : above;
    count = Math.min(stripRows(width) - lacking, height - top);
    let strip = source.rows(top, count);
    if (factor > 1) strip = strip.map((plane) => blockMeans(plane, width, factor, left, lacking));
    if (channels === 1) strip = [grey(strip)];
    resizers.forEach((resizer, plane) => resizer.add(strip[plane]));
  }
  const pixels = new Uint8Array(channels * size * size);
  resizers.forEach((resizer, plane) => pixels.set(resizer.finish(), plane * size * size));
  return pixels;
}

// Raises an error in a browser that adds noise to the pixels a page reads, against fingerprinting.
export function checkCanvas() {
  const [width, height] = [64, 64];
  const context = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  const image = context.createImageData(width, height);
  image.data.forEach((_, i) => { image.data[i] = i % 4 === 3 ? 255 : (i * 7919) >> 3; });
  const wanted = image.data.slice();
  context.putImageData(image, 0, 0);
  const found = context.getImageData(0, 0, width, height).data;
  if (found.some((value, i) => value !== wanted[i])) {
    throw new Error("this browser changes the pixels of images that a page reads, as a protection " +
      "against tracking: allow this page to read canvas data, or use another browser");
  }
}
