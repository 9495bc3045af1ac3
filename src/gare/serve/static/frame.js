// What every page has: the theme, short notices, and knowing when the server is away.

export function $(selector, inside = document) { return inside.querySelector(selector); }

export function toast(text) {
  const box = $("#toast");
  box.textContent = text;
  box.classList.add("shown");
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => box.classList.remove("shown"), 3500);
}

// --- the theme ----------------------------------------------------------------------------------------------

$("#theme")?.addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  try { localStorage.setItem("theme", root.dataset.theme); } catch { /* storage is off */ }
});

// --- the server ---------------------------------------------------------------------------------------------

const waiting = new Set();
let isAway = false;

/** Called once when the server is back. */
export function whenBack(action) { waiting.add(action); }

export function lost() {
  if (isAway) return;
  isAway = true;
  $("#connection").hidden = false;
  look();
}

async function look() {
  try {
    const answer = await fetch("/api/v1/ready", { cache: "no-store" });
    if (answer.ok || answer.status === 401) return back();
  } catch { /* not yet */ }
  setTimeout(look, 1000);
}

function back() {
  isAway = false;
  $("#connection").hidden = true;
  const actions = [...waiting];
  waiting.clear();
  for (const action of actions) action();
}

/** As fetch; a server that does not answer shows the banner, and `busy` is tried again when it says so. */
export async function ask(address, options = {}, tries = 3) {
  let answer;
  try {
    answer = await fetch(address, options);
  } catch (error) {
    if (error.name !== "AbortError") lost();
    throw error;
  }
  if ([429, 503].includes(answer.status) && tries > 1 && answer.headers.get("Retry-After")) {
    const seconds = Math.min(5, Number(answer.headers.get("Retry-After")) || 1);
    await new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
    options.signal?.throwIfAborted();
    return ask(address, options, tries - 1);
  }
  if (answer.status === 401) location.assign(`/login?next=${encodeURIComponent(location.pathname + location.search)}`);
  return answer;
}

/** What an error answer says. */
export async function reason(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the server answered ${answer.status}`;
  }
}
