// Texts in the reader's language.

const LANGUAGES = { en: "English", zh: "中文" };

class Language {
  constructor(texts) {
    this.texts = texts;
    this.name = "en";
  }

  static preferred() {
    return navigator.language.startsWith("zh") ? "zh" : "en";
  }

  /** The text of a key, with {places} filled in. A number and its percent sign stay on one line. */
  text(key, places = {}) {
    const text = this.texts[this.name][key];
    if (text === undefined) throw new Error(`no text ${key} in ${this.name}`);
    return text.replace(/\{(\w+)\}/g, (_, place) => places[place]).replaceAll(" %", "\u00a0%");
  }

  /** The text of a key, or the alternative where there is none. */
  textOr(key, alternative) {
    return this.texts[this.name][key] ?? alternative;
  }

  /** Fill in every element of `root` that names its text in data-text, or its label in data-label. */
  apply(root) {
    for (const element of root.querySelectorAll("[data-text]")) {
      element.textContent = this.text(element.dataset.text);
      const meaning = this.textOr(`word_${element.dataset.text}`, null);
      if (meaning) element.title = meaning;
    }
    for (const element of root.querySelectorAll("[data-label]")) {
      const label = this.text(element.dataset.label);
      element.setAttribute("aria-label", label);
      element.title = label;
    }
  }
}
