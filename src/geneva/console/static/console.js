// Live parts of the console: what is worked out late, what goes on by itself, and one question.
"use strict";

function load(place) {
  place.setAttribute("aria-busy", "true");
  fetch(place.dataset.load, { headers: { "x-part": "1" } })
    .then((answer) => (answer.ok ? answer.text() : Promise.reject(answer.status)))
    .then((html) => { place.innerHTML = html; })
    .catch(() => { place.textContent = "could not be worked out"; })
    .finally(() => place.removeAttribute("aria-busy"));
}

function replace(id, html) {
  const place = document.getElementById(id);
  if (!place || place.innerHTML === html) return;
  // Keep the keyboard's place: a link that is drawn anew is still the link one stood on.
  const active = place.contains(document.activeElement) ? document.activeElement : null;
  const href = active && active.getAttribute("href");
  place.innerHTML = html;
  if (href) {
    const again = Array.from(place.querySelectorAll("a")).find((a) => a.getAttribute("href") === href);
    if (again) again.focus();
  }
}

function show(news) {
  Object.entries(news.html || {}).forEach(([id, html]) => replace(id, html));
  Object.entries(news.bars || {}).forEach(([id, [value, max]]) => {
    const bar = document.getElementById(id);
    if (bar) { bar.max = max; bar.value = value; }
  });
  const say = document.getElementById("say");
  if (news.say && say) say.textContent = news.say;
}

function follow(place) {
  const source = new EventSource(place.dataset.stream);
  source.addEventListener("change", (event) => {
    const news = JSON.parse(event.data);
    show(news);
    if (news.final) source.close();
  });
  window.addEventListener("pagehide", () => source.close());
}

document.querySelectorAll("[data-load]").forEach(load);
document.querySelectorAll("[data-stream]").forEach(follow);
document.querySelectorAll("form.filter select").forEach((choice) => {
  choice.addEventListener("change", () => choice.form.requestSubmit());
});
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-confirm]");
  if (button && !window.confirm(button.dataset.confirm)) event.preventDefault();
});
