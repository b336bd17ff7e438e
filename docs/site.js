// The filters of the catalogue of differences. Without JavaScript its tables are whole.
const tables = [...document.querySelectorAll("table.catalogue")];
if (tables.length) {
  const words = {
    en: ["Call, e.g. BatchNorm", "all topics", "differs only", "rows"],
    zh: ["调用，例如 BatchNorm", "全部类别", "只看不同的", "行"],
  }[document.documentElement.lang];
  const section = (table) => table.closest("details");
  const topics = tables.map((table) => section(table).querySelector("h2").firstChild.textContent);
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
  section(tables[0]).before(form);
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
      section(table).hidden = visible === 0;
      shown += visible;
    });
    count.value = `${shown} ${words[3]}`;
  };
  form.addEventListener("input", () => {
    tables.forEach((table) => (section(table).open = true));
    filter();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  filter(); // a browser that goes back to the page fills the form in as it was left
}

// Material makes a landmark of the button at each code: these are no parts of the page. A table or a formula that
// scrolls does so by keyboard, too, if one can get there.
document$.subscribe(() => {
  document.querySelectorAll(".md-code__nav").forEach((buttons) => buttons.setAttribute("role", "none"));
  document.querySelectorAll(".md-typeset__scrollwrap, .formula > div").forEach((part) => (part.tabIndex = 0));
});

// On a phone the open sections of a long page are folded, but for the first and the one that the address leads to.
if (!matchMedia("(min-width: 60em)").matches) {
  const place = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  [...document.querySelectorAll(".fold[open]")].slice(1).forEach((section) => (section.open = section.contains(place)));
}

// The links to the other language lead to the same place there: the headings of both pages have the same ids. Material
// would lead to the top of the page, but for links with a target.
const lead = () => {
  document.querySelectorAll("a[hreflang]").forEach((link) => {
    Object.assign(link, { hash: location.hash, target: "_self" });
  });
};
lead();
addEventListener("hashchange", lead);
