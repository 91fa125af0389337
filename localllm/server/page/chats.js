// Chats as the terminal's chat exports them ("localllm-chat"), and their storage in this browser.
//
// A chat is a tree of messages: what was edited or answered again stays, as a branch beside the new one.  The path from
// the first message to the leaf is what is being talked about now.  Beyond the terminal's format a chat may have `tools`.

const FORMAT = "localllm-chat", ALL_FORMAT = "localllm-chats";

const newId = () => [...crypto.getRandomValues(new Uint8Array(16))].map(each => each.toString(16).padStart(2, "0")).join("");
const now = () => Date.now() / 1000;

class Chat {
  constructor(values = {}) {
    Object.assign(this, {
      id: newId().slice(0, 10), title: "", system: "", settings: {}, model: "", created: now(), updated: now(), leaf: null,
      tools: null, messages: [],
    }, values);
    this.byId = new Map(this.messages.map(each => [each.id, each]));
    this.chosen = new Map();
    for (const each of this.path()) this.chosen.set(each.parent, each.id);
  }

  path(to = this.leaf) {
    const found = [];
    for (let at = this.byId.get(to); at; at = this.byId.get(at.parent)) found.push(at);
    return found.reverse();
  }

  siblings(message) { return this.messages.filter(each => each.parent === message.parent); }

  add(role, text, more = {}) {
    const message = {id: newId(), parent: this.leaf, role, text, created: now(), state: "complete", ...more};
    this.messages.push(message);
    this.byId.set(message.id, message);
    this.choose(message);
    if (!this.title && role === "user") this.title = titleOf(text);
    return message;
  }

  // Makes the leaf the end of the branch that a message is on, as it was looked at last.
  choose(message) {
    for (let at = message; at; at = this.byId.get(at.parent)) this.chosen.set(at.parent, at.id);
    let leaf = message;
    for (;;) {
      const next = this.byId.get(this.chosen.get(leaf.id)) ?? this.messages.findLast(each => each.parent === leaf.id);
      if (!next) break;
      leaf = next;
    }
    this.leaf = leaf.id;
  }

  get values() {
    const {byId, chosen, isDeleted, ...values} = this;
    return values;
  }

  // In the terminal's format.
  get exported() {
    const {id, ...values} = this.values;
    return {format: FORMAT, version: 1, ...values};
  }
}

const titleOf = text => text.replace(/\s+/g, " ").trim().slice(0, 60) || "Chat";

// -- Thinking, which a reply's text begins with ------------------------------------------------------------------------

const TAGS = {
  "<think>": "</think>", "<thinking>": "</thinking>", "<thought>": "</thought>", "<seed:think>": "</seed:think>",
  "[THINK]": "[/THINK]", "◁think▷": "◁/think▷", "<|channel>thought": "<channel|>",
};

// What a reply thinks, and what it answers.
function split(message) {
  if (message.role !== "assistant") return {thinking: "", content: message.text};
  let text = message.text.trimStart(), tag = message.opened || "";
  if (text.startsWith("<|channel|>")) return splitChannels(text);
  const begun = Object.keys(TAGS).find(each => text.startsWith(each) && (!tag || each === tag));
  if (begun) { tag = begun; text = text.slice(tag.length); }
  if (!tag || tag === "<|start|>assistant") return {thinking: "", content: message.text};
  const end = text.indexOf(TAGS[tag] ?? "</think>");
  if (end < 0) return {thinking: text.trimStart(), content: ""};
  return {thinking: text.slice(0, end).trim(), content: text.slice(end + (TAGS[tag] ?? "</think>").length).trimStart()};
}

// As gpt-oss writes: a header that names the channel, and the text.
function splitChannels(text) {
  const parts = {thinking: "", content: ""};
  for (const [, channel, said] of text.matchAll(/<\|channel\|>(\w+)[^<]*<\|message\|>([^]*?)(?=<\|end\|>|<\|return\|>|<\|call\|>|<\|start\|>|<\|channel\|>|$)/g))
    parts[channel === "analysis" ? "thinking" : "content"] += said;
  return parts;
}

const joined = (thinking, content) => thinking ? `<think>${thinking}${content ? `</think>\n\n${content}` : ""}` : content;

// -- What the model is told ------------------------------------------------------------------------------------------------

