// The panel of one video, in a dialog or on its own page.

import { $, ask, lost, reason, toast, whenBack } from "./frame.js";

export function setUpVideo(root, { onDeleted }) {
  const video = $("video", root);
  if (video) start(video, root);
  for (const cell of root.querySelectorAll("[data-time]")) {
    cell.addEventListener("click", () => { video.currentTime = Number(cell.dataset.time); video.play().catch(() => {}); });
  }
  $("[data-copy]", root)?.addEventListener("click", (event) => copy(event.currentTarget.dataset.copy));
  $("[data-delete]", root)?.addEventListener("click", (event) => remove(event.currentTarget, onDeleted));
}

function start(video, root) {
  const moment = Number(video.dataset.start);
  const seek = () => { video.currentTime = moment; video.play().catch(() => {}); };
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
}

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
  const answer = await ask(`/api/v1/items/${button.dataset.delete}`, { method: "DELETE" });
  if (!answer.ok && answer.status !== 404) return toast(await reason(answer));
  toast(`${button.dataset.name} is not in the library any more`);
  onDeleted(button.dataset.delete);
}
