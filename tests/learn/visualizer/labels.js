// Labels on the page that are cut, covered, outside of the window or hard to read, and the texts of all.
() => {
  const wrong = [];
  const pixel = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => { // of any colour of CSS
    pixel.clearRect(0, 0, 1, 1);
    pixel.fillStyle = colour;
    pixel.fillRect(0, 0, 1, 1);
    return [...pixel.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (colour) => {
    const [r, g, b] = colour.slice(0, 3).map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [light, dark] = [luminance(one), luminance(other)].sort((a, b) => b - a);
    return (light + 0.05) / (dark + 0.05);
  };
  const collide = (labels, what) => labels.forEach((one, i) => labels.slice(i + 1).forEach((other) => {
    const wide = Math.min(one.right, other.right) - Math.max(one.left, other.left);
    const high = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
    if (one.owner !== other.owner && wide > 2 && high > what) wrong.push(`${one.text} on ${other.text}`);
  }));
  for (const { scene, root } of Object.values(flashtilePage.views)) { // what the canvases write
    if (!scene.run || root.offsetParent === null || scene.canvas.offsetParent === null) continue;
    const labels = [];
    let write = scene.write;
    const note = (text, x, y, options = {}) => {
      const size = options.size ?? 13;
      const ground = options.on ?? scene.ground.getContext("2d");
      const behind = [...ground.getImageData(Math.max(x, 0) * scene.ratio, Math.max(y - 0.36 * size, 0) * scene.ratio, 1, 1).data]; // before it is written
      if (behind[3] && contrast(rgba(options.colour ?? flashtilePage.colours.soft), behind) < 3) wrong.push(`pale: ${text}`);
      write(text, x, y, options);
      scene.context.font = `${options.bold ? "600 " : ""}${size}px system-ui, sans-serif`;
      const { width } = scene.context.measureText(text);
      const left = x - { left: 0, center: width / 2, right: width }[options.align ?? "left"];
      const label = { text, left, right: left + width, top: y - 0.72 * size, bottom: y + 2, owner: labels.length };
      labels.push(label);
      if (left < -1 || label.right > scene.width + 1 || label.top < -1 || label.bottom > scene.height + 1) wrong.push(`cut: ${text}`);
    };
    Object.defineProperty(scene, "write", { configurable: true, get: () => note, set: (to) => (write = to) });
    scene.coloured = null; // so that the ground is painted again
    flashtilePage.draw();
    delete scene.write;
    scene.write = write;
    collide(labels, 1);
  }
  const labels = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) { // what the document says
    const { data, parentElement: e } = walker.currentNode;
    if (!data.trim() || e.closest("script, style, option, noscript, details:not([open]) > :not(summary)")) continue;
    if (!e.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true })) continue;
    const range = document.createRange();
    range.selectNodeContents(walker.currentNode);
    for (const { left, right, top, bottom } of range.getClientRects()) {
      let seen = { left, right, top, bottom };
      for (let around = e; seen && around !== document.documentElement; around = around.parentElement) {
        const style = getComputedStyle(around);
        if (style.clipPath !== "none") seen = null; // for screen readers only
        else if (/auto|scroll/.test(style.overflowX + style.overflowY)) { // one can scroll to it
          const box = around.getBoundingClientRect();
          seen = { left: Math.max(seen.left, box.left), right: Math.min(seen.right, box.right), top: Math.max(seen.top, box.top), bottom: Math.min(seen.bottom, box.bottom) };
          if (seen.right - seen.left < 1 || seen.bottom - seen.top < 1) seen = null;
        } else if (/hidden|clip/.test(style.overflowX) && around !== document.body) {
          const box = around.getBoundingClientRect();
          if (seen.left < box.left - 1 || seen.right > box.right + 1 || seen.bottom > box.bottom + 4) wrong.push(`cut: ${data}`);
        }
      }
      if (!seen) continue;
      if (seen.left < -1 || seen.right > innerWidth + 1) wrong.push(`outside: ${data}`);
      labels.push({ ...seen, text: data, owner: e });
    }
  }
  for (const text of document.querySelectorAll(".picture svg text")) { // axe does not look at these
    const { left, right, top, bottom } = text.getBoundingClientRect();
    const [x, y] = [(left + right) / 2, (top + bottom) / 2];
    let opacity = 1;
    for (let e = text; e instanceof SVGElement; e = e.parentElement) opacity *= getComputedStyle(e).opacity;
    if (!text.textContent.trim() || opacity < 0.5 || getComputedStyle(text).fill === "none") continue; // not shown yet
    const under = document.elementsFromPoint(x, y);
    if (!under.includes(text.ownerSVGElement)) continue; // scrolled away
    const painted = under.filter((e) => !(e instanceof SVGElement) || e.matches("rect, circle"));
    const ground = painted.map((e) => rgba(getComputedStyle(e)[e instanceof SVGElement ? "fill" : "backgroundColor"])).find(([, , , alpha]) => alpha === 255);
    if (ground && contrast(rgba(getComputedStyle(text).fill), ground) < 3) wrong.push(`pale: ${text.textContent}`);
  }
  collide(labels, 5);
  return [[...new Set(wrong)], labels.map(({ text }) => text)];
}
