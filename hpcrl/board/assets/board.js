"use strict";
// Keeps a page of the board up to date: asks for it again, and takes over the parts that are marked.
(function () {
  const root = document.documentElement, LEAST_S = 2;
  let tag = root.dataset.tag, timer = null, asking = null, pauseS = LEAST_S;
  const contents = new WeakMap();
  const parts = () => document.querySelectorAll("[data-live]");
  for (const part of parts()) contents.set(part, part.innerHTML);
  const form = document.querySelector("form[data-filter]");
  const live = document.getElementById("live"), pulse = document.getElementById("pulse");
  const trouble = document.getElementById("trouble"), follow = document.getElementById("follow");

  // the element that has the focus, and those that are checked or open, by what stays the same in a new form of a part
  const nameOf = (element) => element.id ? "#" + CSS.escape(element.id)
    : element.value !== undefined && element.name ? `[name="${element.name}"][value="${CSS.escape(element.value)}"]`
      : element.getAttribute("href") ? `a[href="${CSS.escape(element.getAttribute("href"))}"]`
        : element.getAttribute("aria-label") ? `[aria-label="${CSS.escape(element.getAttribute("aria-label"))}"]` : "";
  const atEnd = (box) => box.scrollTop + box.clientHeight >= box.scrollHeight - 40;

  function replace(part, other) {
    const active = part.contains(document.activeElement) ? nameOf(document.activeElement) : "";
    const checked = [...part.querySelectorAll("input:checked")].map(nameOf);
    const places = [...part.querySelectorAll(".scroll")].map((box) => [box.scrollLeft, box.scrollTop]);
    part.replaceChildren(...other.childNodes);
    for (const name of checked) part.querySelectorAll(name).forEach((input) => { input.checked = true; });
    part.querySelectorAll(".scroll").forEach((box, index) => {
      if (places[index]) [box.scrollLeft, box.scrollTop] = places[index];
    });
    if (active) part.querySelector(active)?.focus({ preventScroll: true });
  }

  function follows() {
    const log = document.getElementById("log");
    if (log && follow?.checked) log.scrollTop = log.scrollHeight;
  }

  function take(text) {
    const fresh = new DOMParser().parseFromString(text, "text/html");
    if (fresh.documentElement.dataset.page !== root.dataset.page) return location.reload();
    document.title = fresh.title;
    for (const part of parts()) {
      const other = fresh.getElementById(part.id);
      if (!other || other.innerHTML === contents.get(part)) continue;
      contents.set(part, other.innerHTML);
      replace(part, other);
    }
    // a plot that has its first point
    for (const grid of document.querySelectorAll("[data-plots]")) {
      let before = null;
      for (const figure of fresh.getElementById(grid.id)?.querySelectorAll("figure") ?? []) {
        const there = document.getElementById(figure.id);
        if (!there) grid.insertBefore(figure, before ? before.nextSibling : grid.firstChild);
        before = document.getElementById(figure.id);
      }
    }
    const data = fresh.getElementById("data");
    if (data) document.dispatchEvent(new CustomEvent("hpcrl-data", { detail: JSON.parse(data.textContent) }));
    follows();
  }

  async function look() {
    clearTimeout(timer);
    asking?.abort();
    const mine = asking = new AbortController();
    try {
      const answer = await fetch(location.pathname + location.search, {
        headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store", credentials: "same-origin", signal: mine.signal });
      const text = answer.status === 304 ? "" : await answer.text();
      if (mine.signal.aborted) return;
      if (answer.ok) {
        tag = answer.headers.get("ETag") ?? "";
        take(text);
        root.dataset.looks = +(root.dataset.looks ?? 0) + 1;
      } else if (answer.status !== 304) {
        throw new Error(answer.status === 403 ? "open the link that `hpcrl board` printed" : `it answers ${answer.status}`);
      }
      pauseS = Math.max(LEAST_S, +(answer.headers.get("X-Next-Look-S") ?? 0));
      trouble.hidden = true;
      pulse.textContent = new Date().toLocaleTimeString();
    } catch (error) {
      if (mine.signal.aborted) return;
      pauseS = Math.min(30, 2 * pauseS);
      trouble.textContent = `The board does not answer (${error.message}). What you see may be old.`;
      trouble.hidden = false;
    }
    later();
  }

  function later() {
    clearTimeout(timer);
    if (live.checked && !document.hidden) timer = setTimeout(look, 1000 * pauseS);
  }

  live.addEventListener("change", () => live.checked ? look() : clearTimeout(timer));
  follow?.addEventListener("change", follows);
  document.addEventListener("visibilitychange", () => document.hidden ? clearTimeout(timer) : live.checked && look());

  let typed = null;
  function filter() {
    const chosen = new URLSearchParams([...new FormData(form)].filter(([, value]) => value !== ""));
    history.replaceState(null, "", location.pathname + (chosen.size ? "?" + chosen : ""));
    tag = "";
    look();
  }
  form?.addEventListener("input", () => { clearTimeout(typed); typed = setTimeout(filter, 200); });
  form?.addEventListener("submit", (event) => { event.preventDefault(); clearTimeout(typed); filter(); });

  follows();
  if (!document.getElementById("data")) root.dataset.state = "drawn";
  performance.mark("hpcrl-shown");
  later();
})();
