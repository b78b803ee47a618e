// A small, safe subset of Markdown, built as DOM nodes only: nothing in a message can become markup.

const FENCE = /^\s{0,3}(```+|~~~+)\s*([\w+#.-]*)/;
const BULLET = /^(\s*)[-*+]\s+/;
const NUMBER = /^(\s*)(\d{1,9})[.)]\s+/;
const HEADING = /^#{1,6}\s+/;
const INLINE = /(`[^`\n]+`|\*\*[^*\n]+\*\*|\*[^*\s](?:[^*\n]*[^*\s])?\*)/;

/** @returns {DocumentFragment} */
export function render(text) {
  const out = document.createDocumentFragment();
  const lines = text.split(/\r?\n/);
  for (let at = 0; at < lines.length; ) {
    if (lines[at].trim() === "") at++;
    else if (FENCE.test(lines[at])) at = code(lines, at, out);
    else if (isItem(lines[at])) at = list(lines, at, out);
    else if (HEADING.test(lines[at])) {
      out.append(fill(element("p", "heading"), lines[at].replace(HEADING, "")));
      at++;
    } else at = paragraph(lines, at, out);
  }
  return out;
}

function code(lines, at, out) {
  const [, fence, language] = FENCE.exec(lines[at]);
  let end = at + 1;
  while (end < lines.length && !lines[end].trim().startsWith(fence)) end++;
  const block = element("pre");
  block.tabIndex = 0; // it scrolls sideways, so the keyboard must reach it
  if (language) block.dataset.language = language;
  const inner = element("code");
  inner.textContent = lines.slice(at + 1, end).join("\n");
  block.append(inner);
  out.append(block);
  return end + 1;
}

/** A list, with lists inside it by indentation. */
function list(lines, at, out) {
  const first = item(lines[at]);
  const node = element(first.number === null ? "ul" : "ol");
  if (first.number !== null && first.number !== 1) node.start = first.number;
  let last = null;
  for (; at < lines.length; ) {
    const line = lines[at];
    const next = item(line);
    if (next && next.indent > first.indent && last) at = list(lines, at, last);
    else if (next && next.indent <= first.indent) {
      if (next.indent < first.indent || (next.number === null) !== (first.number === null)) break;
      last = fill(element("li"), next.text);
      node.append(last);
      at++;
    } else if (line.trim() === "" && at + 1 < lines.length && isItem(lines[at + 1])) at++;
    else if (line.trim() !== "" && /^\s/.test(line) && last && !FENCE.test(line)) {
      last.append(element("br"));
      fill(last, line.trim());
      at++;
    } else break;
  }
  out.append(node);
  return at;
}

function item(line) {
  const bullet = BULLET.exec(line);
  if (bullet) return { indent: bullet[1].length, number: null, text: line.slice(bullet[0].length) };
  const number = NUMBER.exec(line);
  if (number) return { indent: number[1].length, number: Number(number[2]), text: line.slice(number[0].length) };
  return null;
}

function isItem(line) {
  return item(line) !== null;
}

function paragraph(lines, at, out) {
  const from = at++;
  while (at < lines.length && lines[at].trim() !== "" && !FENCE.test(lines[at]) && !isItem(lines[at]) && !HEADING.test(lines[at])) at++;
  out.append(fill(element("p"), lines.slice(from, at).join("\n")));
  return at;
}

function fill(node, text) {
  for (const part of text.split(INLINE)) {
    if (/^`[^`]+`$/.test(part)) node.append(leaf("code", part.slice(1, -1)));
    else if (/^\*\*[^*]+\*\*$/.test(part)) node.append(leaf("strong", part.slice(2, -2)));
    else if (/^\*[^*]+\*$/.test(part)) node.append(leaf("em", part.slice(1, -1)));
    else
      part.split("\n").forEach((line, place) => {
        if (place) node.append(element("br"));
        node.append(line);
      });
  }
  return node;
}

function element(name, className) {
  const node = document.createElement(name);
  if (className) node.className = className;
  return node;
}

function leaf(name, text) {
  const node = element(name);
  node.textContent = text;
  return node;
}
