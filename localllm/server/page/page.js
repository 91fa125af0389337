// The page: the list of chats, the open chat, and the actions on both.

const storage = new ChatStore();
const jobs = new Map();  // replies that are being generated, by the id of their chat
let chat = new Chat(), models = [], attachments = [];
let serverIsThere = true, retry = 0;

// Number of messages that are shown at first, and added with each step upwards.
const SHOWN = 60;
let shownFrom = 0;

// -- Models ----------------------------------------------------------------------------------------------------------------

const modelOf = which => models.find(each => each.id === which.model) ?? models[0];
const model = () => modelOf(chat);
const sees = each => Boolean(each?.modalities?.vision ?? each?.meta?.vision ?? each?.capabilities?.includes?.("vision") ?? each?.architecture?.input_modalities?.includes?.("image"));
const hears = each => Boolean(each?.modalities?.audio);
const billions = n => !n ? "" : n >= 1e9 ? `${(n / 1e9).toFixed(n < 1e10 ? 1 : 0)}B` : `${Math.max(1, Math.round(n / 1e6))}M`;
const bytes = n => !n ? "" : n >= 1e9 ? `${(n / 1e9).toFixed(1)} GB` : `${Math.max(1, Math.round(n / 1e6))} MB`;

async function loadModels() {
  try {
    models = (await server.json("v1/models")).data;
    if (!serverIsThere) { serverIsThere = true; notice(""); }
  } catch (error) {
    if (error.status === 401) return askForKey(server.key ? "This key was not accepted." : "");
    serverIsThere = false;
    notice(`${error.message} Trying again…`);
    clearTimeout(retry);
    retry = setTimeout(loadModels, 3000);
    return;
  }
  await readProperties();
  showModel();
}

// Reads the properties that the server reports only for a loaded model, such as whether it accepts images and audio.
async function readProperties() {
  const picked = model();
  if (picked?.status.value !== "loaded" || picked.modalities) return;
  try {
    takeProperties(picked.id, await server.json(`props?model=${encodeURIComponent(picked.id)}`));
  } catch { /* the model is shown as one that accepts only text */ }
}

function takeProperties(id, {modalities, default_generation_settings, chat_template = "", chat_template_caps = {}}) {
  const takesEffort = Boolean(chat_template_caps.supports_reasoning_effort);
  const reasons = takesEffort || chat_template_caps.supports_preserve_reasoning || REASONING.some(word => chat_template.includes(word));
  Object.assign(models.find(each => each.id === id) ?? {}, {modalities: modalities ?? {}, defaults: default_generation_settings?.params ?? {}, reasoning: {reasons, takesEffort}});
}

// Words in the chat templates of models that can reason.
const REASONING = ["enable_thinking", "<|channel|>", ...Object.keys(TAGS)];

function showModel() {
  const picked = model(), status = picked?.status ?? {};
  $("model-name").textContent = picked?.id ?? (chat.model || "…");
  const isLoading = status.value === "loading";
  $("model-state").textContent = isLoading ? `loading ${Math.round(100 * (status.progress ?? 0))} %` : "";
  $("load-progress").hidden = !isLoading;
  $("load-progress").value = status.progress ?? 0;
  $("attach").title = `Attach ${["files", sees(picked) && "images", hears(picked) && "audio"].filter(Boolean).join(", ").replace(/, (?=\w+$)/, " and ")}`;
  $("file").accept = sees(picked) ? "image/*,text/*,*/*" : "";
  $("record").hidden = !recorder && !(hears(picked) && navigator.mediaDevices);
  if ($("models").open) showModelList();
}

const propertiesOf = ({modalities, defaults, reasoning} = {}) => ({modalities, defaults, reasoning});

let watching = null;
// Polls the state of the model until it is loaded, or until `until` returns true.
function watchLoading(until = () => false) {
  watching ??= (async () => {
    for (let idle = 0; idle < 4 && !until();) {
      await new Promise(resolve => setTimeout(resolve, 400));
      try {
        const known = new Map(models.map(each => [each.id, each]));
        models = (await server.json("v1/models")).data.map(each => ({...each, ...propertiesOf(known.get(each.id))}));
      } catch { break; }
      showModel();
      const {value} = model()?.status ?? {};
      if (value === "loaded") break;
      idle = value === "loading" ? 0 : idle + 1;
    }
    await readProperties();
    showModel();
  })().finally(() => { watching = null; });
}

function showModelList() {
  const wanted = $("model-search").value.toLowerCase();
  const rows = models.filter(each => each.id.toLowerCase().includes(wanted)).map(each => {
    const {meta = {}, status = {}} = each;
    const state = {loaded: "loaded", loading: `loading ${Math.round(100 * (status.progress ?? 0))} %`}[status.value];
    const facts = [billions(meta.n_params), meta.ftype, bytes(meta.size), sees(each) && "image input", hears(each) && "audio input", state].filter(Boolean).join(" · ");
    return h("li", {class: "row"}, h("button", {"aria-current": each.id === model()?.id && "true", onclick: () => pickModel(each.id)},
      h("span", {}, each.id), h("span", {class: "quiet"}, facts)), ...modelButtons(each));
  });
  $("model-list").replaceChildren(...(rows.length ? rows : [h("li", {class: "quiet"}, "No model matches.")]));
}

function pickModel(id) {
  chat.model = id;
  store("model", id);
  $("models").close();
  if (chat.messages.length) save(chat, false);
  return loadModel();
}

// Requests that the server loads the model, if necessary, and reads the properties of the loaded model.
async function loadModel() {
  const picked = model();
  if (!picked || picked.modalities) return showModel();
  try {
    const properties = server.json(`props?model=${encodeURIComponent(picked.id)}`);
    if (picked.status.value !== "loaded") watchLoading();
    takeProperties(picked.id, await properties);
  } catch (error) {
    notice(error.message);
  }
  showModel();
}

