// The model of the library: change it, follow the work, go back, forget.

import { $, ask, lost, reason, toast, whenBack } from "./frame.js";

const panel = $("#change-job");
let stream = null;

async function post(path, body) {
  const answer = await ask(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  if (!answer.ok) toast(await reason(answer));
  return answer.ok ? answer.json() : null;
}

async function change(model) {
  const job = await post("/api/v1/jobs", { kind: "change", model });
  if (job) show(job);
}

$("#models").addEventListener("click", async (event) => {
  const { use, forget, change: model } = event.target.dataset;
  if (use && await post("/api/v1/models/use", { set: use })) location.reload();
  if (forget && await post("/api/v1/models/forget", { set: forget })) location.reload();
  if (model) change(model);
});
$("#change")?.addEventListener("click", () => change($("#model").value));
$("#cancel").addEventListener("click", () => ask(`/api/v1/jobs/${panel.dataset.job}/cancel`, { method: "POST" }));

function show(job) {
  panel.dataset.job = job.id;
  panel.hidden = false;
  const isRunning = job.state === "running";
  const share = job.total ? job.done / job.total : 0;
  $("#bar").setAttribute("aria-valuenow", Math.round(100 * share));
  $("#bar-inner").style.width = `${100 * share}%`;
  $("#change-state").textContent = describe(job);
  $("#cancel").hidden = !isRunning;
  for (const button of document.querySelectorAll("#change, [data-use], [data-forget], [data-change]")) button.disabled = isRunning;
  if (isRunning && !stream) follow(job.id);
}

function describe(job) {
  if (job.state === "running" && !job.total) return `Loading ${job.model} …`;
  if (job.state === "running") return `${job.done.toLocaleString()} of ${job.total.toLocaleString()} files encoded with ${job.model}`;
  if (job.state === "failed") return job.message;
  if (job.state === "done") return `Done: ${job.model}`;
  return "Stopped; what is encoded is kept. Go on when you like.";
}

function follow(id) {
  stream = new EventSource(`/api/v1/jobs/${id}/events`);
  stream.addEventListener("progress", (event) => show(JSON.parse(event.data)));
  stream.addEventListener("end", (event) => {
    close();
    const job = JSON.parse(event.data);
    show(job);
    if (job.state === "done") location.reload();
  });
  stream.addEventListener("error", () => { close(); lost(); whenBack(load); });
}

function close() { stream?.close(); stream = null; }

async function load() {
  const answer = await ask(`/api/v1/jobs/${panel.dataset.job}`);
  if (answer.ok) show(await answer.json());
}

if (panel.dataset.job && !panel.hidden) load();
