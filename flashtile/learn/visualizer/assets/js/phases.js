// The phases of the run that leads the clock, above the player: its kernels, or the programs of its only one.

const MAX_PHASES = 16;

class Phases {
  constructor(clock, language) {
    Object.assign(this, { clock, language });
    this.root = document.querySelector(".phases");
    this.root.addEventListener("click", (event) => {
      const phase = event.target.closest("span");
      if (phase) clock.seek(Number(phase.dataset.from));
    });
    new ResizeObserver(() => this.#name()).observe(this.root);
  }

  show() {
    const { leader } = this.clock;
    const phases = leader.kernels ? this.#phasesOf(leader) : [];
    this.root.replaceChildren(...phases.map(({ name, from, to }) => element("span", { style: `flex:${to - from} 0 0`, "data-from": from, "data-to": to, title: name })));
    this.parts = [...this.root.children];
    this.#name();
  }

  /** A name is shown where it fits. */
  #name() {
    for (const part of this.parts ?? []) {
      setText(part, part.title);
      if (part.scrollWidth > part.clientWidth) setText(part, "");
    }
  }

  /** [{name, from, to}] that cover all events in order. */
  #phasesOf({ kernels, trace }) {
    const starts = kernels.flatMap(({ name, programs }) => {
      const only = kernels.length <= 2 && programs.length > 1 && programs.length <= MAX_PHASES;
      const named = (number) => this.language.text("scene_program", { number: number + 1, count: programs.length });
      if (only) return programs.map(({ first }, number) => ({ name: programs.length > 4 ? String(number + 1) : named(number), from: first }));
      return [{ name: this.language.textOr(`kernel_${name.replaceAll(" ", "_")}`, name), from: programs[0].first }];
    }).sort((one, other) => one.from - other.from);
    return starts.map((start, i) => ({ ...start, from: i ? start.from : 0, to: starts[i + 1]?.from ?? trace.length })).filter(({ from, to }) => to > from);
  }

  draw(at) {
    for (const part of this.parts ?? []) part.classList.toggle("here", Number(part.dataset.from) <= at && at < Number(part.dataset.to));
  }
}
