// Markdown of models, which is hostile until shown otherwise: HTML in it is text, what remains is sanitised, and
// nothing is fetched from elsewhere.

const ALLOWED = {
  ALLOWED_TAGS: `p br hr strong em del code pre h1 h2 h3 h4 h5 h6 ul ol li blockquote table thead tbody tr th td a img
    span`.split(/\s+/),
  ALLOWED_ATTR: ["href", "src", "alt", "title", "start", "align", "data-language", "data-math"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:|data:image\/(?:png|jpeg|gif|webp);)/i,
  ADD_URI_SAFE_ATTR: ["start", "align", "data-language", "data-math"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

// Characters beyond which a text is shown as it is, and a block of code without colours.
const MAX_MARKDOWN = 300_000, MAX_HIGHLIGHTED = 30_000;

// Cells of a table, beyond which it is shown as plain text.
const MAX_CELLS = 20_000;

// Blocks inside of blocks, beyond which browsers take seconds to lay them out.
const MAX_DEPTH = 40;

const depth = token => 1 + [...token.tokens ?? [], ...token.items ?? []].reduce((most, each) => Math.max(most, depth(each)), 0);

const escapeHtml = text => text.replace(/[&<>"']/g, each => `&#${each.charCodeAt(0)};`);

// Formulas stay as they were written: Markdown would take their backslashes and underscores.
const CLOSING = {"\\[": "\\]", "\\(": "\\)", "$$": "$$"}, MAX_FORMULA = 2000;

// The formula that a text starts with; its length is bounded, so that openings without a closing take linear time.
function formulaAt(text, isBlock) {
  const closing = CLOSING[text.slice(0, 2)];
  if (!closing) return undefined;
  const beginning = text.slice(0, MAX_FORMULA), end = beginning.indexOf(closing, 3);
  if (end < 0) return undefined;
  const formula = beginning.slice(0, end + 2);
  if (!isBlock) return formula.startsWith("\\(") && formula.includes("\n") ? undefined : formula;
  return /^[ \t]*(?:\n|$)/.test(text.slice(end + 2, end + 100)) && !formula.startsWith("\\(") ? formula : undefined;
}

const formula = (name, level, start) => ({
  name, level, start,
  tokenizer: text => { const raw = formulaAt(text, level === "block"); return raw && {type: name, raw, text: raw.trim()}; },
  renderer: token => level === "block" ? `<p><code data-math="1">${escapeHtml(token.text)}</code></p>` : `<code data-math="1">${escapeHtml(token.text)}</code>`,
});

// The place of the first line of a text's first paragraph that a formula starts.
function displayStart(text) {
  const end = text.indexOf("\n\n"), paragraph = end < 0 ? text : text.slice(0, end);
  for (const {index} of paragraph.matchAll(/\n(?:\\\[|\$\$)/g)) if (formulaAt(text.slice(index + 1), true)) return index + 1;
  return undefined;
}

// The place where a formula may start in the first characters of a text, or their number: the search goes on from there.
function inlineStart(text) {
  const length = 1000, at = text.slice(0, length).search(/\\[[(]|\$\$/);
  return at >= 0 ? at : text.length > length ? length : undefined;
}

const reader = new marked.Marked({
  gfm: true,
  breaks: true,
  extensions: [
    formula("displayFormula", "block", displayStart),
    formula("formula", "inline", inlineStart),
  ],
  tokenizer: {
    // Short rows get the header's number of cells, so that a small text may have millions of cells.
    table(text) {
      const header = text.slice(0, (text.indexOf("\n") + 1 || text.length + 1) - 1), end = text.indexOf("\n\n");
      const nRows = (end < 0 ? text : text.slice(0, end)).split("\n").length;
      return header.split("|").length * nRows > MAX_CELLS ? undefined : false;
    },
  },
  renderer: {
    html: ({text}) => /^<br\s*\/?>$/i.test(text.trim()) ? "<br>" : escapeHtml(text),
    code: ({text, lang}) => `<pre><code data-language="${escapeHtml((lang ?? "").split(/\s/)[0])}">${escapeHtml(text)}</code></pre>`,
    checkbox: ({checked}) => checked ? "☑ " : "☐ ",
    image({href, text}) {
      // Fetching it would tell its host what is talked about.
      if (/^data:image\//i.test(href)) return `<img src="${escapeHtml(href)}" alt="${escapeHtml(text)}">`;
      return `<a href="${escapeHtml(href)}">${escapeHtml(text || href)}</a>`;
    },
  },
});

function plain(text) {
  const pre = h("p");
  pre.style.whiteSpace = "pre-wrap";
  pre.textContent = text;
  return [pre];
}

// Elements of one block of Markdown.
function blockElements(token, links) {
  if (depth(token) > MAX_DEPTH) return plain(token.raw);
  const tokens = [token];
  tokens.links = links;
  const fragment = DOMPurify.sanitize(reader.parser(tokens), ALLOWED);
  for (const link of fragment.querySelectorAll("a"))
    Object.assign(link, {target: "_blank", rel: "noopener noreferrer"});
  for (const table of fragment.querySelectorAll("table")) {
    const around = h("div", {class: "scrolls", tabindex: 0, role: "group", "aria-label": "Table"});
    table.replaceWith(around);
    around.append(table);
  }
  for (const pre of fragment.querySelectorAll("pre")) decorateCode(pre);
  return [...fragment.childNodes];
}

function decorateCode(pre) {
  const code = pre.querySelector("code"), text = pre.textContent, language = code?.dataset.language ?? "";
  if (!code) return;
  pre.replaceWith(codeBlock(text, language));
}

// A block of code with its language and a button that copies it.
function codeBlock(text, language) {
  const code = h("code");
  highlight(code, text, language);
  const label = language || "text";
  return h("div", {class: "block"},
    h("div", {class: "row"}, h("span", {}, label), copyButton(() => text, "Copy code", true)),
    h("pre", {tabindex: 0, role: "group", "aria-label": `Code, ${label}`}, code));
}

function highlight(code, text, language) {
  if (!hljs.getLanguage(language) || text.length > MAX_HIGHLIGHTED) {
    code.textContent = text;
    return;
  }
  const {value} = hljs.highlight(text, {language, ignoreIllegals: true});
  code.append(DOMPurify.sanitize(value, {ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true}));
}

// Blocks at the end of a reply that is being written, which the next words may change.
const UNSETTLED = 2;

// Shows Markdown in an element.  Called again with a longer text, it renders only the blocks that changed; while the
// text is being written, it also parses only the last ones.
function showMarkdown(element, text, isStreaming = false) {
  const shown = element.shown ?? [];
  let settled = [], tokens;
  if (isStreaming && shown.length > UNSETTLED && !text.includes("]:")) {
    settled = shown.slice(0, -UNSETTLED);
    while (settled.at(-1)?.isSpace) settled.pop();
    const beginning = settled.map(each => each.raw).join("");
    if (!text.startsWith(beginning)) settled = [];
    else text = text.slice(beginning.length);
  }
  try {
    if (text.length > MAX_MARKDOWN) throw new RangeError("long");
    tokens = reader.lexer(text);
  } catch {  // nested too deeply
    tokens = Object.assign([{type: "text", raw: text, isPlain: true}], {links: {}});
  }
  const links = JSON.stringify(tokens.links);
  let at = settled.length;
  if (!element.shown || element.links !== links) at = 0;
  else while (at - settled.length < tokens.length && at < shown.length && shown[at].raw === tokens[at - settled.length].raw) at++;
  if (at < settled.length) return showMarkdown(element, settled.map(each => each.raw).join("") + text);
  if (!at) element.replaceChildren();
  for (const block of shown.splice(at)) block.nodes.forEach(node => node.remove());
  for (const token of tokens.slice(at - settled.length)) {
    let nodes;
    try { nodes = token.isPlain ? plain(token.raw) : blockElements(token, tokens.links); } catch { nodes = plain(token.raw); }
    element.append(...nodes);
    shown.push({raw: token.raw, nodes, isSpace: token.type === "space"});
  }
  element.shown = shown;
  element.links = links;
}
