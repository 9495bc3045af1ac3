// Search as you type. The address always says what is shown, so that back, reload and links work.

import { $, ask, lost, reason, toast, whenBack } from "./frame.js";
import { setUpVideo } from "./video.js";

const form = $("#search");
const query = $("#q");
const results = $("#results");
const player = $("#player");
const PAUSE_MS = 160;
const SETTLED_MS = 1200;
let running = null;
let uploading = null;
let timer = 0;
let settling = 0;
let isSettled = false;

// --- the address --------------------------------------------------------------------------------------------

function parameters() {
  const found = new URLSearchParams();
  for (const [name, value] of new FormData(form)) if (value !== "" && typeof value === "string") found.append(name, value);
  return found;
}

function show(address, { push }) {
  if (location.pathname + location.search === address) return;
  history[push ? "pushState" : "replaceState"]({}, "", address);
}

/** Put into the form what the address says, after back or forward. */
function fill(search) {
  uploading?.abort();
  uploading = null;
  const wanted = new URLSearchParams(search);
  for (const name of ["q", "like", "upload", "folder", "duration", "after", "before"]) {
    const field = form.elements[name];
    field.value = wanted.get(name) ?? "";
    if (name === "folder" && field.value !== (wanted.get(name) ?? "")) {
      field.add(new Option(wanted.get(name), wanted.get(name), true, true));
    }
  }
  form.elements.unique.checked = wanted.has("unique");
  $("#unwanted").replaceChildren(...wanted.getAll("not").map(chip));
  showQueryChip();
}

// --- searching ----------------------------------------------------------------------------------------------

async function search({ push = false, remember = true } = {}) {
  clearTimeout(timer);
  running?.abort();
  const mine = (running = new AbortController());
  const wanted = parameters();
  const address = wanted.size ? `/?${wanted}` : "/";
  if (remember) show(address, { push: push || isSettled });
  isSettled = push;
  clearTimeout(settling);
  // What stood still for a moment is worth a step in the history.
  settling = setTimeout(() => { isSettled = true; }, SETTLED_MS);
  countFilters();
  const hasQuery = Boolean(wanted.get("q")?.trim() || wanted.get("like") || wanted.get("upload"));
  document.body.classList.toggle("searching", hasQuery);
  document.body.classList.toggle("home", !hasQuery);
  document.title = wanted.get("q") ? `${wanted.get("q")} · gare` : "gare";
  busy(true);
  try {
    const answer = await ask(`/results?${wanted}`, { signal: mine.signal });
    const html = await answer.text();
    if (mine.signal.aborted) return;
    replaceResults(html);
    busy(false);
  } catch (error) {
    if (error.name === "AbortError") return;
    busy(false);
    whenBack(() => search({ remember: false }));
  }
}

/** New results; who was among the old ones stays where they were. */
function replaceResults(html) {
  const shots = [...results.querySelectorAll(".shot")];
  const place = shots.indexOf(document.activeElement);
  results.innerHTML = html;
  if (place >= 0) (results.querySelectorAll(".shot")[place] ?? query).focus();
}

function busy(is) {
  results.setAttribute("aria-busy", is);
  document.body.classList.toggle("busy", is);
}

query.addEventListener("input", () => {
  if (query.value && (uploading || form.elements.like.value || form.elements.upload.value)) clearQueryMedia();
  clearTimeout(timer);
  timer = setTimeout(() => search(), PAUSE_MS);
});
form.addEventListener("submit", (event) => { event.preventDefault(); search({ push: true }); });
$("#filters").addEventListener("change", () => search({ push: true }));
addEventListener("popstate", () => {
  if (location.pathname.startsWith("/watch/")) return openPlayer(location.pathname.split("/")[2], { remember: false });
  if (player.open) return closePlayer({ remember: false });
  opening?.abort();
  fill(location.search);
  search({ remember: false });
});

// --- chips, filters, examples -------------------------------------------------------------------------------

function chip(text) {
  const made = document.createElement("span");
  made.className = "chip";
  const label = document.createElement("span");
  label.textContent = `not ${text}`;
  const input = Object.assign(document.createElement("input"), { type: "hidden", name: "not", value: text });
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: "×" });
  button.dataset.remove = "";
  button.setAttribute("aria-label", `Allow ${text} again`);
  made.append(label, input, button);
  return made;
}

$("#exclude").addEventListener("keydown", (event) => {
  const text = event.currentTarget.value.trim();
  if (event.key === "Enter") {
    event.preventDefault();
    if (!text) return;
    $("#unwanted").append(chip(text));
    event.currentTarget.value = "";
    search({ push: true });
  } else if (event.key === "Backspace" && !event.currentTarget.value) {
    $("#unwanted").lastElementChild?.remove();
    search({ push: true });
  }
});
$("#unwanted").addEventListener("click", (event) => {
  const button = event.target.closest("[data-remove]");
  if (!button) return;
  button.parentElement.remove();
  search({ push: true });
  $("#exclude").focus();
});
$("#examples").addEventListener("click", (event) => {
  const link = event.target.closest("a");
  if (!link) return;
  event.preventDefault();
  clearQueryMedia();
  query.value = link.textContent;
  search({ push: true });
  query.focus();
});
$("#filters-toggle").addEventListener("click", (event) => {
  const filters = $("#filters");
  filters.hidden = !filters.hidden;
  event.currentTarget.setAttribute("aria-expanded", !filters.hidden);
});
$("#clear-filters").addEventListener("click", clearFilters);