function askForKey(why) {
  const dialog = $("key-dialog");
  dialog.querySelector(".error").textContent = why;
  if (!dialog.open) dialog.showModal();
}

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

// -- The list of chats --------------------------------------------------------------------------------------------------------

function age(updated) {
  const midnight = new Date().setHours(0, 0, 0, 0) / 1000;
  return updated >= midnight ? "Today" : updated >= midnight - 86400 ? "Yesterday" : updated >= midnight - 7 * 86400 ? "Last seven days" : "Earlier";
}

async function showChats() {
  const wanted = $("search").value.trim().toLowerCase(), groups = new Map();
  const listed = await storage.list();
  for (const each of listed) {
    let found = "";
    if (wanted) {
      const at = each.text.indexOf(wanted);
      if (at < 0 && !each.title.toLowerCase().includes(wanted)) continue;
      if (at >= 0) found = each.text.slice(Math.max(0, at - 12), at + 60).replace(/\s+/g, " ");
    }
    const group = age(each.updated);
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push(h("li", {}, h("a", {href: `#${each.id}`, "aria-current": each.id === chat.id && "page", title: each.title}, each.title || "Chat", found && h("small", {}, found))));
  }
  const sections = [...groups].map(([name, rows]) => [h("h2", {}, name), h("ul", {}, rows)]).flat();
  $("chats").replaceChildren(...(sections.length ? sections : [h("p", {class: "quiet"}, wanted ? "No chat matches." : listed.length ? "" : "Chats appear here.")]));
}

// Saves a chat; `isNews` moves it to the top of the list.
async function save(which, isNews = true) {
  if (which.isDeleted) return;
  if (isNews) which.updated = now();
  try {
    await storage.save(which);
  } catch (error) {
    notice(`This chat is not kept: ${error.name === "QuotaExceededError" ? "the browser's storage is full. Export chats and delete some." : error.message}`);
  }
  await showChats();
}

async function openChat(id) {
  const found = jobs.get(id)?.chat ?? await storage.load(id);
  if (!found) return newChat();
  // A reply whose page was closed during the generation.
  if (!jobs.has(id)) for (const each of found.messages) if (each.state === "streaming") each.state = "killed";
  chat = found;
  loadTools(chat);
  if (location.hash !== `#${id}`) history.pushState(null, "", `#${id}`);
  showChat();
  showModel();
  showChats();
}

function newChat() {
  if (location.hash) history.pushState(null, "", location.pathname);
  const {system = "", settings = {}, tools = null} = stored("defaults") ?? {};
  chat = new Chat({system, settings: {...settings}, tools, toolbox: stored("tools") ?? {}, model: stored("model") ?? ""});
  loadTools(chat);
  showChat();
  showModel();
  showChats();
  $("text").focus();
}

// -- The chat ------------------------------------------------------------------------------------------------------------------

const elements = new Map();  // elements of the shown messages, by id

function showChat() {
  elements.clear();
  const path = chat.path();
  shownFrom = Math.max(0, path.length - SHOWN);
  $("messages").replaceChildren();
  showMessages();
  $("scroll").scrollTop = $("scroll").scrollHeight;
  document.body.classList.remove("sidebar");
  $("open-sidebar").setAttribute("aria-expanded", "false");
}

// Updates the shown messages; messages that did not change keep their elements.
function showMessages() {
  const path = chat.path(), rows = [];
  shownFrom = Math.min(shownFrom, Math.max(0, path.length - 1));
  if (shownFrom) rows.push(h("button", {class: "earlier", onclick: showEarlier}, `Show earlier messages (${shownFrom})`));
  const kept = new Set();
  for (const message of path.slice(shownFrom)) {
    const stamp = JSON.stringify([message.state, message.text.length, message.calls?.map(call => [call.name, call.arguments.length, call.result?.length, call.change?.length, call.images?.length, Boolean(call.undo)]), chat.siblings(message).length, message.id === chat.leaf, message.error, jobs.has(chat.id), message.calls && activeTools(chat).length]);
    let element = elements.get(message.id);
    if (!element || element.stamp !== stamp) {
      element ??= h("article", {class: `message ${message.role}`});
      element.stamp = stamp;
      elements.set(message.id, element);
      fillMessage(element, message);
    }
    kept.add(message.id);
    rows.push(element);
  }
  for (const id of elements.keys()) if (!kept.has(id)) elements.delete(id);
  const shown = $("messages").children;
  if (rows.length !== shown.length || rows.some((row, number) => row !== shown[number])) $("messages").replaceChildren(...rows);
  $("empty").hidden = path.length > 0;
  $("heading").textContent = chat.title || "New chat";
  document.title = chat.title ? `${chat.title} · localllm` : "localllm";
  showComposer();
}

function showEarlier() {
  const scroll = $("scroll"), fromBottom = scroll.scrollHeight - scroll.scrollTop;
  shownFrom = Math.max(0, shownFrom - SHOWN);
  showMessages();
  scroll.scrollTop = scroll.scrollHeight - fromBottom;
}

