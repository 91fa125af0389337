// Tools that run on the server: the list of a chat's tools, the user's permissions, and calls of the model.

const NO_TOOLS = {allowed: false, folders: [], has_servers: false, rounds: 10, tools: [], system: "", summary: "", warnings: [], why: ""};
const toolRequests = new Map();  // promises of the server's lists of tools, by working folder
const toolLists = new Map();  // lists that have arrived, by working folder
const decisions = new Map();  // what the user decided about calls: {answer, mark, digest}, by `callKey`

const toolsOf = which => toolLists.get(which.toolbox.folder) ?? NO_TOOLS;
const callKey = (message, number) => `${message.id} ${number}`;
const isPending = call => typeof call.result !== "string";

// Loads the list of a chat's tools, which is requested once per folder unless `isNew`.
async function loadTools(which, isNew = false) {
  const {folder} = which.toolbox;
  if (isNew) toolRequests.delete(folder);
  if (!toolRequests.has(folder)) toolRequests.set(folder, requestTools(folder));
  const list = await toolRequests.get(folder);
  toolLists.set(folder, list);
  if (list.isMissing && which.toolbox.folder === folder) {
    which.toolbox.folder = "";
    notice(list.why);
    return loadTools(which);
  }
  if (which === chat) { showMessages(); if ($("tools").open) showTools(); }
}

async function requestTools(folder) {
  try {
    return {...NO_TOOLS, ...await server.json(`page/tools?folder=${encodeURIComponent(folder)}`)};
  } catch (error) {
    if (!error.status) toolRequests.delete(folder);  // the next request may reach the server
    const isMissing = error.status === 404 && folder !== "";
    return {...NO_TOOLS, isMissing, why: isMissing || error.code === "page_key_needed" ? error.message : ""};
  }
}

// Names of the tools whose results the user types.
const typedNames = which => new Set((which.tools ?? []).map(each => each.function.name));

// The server's tools that are on in a chat.
function activeTools(which) {
  const typed = typedNames(which);
  return toolsOf(which).tools.filter(({name}) => !typed.has(name) && !which.toolbox.off.includes(name));
}

const instructionsOf = which => which.toolbox.instructions ? toolsOf(which).system : "";

const schemaOf = ({name, description, parameters}) => ({type: "function", function: {name, description, parameters}});

// -- Calls -------------------------------------------------------------------------------------------------------------------

// Runs the calls of a reply in order.  Returns whether all have results, so that the model can continue; otherwise
// the user decides, types a result, or has stopped a tool.
async function runCalls(job, message) {
  const which = job.chat;
  await orAborted(loadTools(which), job.controller.signal);
  for (let number = 0; number < message.calls.length; number++) {
    const call = message.calls[number];
    if (!isPending(call)) continue;
    const active = activeTools(which), tool = active.find(each => each.name === call.name);
    if (!tool && (!active.length || typedNames(which).has(call.name))) return false;
    if (!tool) await setCall(which, message, number, {result: `There is no tool ${JSON.stringify(call.name.slice(0, 80))}. The tools are: ${active.map(each => each.name).join(", ")}.`});
    else if (!await runCall(job, message, number, tool)) return false;
  }
  return true;
}

async function setCall(which, message, number, changes) {
  message.calls = message.calls.map((call, at) => at === number ? {...call, ...changes} : call);
  if (which === chat) followEnd(showMessages);
  await save(which);
}

// Runs a call if the user allows it.  Returns whether it has a result.
async function runCall(job, message, number, tool) {
  const which = job.chat, key = callKey(message, number), call = message.calls[number];
  const body = {name: tool.name, mark: tool.mark, arguments: call.arguments, folder: which.toolbox.folder};
  let decision = decisions.get(key) ?? {};
  if (decision.answer && decision.mark !== tool.mark) decision = {};  // the decision was about another tool
  if (decision.answer === "no") {
    await setCall(which, message, number, {result: "(the user does not allow this call)"});
    return true;
  }
  try {
    if (tool.is_editor && decision.digest === undefined) {
      const {change, digest} = await server.json("page/tools/preview", body, job.controller.signal);
      decision = {digest};
      decisions.set(key, decision);
      await setCall(which, message, number, {change});
    }
    if (!decision.answer && !isAllowed(which, message, tool)) {
      say(`The reply asks to use the tool ${tool.name}.`);
      return false;
    }
    const {text, images, undo} = await server.json("page/tools/call", {...body, digest: decision.digest ?? ""}, job.controller.signal);
    await setCall(which, message, number, {...await shownImages(text, images), ...(undo && {undo})});
  } catch (error) {
    if (error.name === "AbortError") await setCall(which, message, number, {result: "(stopped by the user)"});
    else if (error.status === 400) { await setCall(which, message, number, {result: `error: ${error.message}`}); return true; }
    else {
      notice(error.message);
      if (error.code === "tool_changed") await loadTools(which, true);
    }
    return false;
  } finally {
    if (decision.answer) decisions.delete(key);
  }
  return true;
}