function fenced(text) {
  let fence = "```";
  while (text.includes(fence)) fence += "`";
  return `${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

// The beginnings of files of pictures and sounds; what begins otherwise is taken as a PNG.
const MEDIA = {
  "image/jpeg": /^\xff\xd8/, "image/gif": /^GIF8/, "image/webp": /^RIFF....WEBP/s, "image/bmp": /^BM/, "image/tiff": /^(II\*|MM)/,
  "audio/wav": /^R(IFF|F64)....WAVE/s, "audio/mpeg": /^(ID3|\xff[\xe0-\xff])/, "audio/flac": /^fLaC/, "audio/ogg": /^OggS/,
};

// The type of an attached picture or sound, whose `picture` is its file in base64.
function mediaType({picture}) {
  const beginning = atob(picture.slice(0, 16));
  return Object.keys(MEDIA).find(each => MEDIA[each].test(beginning)) ?? "image/png";
}

const isSound = file => Boolean(file.picture) && mediaType(file).startsWith("audio/");
const mediaUrl = file => `data:${mediaType(file)};base64,${file.picture}`;

function mediaPart(file) {
  if (!isSound(file)) return {type: "image_url", image_url: {url: mediaUrl(file)}};
  return {type: "input_audio", input_audio: {data: file.picture, format: mediaType(file) === "audio/mpeg" ? "mp3" : mediaType(file).slice(6)}};
}

function contentOf(message) {
  const files = message.attachments ?? [], media = files.filter(file => file.picture);
  const texts = files.filter(file => !file.picture).map(file => `File \`${file.name}\`:\n${fenced(file.text)}`);
  const text = [...texts, message.text].filter(Boolean).join("\n\n");
  return media.length ? [...media.map(mediaPart), ...(text ? [{type: "text", text}] : [])] : text;
}

// The path to a message as OpenAI's API has it.
function toldMessages(chat, to) {
  let path = chat.path(to);
  const window = path.findLast(each => each.window)?.window;
  if (window) path = path.slice(Math.max(0, path.findIndex(each => each.id === window.first)));
  const system = [chat.system, window?.summary && `Of what was said before: ${window.summary}`].filter(Boolean).join("\n\n");
  const told = system ? [{role: "system", content: system}] : [];
  for (const message of path) {
    if (message.role === "user") { told.push({role: "user", content: contentOf(message)}); continue; }
    const calls = message.calls ?? [], id = number => `call_${message.id.slice(0, 8)}_${number}`;
    const {thinking, content} = split(message);
    told.push({
      role: "assistant", content,
      // What led to calls is told again, as models are trained on it.
      ...(calls.length && thinking && {reasoning_content: thinking}),
      ...(calls.length && {tool_calls: calls.map((call, number) => ({
        id: id(number), type: "function", function: {name: call.name, arguments: call.arguments},
      }))}),
    });
    calls.forEach((call, number) => told.push({role: "tool", tool_call_id: id(number), name: call.name, content: call.result ?? ""}));
  }
  return told;
}

// -- Files ------------------------------------------------------------------------------------------------------------------

function toMarkdown(chat) {
  const parts = [`# ${chat.title || "Chat"}`, `*${new Date(chat.created * 1000).toLocaleString()}${chat.model ? ` · ${chat.model}` : ""}*`];
  if (chat.system) parts.push("## System", chat.system);
  for (const message of chat.path()) {
    const {thinking, content} = split(message);
    parts.push(message.role === "user" ? "## User" : "## Assistant");
    if (thinking) parts.push(`<details><summary>Thinking</summary>\n\n${thinking}\n\n</details>`);
    if (content) parts.push(content);
    for (const file of message.attachments ?? [])
      parts.push(file.picture ? `${isSound(file) ? "" : "!"}[${file.name.replace(/[[\]\n]/g, "")}](${mediaUrl(file)})` : `File \`${file.name}\`:\n\n${fenced(file.text)}`);
    for (const call of message.calls ?? []) parts.push(`Tool \`${call.name}\`:`, fenced(call.arguments), fenced(call.result ?? ""));
  }
  return parts.join("\n\n") + "\n";
}

// The chats of a file, with new ids; anybody may have written it.
function readChats(text) {
  let values;
  try { values = JSON.parse(text); } catch { throw new Error("it is not JSON"); }
  const each = values?.format === ALL_FORMAT && Array.isArray(values.chats) ? values.chats : [values];
  return each.map(readChat);
}

