// The search of a page of experiments: shows the rows that have every word, and opens their sections.
document.addEventListener("input", ({ target }) => {
  if (target.id !== "row-filter") return;
  const words = target.value.toLowerCase().split(/\s+/).filter(Boolean);
  let found = 0;
  for (const section of document.querySelectorAll("details.rows")) {
    let here = 0;
    for (const row of section.querySelectorAll("tbody tr")) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      here += !row.hidden;
    }
    for (const table of section.querySelectorAll("table")) table.hidden = !table.querySelector("tbody tr:not([hidden])");
    section.open = words.length > 0 && here > 0;
    found += here;
  }
  target.nextElementSibling.textContent = words.length ? `${found} rows` : "";
});