// Number of replies with calls since the user's last message, up to a reply.
function roundsOf(which, message) {
  const path = which.path(message.id), start = path.findLastIndex(each => each.role === "user");
  return path.slice(start + 1).filter(each => each.calls).length;
}

// Whether a reply has a call after the maximum number of rounds: the user is then asked again.
function isLate(which, message) {
  const n = roundsOf(which, message), {rounds} = toolsOf(which);
  return n > rounds && (n - 1) % rounds === 0;
}

const isAllowed = (which, message, tool) => which.toolbox.allowed.includes(tool.mark) && !isLate(which, message);

// The text of a result, and its images, encoded again by the browser.
async function shownImages(text, encoded) {
  const images = [];
  let result = text;
  for (const picture of encoded) {
    try {
      const bytes = Uint8Array.from(atob(picture), each => each.charCodeAt(0));
      images.push(await pictureFile(new File([bytes], "image", {type: mediaType({picture})})));
    } catch {
      result += "\n(the browser cannot read an image of this result)";
    }
  }
  return {result, ...(images.length && {images})};
}

function decide(message, number, answer, tool) {
  if (jobs.has(chat.id)) return;
  const key = callKey(message, number);
  if (answer === "chat") changeTools({allowed: [...chat.toolbox.allowed, tool.mark]});
  decisions.set(key, {...decisions.get(key), answer, mark: tool.mark});
  resume(message);
}

async function undo(message, number) {
  const {undo: id, result} = message.calls[number];
  try {
    const {text} = await server.json("page/tools/undo", {id});
    notice(`${text}.`);
    await setCall(chat, message, number, {result: `${result}\n(the user has undone this edit)`, undo: undefined});
  } catch (error) { notice(error.message); }
}

// -- Shown calls --------------------------------------------------------------------------------------------------------------

// Characters that cannot be seen, or that reorder the text around them, and spaces other than the space.
const INVISIBLE = /(?![\n\t ])[\p{C}\p{Z}\u034f\u115f\u1160\u3164\uffa0\u{fe00}-\u{fe0f}\u{e0100}-\u{e01ef}]/gu;

// A text whose invisible characters are escapes, because the user decides by what is shown.
const visible = text => text.replace(INVISIBLE, each => [...each].map(part => `\\u{${part.codePointAt(0).toString(16)}}`).join(""));

// The arguments of a call.  Numbers that JavaScript would round stay as they were written.
const shownArguments = call => visible(/\d{16}/.test(call.arguments) ? call.arguments : pretty(call.arguments));

// A call.  After it has run, its arguments and its result are folded; `open` has the numbers of calls that are not.
function callElement(message, call, number, open) {
  const name = `Tool ${visible(call.name)}`, json = codeBlock(shownArguments(call), "json"), change = call.change && codeBlock(visible(call.change), "diff");
  if (isPending(call)) {
    const element = h("div", {class: "call pending"}, h("p", {class: "name"}, name), change, change ? h("details", {}, h("summary", {}, "Arguments"), json) : json);
    if (message.state !== "streaming") element.append(pendingElement(message, call, number));
    return element;
  }
  const result = h("pre", {tabindex: 0, role: "group", "aria-label": "Result"}, call.result);
  const folded = h("details", {open: open.has(number)}, h("summary", {}, h("span", {class: "name"}, name), " ", h("span", {class: "quiet"}, brief(call))), json, result);
  folded.addEventListener("toggle", () => { if (folded.open) open.add(number); else open.delete(number); });
  return h("div", {class: "call"}, folded, change,
    call.images?.length > 0 && h("div", {class: "pictures"}, call.images.map(picture => h("img", {src: mediaUrl({picture}), alt: `Image of ${call.name}`}))),
    call.undo && h("button", {type: "button", onclick: () => undo(message, number)}, "Undo the edit"));
}

// The first text in a call's arguments, on one line.
function brief(call) {
  const text = Object.values(JSON.parse(call.arguments)).find(value => typeof value === "string") ?? "";
  return visible(text.slice(0, 80).replace(/\s+/g, " "));
}

