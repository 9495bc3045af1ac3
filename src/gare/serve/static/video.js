// The panel of one video, in a dialog or on its own page.

import { $, ask, lost, reason, toast, whenBack } from "./frame.js";

let step = null;  // to another moment of the video that is shown, if it has any

export function setUpVideo(root, { onDeleted }) {
  const video = $("video", root);
  step = null;
  if (video) { start(video, root); setUpMoments(video, root); }
  root.onclick = (event) => {
    const cell = event.target.closest("[data-time]");
    if (cell) play(video, Number(cell.dataset.time));
  };
  centre(root);
  $("[data-copy]", root)?.addEventListener("click", (event) => copy(event.currentTarget.dataset.copy));
  $("[data-delete]", root)?.addEventListener("click", (event) => remove(event.currentTarget, onDeleted));
}

function play(video, time) {
  video.currentTime = time;
  video.play().catch(() => {});
}

function start(video, root) {
  const seek = () => play(video, Number(video.dataset.start));
  if (video.readyState >= 1) seek();
  else video.addEventListener("loadedmetadata", seek, { once: true });
  video.addEventListener("timeupdate", () => mark(root, video.currentTime));
  video.addEventListener("error", () => explain(video, root));
}

function mark(root, time) {
  let current = null;
  for (const cell of root.querySelectorAll("[data-time]")) {
    if (Number(cell.dataset.time) <= time + 0.05) current = cell;
    cell.removeAttribute("aria-current");
  }
  current?.setAttribute("aria-current", "true");
  return current ? [current] : [];
}

/** Scroll the strip to the frame where the moment begins. */
function centre(root) {
  const frames = $(".frames", root);
  if (!frames) return;
  const [cell] = mark(root, Number($("video", root)?.dataset.start ?? 0));
  if (cell) frames.scrollLeft = cell.offsetLeft + cell.offsetWidth / 2 - frames.clientWidth / 2;
}

// --- moments ------------------------------------------------------------------------------------------------

function setUpMoments(video, root) {
  const line = $(".film .heat", root);
  const links = [...root.querySelectorAll("[data-go]")];
  const playOn = $("#play-on", root);
  if (!line) return;
  let end = Number(video.dataset.end ?? Infinity);
  let timer = 0;

  playOn.checked = stored("play-on") === "true";
  playOn.addEventListener("change", () => store("play-on", playOn.checked));

  const shown = links.find((link) => link.hasAttribute("aria-current"));
  const list = $(".moments ol", root);
  if (shown) list.scrollLeft = shown.offsetLeft - list.offsetLeft - list.clientWidth / 2;

  const duration = () => video.duration || Number(line.dataset.duration);
  line.addEventListener("click", (event) => {
    const box = line.getBoundingClientRect();
    play(video, duration() * (event.clientX - box.left) / box.width);
  });
  video.addEventListener("timeupdate", () => {
    const x = line.viewBox.baseVal.width * video.currentTime / duration();
    for (const name of ["x1", "x2"]) $(".playhead", line).setAttribute(name, x);
    const left = end - video.currentTime;
    clearTimeout(timer);
    if (video.paused || playOn.checked || left > 0.4) return;
    // Whoever plays it again, or jumps, wants to see what comes then.
    timer = setTimeout(() => { if (!playOn.checked && video.currentTime >= end - 0.1) { end = Infinity; video.pause(); } }, 1000 * Math.max(0, left) / video.playbackRate);
  });
  video.addEventListener("seeking", () => { if (video.currentTime > end) end = Infinity; });

  const go = (link) => {
    for (const other of links) other.removeAttribute("aria-current");
    link.setAttribute("aria-current", "true");
    link.scrollIntoView({ block: "nearest", inline: "nearest" });
    end = Infinity;
    video.dataset.start = link.dataset.from;
    play(video, Number(link.dataset.from));
    end = Number(link.dataset.to);
    showFrames(root, link);
  };
  for (const link of links) {
    link.addEventListener("click", (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      go(link);
    });
  }
  step = (by) => {
    const place = links.findIndex((link) => link.hasAttribute("aria-current"));
    go(links[(place + by + links.length) % links.length]);
  };
  for (const button of root.querySelectorAll("[data-step]")) {
    button.addEventListener("click", () => step(Number(button.dataset.step)));
  }
}

addEventListener("keydown", (event) => {
  const by = { n: 1, p: -1 }[event.key];
  const isTyping = event.target.matches?.("input:not([type=checkbox]), select, textarea");
  if (!by || !step || isTyping || event.ctrlKey || event.metaKey || event.altKey || !$(".watch")) return;
  event.preventDefault();
  step(by);
});

/** The strip, the facts and the button to cut, of the moment that plays now; the address, too. */
async function showFrames(root, link) {
  const { pathname, search } = new URL(link.href);
  if (location.pathname.startsWith("/watch/")) history.replaceState({}, "", pathname + search);
  try {
    const answer = await ask(`${pathname}/part${search}`);
    if (!answer.ok || !link.hasAttribute("aria-current")) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const part of [".frames", ".facts", "#cut"]) {
      const [old, made] = [$(part, root), $(part, fresh)];
      if (old && made && link.hasAttribute("aria-current")) old.replaceWith(document.adoptNode(made));
    }
    centre(root);
  } catch { /* the video plays on */ }
}

function stored(name) {
  try { return localStorage.getItem(name); } catch { return null; }
}

function store(name, value) {
  try { localStorage.setItem(name, value); } catch { /* storage is off */ }
}

// --- when it cannot be shown --------------------------------------------------------------------------------

async function explain(video, root) {
  const box = $(".unplayable", root);
  video.hidden = true;
  box.hidden = false;
  try {
    const answer = await ask(video.src, { method: "HEAD" });
    if (answer.ok) return;
    const said = await fetch(video.src, { headers: { Range: "bytes=0-0" } });
    const text = await reason(said);
    $("#video-problem", root).textContent = `${text[0].toUpperCase()}${text.slice(1)}.`;
  } catch {
    $("#video-problem", root).textContent = "The server does not answer.";
    lost();
    whenBack(() => { video.hidden = false; box.hidden = true; video.load(); });
  }
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    toast("Path copied");
  } catch {
    getSelection().selectAllChildren($("#path"));
    toast("Press Ctrl-C to copy the path");
  }
}

async function remove(button, onDeleted) {
  if (button.dataset.sure === undefined) {
    const label = button.innerHTML;
    button.dataset.sure = "";
    button.textContent = "Remove from the library? The file stays.";
    setTimeout(() => { delete button.dataset.sure; button.innerHTML = label; }, 4000);
    return;
  }
  const answer = await ask(`/api/v1/items/${button.dataset.delete}?whole=true`, { method: "DELETE" });
  if (!answer.ok && answer.status !== 404) return toast(await reason(answer));
  toast(`${button.dataset.name} is not in the library any more`);
  onDeleted(button.dataset.delete);
}
