// A small, safe subset of Markdown, built as DOM nodes only: nothing in a message can become markup.

/** @returns {DocumentFragment} */
export function render(text) {
  const out = document.createDocumentFragment();
  const lines = text.split("\n");
  for (let at = 0; at < lines.length; ) {
    if (lines[at].startsWith("```")) {
      const end = lines.findIndex((line, place) => place > at && line.startsWith("```"));
      const stop = end < 0 ? lines.length : end;
      const code = element("code", lines.slice(at + 1, stop).join("\n"));
      out.append(wrap("pre", code));
      at = stop + 1;
    } else if (/^\s*[-*] /.test(lines[at]) || /^\s*\d+\. /.test(lines[at])) {
      const ordered = /^\s*\d+\. /.test(lines[at]);
      const item = ordered ? /^\s*\d+\. / : /^\s*[-*] /;
      const list = document.createElement(ordered ? "ol" : "ul");
      for (; at < lines.length && item.test(lines[at]); at++) list.append(inline("li", lines[at].replace(item, "")));
      out.append(list);
    } else if (/^#{1,6} /.test(lines[at])) {
      out.append(wrap("p", inline("strong", lines[at].replace(/^#+ /, ""))));
      at++;
    } else if (lines[at].trim() === "") {
      at++;
    } else {
      const from = at;
      while (at < lines.length && lines[at].trim() !== "" && !/^(```|\s*[-*] |\s*\d+\. |#{1,6} )/.test(lines[at])) at++;
      if (at === from) at++;
      out.append(inline("p", lines.slice(from, at).join("\n")));
    }
  }
  return out;
}

function inline(name, text) {
  const node = document.createElement(name);
  for (const part of text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/)) {
    if (/^`[^`]+`$/.test(part)) node.append(element("code", part.slice(1, -1)));
    else if (/^\*\*[^*]+\*\*$/.test(part)) node.append(element("strong", part.slice(2, -2)));
    else
      part.split("\n").forEach((line, place) => {
        if (place) node.append(document.createElement("br"));
        node.append(line);
      });
  }
  return node;
}

function element(name, text) {
  const node = document.createElement(name);
  node.textContent = text;
  return node;
}

function wrap(name, child) {
  const node = document.createElement(name);
  node.append(child);
  return node;
}
