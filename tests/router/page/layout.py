"""Faults of a page's layout, as a browser sees them: text over text, cut, or out of its box."""

import json
from typing import Any

_FAULTS = """
(() => {
  const faults = [], boxes = [];
  const shown = (one) => one.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode()); ) {
    const owner = node.parentElement, text = node.data.trim();
    if (!text || !shown(owner) || owner.closest("option, textarea, title, .skip")) continue;
    if (document.querySelector("dialog[open]") && !owner.closest("dialog")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) {
      if (box.width < 1) continue;
      boxes.push([box, text, node]);
      const scrolls = owner.closest(".scroll");
      if (!scrolls && box.right > innerWidth + 1) faults.push(`out of the window: ${text}`);
      const frame = owner.closest(".cell, figure, article, .side, dialog, td, th");
      const limit = frame && !scrolls && frame.getBoundingClientRect();
      const out = limit && (box.right > limit.right + 1 || box.left < limit.left - 1);
      if (out) faults.push(`out of its box: ${text}`);
    }
    const hides = getComputedStyle(owner).overflow === "hidden";
    if (hides && owner.scrollWidth > owner.clientWidth + 1) faults.push(`cut: ${text}`);
  }
  boxes.sort((a, b) => a[0].top - b[0].top);
  boxes.forEach(([box, text, node], place) => {
    for (const [other, its, another] of boxes.slice(place + 1)) {
      if (other.top >= box.bottom - 1) break;
      const wide = Math.min(box.right, other.right) - Math.max(box.left, other.left);
      const high = Math.min(box.bottom, other.bottom) - other.top;
      if (node !== another && wide > 1 && high > 2) faults.push(`overlap: ${text} / ${its}`);
    }
  });
  const wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) faults.push(`the page is ${wide} pixels wide`);
  return [...new Set(faults)];
})()
"""


async def faults(tab: Any) -> list[str]:
    """Return the faults of the present layout."""
    return await tab.js(_FAULTS)


async def top_of(tab: Any, selector: str) -> float:
    """Distance of an element's top from the top of the window, in pixels."""
    found = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
    return await tab.js(f"{found}.top")