function fillMessage(element, message) {
  const isUser = message.role === "user", isStreaming = message.state === "streaming";
  element.setAttribute("aria-label", isUser ? "You" : "Reply");
  element.setAttribute("aria-busy", isStreaming);
  const {thinking, content} = split(message), parts = element.parts ??= {};
  if (!parts.content) {
    parts.thoughts = h("div", {class: "markdown"});
    parts.summary = h("summary", {}, "Thinking");
    parts.thinking = h("details", {class: "thinking", hidden: true}, parts.summary, parts.thoughts);
    parts.thinking.addEventListener("toggle", () => { if (parts.thinking.open) showMarkdown(parts.thoughts, split(message).thinking); });
    parts.extras = h("div");
    parts.body = h("div", {class: "markdown"});
    parts.answerNow = h("button", {class: "answer-now", hidden: true, onclick: () => answerNow(chat)}, "Answer now");
    parts.content = h("div", {class: "content"}, parts.thinking, parts.answerNow, parts.extras, parts.body);
    parts.calls = h("div");
    parts.openCalls = new Set();
    parts.error = h("div", {class: "error", role: "alert"});
    parts.footer = h("footer");
    element.replaceChildren(parts.content, parts.calls, parts.error, parts.footer);
    const attached = message.attachments ?? [];
    const media = attached.filter(file => file.picture).map(file => isSound(file)
      ? h("audio", {src: mediaUrl(file), controls: true, "aria-label": file.name})
      : h("img", {src: mediaUrl(file), alt: file.name}));
    const files = attached.filter(file => !file.picture).map(file => h("span", {class: "chip"}, icon("attach"), file.name));
    if (media.length) parts.extras.append(h("div", {class: "pictures"}, media));
    if (files.length) parts.extras.append(h("div", {class: "pictures"}, files));
  }
  parts.thinking.hidden = !thinking;
  parts.answerNow.hidden = !(thinking && !content && isStreaming);
  const seconds = message.stats?.thinking_s;
  parts.summary.textContent = thinking && !content && isStreaming ? "Thinking…" : seconds >= .1 ? `Thought for ${seconds.toFixed(seconds < 10 ? 1 : 0)} s` : "Thoughts";
  if (parts.thinking.open) showMarkdown(parts.thoughts, thinking, isStreaming);
  const isJson = !isUser && chat.settings.json_schema && /^\s*[{[]/.test(content);
  if (isJson && !isStreaming) parts.body.replaceChildren(codeBlock(pretty(content), "json"));
  else if (content) showMarkdown(parts.body, content, isStreaming);
  if (isStreaming && !content && !message.calls) {
    parts.body.shown = null;
    parts.body.replaceChildren(h("span", {class: "waiting"}, thinking ? "" : waitingFor()));
  } else if (!content && !isUser && !isStreaming) parts.body.replaceChildren();
  parts.content.hidden = !isUser && !content && !thinking && !isStreaming;
  parts.calls.replaceChildren(...(message.calls ?? []).map((call, number) => callElement(message, call, number, parts.openCalls)));
  parts.error.replaceChildren(...(message.error ? [h("p", {}, message.error)] : []));
  if (message.isTooLong && message.id === chat.leaf)
    parts.error.append(h("button", {onclick: () => leaveOut(message)}, "Leave out the oldest messages"));
  parts.footer.replaceChildren(...(isStreaming ? [] : footer(message)));
}

const waitingFor = () => {
  const {value, progress} = model()?.status ?? {};
  return value === "loading" ? `Loading the model, ${Math.round(100 * (progress ?? 0))} %` : "Reading";
};

function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

function footer(message) {
  const siblings = chat.siblings(message), place = siblings.indexOf(message), busy = jobs.has(chat.id);
  const isUser = message.role === "user", isLast = message.id === chat.leaf;
  const step = by => () => { chat.choose(siblings[place + by]); showMessages(); save(chat, false); };
  const row = [];
  if (siblings.length > 1)
    row.push(h("span", {class: "branches"},
      iconButton("left", "Previous branch", step(-1), {disabled: !place || busy}), `${place + 1}/${siblings.length}`,
      iconButton("right", "Next branch", step(1), {disabled: place === siblings.length - 1 || busy})));
  row.push(copyButton(() => split(message).content, "Copy"));
  row.push(iconButton("edit", isUser ? "Edit" : "Edit reply", () => edit(message), {disabled: busy}));
  if (!isUser) row.push(iconButton("again", "Regenerate", () => generate(message.parent), {disabled: busy}));
  if (!isUser && isLast && !["complete", "streaming"].includes(message.state) && !message.calls)
    row.push(iconButton("go-on", "Continue", () => goOn(message), {disabled: busy}));
  if (!isUser && isLast && message.calls && !message.calls.some(isPending))
    row.push(iconButton("go-on", "Continue", () => generate(message.id), {disabled: busy}));
  if (isUser && isLast) row.push(iconButton("again", "Send again", () => generate(message.id), {disabled: busy}));
  const state = {stopped: "stopped", length: "cut off at the maximum length", context: "cut off at the end of the context", failed: "interrupted", killed: "interrupted"}[message.state];
  row.push(h("span", {class: "stats"}, [state, ...numbers(message.stats)].filter(Boolean).join(" · ")));
  return row;
}

function numbers(stats) {
  if (!stats?.new_tokens) return [];
  return [
    `${stats.new_tokens.toLocaleString()} tokens`, stats.rate && `${stats.rate.toFixed(1)} tokens/s`,
    stats.cached_tokens && `${stats.cached_tokens.toLocaleString()} of ${stats.prompt_tokens.toLocaleString()} prompt tokens cached`,
  ];
}

// -- Replies ---------------------------------------------------------------------------------------------------------------------

function requestOf(which, messages) {
  const {thinking, json_schema, reply_prefix, ...options} = which.settings;
  const tools = [...which.tools ?? [], ...activeTools(which).map(schemaOf)];
  return {
    ...options, model: modelOf(which)?.id, messages,
    ...(thinking !== undefined && {chat_template_kwargs: {enable_thinking: thinking}}),
    ...(json_schema && {response_format: {type: "json_schema", json_schema: {name: "reply", schema: json_schema}}}),
    ...(tools.length && {tools}),
  };
}

// The messages that the model gets, up to a message.
const told = (which, to) => toldMessages(which, to, {instructions: instructionsOf(which), seesImages: sees(modelOf(which))});

// Generates a new reply to a message, as a branch next to its other replies.
function generate(parent) {
  const which = chat;
  if (jobs.has(which.id)) return;
  const failed = chat.messages.find(each => each.parent === parent && each.role === "assistant" && each.state === "failed" && !each.text);
  chat.leaf = parent;
  const reply = failed ?? chat.add("assistant", "");
  chat.choose(reply);
  Object.assign(reply, {state: "streaming", error: undefined, isTooLong: undefined});
  return run(which, reply, {begin: () => requestOf(which, told(which, parent))});
}

// Continues a reply that was cut off, including its reasoning if that was cut off.
async function goOn(message) {
  if (jobs.has(chat.id)) return;
  const {thinking, content} = split(message), messages = told(chat, message.parent);
  let begun = content;
  if (thinking) {
    begun = message.text;
    const {prompt} = await server.json("apply-template", requestOf(chat, messages)).catch(() => ({prompt: ""}));
    const opened = Object.keys(TAGS).find(tag => prompt.trimEnd().endsWith(tag));
    if (opened) begun = begun.replace("<think>", "").replace("</think>", TAGS[opened]);
  }
  message.state = "streaming";
  delete message.error;
  const request = requestOf(chat, [...messages, {role: "assistant", content: begun}]);
  return run(chat, message, {begin: () => ({...request, continue_final_message: true}), before: message.text});
}

// Generates the answer again without older messages: drops half of the remaining messages until the rest fits.
async function leaveOut(message) {
  do {
    const path = chat.path(message.parent), first = path.findLast(each => each.window)?.window.first;
    const told = path.slice(Math.max(0, path.findIndex(each => each.id === first))).filter(each => each.role === "user");
    if (told.length < 2) return notice("The last message alone is longer than the context.");
    path.at(-1).window = {first: told[Math.ceil(told.length / 2)].id, summary: ""};
    await generate(message.parent);
  } while (message.isTooLong);
}

// Ends the reasoning of a chat's running reply.
async function answerNow(which) {
  const id = jobs.get(which.id)?.completion;
  try {
    if (id) await server.json("v1/chat/completions/control", {id, action: "reasoning_end", model: model()?.id});
  } catch (error) { notice(error.message); }
}

// Writes a reply with the request that `begin` returns, runs the tools that the reply calls, and writes further replies.
// Without `begin` the reply is written, and some of its calls have no results yet.
async function run(which, message, {begin, before = ""} = {}) {
  const job = {chat: which, controller: new AbortController()};
  jobs.set(which.id, job);
  if (chat === which) { showMessages(); scrollToEnd(); }
  try {
    if (begin) await write(job, message, begin, before);
    while (jobs.get(which.id) === job && await runCalls(job, message)) {
      which.leaf = message.id;
      const next = message = which.add("assistant", "", {state: "streaming"});
      await write(job, next, () => requestOf(which, told(which, next.parent)), "");
    }
  } finally {
    endJob(job);
  }
}

function endJob(job) {
  if (jobs.get(job.chat.id) !== job) return;
  jobs.delete(job.chat.id);
  if (chat === job.chat) followEnd(showMessages);
}

// Runs the calls of a reply that have no results, and continues.
function resume(message) {
  if (!jobs.has(chat.id)) run(chat, message);
}

// Streams a reply into a message.  The job continues if the reply calls tools.
async function write(job, message, begin, before) {
  const {chat: which, controller} = job;
  let {thinking, content} = split({role: "assistant", text: before});
  const calls = [], begun = performance.now();
  job.thinkingSeconds = job.completion = undefined;
  let firstThought = 0, shownAt = 0, savedAt = performance.now(), drawing = 0, pause = 50, timings = null, reason = null;
  const draw = () => {
    const begun = performance.now();
    drawing = 0;
    if (chat === which) followEnd(showMessages);
    shownAt = performance.now();
    pause = Math.max(50, 2 * (shownAt - begun));  // for long replies, leaves time for the user's keys
  };
  const changed = () => {
    message.text = joined(thinking, content);
    if (!drawing) drawing = setTimeout(draw, Math.max(0, pause - (performance.now() - shownAt)));
    if (performance.now() - savedAt > 2000) { savedAt = performance.now(); save(which); }
  };
  if (chat === which) followEnd(showMessages);
  if (model()?.status.value !== "loaded") watchLoading(() => !jobs.has(which.id) || message.text);
  save(which).then(() => { if (chat === which && location.hash !== `#${which.id}`) history.replaceState(null, "", `#${which.id}`); showChats(); });
  const waiting = setInterval(() => { if (!message.text && chat === which) fillWaiting(message); }, 400);
  let request = {};
  try {
    await orAborted(loadTools(which), controller.signal);
    request = begin();
    for await (const event of server.chat(request, controller.signal)) {
      const [choice] = event.choices, delta = choice?.delta ?? {};
      job.completion = event.id;
      if (delta.reasoning_content) { firstThought ||= performance.now(); thinking += delta.reasoning_content; changed(); }
      if (delta.content) {
        if (firstThought && !job.thinkingSeconds) job.thinkingSeconds = (performance.now() - firstThought) / 1000;
        content += delta.content;
        changed();
      }
      for (const {index, function: part} of delta.tool_calls ?? []) {
        const call = calls[index] ??= {name: "", arguments: "", result: null};
        call.name += part.name ?? "";
        call.arguments += part.arguments ?? "";
        message.calls = calls.map(each => ({...each}));
        changed();
      }
      if (choice?.finish_reason) reason = choice.finish_reason;
      timings = event.timings ?? timings;
      if (event.warnings?.length) message.error = event.warnings.join("; ");
    }
    message.state = reason === "length" ? "length" : "complete";
  } catch (error) {
    if (error.name === "AbortError") message.state = "stopped";
    else {
      message.state = "failed";
      message.error = error.message;
      message.isTooLong = error.code === "context_length_exceeded";
      if (error.status === 401) askForKey("");
      if (!error.status) loadModels();
    }
  }
  clearInterval(waiting);
  clearTimeout(drawing);
  message.text = joined(thinking, content);
  // Calls of a reply that was cut off are incomplete.
  const whole = calls.map(call => ({...call, arguments: call.arguments || "{}"}));
  message.calls = whole.length && message.state === "complete" && whole.every(call => isObject(call.arguments)) ? whole : undefined;
  message.stats = {
    prompt_tokens: (timings?.prompt_n ?? 0) + (timings?.cache_n ?? 0), cached_tokens: timings?.cache_n ?? 0, new_tokens: timings?.predicted_n ?? 0,
    first_token_s: (timings?.first_token_ms ?? performance.now() - begun) / 1000, rate: timings?.predicted_per_second ?? 0, model: request.model ?? "",
    thinking_s: job.thinkingSeconds ?? null,
  };
  if (message.state !== "complete" || !message.calls) jobs.delete(which.id);
  if (chat === which) followEnd(showMessages);
  await save(which);
  say(message.state === "complete" ? "The reply is complete." : message.error ?? "The reply ended.");
}

// A promise's result.  Rejects with an AbortError when the signal is aborted before.
const orAborted = (promise, signal) => Promise.race([promise, new Promise((_, reject) => {
  const abort = () => reject(new DOMException("", "AbortError"));
  if (signal.aborted) abort(); else signal.addEventListener("abort", abort, {once: true});
})]);

function fillWaiting(message) {
  const waiting = elements.get(message.id)?.querySelector(".waiting");
  if (waiting) waiting.textContent = waitingFor();
}

const scrollToEnd = () => { $("scroll").scrollTop = $("scroll").scrollHeight; };

// If the end of the chat is visible, scrolls with the growing reply; otherwise does not scroll.
function followEnd(change) {
  const scroll = $("scroll"), isAtEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 80;
  change();
  if (isAtEnd) scrollToEnd();
}

// Enter sends, Shift+Enter starts a new line; Enter also ends the composition of an input method.
const isSendKey = event => event.key === "Enter" && !event.shiftKey && !event.isComposing;

// -- Editing -----------------------------------------------------------------------------------------------------------------------

function edit(message) {
  const element = elements.get(message.id), isUser = message.role === "user";
  const area = h("textarea", {rows: Math.min(16, split(message).content.split("\n").length + 1), "aria-label": "Edit"});
  area.value = split(message).content;
  const done = () => { element.classList.remove("editing"); element.stamp = ""; element.parts = null; showMessages(); };
  const apply = () => {
    const text = area.value, {thinking} = split(message);
    done();
    if (text === split(message).content && !isUser) return;
    chat.leaf = message.parent;
    const {attachments} = message;
    const made = chat.add(message.role, isUser ? text : joined(thinking, text), {state: isUser ? "complete" : "edited", ...(attachments && {attachments})});
    if (isUser) generate(made.id);
    else { showMessages(); save(chat); }
  };
  area.addEventListener("keydown", event => {
    if (event.key === "Escape") { event.stopPropagation(); done(); }
    if (isSendKey(event)) { event.preventDefault(); apply(); }
  });
  element.classList.add("editing");
  element.parts.content.hidden = false;
  element.parts.content.replaceChildren(area);
  element.parts.footer.replaceChildren(h("button", {class: "primary", onclick: apply}, isUser ? "Send" : "Keep"), h("button", {onclick: done}, "Cancel"));
  area.focus();
}

// -- The message that is written ---------------------------------------------------------------------------------------------------

function showComposer() {
  const busy = jobs.has(chat.id), send = $("send"), label = busy ? "Stop" : "Send";
  if (send.title !== label) {
    send.title = label;
    send.setAttribute("aria-label", label);
    send.replaceChildren(icon(busy ? "stop" : "send"));
  }
  const {settings, system, tools} = chat, nTools = (tools?.length ?? 0) + activeTools(chat).length, list = toolsOf(chat);
  $("open-tools").hidden = !list.allowed && !list.why;
  const marks = [system && "system prompt", settings.json_schema && "JSON schema", nTools && `${nTools} tool${nTools > 1 ? "s" : ""}`, settings.thinking === false && "no thinking",
    settings.reasoning_effort && `${settings.reasoning_effort} effort`, settings.reasoning_budget !== undefined && `${settings.reasoning_budget.toLocaleString()} thinking tokens`];
  $("marks").textContent = marks.filter(Boolean).join(" · ");
  $("attached").replaceChildren(
    ...attachments.map((file, at) => h("span", {class: file.picture && !isSound(file) ? "chip picture" : "chip"},
      file.picture && !isSound(file) ? h("img", {src: mediaUrl(file), alt: file.name}) : file.name,
      iconButton("close", `Remove ${file.name}`, () => { attachments.splice(at, 1); showComposer(); }))));
}

function grow() {
  const area = $("text");
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
}

function submit() {
  if (jobs.has(chat.id)) return jobs.get(chat.id).controller.abort();
  const text = $("text").value.trim();
  if (!text && !attachments.length) return;
  const media = attachments.filter(file => file.picture);
  const why = media.some(isSound) && !hears(model()) ? "does not accept audio" : !media.every(isSound) && !sees(model()) ? "does not accept images" : "";
  if (why) return notice(`${model()?.id} ${why}: pick a model that does, or remove them.`);
  notice("");
  chat.add("user", text, attachments.length ? {attachments} : {});
  if (!chat.model) chat.model = model()?.id ?? "";
  attachments = [];
  $("text").value = "";
  grow();
  generate(chat.leaf);
}

// Images are scaled down to this size before they are sent; texts must be smaller; longer audio is resampled to the models' rate.
const MAX_PIXELS = 2048, MAX_TEXT = 4 << 20, MAX_SOUND = 4 << 20, SOUND_RATE = 16000;

async function attach(files) {
  for (const file of files) {
    try {
      const isPicture = file.type.startsWith("image/") && file.type !== "image/svg+xml";
      if (isPicture || file.type.startsWith("audio/")) {
        const takes = isPicture ? sees : hears, media = isPicture ? "images" : "audio", name = model()?.id ?? "the model";
        if (!takes(model())) {
          notice(`Loading ${name}, to see whether it accepts ${media}…`);
          await loadModel();
        }
        if (!takes(model())) throw new Error(`${name} does not accept ${media}`);
        attachments.push({name: file.name || (isPicture ? "image" : "audio"), text: "", n_tokens: 0, picture: await (isPicture ? pictureFile : soundFile)(file)});
      } else {
        if (file.size > MAX_TEXT) throw new Error("it is larger than 4 MiB");
        const text = new TextDecoder("utf-8", {fatal: true}).decode(await file.arrayBuffer());
        if (text.includes("\0")) throw new TypeError();
        attachments.push({name: file.name || "text", text, n_tokens: Math.ceil(text.length / 4)});
      }
      notice("");
    } catch (error) {
      notice(`${file.name} is not attached: ${error instanceof TypeError ? "it is not text, an image or audio" : error.message}.`);
    }
  }
  showComposer();
  $("text").focus();
}

// Returns an image file in base64, encoded again by the browser: upright, and not larger than models use.
async function pictureFile(file) {
  let bitmap;
  try { bitmap = await createImageBitmap(file); } catch { throw new Error("this browser cannot read the image"); }
  const scale = Math.min(1, MAX_PIXELS / Math.max(bitmap.width, bitmap.height));
  const canvas = h("canvas");
  [canvas.width, canvas.height] = [bitmap.width, bitmap.height].map(each => Math.max(1, Math.round(each * scale)));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  const asJpeg = file.type === "image/jpeg" || file.size > 4 << 20;
  return (asJpeg ? canvas.toDataURL("image/jpeg", .9) : canvas.toDataURL("image/png")).replace(/^[^,]*,/, "");
}

async function base64(blob) {
  const reader = new FileReader();
  await new Promise((resolve, reject) => { Object.assign(reader, {onload: resolve, onerror: () => reject(reader.error)}).readAsDataURL(blob); });
  return reader.result.replace(/^[^,]*,/, "");
}

// Returns an audio file in base64: unchanged if it is small and the server reads its format, otherwise as 16-bit samples.
async function soundFile(file) {
  const isRead = isSound({picture: await base64(file.slice(0, 12))});
  if (isRead && file.size <= MAX_SOUND) return base64(file);
  let samples;
  try {
    const decoded = await new OfflineAudioContext(1, 1, SOUND_RATE).decodeAudioData(await file.arrayBuffer());
    const mixer = new OfflineAudioContext(1, decoded.length, SOUND_RATE), source = mixer.createBufferSource();
    source.buffer = decoded;
    source.connect(mixer.destination);
    source.start();
    samples = (await mixer.startRendering()).getChannelData(0);
  } catch {
    if (isRead) return base64(file);
    throw new Error("this browser cannot read the audio");
  }
  const made = new Blob([wavHeader(samples.length), Int16Array.from(samples, each => Math.max(-1, Math.min(1, each)) * 32767)]);
  return base64(isRead && file.size < made.size ? file : made);
}

// Returns the header of a WAV file with one channel of 16-bit samples.
function wavHeader(n) {
  const header = new DataView(new ArrayBuffer(44)), words = {0: "RIFF", 8: "WAVEfmt ", 36: "data"};
  for (const at in words) [...words[at]].forEach((letter, i) => header.setUint8(+at + i, letter.charCodeAt(0)));
  for (const [at, value] of [[4, 36 + 2 * n], [16, 16], [24, SOUND_RATE], [28, 2 * SOUND_RATE], [40, 2 * n]]) header.setUint32(at, value, true);
  for (const [at, value] of [[20, 1], [22, 1], [32, 2], [34, 16]]) header.setUint16(at, value, true);
  return header;
}

let recorder = null;  // while the microphone is on

async function record() {
  if (recorder) return recorder.stop();
  let stream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({audio: true});
  } catch (error) {
    return notice(error.name === "NotFoundError" ? "There is no microphone." : `The microphone cannot be used: ${error.message}.`);
  }
  const pieces = [];
  recorder = new MediaRecorder(stream);
  recorder.addEventListener("dataavailable", ({data}) => pieces.push(data));
  recorder.addEventListener("stop", () => {
    for (const track of stream.getTracks()) track.stop();
    recorder = null;
    showRecording();
    attach([new File(pieces, "recording.wav", {type: "audio/webm"})]);
  });
  recorder.start();
  showRecording();
}

function showRecording() {
  const label = recorder ? "Stop recording" : "Record audio";
  $("record").setAttribute("aria-label", label);
  $("record").title = label;
  $("record").replaceChildren(icon(recorder ? "stop" : "microphone"));
  say(recorder ? "Recording" : "");
  showModel();
}

// -- Settings -----------------------------------------------------------------------------------------------------------------------

const NUMBERS = [
  ["temperature", "Temperature", .1], ["top_p", "Top p", .05], ["top_k", "Top k", 1], ["min_p", "Min p", .01],
  ["repeat_penalty", "Repeat penalty", .05], ["max_tokens", "Maximum tokens", 1],
  ["seed", "Seed", 1], ["reasoning_budget", "Thinking tokens", 1],
];

function openSettings() {
  const {elements: fields} = $("settings").querySelector("form"), {settings} = chat, json = value => value ? JSON.stringify(value, null, 2) : "";
  for (const [name] of NUMBERS) {
    fields[name].value = settings[name] ?? "";
    const usual = model()?.defaults?.[name === "max_tokens" ? "n_predict" : name];
    fields[name].placeholder = usual === undefined || usual === -1 ? "" : `${+(+usual).toFixed(4)}`;
  }
  fields.system.value = chat.system;
  showReasoning(fields);
  fields.thinking.value = settings.thinking === undefined ? "" : String(settings.thinking);
  fields.stop.value = (settings.stop ?? []).join("\n");
  fields.json_schema.value = json(settings.json_schema);
  fields.tools.value = json(chat.tools);
  fields.default.checked = false;
  fields.theme.value = stored("theme") ?? "";
  fields.key.value = server.key;
  $("settings").querySelector(".error").textContent = "";
  $("settings").showModal();
}

// Shows the settings of reasoning that the model has.  Before a model is loaded, its abilities are unknown.
function showReasoning(fields) {
  const {reasons, takesEffort} = model()?.reasoning ?? {reasons: true, takesEffort: false}, {settings} = chat;
  const effort = settings.reasoning_effort ?? "", isUsed = ["thinking", "reasoning_effort", "reasoning_budget"].some(name => settings[name] !== undefined);
  $("reasoning").hidden = !reasons && !isUsed;
  fields.reasoning_effort.closest("label").hidden = !takesEffort && !effort;
  const efforts = ["low", "medium", "high"];
  if (effort && !efforts.includes(effort)) efforts.push(effort);
  fields.reasoning_effort.replaceChildren(...["", ...efforts].map(value => h("option", {value, selected: value === effort}, value || "default")));
}

function saveSettings(event) {
  const {elements: fields} = event.target, settings = {...chat.settings}, error = event.target.querySelector(".error");
  const read = (name, what, good) => {
    if (!fields[name].value.trim()) return null;
    let value;
    try { value = JSON.parse(fields[name].value); } catch { /* reported below */ }
    if (!good(value)) throw new Error(`${what}`);
    return value;
  };
  let tools;
  try {
    for (const [name, label] of NUMBERS) {
      if (!fields[name].validity.valid) throw new Error(`${label} is not a number that it can be.`);
      if (fields[name].value === "") delete settings[name];
      else settings[name] = +fields[name].value;
    }
    const schema = read("json_schema", "The JSON schema is not a JSON object.", value => value && typeof value === "object" && !Array.isArray(value));
    if (schema) settings.json_schema = schema; else delete settings.json_schema;
    tools = read("tools", "The tools are not a JSON list of functions with names.", value => Array.isArray(value) && value.every(each => each?.function?.name));
  } catch (problem) {
    event.preventDefault();
    error.textContent = problem.message;
    return;
  }
  const stop = fields.stop.value.split("\n").filter(Boolean);
  if (stop.length) settings.stop = stop; else delete settings.stop;
  if (fields.reasoning_effort.value) settings.reasoning_effort = fields.reasoning_effort.value; else delete settings.reasoning_effort;
  if (fields.thinking.value) settings.thinking = fields.thinking.value === "true"; else delete settings.thinking;
  Object.assign(chat, {settings, tools, system: fields.system.value});
  if (fields.default.checked) store("defaults", {settings, tools, system: chat.system});
  store("theme", fields.theme.value || null);
  showTheme();
  if (fields.key.value !== server.key) { server.key = fields.key.value; loadModels(); loadTools(chat, true); }
  if (chat.messages.length) save(chat);
  showMessages();
}

function showTheme() {
  const theme = stored("theme");
  if (theme) document.documentElement.dataset.theme = theme; else delete document.documentElement.dataset.theme;
}

// -- Files of chats -----------------------------------------------------------------------------------------------------------------

const fileName = title => (title || "chat").replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 50).toLowerCase() || "chat";
const jsonText = value => JSON.stringify(value, null, 1) + "\n";

