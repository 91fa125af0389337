// Chats as the terminal's chat exports them ("localllm-chat"), and their storage in this browser.
//
// A chat is a tree of messages: what was edited or answered again stays, as a branch beside the new one.  The path from
// the first message to the leaf is what is being talked about now.  Beyond the terminal's format a chat may have `tools`.

const FORMAT = "localllm-chat", ALL_FORMAT = "localllm-chats";

const newId = () => [...crypto.getRandomValues(new Uint8Array(16))].map(each => each.toString(16).padStart(2, "0")).join("");
const now = () => Date.now() / 1000;

// The server's tools in a chat: the working folder, the names of tools that are off, the marks of tools that the user
// always allows, and whether the folder's instructions are used.
const newToolbox = () => ({folder: "", off: [], allowed: [], instructions: true});

class Chat {
  constructor(values = {}) {
    Object.assign(this, {
      id: newId().slice(0, 10), title: "", system: "", settings: {}, model: "", created: now(), updated: now(), leaf: null,
      tools: null, messages: [],
    }, values);
    this.toolbox = {...newToolbox(), ...values.toolbox};
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

  // In the terminal's format.  Permissions stay in this browser.
  get exported() {
    const {id, toolbox, ...values} = this.values;
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

// First bytes of image and audio files. A file with other first bytes is treated as a PNG.
const MEDIA = {
  "image/jpeg": /^\xff\xd8/, "image/gif": /^GIF8/, "image/webp": /^RIFF....WEBP/s, "image/bmp": /^BM/, "image/tiff": /^(II\*|MM)/,
  "audio/wav": /^R(IFF|F64)....WAVE/s, "audio/mpeg": /^(ID3|\xff[\xe0-\xff])/, "audio/flac": /^fLaC/, "audio/ogg": /^OggS/,
};

// Returns the type of an attached image or audio file, whose content is `picture` in base64.
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

// The content of a tool's message.
function resultOf({result, images}, seesImages) {
  const text = result ?? "(it was not run)";
  if (!images?.length) return text;
  if (!seesImages) return `${text}\n(the model does not accept images)`;
  return [...images.map(picture => mediaPart({picture})), {type: "text", text}];
}

// The path to a message as OpenAI's API has it.  `instructions` are a part of the system message, and
// `seesImages` is whether the model accepts images.
function toldMessages(chat, to, {instructions = "", seesImages = false} = {}) {
  let path = chat.path(to);
  const window = path.findLast(each => each.window)?.window;
  if (window) path = path.slice(Math.max(0, path.findIndex(each => each.id === window.first)));
  const system = [chat.system, instructions, window?.summary && `Of what was said before: ${window.summary}`].filter(Boolean).join("\n\n");
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
    calls.forEach((call, number) => told.push({role: "tool", tool_call_id: id(number), name: call.name, content: resultOf(call, seesImages)}));
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
    for (const call of message.calls ?? []) {
      parts.push(`Tool \`${call.name}\`:`, fenced(call.change || call.arguments), fenced(call.result ?? ""));
      for (const picture of call.images ?? []) parts.push(`![](${mediaUrl({picture})})`);
    }
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

// A JSON value's known properties.  Raises an Error if the value does not follow a schema; knows the keywords of
// CHAT_SCHEMA alone.
function checked(value, schema, where) {
  const fail = why => { throw new Error(`${where} ${why}`); };
  if (schema.$ref) return checked(value, CHAT_SCHEMA.$defs[schema.$ref.split("/").at(-1)], where);
  if (schema.anyOf) return checked(value, schema.anyOf.find(each => each.type === "null") && value === null ? {} : schema.anyOf.find(each => each.type !== "null"), where);
  if (schema.enum && !schema.enum.includes(value)) fail(`is none of ${schema.enum.join(", ")}`);
  const kind = value === null ? "null" : Array.isArray(value) ? "array" : typeof value;
  const isOfType = schema.type === "integer" ? Number.isInteger(value) : !schema.type || schema.type === kind;
  if (!isOfType) fail(`is not of the type ${schema.type}`);
  if (kind === "number" && !(value >= (schema.minimum ?? -Infinity) && value <= (schema.maximum ?? Infinity) && value < (schema.exclusiveMaximum ?? Infinity)))
    fail("is out of range");
  if (kind === "string" && !(value.length >= (schema.minLength ?? 0) && value.length <= (schema.maxLength ?? Infinity)))
    fail("has a wrong length");
  if (schema.contentEncoding === "base64" && !/^([A-Za-z\d+/]{4})*([A-Za-z\d+/]{2}([A-Za-z\d+/]|=)=)?$/.test(value)) fail("is not base64");
  if (kind === "array" && schema.items) return value.map((each, number) => checked(each, schema.items, `${where}[${number}]`));
  if (kind !== "object" || !schema.properties) return value;
  for (const name of schema.required ?? []) if (!Object.hasOwn(value, name)) fail(`has no ${name}`);
  const known = {};
  for (const [name, each] of Object.entries(value)) {
    if (Object.hasOwn(schema.properties, name)) known[name] = checked(each, schema.properties[name], `${where}.${name}`);
    else if (schema.additionalProperties === false) fail(`has an unknown ${name.slice(0, 40)}`);
  }
  return known;
}

function readChat(values) {
  if (values?.format !== FORMAT) throw new Error(`'format' is not "${FORMAT}"`);
  if (values.version !== 1) throw new Error(`it has version ${values.version}, and this page knows 1`);
  const {tools = null, ...chat} = checked(values, CHAT_SCHEMA, "it"), ids = new Map();
  const messages = chat.messages.map((message, number) => {
    const fail = why => { throw new Error(`message ${number} ${why}`); };
    if (ids.has(message.id)) fail("has the id of an earlier one");
    const parent = message.parent ?? null, id = newId();
    if (parent !== null && !ids.has(parent)) fail("has a parent that is not before it");
    ids.set(message.id, id);
    if (message.window && !ids.has(message.window.first)) fail("has a window that begins at no message before it");
    for (const call of message.calls ?? []) if (!isObject(call.arguments)) fail("has a call whose arguments are not a JSON object");
    return {
      ...message, id, parent: parent === null ? null : ids.get(parent), created: message.created ?? 0,
      state: message.state === "streaming" ? "killed" : message.state ?? "complete",
      ...(message.window && {window: {...message.window, first: ids.get(message.window.first)}}),
      attachments: message.attachments?.length ? message.attachments : undefined,
      calls: message.calls?.length ? message.calls : undefined,
    };
  });
  if (chat.leaf != null && !ids.has(chat.leaf)) throw new Error("its 'leaf' is not one of its messages");
  // Tools as they were: the form has just the names of their functions.
  return new Chat({...chat, messages, tools: tools && values.tools, title: titleOf(chat.title || "Chat"), settings: chat.settings ?? {}, leaf: ids.get(chat.leaf) ?? messages.at(-1)?.id ?? null});
}

function isObject(text) {
  try {
    const value = JSON.parse(text);
    return value !== null && typeof value === "object" && !Array.isArray(value);
  } catch { return false; }
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