function clearFilters() {
  for (const name of ["folder", "duration", "after", "before"]) form.elements[name].value = "";
  search({ push: true });
}

function countFilters() {
  const number = ["folder", "duration", "after", "before"].filter((name) => form.elements[name].value).length;
  $("#num-filters").textContent = number;
  $("#num-filters").hidden = !number;
}

// --- results ------------------------------------------------------------------------------------------------

results.addEventListener("click", (event) => {
  const shot = event.target.closest("[data-watch]");
  if (shot && !event.ctrlKey && !event.metaKey && !event.shiftKey && event.button === 0) {
    event.preventDefault();
    openPlayer(shot.dataset.watch, { from: shot });
  } else if (event.target.closest("[data-more]")) {
    event.preventDefault();
    more(event.target.closest("[data-more]"));
  } else if (event.target.closest("[data-clear]")) clearFilters();
  else if (event.target.closest("[data-again]")) search({ remember: false });
});

async function more(link) {
  link.setAttribute("aria-disabled", "true");
  link.textContent = "…";
  const wanted = parameters();
  wanted.set("offset", link.dataset.more);
  try {
    const answer = await ask(`/results?${wanted}`);
    const part = document.createElement("div");
    part.innerHTML = await answer.text();
    if (!link.isConnected) return;  // other results are shown by now
    if (!answer.ok) throw new Error(answer.status);
    const had = link.matches(":focus-visible");
    const cards = [...part.querySelectorAll(".card")];
    $("#grid").append(...cards);
    $("#pager").replaceWith($("#pager", part));
    if (had) $("a", cards[0]).focus();
    watchEnd();
  } catch {
    link.removeAttribute("aria-disabled");
    link.textContent = "More results";
  }
}

// The next page comes by itself when the end is near.
const nearEnd = new IntersectionObserver((entries) => {
  const link = entries.some((entry) => entry.isIntersecting) && $("#pager [data-more]:not([aria-disabled])");
  if (link) more(link);
}, { rootMargin: "400px" });
function watchEnd() { nearEnd.disconnect(); const pager = $("#pager"); if (pager) nearEnd.observe(pager); }
new MutationObserver(watchEnd).observe(results, { childList: true });
watchEnd();

// Preview: the best moment plays while the pointer (or the focus) rests on a card.
let preview = null;
function startPreview(shot) {
  stopPreview();
  const moment = Number(shot.dataset.moment);
  const video = Object.assign(document.createElement("video"), { muted: true, playsInline: true, loop: true, preload: "auto" });
  video.src = shot.dataset.video;
  video.tabIndex = -1;
  video.setAttribute("aria-hidden", "true");
  video.addEventListener("loadedmetadata", () => { video.currentTime = Math.max(0, moment - 0.5); }, { once: true });
  video.addEventListener("seeked", () => { video.classList.add("shown"); video.play().catch(() => {}); }, { once: true });
  video.addEventListener("timeupdate", () => { if (video.currentTime > Number(shot.dataset.end)) video.currentTime = Number(shot.dataset.start); });
  video.addEventListener("error", stopPreview);
  preview = { shot, video, timer: setTimeout(() => shot.append(video), 220) };
}
function stopPreview() {
  if (!preview) return;
  const { video, timer: planned } = preview;
  preview = null;  // first: what follows may end the focus, and call this again
  clearTimeout(planned);
  video.remove();
  video.removeAttribute("src");
  video.load();  // ends the download
}
const calm = matchMedia("(prefers-reduced-motion: reduce)");
for (const [on, off] of [["pointerover", "pointerout"], ["focusin", "focusout"]]) {
  results.addEventListener(on, (event) => {
    const shot = event.target.closest(".shot");
    if (shot && preview?.shot !== shot && event.pointerType !== "touch" && !calm.matches) startPreview(shot);
  });
  results.addEventListener(off, (event) => {
    if (preview && !preview.shot.contains(event.relatedTarget)) stopPreview();
  });
}

// --- the player ---------------------------------------------------------------------------------------------

let opener = null;
let opening = null;

async function openPlayer(id, { from = null, remember = true } = {}) {
  stopPreview();
  opening?.abort();
  const mine = (opening = new AbortController());
  const wanted = parameters();
  let html;
  try {
    const answer = await ask(`/watch/${id}/part?${wanted}`, { headers: { Accept: "application/json" }, signal: mine.signal });
    if (!answer.ok) return toast(await reason(answer));
    html = await answer.text();
  } catch { return; }
  if (mine.signal.aborted) return;  // gone back, or on, meanwhile
  $("#player-body").innerHTML = html;
  if (!player.open) { opener = from; player.showModal(); }  // first: what is not shown has no size
  setUpVideo($("#player-body"), { onDeleted: (gone) => { results.querySelector(`[data-watch="${gone}"]`)?.closest(".card").remove(); closePlayer(); } });
  player.scrollTop = 0;
  if (remember) history.pushState({}, "", wanted.size ? `/watch/${id}?${wanted}` : `/watch/${id}`);
}

