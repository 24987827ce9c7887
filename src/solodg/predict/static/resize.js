// The bilinear resizing of Pillow, with its antialias filter, its integers and its order of axes: an
// image of 8 bits gets the same pixels as in `solodg predict`, to the last grey level.

const BITS = 22; // of the weights: 255 * 2 ** 22 fits into 32 bits

// Returns, for each of `after` pixels, the first of the `before` pixels under it and their weights.
export function axisWeights(before, after) {
  const scale = before / after;
  const reach = Math.max(scale, 1);
  return Array.from({ length: after }, (_, index) => {
    const centre = (index + 0.5) * scale;
    const first = Math.max(0, Math.trunc(centre - reach + 0.5));
    const end = Math.min(before, Math.trunc(centre + reach + 0.5));
    const raw = [];
    for (let i = first; i < end; i++) {
      raw.push(Math.max(0, 1 - Math.abs((i - centre + 0.5) * (1 / reach))));
    }
    const total = raw.reduce((a, b) => a + b, 0);
    const weights = raw.map((weight) => Math.trunc(0.5 + (weight / total) * 2 ** BITS));
    return { first, weights: Int32Array.from(weights) };
  });
}

// Resizes one plane that arrives in strips of rows, so that it is never whole in memory. Each axis is
// rounded to whole grey levels; the order of the axes is that of Pillow 13.
export class PlaneResizer {
  constructor(width, height, size) {
    Object.assign(this, { width, size });
    this.columns = axisWeights(width, size);
    this.rowsFirst = height > size && height - size > 2 * (width - size);
    this.length = this.rowsFirst ? width : size; // of a line whose rows are added up
    this.uses = Array.from({ length: height }, () => []); // by row: the rows made of it
    axisWeights(height, size).forEach(({ first, weights }, y) => {
      weights.forEach((weight, i) => this.uses[first + i].push([y, weight]));
    });
    this.sums = new Int32Array(size * this.length).fill(1 << (BITS - 1));
    this.row = 0;
  }

  add(pixels) {
    for (let start = 0; start < pixels.length; start += this.width) {
      const row = pixels.subarray(start, start + this.width);
      const line = this.rowsFirst ? row : this.resizedLine(row);
      for (const [y, weight] of this.uses[this.row++]) {
        for (let x = 0; x < line.length; x++) this.sums[y * this.length + x] += line[x] * weight;
      }
    }
  }

  resizedLine(row) {
    return Uint8Array.from(this.columns, ({ first, weights }) => {
      let sum = 1 << (BITS - 1);
      for (let i = 0; i < weights.length; i++) sum += row[first + i] * weights[i];
      return clipped(sum);
    });
  }

  // Returns the (size, size) pixels.
  finish() {
    const lines = Uint8Array.from(this.sums, clipped);
    if (!this.rowsFirst) return lines;
    const out = new Uint8Array(this.size * this.size);
    for (let y = 0; y < this.size; y++) {
      const line = lines.subarray(y * this.length, (y + 1) * this.length);
      out.set(this.resizedLine(line), y * this.size);
    }
    return out;
  }
}

function clipped(sum) {
  return Math.min(255, sum >> BITS);
}

// Returns a plane whose pixels are the means of blocks of `factor` x `factor` pixels. The first block
// of a row and of a column lacks `left` and `above` pixels.
export function blockMeans(pixels, width, factor, left, above) {
  const height = pixels.length / width;
  const [columns, rows] = [width + left, height + above].map((n) => Math.ceil(n / factor));
  const sums = new Uint32Array(columns * rows);
  const counts = new Uint32Array(columns * rows);
  for (let y = 0; y < height; y++) {
    const row = Math.floor((y + above) / factor) * columns;
    for (let x = 0; x < width; x++) {
      const block = row + Math.floor((x + left) / factor);
      sums[block] += pixels[y * width + x];
      counts[block]++;
    }
  }
  return Uint8Array.from(sums, (sum, i) => Math.floor((sum + counts[i] / 2) / counts[i]));
}
