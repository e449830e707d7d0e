// The whole state of the page in its address, so that a link shows what its sender saw.
//
//   #a=flash2;block=64x64&b=standard&seqlen=1024&head_dim=64&mask=causal&sram=102400&sync=bytes&at=120&row=341

const RUN_NUMBERS = new Set(["num_splits", "page_size"]);
const NUMBERS = ["seqlen", "head_dim", "sram", "at", "row", "scene", "element", "speed"];
const WORDS = ["queries", "mask", "sync", "card", "question", "tour", "story", "variant", "case", "drawer", "preset", "inputs", "words", "predict", "arithmetic", "lang", "theme"];

function writeAddress(state) {
  if (state.home) return `#${AT_HOME.filter((key) => state[key]).map((key) => `${key}=${encodeURIComponent(state[key])}`).join("&")}`;
  const parts = [`a=${writeRun(state.a)}`];
  if (state.b) parts.push(`b=${writeRun(state.b)}`);
  for (const key of [...NUMBERS, ...WORDS]) {
    if (state[key] !== undefined && state[key] !== null) parts.push(`${key}=${encodeURIComponent(state[key])}`);
  }
  return `#${parts.join("&")}`;
}

function writeRun({ algorithm, ...own }) {
  const settings = Object.entries(own).filter(([, value]) => value !== undefined);
  return [algorithm, ...settings.map(([key, value]) => `${key}=${encodeURIComponent(value)}`)].join(";");
}

/** What an address says of the state; parts that mean nothing are left out. */
function readAddress(hash) {
  const state = {};
  for (const part of hash.replace(/^#/, "").split("&")) {
    const [key, value] = splitOnce(part);
    if (key === "a" || key === "b") state[key] = readRun(value);
    else if (NUMBERS.includes(key) && value !== "" && Number.isFinite(Number(value))) state[key] = Number(value);
    else if (WORDS.includes(key)) state[key] = decode(value);
  }
  return state;
}

function readRun(text) {
  const [algorithm, ...settings] = text.split(";").map(decode);
  const run = { algorithm };
  for (const setting of settings) {
    const [key, value] = splitOnce(setting);
    if (OWN.includes(key)) run[key] = RUN_NUMBERS.has(key) ? Number(value) : value;
  }
  return run;
}

function splitOnce(text) {
  const at = text.indexOf("=");
  return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at + 1)];
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return "";
  }
}
