// Before the first paint, so that nothing flashes.
(() => {
  let wanted = null;
  try { wanted = localStorage.getItem("theme"); } catch { /* storage is off */ }
  if (wanted === "light" || wanted === "dark") document.documentElement.dataset.theme = wanted;
})();
