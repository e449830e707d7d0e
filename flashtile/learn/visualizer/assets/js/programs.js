// What could run at the same time: each kernel's programs (thread blocks, splits), and the longest chain among them.

const MOST_BARS = 64;
const HIGHEST = 8; // bars above one another

/**
 * The kernels of a trace in order, each with its programs: the bytes each moves, its first event and the one after
 * its last. Programs depend on each other if one reads or writes what another of the same kernel has written.
 */
function kernelsOf(trace) {
  const kernels = new Map();
  const arrays = new Map(); // how often a name has appeared in HBM: it may be another array each time
  for (let i = 0; i < trace.length; i++) {
    const form = trace.forms[trace.form[i]];
    if (form.kind === "place" || form.kind === "empty") arrays.set(form.array, (arrays.get(form.array) ?? 0) + 1);
    if (form.kind !== "load" && form.kind !== "store" && form.kind !== "compute") continue;
    const kernel = kernels.get(form.kernel) ?? { name: form.kernel, programs: [], writers: new Map(), dependent: false };
    kernels.set(form.kernel, kernel);
    const number = trace.program[i];
    const program = (kernel.programs[number] ??= { bytes: 0, first: i, end: i });
    program.end = i + 1;
    if (form.kind === "compute") continue;
    program.bytes += form.bytes;
    const place = `${form.array} ${arrays.get(form.array)} ${trace.row[i]} ${trace.col[i]}`;
    const writer = kernel.writers.get(place);
    if (writer !== undefined && writer !== number) kernel.dependent = true;
    if (form.kind === "store") kernel.writers.set(place, number);
  }
  return [...kernels.values()].map(({ name, programs, dependent }) => {
    const bytes = programs.map((program) => program.bytes);
    const longest = bytes.reduce((most, more) => Math.max(most, more), 0);
    const chain = dependent ? bytes.reduce((sum, more) => sum + more, 0) : longest;
    return { name, programs, dependent, longest, chain };
  });
}

class ProgramsView {
  constructor(root, language) {
    this.root = root.querySelector(".programs");
    this.list = this.root.querySelector(".kernels");
    this.chain = this.root.querySelector("[data-counter=chain]");
    this.language = language;
  }

  show(run) {
    this.root.hidden = run.trace.data.length > 0; // with pages, a program is a step in time
    this.kernels = run.kernels;
    this.bars = [];
    this.list.replaceChildren(...this.kernels.map((kernel) => this.#line(kernel)));
    setCounter(this.chain, run.chain, formatBytes);
  }

  #line(kernel) {
    const bars = element("div", { class: "lanes", style: `--high:${Math.min(kernel.programs.length, HIGHEST)}` });
    for (const program of kernel.programs.slice(0, MOST_BARS)) {
      const fill = element("i");
      bars.append(element("span", { style: `--length:${kernel.longest ? program.bytes / kernel.longest : 0}` }, fill));
      this.bars.push({ program, fill });
    }
    const wording = kernel.programs.length === 1 ? "one_program" : kernel.dependent ? "dependent_programs" : "programs";
    const count = this.language.text(wording, { count: kernel.programs.length });
    return element("li", { "data-kernel": kernel.name, "data-programs": kernel.programs.length },
      element("span", {}, kernel.name ? `${kernel.name}: ${count}` : count), bars);
  }

  draw(position) {
    for (const { program, fill } of this.bars) {
      const done = (position - program.first) / Math.max(program.end - program.first, 1);
      setStyle(fill, "transform", `scaleX(${Math.min(Math.max(done, 0), 1)})`);
    }
  }
}
