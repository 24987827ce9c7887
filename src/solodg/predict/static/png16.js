// PNG files of 16 bits a channel, which a canvas would reduce to 8 bits in a way of its own.

const CHANNELS = { 0: 1, 2: 3, 4: 2, 6: 4 }; // by PNG's colour type

// Returns {width, height, channels, values}; values are 16-bit, (height * width * channels).
// `check` is called with the width and the height before the file is decoded.
export async function readPng16(bytes, check) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const parts = [];
  let transparency = false;
  for (let at = 8; at + 12 <= bytes.length;) {
    const length = view.getUint32(at);
    const kind = String.fromCharCode(...bytes.subarray(at + 4, at + 8));
    if (kind === "IDAT") parts.push(bytes.subarray(at + 8, at + 8 + length));
    if (kind === "tRNS") transparency = true;
    at += 12 + length;
  }
  const [width, height, colour] = [view.getUint32(16), view.getUint32(20), bytes[25]];
  const channels = CHANNELS[colour];
  check(width, height);
  if (bytes[28]) throw new Error("an interlaced PNG of 16 bits: save it without interlacing");
  if (!channels || (transparency && colour === 2)) throw new Error("a PNG of 16 bits of a rare kind");
  const stream = new Blob(parts).stream().pipeThrough(new DecompressionStream("deflate"));
  const stride = 2 * channels * width;
  let raw;
  try {
    raw = new Uint8Array(await new Response(stream).arrayBuffer());
  } catch {
    throw new Error("a damaged PNG");
  }
  if (raw.length < height * (stride + 1)) throw new Error("a PNG that is cut off");
  unfilter(raw, height, stride, 2 * channels);
  const values = new Uint16Array(height * width * channels);
  for (let y = 0, out = 0; y < height; y++) {
    for (let i = y * (stride + 1) + 1; i < (y + 1) * (stride + 1); i += 2) {
      values[out++] = (raw[i] << 8) | raw[i + 1];
    }
  }
  return { width, height, channels, values };
}

// Undoes the filters of the rows in place; each row begins with the number of its filter.
function unfilter(raw, height, stride, pixel) {
  for (let y = 0; y < height; y++) {
    const start = y * (stride + 1) + 1;
    const filter = raw[start - 1];
    for (let i = 0; i < stride; i++) {
      const at = start + i;
      const left = i >= pixel ? raw[at - pixel] : 0;
      const above = y ? raw[at - stride - 1] : 0;
      const corner = y && i >= pixel ? raw[at - stride - 1 - pixel] : 0;
      raw[at] += predicted(filter, left, above, corner);
    }
  }
}

function predicted(filter, left, above, corner) {
  switch (filter) {
    case 0: return 0;
    case 1: return left;
    case 2: return above;
    case 3: return (left + above) >> 1;
    case 4: {
      const [a, b, c] = [above - corner, left - corner, left + above - 2 * corner].map(Math.abs);
      if (a <= b && a <= c) return left;
      return b <= c ? above : corner;
    }
    default: throw new Error("a damaged PNG");
  }
}
