"use strict";
/* The server's page. It calls OpenAI's paths for answers and polls /live for the state of the engine.
   Text of models and users only enters the page as text nodes, never as markup. */

// ---- Helpers ----

const byId = (id) => document.getElementById(id);

// ---- Languages: English sentences in the code name their Chinese ones ----

const CHINESE = /* zh.json */;
const SPOKEN_ATTRIBUTES = ["placeholder", "aria-label"];
const originals = new WeakMap(); // by text node, or element with attributes: what it says in English
let language = navigator.language.startsWith("zh") ? "zh" : "en";

/** A text in the reader's language, with {places} filled in; a function gives a place in that language as well. */
function say(text, places = {}) {
  const found = language === "zh" ? CHINESE[text] ?? text : text;
  return found.replace(/\{(\w+)\}/g, (_, place) => {
    const value = places[place];
    return typeof value === "function" ? value() : value;
  });
}

/** A text node that changes with the language. */
function spoken(text, places) {
  const node = document.createTextNode(say(text, places));
  originals.set(node, { text, places });
  return node;
}

/** Note the English of the page's own words, before text of models and users is there. */
function noteWords() {
  for (const node of textNodes()) if (node.data.trim() in CHINESE) originals.set(node, { text: node.data.trim() });
  for (const name of SPOKEN_ATTRIBUTES) {
    for (const element of document.querySelectorAll(`[${name}]`)) {
      originals.set(element, { ...originals.get(element), [name]: element.getAttribute(name) });
    }
  }
}

function* textNodes() {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) yield walker.currentNode;
}

function setLanguage(name) {
  language = name;
  document.documentElement.lang = name === "zh" ? "zh-CN" : "en";
  byId("language").textContent = name === "zh" ? "English" : "中文";
  for (const node of textNodes()) {
    const own = originals.get(node);
    if (own) node.data = node.data.replace(node.data.trim(), () => say(own.text, own.places));
  }
  for (const attribute of SPOKEN_ATTRIBUTES) {
    for (const element of document.querySelectorAll(`[${attribute}]`)) {
      const own = originals.get(element)?.[attribute];
      if (own) element.setAttribute(attribute, say(own));
    }
  }
  nameModel();
  draw();
  for (const turn of [...turns.chat, ...turns.text]) turn.drawAsk();
  if (seen) drawEngine();
}

/** Make an element. Properties are set as they are; `class`, `data-...`, `aria-...` and `role` as attributes. */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class" || name === "role" || name.includes("-")) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/** A button without a border. One that is only for idle times is disabled while answers are written. */
function quiet(text, onclick, whenIdle = false) {
  const properties = { type: "button", class: "quiet", onclick, ...(whenIdle && { "data-idle": "" }) };
  return make("button", properties, spoken(text));
}

function plural(count, noun) {
  const ending = count === 1 || language === "zh" ? "" : "s";
  return `${count.toLocaleString("en")} ${say(noun)}${ending}`;
}

const announce = (text, places) => byId("status").replaceChildren(spoken(text, places));

