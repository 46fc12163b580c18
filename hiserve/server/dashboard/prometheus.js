// Prometheus' text format, as this server writes it.

const LINE = /^(?:hiserve:)?([\w:]+)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

export class Samples {
  constructor(text) {
    this.byName = new Map();
    for (const line of text.split("\n")) {
      if (!line || line[0] === "#") continue;
      const found = LINE.exec(line);
      if (!found) continue;
      const labels = {};
      for (const [, name, value] of (found[2] ?? "").matchAll(LABEL)) labels[name] = value;
      let list = this.byName.get(found[1]);
      if (!list) this.byName.set(found[1], (list = []));
      list.push({ labels, value: Number(found[3]) });
    }
  }

  // All samples of a metric, with their labels.
  all(name) {
    return this.byName.get(name) ?? [];
  }

  // The sum of the samples with these labels.
  sum(name, labels = {}) {
    const wanted = Object.entries(labels);
    let sum = 0;
    for (const each of this.all(name)) if (wanted.every(([label, value]) => each.labels[label] === value)) sum += each.value;
    return sum;
  }
}
