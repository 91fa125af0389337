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

// Blocks inside of blocks, beyond which browsers take seconds to lay them out.
const MAX_DEPTH = 40;

const depth = token => 1 + [...token.tokens ?? [], ...token.items ?? []].reduce((most, each) => Math.max(most, depth(each)), 0);

const escapeHtml = text => text.replace(/[&<>"']/g, each => `&#${each.charCodeAt(0)};`);

// Formulas stay as they were written: Markdown would take their backslashes and underscores.
const formula = (name, level, start, pattern) => ({
  name, level,
  start: text => { const at = text.search(start); return at < 0 ? undefined : at; },
  tokenizer: text => { const found = pattern.exec(text); return found ? {type: name, raw: found[0], text: found[0].trim()} : undefined; },
  renderer: token => level === "block" ? `<p><code data-math="1">${escapeHtml(token.text)}</code></p>` : `<code data-math="1">${escapeHtml(token.text)}</code>`,
});

const reader = new marked.Marked({
  gfm: true,
  breaks: true,
  extensions: [
    formula("displayFormula", "block", /\\\[|\$\$/, /^(?:\\\[[^]+?\\\]|\$\$[^]+?\$\$)[ \t]*(?:\n|$)/),
    formula("formula", "inline", /\\\(|\$\$/, /^(?:\\\([^\n]+?\\\)|\$\$[^\n]+?\$\$)/),
  ],
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
    const around = h("div", {class: "scrolls", tabindex: 0, role: "region", "aria-label": "Table"});
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
    h("pre", {tabindex: 0, role: "region", "aria-label": `Code, ${label}`}, code));
}

function highlight(code, text, language) {
  if (!hljs.getLanguage(language) || text.length > MAX_HIGHLIGHTED) {
    code.textContent = text;
    return;
  }
  const {value} = hljs.highlight(text, {language, ignoreIllegals: true});
  code.append(DOMPurify.sanitize(value, {ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true}));
}

// Shows Markdown in an element.  Called again with a longer text, it renders only the blocks that changed.
function showMarkdown(element, text) {
  let tokens;
  try {
    if (text.length > MAX_MARKDOWN) throw new RangeError("long");
    tokens = reader.lexer(text);
  } catch {  // nested too deeply
    element.replaceChildren(...plain(text));
    element.shown = [];
    return;
  }
  const shown = element.shown ?? [], links = JSON.stringify(tokens.links), blocks = [];
  let at = 0;
  if (!element.shown || element.links !== links) at = -1;
  else while (at < tokens.length && at < shown.length && shown[at].raw === tokens[at].raw) at++;
  if (at < 0) { element.replaceChildren(); at = 0; shown.length = 0; }
  for (const block of shown.splice(at)) block.nodes.forEach(node => node.remove());
  blocks.push(...shown);
  for (const token of tokens.slice(at)) {
    let nodes;
    try { nodes = blockElements(token, tokens.links); } catch { nodes = plain(token.raw); }
    element.append(...nodes);
    blocks.push({raw: token.raw, nodes});
  }
  element.shown = blocks;
  element.links = links;
}