function readChat(values) {
  if (values?.format !== FORMAT) throw new Error(`'format' is not "${FORMAT}"`);
  if (values.version !== 1) throw new Error(`it has version ${values.version}, and this page knows 1`);
  if (!Array.isArray(values.messages)) throw new Error("it has no messages");
  const ids = new Map(), text = value => typeof value === "string" ? value : "";
  const time = value => Number.isFinite(value) && value >= 0 && value < 253402300799 ? value : now();
  const messages = values.messages.map((message, number) => {
    const fail = why => { throw new Error(`message ${number} ${why}`); };
    if (!["user", "assistant"].includes(message?.role) || typeof message.text !== "string") fail("has no role or text");
    if (typeof message.id !== "string" || ids.has(message.id)) fail("has no id of its own");
    const parent = message.parent ?? null;
    if (parent !== null && !ids.has(parent)) fail("has a parent that is not before it");
    const read = {id: newId(), parent: parent === null ? null : ids.get(parent), role: message.role, text: message.text, created: time(message.created)};
    ids.set(message.id, read.id);
    read.state = message.state === "streaming" ? "killed" : text(message.state) || "complete";
    if (message.opened) read.opened = text(message.opened);
    if (message.stats && typeof message.stats === "object") read.stats = message.stats;
    if (message.window) read.window = {first: ids.get(message.window.first) ?? read.id, summary: text(message.window.summary)};
    const list = (name, good) => {
      if (!Array.isArray(message[name]) || !message[name].length) return;
      if (!message[name].every(good)) fail(`has ${name} that are not what they should be`);
      read[name] = message[name];
    };
    list("attachments", file => typeof file?.name === "string" && typeof file.text === "string" && /^([A-Za-z\d+/]{4})*([A-Za-z\d+/]{2}([A-Za-z\d+/]|=)=)?$/.test(file.picture ?? ""));
    list("calls", call => typeof call?.name === "string" && typeof call.arguments === "string" && ["string", "undefined"].includes(typeof (call.result ?? undefined)));
    return read;
  });
  return new Chat({
    title: text(values.title), system: text(values.system), model: text(values.model), messages,
    settings: values.settings && typeof values.settings === "object" && !Array.isArray(values.settings) ? values.settings : {},
    tools: Array.isArray(values.tools) ? values.tools : null,
    created: time(values.created), updated: time(values.updated), leaf: ids.get(values.leaf) ?? messages.at(-1)?.id ?? null,
  });
}

// -- Storage ----------------------------------------------------------------------------------------------------------------

const asked = request => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

// Chats in IndexedDB: `chats` has them whole, `list` what the list and the search need.  Where the browser keeps nothing,
// as in some private windows, they live as long as the page.
class ChatStore {
  constructor() {
    this.memory = null;
    this.changes = new BroadcastChannel("localllm");
    this.opened = this.open().catch(() => { this.memory = {chats: new Map(), list: new Map()}; });
  }

  async open() {
    const opening = indexedDB.open("localllm", 1);
    opening.onupgradeneeded = () => {
      opening.result.createObjectStore("chats", {keyPath: "id"});
      opening.result.createObjectStore("list", {keyPath: "id"});
    };
    return asked(opening);
  }

  async stores(mode) {
    const database = await this.opened;
    if (!this.memory) {
      const transaction = database.transaction(["chats", "list"], mode);
      return name => transaction.objectStore(name);
    }
    return name => {
      const kept = this.memory[name], result = value => { const request = {result: value}; queueMicrotask(() => request.onsuccess()); return request; };
      return {
        get: id => result(kept.get(id)), getAll: () => result([...kept.values()]), delete: id => result(kept.delete(id)),
        put: value => result(kept.set(value.id, structuredClone(value))),
      };
    };
  }

  async list() { return (await asked((await this.stores("readonly"))("list").getAll())).sort((a, b) => b.updated - a.updated); }

  async load(id) {
    const values = await asked((await this.stores("readonly"))("chats").get(id));
    return values && new Chat(values);
  }

  // Writes a chat, and keeps messages that another tab added meanwhile.
  async save(chat) {
    const stores = await this.stores("readwrite"), before = await asked(stores("chats").get(chat.id));
    const theirs = before?.messages.filter(each => !chat.byId.has(each.id)) ?? [];
    for (const each of theirs) { chat.messages.push(each); chat.byId.set(each.id, each); }
    await asked(stores("chats").put(chat.values));
    const text = chat.messages.map(each => each.text).join("\n").toLowerCase();
    await asked(stores("list").put({id: chat.id, title: chat.title, updated: chat.updated, text}));
    this.changes.postMessage(chat.id);
  }

  async delete(id) {
    const stores = await this.stores("readwrite");
    await asked(stores("chats").delete(id));
    await asked(stores("list").delete(id));
    this.changes.postMessage(id);
  }
}