function closePlayer({ remember = true } = {}) {
  opening?.abort();
  if (!player.open) return;
  player.close();
  if (remember) { const wanted = parameters(); history.pushState({}, "", wanted.size ? `/?${wanted}` : "/"); }
}

player.addEventListener("close", () => {
  $("#player-body").replaceChildren();
  // This comes late: by now the search box may have been asked for.
  if (document.activeElement !== query) opener?.focus();
});
player.addEventListener("cancel", (event) => { event.preventDefault(); closePlayer(); });
player.addEventListener("click", (event) => {
  if (event.target === player) return closePlayer();
  const other = event.target.closest("[data-watch]");
  if (other) { event.preventDefault(); openPlayer(other.dataset.watch); }
});
$("#player-close").addEventListener("click", () => closePlayer());

// --- keyboard -----------------------------------------------------------------------------------------------

addEventListener("keydown", (event) => {
  const isTyping = event.target.matches("input, select, textarea");
  if (event.key === "/" && !isTyping && !player.open) { event.preventDefault(); query.focus(); query.select(); }
  if (event.key === "Escape" && event.target === query && query.value) { query.value = ""; search({ push: true }); }
  if (event.key === "ArrowDown" && event.target === query) { event.preventDefault(); return $(".shot", results)?.focus(); }
  const shot = document.activeElement.closest?.(".shot");
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns(), ArrowDown: columns() }[event.key];
  if (!shot || !step || player.open) return;
  const shots = [...results.querySelectorAll(".shot")];
  const next = shots[shots.indexOf(shot) + step];
  event.preventDefault();
  if (next) next.focus();
  else if (event.key === "ArrowUp") query.focus();
});

function columns() {
  const grid = $(".grid", results);
  return grid ? getComputedStyle(grid).gridTemplateColumns.split(" ").length : 1;
}

// --- a picture or clip as the query -------------------------------------------------------------------------

async function upload(file) {
  const body = new FormData();
  body.append("file", file);
  running?.abort();
  clearTimeout(timer);
  clearQueryMedia();
  query.value = "";
  const mine = (uploading = new AbortController());
  showQueryChip(file);
  busy(true);
  try {
    const answer = await ask("/api/v1/search/upload", { method: "POST", body, signal: mine.signal });
    if (!answer.ok) throw new Error(await reason(answer));
    const { upload: name } = await answer.json();
    uploading = null;
    form.elements.upload.value = name;
    await search({ push: true });
  } catch (error) {
    if (mine.signal.aborted) return;  // something else is searched for by now
    fill(location.search);  // what is still shown
    busy(false);
    toast(error instanceof TypeError ? "The server does not answer" : `${file.name}: ${error.message}`);
  }
}

function clearQueryMedia() {
  uploading?.abort();
  uploading = null;
  form.elements.like.value = form.elements.upload.value = "";
  showQueryChip();
}

function showQueryChip(file = null) {
  const { like, upload: uploaded } = form.elements;
  $("#query-chip").hidden = !(like.value || uploaded.value || file);
  const picture = $("#query-picture");
  if (picture.src.startsWith("blob:") && !uploaded.value) URL.revokeObjectURL(picture.src);
  if (file) {
    $("#query-label").textContent = file.name;
    picture.hidden = !file.type.startsWith("image/");
    if (!picture.hidden) picture.src = URL.createObjectURL(file);
  } else if (like.value) {
    picture.src = `/api/v1/items/${like.value}/thumbnail`;
    picture.hidden = false;
    $("#query-label").textContent = "More like this";
  } else if (!uploaded.value) picture.hidden = true;
}

$("#query-clear").addEventListener("click", () => { clearQueryMedia(); search({ push: true }); query.focus(); });
$("#file").addEventListener("change", (event) => {
  const [file] = event.currentTarget.files;
  if (file) upload(file);
  event.currentTarget.value = "";
});

let depth = 0;
const hasFile = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
addEventListener("dragenter", (event) => { if (hasFile(event)) { depth += 1; $("#drop").hidden = false; } });
addEventListener("dragleave", (event) => { if (hasFile(event) && (depth -= 1) <= 0) endDrag(); });
addEventListener("dragover", (event) => { if (hasFile(event)) event.preventDefault(); });
addEventListener("drop", (event) => {
  endDrag();
  if (!hasFile(event)) return;
  event.preventDefault();
  const [file] = event.dataTransfer.files;
  if (file) upload(file);
});
addEventListener("paste", (event) => {
  const file = [...(event.clipboardData?.files ?? [])][0];
  if (file) upload(file);
});
function endDrag() { depth = 0; $("#drop").hidden = true; }

// A thumbnail that does not come, while everything else did, means the server went away.
results.addEventListener("error", (event) => {
  if (event.target.matches?.("img")) event.target.closest(".shot")?.classList.add("blank");
}, true);
addEventListener("offline", lost);
