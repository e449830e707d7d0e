// Small helpers around the document.

const SVG = "http://www.w3.org/2000/svg";

/** element("p", {class: "now"}, "text", child) */
function element(tag, attributes = {}, ...children) {
  return fillIn(document.createElement(tag), attributes, children);
}

function svgElement(tag, attributes = {}, ...children) {
  return fillIn(document.createElementNS(SVG, tag), attributes, children);
}

function fillIn(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** Write only what changed: at 60 frames a second most numbers stay. */
function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** A counter shows a formatted number and keeps the exact one in data-value. */
function setCounter(target, value, format) {
  const exact = String(value);
  if (target.dataset.value === exact) return;
  target.dataset.value = exact;
  target.textContent = format(value);
}

function setStyle(target, property, value) {
  if (target.style.getPropertyValue(property) !== value) target.style.setProperty(property, value);
}

/** Move without a new layout. */
function moveTo(target, x, y) {
  setStyle(target, "transform", `translate(${x}px, ${y}px)`);
}

const COLOURED = ["Q", "K", "V", "S", "P", "O"];

/** The name of an array's colour: its own, that of its block or gradient, or the one of all statistics. */
function colourKey(name) {
  const bare = arrayOf(name).replace(/^d(?=[A-Z])/, "").replace(/_s$/, "");
  return COLOURED.includes(bare) ? bare : "statistics";
}

/** The CSS variable of an array's colour. */
function colourName(name) {
  return `--${colourKey(name).toLowerCase()}`;
}
