// What the other scripts of the page share.

const $ = id => document.getElementById(id);

// An element with attributes, listeners (`onclick`) and children; undefined and false leave a thing out.
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === false || value === null) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter(each => each !== undefined && each !== null && each !== false));
  return element;
}

function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

const iconButton = (name, label, onclick, more = {}) =>
  h("button", {class: "icon", type: "button", "aria-label": label, title: label, onclick, ...more}, icon(name));

// Values that the browser keeps beside the chats; where it keeps none, the page goes on without.
function stored(name) {
  try { return JSON.parse(localStorage.getItem(`localllm.${name}`)); } catch { return null; }
}
function store(name, value) {
  try {
    if (value === null) localStorage.removeItem(`localllm.${name}`);
    else localStorage.setItem(`localllm.${name}`, JSON.stringify(value));
  } catch { /* kept until the page is closed at most */ }
}

const say = text => { $("said").textContent = text; };

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // a page that came without HTTPS from another machine has no clipboard
    const area = h("textarea", {class: "hidden"});
    area.value = text;
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

function copyButton(text, label, withWord = false) {
  const button = iconButton("copy", label, async () => {
    await copy(text());
    button.replaceChildren(icon("done"), ...(withWord ? ["Copied"] : []));
    say("Copied");
    setTimeout(() => button.replaceChildren(icon("copy"), ...(withWord ? ["Copy"] : [])), 1500);
  });
  if (withWord) { button.className = ""; button.append("Copy"); }
  return button;
}

function download(name, text, type) {
  const link = h("a", {href: URL.createObjectURL(new Blob([text], {type})), download: name});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