async function exportAll() {
  const chats = [];
  for (const {id} of await storage.list()) chats.push((await storage.load(id)).exported);
  download("chats.json", jsonText({format: ALL_FORMAT, version: 1, chats}), "application/json");
}

async function importFiles(files) {
  let last = null, n = 0;
  for (const file of files) {
    try {
      for (const read of readChats(await file.text())) { await storage.save(read); last = read; n++; }
    } catch (error) {
      return notice(`${file.name} cannot be imported: ${error.message}.`);
    }
  }
  if (last) await openChat(last.id);
  notice(n > 1 ? `${n} chats are imported.` : "");
}

async function chatAction(name) {
  $("chat-actions").hidePopover();
  if (name === "markdown") download(`${fileName(chat.title)}.md`, toMarkdown(chat), "text/markdown");
  if (name === "json") download(`${fileName(chat.title)}.json`, jsonText(chat.exported), "application/json");
  if (name === "rename") {
    const title = prompt("Title of this chat", chat.title);
    if (title !== null) { chat.title = titleOf(title); await save(chat); showMessages(); }
  }
  if (name === "delete" && confirm(`Delete “${chat.title || "this chat"}”? It cannot be brought back.`)) {
    chat.isDeleted = true;  // otherwise a reply in progress would save the chat again
    jobs.get(chat.id)?.controller.abort();
    await storage.delete(chat.id);
    newChat();
  }
}

