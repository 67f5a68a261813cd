"use strict";
/* Reload the table every few seconds: replace the cells that have changed, or the whole table if the number of cells has. */
const cells = root => [...root.querySelectorAll("td")];
async function look() {
  if (document.hidden) return;
  const ended = document.getElementById("ended");
  try {
    const text = await (await fetch(location.href)).text();
    const fresh = new DOMParser().parseFromString(text, "text/html").querySelector("table"), table = document.querySelector("table");
    const now = cells(fresh), before = cells(table);
    if (now.length !== before.length) table.replaceWith(fresh);
    else now.forEach((cell, i) => { if (cell.innerHTML !== before[i].innerHTML) before[i].replaceChildren(...cell.childNodes); });
    ended.hidden = true;
  } catch { ended.hidden = false; }
}
async function follow() { await look(); setTimeout(follow, 1000 * document.querySelector("main").dataset.every); }
follow();
