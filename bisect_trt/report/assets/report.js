"use strict";
// Draws the plots and fills the layer table. All data is in #report-data; names in it are text.
(() => {
  const root = document.documentElement;
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const layers = data.layers;
  const column = Object.fromEntries(layers.columns.map((c, i) => [c.name, i]));
  const $ = (id) => document.getElementById(id);
  const escaped = (s) => String(s).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
  const cut = (s) => (s.length > 64 ? `${s.slice(0, 32)}\u2026${s.slice(-32)}` : s);

  // Colours as the system has them.
  const system = matchMedia("(prefers-color-scheme: dark)");
  const drawn = new Map();
  const colours = () => {
    const style = getComputedStyle(root);
    const of = (name) => style.getPropertyValue(name).trim();
    return { text: of("--fg"), line: of("--line"), card: of("--card") };
  };
  const themed = (figure) => {
    const { text, line, card } = colours();
    const axis = { gridcolor: line, linecolor: line, zerolinecolor: line, automargin: true };
    const own = figure.layout;
    return {
      ...own,
      autosize: true,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12, color: text },
      hoverlabel: { bgcolor: card, bordercolor: line, font: { color: text }, align: "left" },
      margin: { l: 60, r: 16, t: 24, b: 44, ...own.margin },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, ...own.legend },
      hovermode: "closest",
      xaxis: { ...axis, ...own.xaxis },
      yaxis: { ...axis, ...own.yaxis },
    };
  };
  const traces = (figure) =>
    figure.data.map((trace) => {
      if (!figure.ofLayers || trace.hoverinfo === "skip") return trace;
      return { ...trace, text: trace.x.map((i) => escaped(cut(data.names[i]))) };
    });
  const draw = (figure) => {
    const where = $(figure.name);
    if (drawn.has(figure.name)) return drawn.get(figure.name);
    const config = {
      displaylogo: false,
      // Of the small plots it would cover the marks, and each button is a stop of the Tab key.
      displayModeBar: figure.ofLayers,
      responsive: true,
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
    };
    const done = Plotly.newPlot(where, traces(figure), themed(figure), config).then(() => {
      where.style.minHeight = "";
      where.on("plotly_click", (event) => clicked(figure, event.points[0]));
    });
    drawn.set(figure.name, done);
    return done;
  };
  const clicked = (figure, point) => {
    if (figure.ofLayers && table) {
      table.search(`"${data.names[point.x]}"`).draw();
      $("layers").open = true;
      $("layers").scrollIntoView();
    }
  };
  const paint = () => {
    root.classList.toggle("dark", system.matches);
    for (const figure of data.figures) {
      if (drawn.has(figure.name)) Plotly.react($(figure.name), traces(figure), themed(figure));
    }
  };
  system.addEventListener("change", paint);
  paint();

  // A plot is drawn when it comes near, so that a page of many layers opens at once; for printing all that show are.
  const near = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        near.unobserve(entry.target);
        draw(data.figures.find((f) => f.name === entry.target.id));
      }
    },
    { rootMargin: "600px 0px" },
  );
  for (const figure of data.figures) near.observe($(figure.name));
  addEventListener("beforeprint", () => {
    root.classList.remove("dark");
    // Plotly cannot size what a folded part hides.
    const seen = data.figures.filter((f) => $(f.name).offsetParent);
    for (const figure of seen) draw(figure).then(() => Plotly.Plots.resize($(figure.name)));
  });
  addEventListener("afterprint", paint);

  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      const code = button.parentElement.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
      } catch {
        // A page from a file may not write to the clipboard: select it, the older way may.
        getSelection().selectAllChildren(code);
        document.execCommand("copy");
      }
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
  }

  // The layer table: numbers sort as numbers, infinities at their end, what is unknown last.
  const value = (v) => (v === "inf" ? Infinity : v === "-inf" ? -Infinity : v);
  const words = (v) => {
    if (v === null) return "";
    if (typeof v === "string" || Number.isInteger(v)) return String(v);
    const size = Math.abs(v);
    return size >= 1e5 || size < 1e-3 ? v.toExponential(3) : String(Number(v.toPrecision(4)));
  };
  const shown = {
    text: (v, type) => (type === "display" ? `<bdi>${escaped(v)}</bdi>` : v),
    flag: (v, type) => (type === "display" ? (v === null ? "" : v ? "yes" : '<span class="no">no</span>') : v),
    number: (v, type) => {
      if (type === "display" || type === "filter") return words(v);
      return v === null ? -Infinity : value(v);
    },
  };
  // What stands for a miss where none is allowed (numerics/scores.py).
  const score = (v, type) => (type === "display" && v >= 1e9 ? "none allowed" : shown.number(v, type));
  let table = null;
  if ($("layer-table")) {
    const order = ["sensitivity", "introduced_rel_range"].find((name) => name in column);
    table = new DataTable($("layer-table"), {
      data: layers.rows,
      columns: layers.columns.map((c, i) => ({
        title: escaped(c.title),
        data: i,
        type: c.kind === "text" ? "string" : "num",
        className: c.kind === "number" ? "n dt-right" : "dt-left",
        render: c.name === "sensitivity" ? score : shown[c.kind],
        searchable: c.kind === "text",
        orderSequence: c.kind === "text" ? ["asc", "desc", ""] : ["desc", "asc", ""],
      })),
      order: order ? [[column[order], "desc"]] : [],
      pageLength: 25,
      lengthMenu: [10, 25, 100, 500],
      autoWidth: false,
      deferRender: true,
      createdRow: (row, cells) => row.classList.toggle("pinned", cells[column.pinned] === 1),
      language: { search: "Search names", info: "_START_ to _END_ of _TOTAL_ layers", emptyTable: "No layers" },
    });
    layers.columns.forEach((c, i) => table.column(i).header().setAttribute("title", c.name));
    $("layer-table").addEventListener("click", (event) => {
      event.target.closest("tbody tr")?.classList.toggle("open");
    });
    for (const op of [...new Set(layers.rows.map((r) => r[column.op]))].sort()) {
      const option = document.createElement("option");
      option.textContent = option.value = op;
      $("by-op").append(option);
    }
    const flag = (id, name, wanted) => {
      const box = $(id);
      if (!(name in column)) box.parentElement.hidden = true;
      return (row) => !box.checked || row[column[name]] === wanted;
    };
    const tests = [
      (row) => $("by-op").value === "" || row[column.op] === $("by-op").value,
      flag("only-pinned", "pinned", 1),
      flag("only-sources", "source", 1),
      flag("only-broken", "finite", 0),
    ];
    table.search.fixed("chosen", (_, row) => tests.every((test) => test(row)));
    const filters = document.querySelector(".filters");
    filters.hidden = false;
    filters.addEventListener("change", () => table.draw());
  }
  root.dataset.ready = "true";
})();