// -- Events ---------------------------------------------------------------------------------------------------------------------------

function sidebar(isOpen) {
  document.body.classList.toggle("sidebar", isOpen);
  $("open-sidebar").setAttribute("aria-expanded", isOpen);
  (isOpen ? $("close-sidebar") : $("open-sidebar")).focus();
}

for (const [name, label, step] of NUMBERS)
  $(name === "reasoning_budget" ? "reasoning" : "numbers").append(
    h("label", {}, label, h("input", {name, type: "number", step: step === 1 ? 1 : "any", min: /^(seed|reasoning_budget)$/.test(name) || step !== 1 ? 0 : 1, inputmode: "decimal"})));
$("composer").addEventListener("submit", event => { event.preventDefault(); submit(); });
$("text").addEventListener("input", grow);
$("text").addEventListener("keydown", event => {
  if (isSendKey(event)) { event.preventDefault(); if (!jobs.has(chat.id)) submit(); }
  if (event.key === "ArrowUp" && !$("text").value && !jobs.has(chat.id)) {
    const last = chat.path().findLast(each => each.role === "user");
    if (last) { event.preventDefault(); edit(last); }
  }
});
$("text").addEventListener("paste", event => {
  if (event.clipboardData.files.length) { event.preventDefault(); attach(event.clipboardData.files); }
});
for (const kind of ["dragenter", "dragover"])
  document.addEventListener(kind, event => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    $("composer").classList.add("dropping");
  });