/** Show one line about the server above the composer, with a button if something can be done; "" hides it. */
function notify(text, label, act) {
  byId("notice").hidden = !text;
  byId("notice").replaceChildren(make("span", {}, spoken(text)));
  if (label) byId("notice").append(quiet(label, act));
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // pages without TLS have no clipboard
    const area = make("textarea", { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.replaceChildren(spoken("Copied"));
  setTimeout(() => { button.replaceChildren(spoken("Copy")); }, 1500);
}

const copyButton = (text) => quiet("Copy", (event) => copy(text(), event.currentTarget));

// ---- The server ----

/** An error with the HTTP status of the server's answer; 0: it did not answer. */
const failure = (message, status) => Object.assign(new Error(message), { status });

/** Call the server, with JSON if there is a body. A failure has the server's own message. */
async function call(path, body, signal) {
  const key = byId("key").value;
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const options = body ? { method: "POST", body: JSON.stringify(body) } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw failure(say("The server does not answer."), 0);
  }
  if (response.ok) return response;
  const message = await response.json().then((found) => found.error.message, () => response.statusText);
  throw failure(message, response.status);
}

/** Yield the events of a stream. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (left + value).split("\n\n");
    left = parts.pop();
    for (const part of parts) {
      const data = part.slice("data: ".length);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw failure(event.error.message, 200);
      yield event;
    }
  }
}

const model = { name: "", maxLength: 0, hasTemplate: document.body.dataset.chat === "yes" };

/** The name of a model for readers: a folder's own name without the path, a name of Hugging Face as it is. */
function nameOfModel(id) {
  const cached = id.match(/models--([^/]+?)--([^/]+)\/snapshots\//);
  if (cached) return `${cached[1]}/${cached[2]}`;
  const parts = id.split("/").filter(Boolean);
  return id.startsWith("/") || id.startsWith(".") || parts.length > 2 ? parts.at(-1) : id;
}

function nameModel() {
  if (!model.name) return;
  byId("model").textContent = say("{name}, up to {tokens}", { name: model.name, tokens: plural(model.maxLength, "token") });
  document.title = `${model.name} - flashtile`;
}

async function describeModel() {
  try {
    const found = (await (await call("v1/models")).json()).data[0];
    model.name = nameOfModel(found.id);
    model.maxLength = found.max_model_len;
    nameModel();
    notify("");
    draw();
  } catch (error) {
    complain(error);
  }
}

function complain(error) {
  if (error.status === 401) notify("This server needs an API key.", "Enter the key", () => openSettings("key"));
  else notify(error.message, "Try again", start);
}

// ---- Settings ----

/** Sampling fields that differ from the server's defaults. Empty fields are left out. */
function sampling() {
  const fields = {};
  for (const input of document.querySelectorAll("[data-sampling]")) {
    if (input.value !== "") fields[input.id] = Number(input.value);
  }
  const stop = byId("stop-texts").value.split("\n").filter(Boolean).map((text) => text.replaceAll("\\n", "\n"));
  if (stop.length) fields.stop = stop;
  return fields;
}

function openSettings(field) {
  byId("settings").showModal();
  if (field) byId(field).focus();
}

// ---- The conversation ----

const TOP_TOKENS = 5;
const STARTERS = {
  chat: ["Explain attention in two sentences.", "Write a haiku about memory.", "What is 12 times 12?"],
  text: ["Once upon a time", "def read(path):\n    ", "The capital of France is"],
};
const turns = { chat: [], text: [] };
let mode = "chat";
let running = null; // the AbortController of the call that is being answered

/** One answer: its pieces (one for each event of the stream) and how it ended. */
class Answer {
  constructor(turn, index) {
    this.turn = turn;
    this.text = "";
    this.pieces = [];
    this.count = 0; // tokens
    this.reason = null;
    this.words = make(turn.mode === "text" ? "span" : "div", { class: "words" });
    this.tokens = make("span", { class: "tokens", role: "listbox", "aria-label": say("Tokens") });
    this.body = make("div", { class: `text${turn.mode === "text" ? " plain" : ""}` },
      make("span", { class: "given", textContent: turn.isInline ? turn.prompt : "" }), this.words, this.tokens);
    this.details = make("div", { class: "details", hidden: true });
    this.end = make("span", { class: "note" });
    this.further = quiet("Continue", () => turn.extend(this), true);
    this.further.hidden = true;
    this.actions = make("div", { class: "actions" }, copyButton(() => this.text), this.further, this.end);
    this.title = make("h2", {}, make("i", { class: "dot" }), spoken("Answer {number}", { number: index + 1 }));
    this.element = make("section", { class: "answer", "aria-label": say("Answer {number}", { number: index + 1 }) },
      this.title, this.body, this.details, this.actions);
    this.draw();
  }

  setRunning(on) {
    this.element.classList.toggle("running", on);
    this.actions.style.visibility = on ? "hidden" : "";
    const reasons = { length: "cut at the longest answer", abort: "ended by the server", error: "ended by an error" };
    const end = on ? "" : this.text || this.reason === null ? reasons[this.reason] ?? "" : "empty answer";
    this.end.replaceChildren(spoken(this.reason === "stopped" ? "stopped by you" : end));
    this.further.hidden = on || !this.text || !["length", "stopped"].includes(this.reason);
  }

  add(piece) {
    this.text += piece.text;
    this.pieces.push(piece);
    this.count += piece.tokens.length;
    if (!byId("show-tokens").checked) return this.drawText();
    this.tokens.append(this.token(piece, this.pieces.length - 1));
    this.tokens.hidden = false;
  }

  draw() {
    const asTokens = byId("show-tokens").checked;
    this.details.hidden = true;
    this.words.hidden = asTokens;
    this.tokens.hidden = !asTokens || !this.pieces.length;
    if (asTokens) this.tokens.replaceChildren(...this.pieces.map((piece, i) => this.token(piece, i)));
    else this.drawText();
  }

  /** Bring the text up to date; text that is there already stays, and with it the reader's selection. */
  drawText() {
    const wanted = this.turn.mode === "text" ? [["span", this.text]] : codeBlocks(this.text);
    wanted.forEach(([tag, text], i) => {
      let part = this.words.children[i];
      if (part?.localName !== tag) {
        const made = make(tag, {}, "");
        if (part) part.replaceWith(made);
        else this.words.append(made);
        part = made;
      }
      const node = part.firstChild;
      if (text.startsWith(node.data)) node.appendData(text.slice(node.data.length));
      else node.data = text;
    });
    while (this.words.children.length > wanted.length) this.words.lastChild.remove();
  }

  token(piece, i) {
    const text = piece.text.replaceAll("\n", "↵\n");
    const made = make("span", {
      class: "token", role: "option", "aria-selected": "false", tabIndex: i === 0 ? 0 : -1, textContent: text,
      onclick: () => this.select(i),
      onkeydown: (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1, Enter: 0, " ": 0 }[event.key];
        if (step === undefined || !this.pieces[i + step]) return;
        event.preventDefault();
        this.select(i + step);
      },
    });
    const likely = piece.tokens[0]?.logprob;
    if (likely !== undefined) made.style.setProperty("--doubt", (1 - Math.exp(likely)).toFixed(3));
    return made;
  }

  /** Show a piece's tokens, and what the model could have written in place of each. */
  select(i) {
    const options = this.tokens.children;
    for (const [k, option] of [...options].entries()) {
      option.setAttribute("aria-selected", k === i);
      option.tabIndex = k === i ? 0 : -1;
    }
    options[i].focus();
    const parts = this.pieces[i].tokens.flatMap((token) => {
      const chance = token.logprob === undefined ? say("sent without probabilities: ask again with tokens shown")
        : say("probability {share}", { share: percent(token.logprob) });
      return [make("p", { textContent: say("Token {id}, {chance}", { id: token.id, chance }) }), ...alternatives(token)];
    });
    this.details.replaceChildren(...parts);
    this.details.hidden = false;
  }
}

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;

function alternatives(token) {
  if (!token.top) return [];
  const rows = token.top.map(([text, logprob]) => {
    const bar = make("i");
    bar.style.width = `${100 * Math.exp(logprob)}%`;
    const cells = [JSON.stringify(text), percent(logprob)].map((textContent) => make("td", { textContent }));
    return make("tr", {}, ...cells, make("td", {}, bar));
  });
  return [make("table", { "aria-label": say("Likeliest tokens") }, make("tbody", {}, ...rows))];
}

/** Split a text at its fences (```) into [tag, text] parts; only whole lines are fences. */
function codeBlocks(text) {
  const parts = [["p", ""]];
  for (const line of text.split(/(?<=\n)/)) {
    const last = parts.at(-1);
    if (line.trimStart().startsWith("```")) parts.push([last[0] === "p" ? "pre" : "p", ""]);
    else last[1] += line;
  }
  return parts.filter(([tag, part], i) => part || tag === "pre" || i === 0);
}

/** One message or text, and the answers to it. */
class Turn {
  constructor(kind, prompt) {
    this.mode = kind;
    this.prompt = prompt;
    this.answers = [];
    this.chosen = 0;
    this.isInline = false; // the text and its one completion are shown as one text
    this.ask = make("div", { class: "ask" });
    this.grid = make("div", { class: "answers" });
    this.error = make("p", { class: "error", role: "alert" });
    this.note = make("span", { class: "note" });
    this.foot = make("div", { class: "actions" });
    this.element = make("article", { class: "turn" }, this.ask, this.grid, this.error, this.foot);
  }

  get answer() { return this.answers[this.chosen]; }

  drawAsk() {
    const edit = quiet("Edit", () => this.edit(), true);
    const retry = quiet("Retry", () => this.run(), true);
    const style = this.mode === "text" ? "user plain" : "user";
    this.ask.hidden = this.isInline;
    this.ask.replaceChildren(
      make("div", { class: style, textContent: this.prompt }),
      make("div", { class: "actions" }, ...(this.isInline ? [] : [edit]), copyButton(() => this.prompt)));
    this.foot.replaceChildren(...(this.isInline ? [edit] : []), retry, this.note);
  }

  /** Let the user change the message. Later messages of a chat depend on it and go. */
  edit() {
    const rows = Math.min(10, this.prompt.split("\n").length + 1);
    const area = make("textarea", { value: this.prompt, "aria-label": say("Edit message"), rows });
    const form = make("form", {}, area, make("div", { class: "buttons" },
      make("button", { type: "button", onclick: () => this.drawAsk() }, spoken("Cancel")),
      make("button", { class: "primary", "data-idle": "" }, spoken("Send"))));
    form.onsubmit = (event) => {
      event.preventDefault();
      if (running || !area.value.trim()) return;
      this.prompt = area.value;
      this.run();
    };
    area.onkeydown = (event) => {
      if (event.key === "Escape") this.drawAsk();
      else sendOnEnter(event, form);
    };
    this.ask.hidden = false;
    this.ask.replaceChildren(form);
    area.focus();
  }

  /** The messages up to this turn, with the chosen answers of the turns before it. */
  messages() {
    const found = [], system = byId("system").value.trim();
    if (system) found.push({ role: "system", content: system });
    for (const turn of turns.chat) {
      if (turn === this) break;
      if (turn.answer?.text) {
        found.push({ role: "user", content: turn.prompt }, { role: "assistant", content: turn.answer.text });
      }
    }
    return [...found, { role: "user", content: this.prompt }];
  }

  /** Answer the prompt, in place of the answers that are there. */
  async run() {
    const n = Math.max(1, Number(byId("n").value) || 1);
    if (this.mode === "chat") turns.chat.splice(turns.chat.indexOf(this) + 1);
    this.isInline = this.mode === "text" && n === 1;
    this.chosen = 0;
    this.answers = Array.from({ length: n }, (_, i) => new Answer(this, i));
    this.grid.classList.toggle("several", n > 1);
    this.grid.replaceChildren(...this.answers.map((answer) => answer.element));
    for (const answer of this.answers) answer.title.hidden = n === 1;
    if (n > 1 && this.mode === "chat") this.offerChoice();
    this.drawAsk();
    draw();
    byId("log").scrollTop = this.element.nextSibling ? this.element.offsetTop : byId("log").scrollHeight;
    const asked = this.mode === "chat" ? { messages: this.messages() } : { prompt: this.prompt };
    await this.generate({ ...asked, n }, this.answers);
  }

  offerChoice() {
    const name = `choice-${Math.random()}`;
    const choose = (chosen) => {
      this.chosen = chosen;
      this.answers.forEach((answer, i) => answer.element.classList.toggle("chosen", i === chosen));
    };
    this.answers.forEach((answer, i) => {
      const input = make("input", { type: "radio", name, checked: i === 0, onchange: () => choose(i) });
      answer.actions.append(make("label", { class: "choose" }, input, spoken("Reply to this")));
    });
    choose(0);
  }

  /** Make one answer longer. */
  async extend(answer) {
    if (this.mode === "text") return this.generate({ prompt: this.prompt + answer.text, n: 1 }, [answer]);
    const messages = [...this.messages(), { role: "assistant", content: answer.text }];
    return this.generate({ messages, n: 1, add_generation_prompt: false, continue_final_message: true }, [answer]);
  }

  /** Stream `asked` into answers, and show what the server says if it refuses. */
  async generate(asked, answers) {
    const controller = new AbortController(), begun = performance.now(), before = sum(answers);
    let first = 0, prompt = 0, waiting = []; // pieces that the next frame shows
    this.error.textContent = this.note.textContent = "";
    for (const answer of answers) answer.setRunning(true);
    setRunning(controller);
    const show = () => {
      keepAtEnd(() => waiting.forEach(([answer, piece]) => answer.add(piece)));
      waiting = [];
      if (!first) return;
      const count = sum(answers) - before, later = count - answers.length;
      const seconds = (performance.now() - first) / 1000;
      const time = (first - begun).toFixed(0), rate = (later / seconds).toFixed(0);
      const parts = () => [
        ...(prompt ? [plural(prompt, "prompt token")] : []),
        say("{tokens} written", { tokens: plural(count, "token") }),
        say("first after {time} ms", { time }),
        ...(later > 0 && seconds > 0 ? [say("{rate} tokens/s", { rate })] : []),
      ].join(", ");
      this.note.replaceChildren(spoken("Request {number}: {parts}", { number: this.number, parts }));
    };
    try {
      const body = await this.body(asked, controller.signal);
      const path = this.mode === "chat" ? "v1/chat/completions" : "v1/completions";
      for await (const event of events(await call(path, body, controller.signal))) {
        if (event.usage) prompt = event.usage.prompt_tokens;
        this.color(`${event.id}-0`);
        for (const choice of event.choices) {
          if (choice.delta?.role) continue;
          first ||= performance.now();
          const answer = answers[choice.index];
          if (waiting.push([answer, pieceOf(choice, this.mode)]) === 1) requestAnimationFrame(show);
          if (choice.finish_reason) answer.reason = choice.finish_reason;
        }
      }
      show();
      const written = sum(answers) - before;
      announce("Done: {tokens}", { tokens: () => plural(written, "token") });
    } catch (error) {
      show();
      if (error.name === "AbortError") {
        for (const answer of answers) answer.reason ??= "stopped";
        announce("Stopped");
      } else {
        this.error.textContent = error.message;
        announce("");
        if (error.status === 401) complain(error);
      }
    }
    setRunning(null);
    keepAtEnd(() => answers.forEach((answer) => answer.setRunning(false)));
    for (const answer of this.answers) answer.element.hidden = !answer.text && Boolean(this.error.textContent);
  }

  /** The body of a call. Answers are no longer than the room after the prompt. */
  async body(asked, signal) {
    const { n, ...prompt } = asked;
    const { count, max_model_len: most } = await (await call("tokenize", prompt, signal)).json();
    const wanted = Number(byId("max_tokens").value) || 256, room = most - count;
    const fields = { ...asked, ...sampling(), max_tokens: room > 0 ? Math.min(wanted, room) : wanted };
    if (this.mode === "chat") fields.separate_reasoning = false;
    if (byId("show-tokens").checked) {
      if (this.mode === "chat") Object.assign(fields, { logprobs: true, top_logprobs: TOP_TOKENS });
      else fields.logprobs = TOP_TOKENS;
    }
    return { ...fields, stream: true, stream_options: { include_usage: true }, return_token_ids: true };
  }

  /** Give the turn the colour that the engine's blocks of its request have. */
  color(id) {
    const { number, color } = request(id);
    this.number = number;
    this.element.style.setProperty("--request", `var(${color})`);
  }
}

const sum = (answers) => answers.reduce((total, answer) => total + answer.count, 0);

/** An event's text with its tokens: {id, logprob, top}, the last two if they were requested. */
function pieceOf(choice, kind) {
  const found = choice.logprobs;
  let scores = [];
  if (found && kind === "chat") {
    const pair = (one) => [one.token, one.logprob];
    scores = found.content.map((one) => ({ logprob: one.logprob, top: one.top_logprobs.map(pair) }));
  } else if (found) {
    const pairs = (i) => Object.entries(found.top_logprobs[i] ?? {});
    scores = found.token_logprobs.map((logprob, i) => ({ logprob, top: pairs(i) }));
  }
  for (const { top } of scores) top.sort((a, b) => b[1] - a[1]);
  const text = kind === "chat" ? choice.delta.content : choice.text;
  return { text, tokens: (choice.token_ids ?? []).map((id, i) => ({ id, ...scores[i] })) };
}

/** Change the messages; a reader at their end stays there. */
function keepAtEnd(change) {
  const log = byId("log"), atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function setRunning(controller) {
  running = controller;
  const hadFocus = document.activeElement === byId("stop") || document.activeElement === document.body;
  byId("send").hidden = Boolean(running);
  byId("stop").hidden = !running;
  if (running) announce("Answering");
  if (running && hadFocus) byId("stop").focus(); // Retry and Edit, which had the focus, are gone
  else if (hadFocus) focusPrompt();
  for (const button of document.querySelectorAll("[data-idle]")) button.disabled = Boolean(running);
  document.querySelector("[name=mode][value=chat]").disabled = Boolean(running) || !model.hasTemplate;
}

/** Show the messages of the current mode. */
function draw() {
  const shown = turns[mode], system = byId("system").value.trim();
  document.body.dataset.mode = mode;
  byId("welcome").hidden = shown.length > 0;
  byId("welcome-title").textContent = model.name
    && say(mode === "chat" ? "Chat with {name}" : "Complete text with {name}", { name: model.name });
  byId("welcome-text").textContent = mode === "chat"
    ? say("Messages go to this server as chat completions, with the model's own chat template.")
    : [...(model.hasTemplate ? [] : [say("This model has no chat template.")]),
      say("The model writes what follows your text.")].join(" ");
  byId("starters").replaceChildren(...STARTERS[mode].map((text) =>
    make("button", { type: "button", textContent: say(text), onclick: () => { setPrompt(say(text)); } })));
  byId("prompt-label").textContent = say(mode === "chat" ? "Message" : "Text to complete");
  byId("prompt").placeholder = say(mode === "chat" ? "Write a message" : "Write the beginning of a text");
  byId("prompt").classList.toggle("plain", mode === "text");
  const head = make("p", { class: "system", textContent: say("System prompt: {text}", { text: system }) });
  head.hidden = mode !== "chat" || !system || !shown.length;
  byId("turns").replaceChildren(head, ...shown.map((turn) => turn.element));
}

/** Focus the prompt, except where that would open a keyboard on the screen. */
function focusPrompt() {
  if (matchMedia("(pointer: fine)").matches) byId("prompt").focus();
}

function setMode(value) {
  mode = value;
  document.querySelector(`[name=mode][value=${value}]`).checked = true;
  draw();
}

function setPrompt(text) {
  byId("prompt").value = text;
  grow();
  focusPrompt();
}

function grow() {
  const area = byId("prompt");
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

function send(event) {
  event.preventDefault();
  const text = byId("prompt").value;
  if (running || !text.trim()) return;
  const turn = new Turn(mode, text);
  turns[mode].push(turn);
  setPrompt("");
  turn.run();
}

/** Send a form on Enter, but not on Shift+Enter, nor on the Enter that ends the input of Chinese characters. */
function sendOnEnter(event, form) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
}

// ---- The engine ----

const COLORS = 8, SECONDS = 60, LISTED_BLOCKS = 40;
const requests = new Map(); // by the engine's request id: {number, color}
const samples = []; // {time in seconds, total tokens, rate in tokens per second, server}
let seen = null; // the last answer of /live
let owners = new Map(); // by block: the sequences that use it

function request(id) {
  if (!requests.has(id)) requests.set(id, { number: requests.size + 1, color: `--r${requests.size % COLORS}` });
  return requests.get(id);
}

const nameOf = (sequence) => say("Request {number}, answer {answer}",
  { number: request(sequence.request_id).number, answer: sequence.index + 1 });

/** Count tokens per second over the last second, and forget what is older than the chart. */
function sample(total) {
  const time = performance.now() / 1000;
  if (samples.at(-1)?.server !== seen.server) samples.length = 0; // another replica counts its own tokens
  const before = samples.findLast((one) => time - one.time >= 0.9) ?? samples[0];
  const rate = before && time > before.time ? (total - before.total) / (time - before.time) : 0;
  samples.push({ time, total, rate, server: seen.server });
  while (samples[0].time < time - SECONDS) samples.shift();
  return rate;
}

function drawChart(rate) {
  const most = Math.max(...samples.map((one) => one.rate)), now = samples.at(-1).time;
  const power = 10 ** Math.max(1, Math.floor(Math.log10(most || 1))), top = power * Math.max(1, Math.ceil(most / power));
  const points = samples.map((one) => [600 * (1 - (now - one.time) / SECONDS), 98 - 96 * one.rate / top]);
  const line = points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
  byId("chart-line").setAttribute("d", `M${line}`);
  byId("chart-area").setAttribute("d", `M${points[0][0].toFixed(1)} 100L${line}L600 100Z`);
  byId("chart-most").textContent = top.toLocaleString("en");
  byId("rate").textContent = rate.toFixed(rate < 10 && rate > 0 ? 1 : 0);
  const described = say("{now} now, at most {most}", { now: rate.toFixed(0), most: most.toFixed(0) });
  byId("chart").setAttribute("aria-label", `${say("Tokens per second over the last minute")}: ${described}`);
}

/** Size and columns of the squares in the picture of the blocks. */
function layout(count) {
  const width = byId("blocks").clientWidth || 300;
  const size = Math.max(6, Math.min(18, Math.floor(Math.sqrt((width * 160) / Math.max(1, count)))));
  return { size, columns: Math.max(1, Math.floor(width / size)) };
}

/** Return a function from a variable of the design to its colour in the present scheme, which a canvas needs. */
function resolvedColors(element) {
  const found = new Map();
  return (name) => {
    if (!found.has(name)) {
      element.style.color = `var(${name})`;
      found.set(name, getComputedStyle(element).color);
    }
    return found.get(name);
  };
}

function drawBlocks() {
  const canvas = byId("blocks"), scale = devicePixelRatio || 1, count = seen.blocks.length;
  const { size, columns } = layout(count), side = size - (size > 8 ? 2 : 1);
  const height = Math.ceil(count / columns) * size;
  canvas.width = canvas.clientWidth * scale;
  canvas.height = height * scale;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const color = resolvedColors(canvas);
  let shared = 0;
  for (const [place, block] of seen.blocks.entries()) {
    const x = (place % columns) * size, y = Math.floor(place / columns) * size, sequences = owners.get(block);
    if (!sequences) {
      const cached = seen.refs[place] !== "0";
      context.fillStyle = context.strokeStyle = color("--cached");
      context.globalAlpha = cached ? 1 : 0.35;
      if (cached) context.fillRect(x, y, side, side);
      else context.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
      context.globalAlpha = 1;
      continue;
    }
    const colors = [...new Set(sequences.map((one) => request(one.request_id).color))];
    colors.forEach((name, i) => { // a block of several requests is striped
      context.fillStyle = color(name);
      context.fillRect(x + (side * i) / colors.length, y, side / colors.length, side);
    });
    if (sequences.length === 1) continue;
    shared++;
    const rim = Math.max(1, Math.round(side / 4));
    context.fillStyle = color("--ink");
    context.fillRect(x + rim, y + rim, side - 2 * rim, side - 2 * rim);
  }
  const { num_free: free, num_cached: cached } = seen, all = seen.num_blocks - seen.null_blocks;
  const found = { used: all - free - cached, shared, cached, free };
  for (const [name, number] of Object.entries(found)) byId(`count-${name}`).textContent = number.toLocaleString("en");
  for (const name of ["used", "cached"]) byId(`bar-${name}`).style.width = `${100 * found[name] / all}%`;
  const described = say("{used} used, of which {shared} shared; {cached} in the prefix cache, {free} free", found);
  canvas.setAttribute("aria-label", `${say("Blocks of the KV cache")}: ${described}`);
}

function describeBlocks() {
  const all = seen.num_blocks - seen.null_blocks, inUse = all - seen.num_free;
  const isWhole = seen.blocks.length === all, isCut = seen.num_running > seen.running.length
    || (!isWhole && inUse > seen.blocks.length);
  const parts = [say("{blocks} of {tokens}, coloured by request. A dot marks a shared block.",
    { blocks: plural(all, "block"), tokens: plural(seen.block_size, "token") })];
  if (!isWhole) parts.push(say("Only blocks in use are drawn."));
  if (isCut) {
    parts.push(say("The picture has {blocks} and {sequences}.",
      { blocks: plural(seen.blocks.length, "block"), sequences: plural(seen.running.length, "sequence") }));
  }
  byId("blocks-note").textContent = parts.join(" ");
}

function describeBlock(event) {
  if (!seen) return;
  const { size, columns } = layout(seen.blocks.length);
  const place = Math.floor(event.offsetY / size) * columns + Math.floor(event.offsetX / size);
  const number = seen.blocks[place];
  if (number === undefined) return;
  const used = (owners.get(number) ?? []).map(nameOf);
  const state = used.length ? used.join("; ") : say(seen.refs[place] === "0" ? "free" : "in the prefix cache");
  byId("blocks-note").textContent = say("Block {number}: {state}", { number, state });
}

function batchItem(sequence, longest) {
  const item = make("li"), { computed, tokens, prompt_tokens: prompt } = sequence;
  item.style.setProperty("--request", `var(${request(sequence.request_id).color})`);
  const state = computed < prompt
    ? say("{computed} of {prompt} prompt tokens", { computed, prompt })
    : say("{prompt} prompt + {written} written", { prompt, written: tokens - prompt });
  const step = sequence.step_tokens ? `+${sequence.step_tokens}` : say("waits");
  const bars = [Math.min(computed, prompt), Math.max(0, computed - prompt)].map((length) => {
    const bar = make("i");
    bar.style.width = `${(100 * length) / longest}%`;
    return bar;
  });
  const table = sequence.blocks.slice(0, LISTED_BLOCKS).map((block) =>
    make("span", { class: owners.get(block)?.length > 1 ? "shared" : "", textContent: block }));
  if (sequence.blocks.length > LISTED_BLOCKS) table.push(say("and {count} more", { count: sequence.blocks.length - LISTED_BLOCKS }));
  const words = [nameOf(sequence), state].map((textContent) => make("span", { textContent }));
  item.append(
    make("div", { class: "line" }, make("i", { class: "dot" }), ...words, make("b", { textContent: step })),
    make("div", { class: "progress" }, ...bars), make("div", { class: "table" }, ...table));
  return item;
}

function drawEngine() {
  owners = new Map();
  for (const sequence of seen.running) {
    for (const block of sequence.blocks) {
      if (block >= seen.null_blocks) owners.set(block, [...(owners.get(block) ?? []), sequence]);
    }
  }
  const rate = sample(seen.generation_tokens);
  if (document.body.dataset.engine !== "shown") return;
  byId("engine-state").textContent = seen.num_running
    ? say("{tokens} in this step", { tokens: plural(seen.step_tokens, "token") }) : say("Idle");
  drawChart(rate);
  byId("usage").textContent = say("{share} % in use", { share: (100 * seen.cache_usage).toFixed(1) });
  drawBlocks();
  if (!byId("blocks").matches(":hover")) describeBlocks();
  const seats = plural(seen.max_num_seqs, "sequence");
  byId("batch-state").textContent = say("{running} of {seats}, {waiting} waiting",
    { running: seen.num_running, seats, waiting: seen.num_waiting });
  const longest = Math.max(1, ...seen.running.map((one) => one.tokens));
  byId("batch").replaceChildren(...seen.running.map((one) => batchItem(one, longest)));
  byId("totals").textContent = say(
    "Since the start: {written} written, {computed} computed, {found} found in the prefix cache, {preemptions}.",
    {
      written: plural(seen.generation_tokens, "token"), computed: plural(seen.prompt_tokens, "prompt token"),
      found: plural(seen.prefix_hits, "prompt token"), preemptions: plural(seen.num_preemptions, "preemption"),
    });
}

async function watch() {
  let pause = 1000;
  try {
    if (!document.hidden && !watch.needsKey) {
      seen = await (await call("live")).json();
      if (seen.chat_template !== model.hasTemplate) {
        model.hasTemplate = seen.chat_template;
        setRunning(running);
        setMode(model.hasTemplate ? "chat" : "text");
      }
      drawEngine();
      if (seen.num_running) pause = 200;
    }
  } catch (error) {
    watch.needsKey = error.status === 401;
    byId("engine-state").textContent = error.message;
  }
  setTimeout(watch, running ? 200 : pause);
}

// ---- Start ----

function start() {
  watch.needsKey = false;
  return describeModel();
}

function showEngine(on) {
  document.body.dataset.engine = on ? "shown" : "hidden";
  byId("show-engine").setAttribute("aria-pressed", on);
  if (on && seen) drawEngine();
}

byId("composer").addEventListener("submit", send);
byId("prompt").addEventListener("keydown", (event) => sendOnEnter(event, byId("composer")));
byId("prompt").addEventListener("input", grow);
byId("stop").addEventListener("click", () => running?.abort());
byId("new").addEventListener("click", () => { turns[mode].length = 0; draw(); focusPrompt(); });
byId("open-settings").addEventListener("click", () => openSettings());
byId("settings").addEventListener("close", draw);
byId("show-engine").addEventListener("click", () => showEngine(document.body.dataset.engine !== "shown"));
byId("show-tokens").addEventListener("change", () => {
  for (const turn of [...turns.chat, ...turns.text]) for (const answer of turn.answers) answer.draw();
});
byId("key").addEventListener("change", start);
byId("blocks").addEventListener("mousemove", describeBlock);
byId("blocks").addEventListener("mouseleave", () => { if (seen) describeBlocks(); });
for (const input of document.querySelectorAll("[name=mode]")) {
  input.addEventListener("change", () => setMode(input.value));
}
for (const name of ["temperature", "top_p"]) {
  const show = () => { byId(`${name}-value`).textContent = Number(byId(name).value).toFixed(2); };
  byId(name).addEventListener("input", show);
  show();
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !byId("settings").open) running.abort();
});

byId("language").addEventListener("click", () => setLanguage(language === "zh" ? "en" : "zh"));

noteWords();
showEngine(matchMedia("(min-width: 56rem)").matches);
setRunning(null);
setMode(model.hasTemplate ? "chat" : "text");
setLanguage(language);
focusPrompt();
start();
watch();
