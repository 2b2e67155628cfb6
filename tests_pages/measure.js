// Measures of a page as a reader gets it; each function returns texts, one for each fault.
(() => {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const context = canvas.getContext("2d", { willReadFrequently: true });

  // Any CSS colour as [red, green, blue, alpha], 0 to 255.
  const known = new Map();
  function rgba(color) {
    if (!known.has(color)) {
      context.clearRect(0, 0, 1, 1);
      context.fillStyle = color;
      context.fillRect(0, 0, 1, 1);
      known.set(color, [...context.getImageData(0, 0, 1, 1).data]);
    }
    return known.get(color);
  }

  const over = ([r, g, b, a], below, opacity = 1) =>
    [r, g, b].map((c, i) => below[i] + ((c - below[i]) * a * opacity) / 255);

  function luminance(color) {
    const [r, g, b] = color.slice(0, 3).map((c) => c / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }

  // WCAG 2.2, contrast ratio.
  function contrast(one, other) {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  }

  function ancestors(element) {
    const found = [];
    for (let each = element; each; each = each.parentElement) found.push(each);
    return found;
  }

  // What is behind an element's text, its own background included.
  function background(element) {
    return ancestors(element).reverse().reduce(
      (below, each) => over(rgba(getComputedStyle(each).backgroundColor), below), [255, 255, 255]);
  }

  const opacity = (element) =>
    ancestors(element).reduce((product, each) => product * getComputedStyle(each).opacity, 1);

  const isSeen = (element) => {
    const box = element.getBoundingClientRect();
    const hidden = ancestors(element).some((each) => getComputedStyle(each).clipPath === "inset(50%)");
    return box.width > 0 && box.height > 0 && box.right > 0 && !hidden &&
      element.checkVisibility({ visibilityProperty: true });
  };

  const scrolls = (element) => ["auto", "scroll"].includes(getComputedStyle(element).overflowX);
  const named = (element) => `${element.tagName.toLowerCase()}.${element.getAttribute("class") ?? ""} ` +
    `"${(element.textContent || element.id).trim().slice(0, 40)}"`;

  function texts() {
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = new Set();
    while (walker.nextNode()) {
      const element = walker.currentNode.parentElement;
      if (walker.currentNode.data.trim() && !["SCRIPT", "STYLE", "NOSCRIPT", "OPTION"].includes(element.tagName) &&
        isSeen(element)) found.add(element);
    }
    return [...found];
  }

  window.measure = {
    // Everything lies inside the window, except inside boxes that scroll.
    outside: () => [...document.body.querySelectorAll("*")]
      .filter((e) => isSeen(e) && !ancestors(e.parentElement).some(scrolls))
      .filter((e) => e.getBoundingClientRect().right > innerWidth + 1)
      .map((e) => `${named(e)} ends at ${e.getBoundingClientRect().right}`),

    cutOff: () => [...document.querySelectorAll(".scroll")]
      .filter((e) => isSeen(e) && e.scrollWidth > e.clientWidth + 1)
      .map((e) => `${named(e)} is ${e.scrollWidth} wide in ${e.clientWidth}`),

    small: (least) => texts().filter((e) => parseFloat(getComputedStyle(e).fontSize) < least)
      .map((e) => `${named(e)} ${getComputedStyle(e).fontSize}`),

    faint: (least) => texts().map((e) => {
      const style = getComputedStyle(e), below = background(e);
      const color = e.ownerSVGElement ? style.fill : style.color;
      return [e, contrast(over(rgba(color), below, opacity(e)), below)];
    }).filter(([, ratio]) => ratio < least).map(([e, ratio]) => `${named(e)} ${ratio.toFixed(2)}`),

    // Colours that draw marks and lines.
    faintMarks: (selector, least) => [...document.querySelectorAll(selector)].map((e) => {
      const style = getComputedStyle(e), isLine = e.tagName === "line" || style.fill === "none";
      return [e, contrast(over(rgba(isLine ? style.stroke : style.fill), background(e)), background(e))];
    }).filter(([, ratio]) => ratio < least).map(([e, ratio]) => `${named(e)} ${ratio.toFixed(2)}`),

    overlaps: (selector) => {
      const boxes = [...document.querySelectorAll(selector)].filter(isSeen)
        .map((e) => [named(e), e.getBoundingClientRect()]);
      const apart = (a, b) => a.right <= b.left + 1 || b.right <= a.left + 1 || a.bottom <= b.top + 1 || b.bottom <= a.top + 1;
      return boxes.flatMap(([name, a], i) => boxes.slice(i + 1)
        .filter(([, b]) => !apart(a, b)).map(([other]) => `${name} and ${other}`));
    },

    // Elements that can be used, in the order of the document; a number names each.
    controls: () => {
      const found = [...document.querySelectorAll("a[href], button, select, input, summary, [tabindex='0']")]
        .filter((e) => e.checkVisibility({ visibilityProperty: true }));
      found.forEach((e, i) => { e.dataset.control = i; });
      return found.map(named);
    },

    focused: () => {
      const element = document.activeElement, style = getComputedStyle(element);
      const drawn = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
      return [element.dataset.control ?? null, drawn];
    },
  };
})();