document.addEventListener("dragleave", event => { if (!event.relatedTarget) $("composer").classList.remove("dropping"); });
document.addEventListener("drop", event => {
  $("composer").classList.remove("dropping");
  if (!event.dataTransfer.files.length) return;
  event.preventDefault();
  attach(event.dataTransfer.files);
});
$("attach").addEventListener("click", () => $("file").click());
$("record").addEventListener("click", record);
$("file").addEventListener("change", async event => { await attach([...event.target.files]); event.target.value = ""; });
$("new").addEventListener("click", newChat);
$("search").addEventListener("input", showChats);
$("import").addEventListener("click", () => $("import-file").click());
$("import-file").addEventListener("change", async event => { await importFiles([...event.target.files]); event.target.value = ""; });
$("export-all").addEventListener("click", exportAll);
$("open-sidebar").addEventListener("click", () => sidebar(true));
for (const id of ["close-sidebar", "shade"]) $(id).addEventListener("click", () => sidebar(false));
$("model").addEventListener("click", openModels);
$("model-search").addEventListener("input", showModelList);
$("open-settings").addEventListener("click", openSettings);
$("settings").querySelector("form").addEventListener("submit", saveSettings);
$("show-keys").addEventListener("click", () => { $("settings").close(); $("keys").showModal(); });
$("key-dialog").querySelector("form").addEventListener("submit", () => { server.key = $("key").value; loadModels(); loadTools(chat, true); });
$("chat-actions").addEventListener("click", event => { if (event.target.dataset.do) chatAction(event.target.dataset.do); });
for (const button of document.querySelectorAll("[data-close]")) button.addEventListener("click", () => button.closest("dialog").close());
for (const dialog of document.querySelectorAll("dialog")) dialog.addEventListener("click", event => { if (event.target === dialog) dialog.close(); });
storage.changes.addEventListener("message", async event => {
  showChats();
  const job = jobs.get(event.data);
  if (job) {  // a permission that was taken back in another tab ends here, too
    job.chat.toolbox = (await storage.load(event.data))?.toolbox ?? job.chat.toolbox;
    showComposer();
  }
  if (event.data !== chat.id || jobs.has(chat.id) || document.querySelector(".editing")) return;
  const changed = await storage.load(chat.id);
  if (changed?.id !== chat.id || jobs.has(chat.id)) return;
  chat = changed;
  elements.clear();  // their buttons refer to the old messages
  followEnd(showMessages);
});
addEventListener("hashchange", () => {
  if (takeKey()) return void (loadModels(), loadTools(chat));
  const id = location.hash.slice(1); if (id && id !== chat.id) openChat(id); else if (!id) newChat();
});
addEventListener("beforeunload", () => { for (const {chat: each} of jobs.values()) storage.save(each); });

