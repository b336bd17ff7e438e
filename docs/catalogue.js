// The filters of the catalogue of differences. Without JavaScript its tables are whole.
const tables = [...document.querySelectorAll("table.catalogue")];
if (tables.length) {
  const words = {
    en: ["Call, e.g. BatchNorm", "all topics", "differs only", "rows"],
    zh: ["调用，例如 BatchNorm", "全部类别", "只看不同的", "行"],
  }[document.documentElement.lang];
  const heading = (table) => table.closest(".md-typeset > *").previousElementSibling;
  const topics = tables.map((table) => heading(table).firstChild.textContent);
  const form = document.createElement("form");
  form.className = "filter";
  const text = Object.assign(document.createElement("input"), { type: "search", placeholder: words[0] });
  text.setAttribute("aria-label", words[0]);
  const topic = document.createElement("select");
  topic.setAttribute("aria-label", words[1]);
  topic.append(...[words[1], ...topics].map((name, place) => new Option(name, place)));
  const differs = Object.assign(document.createElement("input"), { type: "checkbox" });
  const label = document.createElement("label");
  label.append(differs, ` ${words[2]}`);
  const count = document.createElement("output");
  form.append(text, topic, label, count);
  heading(tables[0]).before(form);
  const filter = () => {
    let shown = 0;
    tables.forEach((table, place) => {
      const rows = [...table.tBodies[0].rows];
      for (const row of rows) {
        row.hidden =
          (topic.value > 0 && topic.value != place + 1) ||
          (differs.checked && !row.cells[2].querySelector("strong")) ||
          !row.textContent.toLowerCase().includes(text.value.trim().toLowerCase());
      }
      const visible = rows.filter((row) => !row.hidden).length;
      heading(table).hidden = table.hidden = visible === 0;
      shown += visible;
    });
    count.value = `${shown} ${words[3]}`;
  };
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  filter(); // a browser that goes back to the page fills the form in as it was left
}