// The state of a call without a result, or the controls that give it one.
function pendingElement(message, call, number) {
  const quiet = text => h("p", {class: "quiet"}, text);
  if (message.id !== chat.leaf || message.state !== "complete") return quiet("It was not run.");
  const isNext = message.calls.findIndex(isPending) === number, tool = activeTools(chat).find(each => each.name === call.name);
  if (jobs.has(chat.id)) return isNext ? h("p", {class: "waiting"}, "Running") : quiet("Waits for the call before it.");
  if (!tool) return typedResult(message, call, number);
  if (!isNext) return quiet("Waits for the call before it.");
  if (tool.is_editor && decisions.get(callKey(message, number))?.digest === undefined)
    return h("button", {class: "primary", type: "button", onclick: () => resume(message)}, "Show the change");
  const button = (answer, label, more = {}) => h("button", {type: "button", onclick: () => decide(message, number, answer, tool), ...more}, label);
  const late = isLate(chat, message) && quiet(`The model has used tools in ${roundsOf(chat, message) - 1} replies.`);
  return h("div", {class: "choices", role: "group", "aria-label": `May the model use ${call.name}?`},
    late, button("once", "Allow once", {class: "primary"}), button("chat", "Always in this chat"), button("no", "Deny"));
}

function typedResult(message, call, number) {
  const area = h("textarea", {rows: 2, "aria-label": `Result of ${call.name}`, placeholder: "The tool's result"});
  return h("form", {onsubmit: event => { event.preventDefault(); giveResult(message, number, area.value); }}, area, h("button", {class: "primary"}, "Send result"));
}

async function giveResult(message, number, result) {
  await setCall(chat, message, number, {result});
  resume(message);
}

// -- The dialog of tools ------------------------------------------------------------------------------------------------------

async function openTools() {
  $("tools-default").checked = false;
  showTools();
  $("tools").showModal();
  await loadTools(chat, true);
}

function showTools() {
  const {folders, tools, summary, warnings, why, has_servers: hasServers} = toolsOf(chat), {folder, off, allowed, instructions} = chat.toolbox;
  const select = $("tools-folder").querySelector("select");
  $("tools-folder").hidden = !folders.length;
  select.replaceChildren(...["", ...folders].map(name => h("option", {value: name, selected: name === folder}, name || "none")));
  $("restart-tools").hidden = !hasServers;
  $("tools-instructions").hidden = !summary;
  $("tools-instructions").querySelector("input").checked = instructions;
  $("tools-instructions").querySelector("span").textContent = `Use instructions: ${summary}`;
  const rows = tools.map(({name, description, mark}) => h("li", {},
    h("label", {class: "check"}, h("input", {type: "checkbox", checked: !off.includes(name), onchange: event => switchTool(name, event.target.checked)}),
      h("span", {}, h("span", {class: "tool"}, visible(name)), h("span", {class: "quiet"}, visible(description)))),
    allowed.includes(mark) && h("button", {class: "small", type: "button", "aria-label": `Ask again before ${name}`, onclick: () => askAgain(mark)}, "Ask again")));
  const notes = [why, ...warnings].filter(Boolean).map(text => h("li", {class: "quiet"}, text));
  $("tool-list").replaceChildren(...rows, ...notes);
  if (!rows.length && !notes.length) $("tool-list").append(h("li", {class: "quiet"}, "No tools are on. Choose a folder, or switch tools on in the settings file of the server."));
}

// Starts the MCP servers again, on the server.
async function restartTools() {
  const button = $("restart-tools");
  button.disabled = true;
  try {
    await server.json("page/tools/restart", {});
    toolRequests.clear();
    await loadTools(chat);
    say("The MCP servers are started.");
  } catch (error) { notice(error.message); }
  button.disabled = false;
}

function changeTools(changes) {
  Object.assign(chat.toolbox, changes);
  if ($("tools-default").checked) storeToolDefaults();
  if (chat.messages.length) save(chat);
  showMessages();
}

function storeToolDefaults() {
  const {folder, off, instructions} = chat.toolbox;
  store("tools", {folder, off, instructions});
}

const switchTool = (name, isOn) => changeTools({off: [...chat.toolbox.off.filter(each => each !== name), ...(isOn ? [] : [name])]});

function askAgain(mark) {
  changeTools({allowed: chat.toolbox.allowed.filter(each => each !== mark)});
  showTools();
}

$("restart-tools").addEventListener("click", restartTools);
$("open-tools").addEventListener("click", openTools);
$("tools-folder").addEventListener("change", event => { changeTools({folder: event.target.value}); loadTools(chat, true); });
$("tools-instructions").addEventListener("change", event => changeTools({instructions: event.target.checked}));
$("tools-default").addEventListener("change", event => { if (event.target.checked) storeToolDefaults(); else store("tools", null); });