async function openModels() {
  $("model-search").value = "";
  showModelList();
  $("models").showModal();
  await loadModels();
  await searchModels();
  showModelList();
}

document.addEventListener("keydown", event => {
  const isOpen = document.querySelector("dialog[open]"), control = event.ctrlKey || event.metaKey, key = event.key.toLowerCase();
  const types = /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement?.tagName);
  const act = work => { event.preventDefault(); work(); };
  if (event.key === "Escape" && !isOpen) {
    if (document.body.classList.contains("sidebar")) sidebar(false);
    else jobs.get(chat.id)?.controller.abort();
  } else if (isOpen) return;
  else if (control && key === "k") act(() => { if (getComputedStyle($("open-sidebar")).display !== "none") sidebar(true); $("search").focus(); });
  else if (control && event.shiftKey && key === "o") act(newChat);
  else if (event.ctrlKey && key === "m") act(openModels);
  else if (!types && !control && event.key === "/") act(() => $("text").focus());
  else if (!types && !control && event.key === "?") act(() => $("keys").showModal());
});

// The address may contain a key, for example from a QR code; the key is removed from the address.
function takeKey() {
  const given = /^#(key|tools)=(.+)$/.exec(location.hash);
  if (!given) return false;
  server[given[1] === "key" ? "key" : "toolsKey"] = decodeURIComponent(given[2]);
  toolRequests.clear();
  history.replaceState(null, "", location.pathname);
  $("key-dialog").close();
  return true;
}
takeKey();
showTheme();
loadModels();
storage.opened.then(() => storage.memory && notice("This browser keeps no chats: export those that you want to keep before you close the page."));
if (location.hash.length > 1) openChat(location.hash.slice(1)); else newChat();
