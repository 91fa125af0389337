// Models to download, in the dialog of models, if the server allows downloads.

let offered = null;  // the models and repositories that the last search found; null: the server allows no downloads
let searching = 0;  // timer of the next search
const pulls = new Map();  // running and failed downloads by name: {controller, share, text}

async function searchModels() {
  const words = $("model-search").value.trim();
  try {
    const answer = await server.json(`models/catalog?search=${encodeURIComponent(words)}${words.length > 2 ? "&hub=1" : ""}`);
    offered = answer.allowed ? answer : null;
  } catch {
    offered = null;
  }
  showDownloads();
}

function showDownloads() {
  $("downloads").hidden = !offered;
  if (!offered) return;
  const known = offered.models.filter(each => !each.is_here).map(({name, title, n_bytes, fits, abilities}) =>
    downloadRow(name, [title, bytes(n_bytes), fits ? "" : "does not fit into memory", ...abilities]));
  const remote = offered.repositories.map(({name, downloads, gated}) =>
    downloadRow(name, [`${downloads.toLocaleString("en")} downloads in a month`, gated && "needs permission"]));
  const rows = [...known, ...remote];
  if (offered.problem) rows.push(h("li", {class: "quiet"}, offered.problem));
  $("download-list").replaceChildren(...(rows.length ? rows : [h("li", {class: "quiet"}, "No model to download matches.")]));
}

function downloadRow(name, facts) {
  const pull = pulls.get(name);
  const button = pull?.controller
    ? h("button", {type: "button", onclick: () => pull.controller.abort()}, "Stop")
    : h("button", {type: "button", "aria-label": `Download ${name}`, onclick: () => pullModel(name)}, "Download");
  return h("li", {class: "row"},
    h("span", {class: "fact"}, h("span", {}, name), h("span", {class: "quiet"}, (pull?.text ?? facts.filter(Boolean).join(" · ")))),
    pull?.controller && h("progress", {max: 1, value: pull.share, "aria-label": `Download of ${name}`}), button);
}

async function pullModel(name) {
  const pull = {controller: new AbortController(), share: 0, text: "starting"};
  pulls.set(name, pull);
  showDownloads();
  try {
    let state = {};
    for await (const line of server.lines("api/pull", {model: name}, pull.controller.signal)) {
      state = JSON.parse(line);
      if (state.error) throw new ServerError(state.error);
      pull.share = state.total ? state.completed / state.total : 0;
      pull.text = state.total ? `${state.status}: ${bytes(state.completed)} of ${bytes(state.total)}` : state.status;
      showDownloads();
    }
    if (state.status !== "success") throw new ServerError("The connection to the server ended before the download did.");
    pulls.delete(name);
    say(`${name} is downloaded`);
    await loadModels();
    await searchModels();
  } catch (error) {
    pull.controller = null;
    pull.text = error.name === "AbortError" ? "stopped: the downloaded part is kept" : error.message;
    showDownloads();
  }
}

// Buttons of a served model: to unload it, and to delete its files.
function modelButtons({id, status}) {
  const act = async (text, work) => {
    try { await work(); say(text); } catch (error) { notice(error.message); }
    await loadModels();
    if (offered) await searchModels();
  };
  return [
    status?.value === "loaded" && h("button", {class: "small", type: "button", "aria-label": `Unload ${id}`,
      onclick: () => act(`${id} is unloaded`, () => server.fetch("models/unload", {model: id}))}, "Unload"),
    offered && models.length > 1 && h("button", {class: "small", type: "button", "aria-label": `Delete ${id}`,
      onclick: () => confirm(`Delete the files of ${id}?`) && act(`${id} is deleted`, () => server.fetch("api/delete", {model: id}, undefined, "DELETE"))}, "Delete"),
  ];
}

$("model-search").addEventListener("input", () => {
  clearTimeout(searching);
  if (offered) searching = setTimeout(searchModels, 400);
});
