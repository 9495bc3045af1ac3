// Indexing from the page: start, follow, cancel.

import { $, ask, lost, reason, toast, whenBack } from "./frame.js";

const panel = $("#job");
let stream = null;
let startedAt = 0;
let startedDone = 0;

async function start(order) {
  const answer = await ask("/api/v1/jobs", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(order),
  });
  if (!answer.ok) return toast(await reason(answer));
  show(await answer.json());
}

for (const button of document.querySelectorAll("[data-index]")) {
  button.addEventListener("click", () => start({ folder: button.dataset.index || null }));
}
$("#retry")?.addEventListener("click", () => start({ retry_failed: true }));
$("#cancel").addEventListener("click", () => ask(`/api/v1/jobs/${panel.dataset.job}/cancel`, { method: "POST" }));

function show(job) {
  panel.hidden = false;
  panel.dataset.job = job.id;
  const isRunning = job.state === "running";
  $("#job-title").textContent = { audit: "Audit", change: "Changing the model" }[job.kind] ?? "Indexing";
  $("#cancel").hidden = !isRunning;
  for (const button of document.querySelectorAll("[data-index], #retry")) button.disabled = isRunning;
  const share = job.total ? job.done / job.total : isRunning ? 0 : 1;
  panel.classList.toggle("unknown", isRunning && job.total === null);
  $("#bar").setAttribute("aria-valuenow", Math.round(100 * share));
  $("#bar-inner").style.width = `${100 * share}%`;
  $("#job-state").textContent = describe(job);
  $("#job-rate").textContent = isRunning ? rate(job) : "";
  $("#job-path").textContent = isRunning ? job.path : "";
  if (isRunning && !stream) follow(job.id);
}

function describe(job) {
  const failed = job.failed ? `, ${job.failed} failed` : "";
  if (job.state === "running" && job.total === null) return job.resumed ? "Taking up where it was …" : "Looking for videos …";
  if (job.state === "running") return `${job.done.toLocaleString()} of ${job.total.toLocaleString()} files${failed}`;
  if (job.state === "failed") return job.message;
  if (job.state === "cancelled") return `Cancelled; ${job.done} files are done and stay.`;
  if (job.state === "interrupted") return "Stopped with the server; it goes on when the server does.";
  const report = job.report ?? {};
  const names = { new: "new", changed: "changed", moved: "moved", duplicate: report.duplicate === 1 ? "copy" : "copies", unchanged: "unchanged", deleted: "gone", failed: "failed" };
  const parts = Object.entries(names).filter(([name]) => report[name]).map(([name, label]) => `${report[name].toLocaleString()} ${label}`);
  return `Done: ${parts.join(", ") || "nothing to do"}.`;
}

function rate(job) {
  if (!job.total || !job.done) return "";
  if (!startedAt) { startedAt = performance.now(); startedDone = job.done; return ""; }
  const perSecond = (job.done - startedDone) / ((performance.now() - startedAt) / 1000);
  if (!(perSecond > 0)) return "";
  const left = (job.total - job.done) / perSecond;
  return `${perSecond.toFixed(1)} files/s, ${left < 90 ? `${Math.ceil(left)} s` : `${Math.ceil(left / 60)} min`} left`;
}

function follow(id) {
  startedAt = 0;
  stream = new EventSource(`/api/v1/jobs/${id}/events`);
  stream.addEventListener("progress", (event) => show(JSON.parse(event.data)));
  stream.addEventListener("end", (event) => {
    close();
    const job = JSON.parse(event.data);
    show(job);
    refresh();
  });
  stream.addEventListener("error", () => { close(); lost(); whenBack(load); });
}

function close() { stream?.close(); stream = null; }

/** Counts and failed files are made by the server; fetch the page and take them over. */
async function refresh() {
  const answer = await ask("/library");
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  $("#num-items").textContent = $("#num-items", fresh).textContent;
  const failed = (page) => page.querySelector("[aria-labelledby=failed-title]");
  failed(document).replaceWith(document.adoptNode(failed(fresh)));
  $("#retry")?.addEventListener("click", () => start({ retry_failed: true }));
}

async function load() {
  const answer = await ask("/api/v1/jobs");
  const [job] = answer.ok ? await answer.json() : [];
  if (job) show(job);
  refresh();
}

if (panel.dataset.job) load();
