"""The page of a run in a real browser: nothing is wider than the screen, cut off, too pale to read, or an error."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.report.test_report import run  # noqa: F401  (a fixture)
from xlme_ds.report.run_page import write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
VIEWS = {
    "desktop": {"width": 1280},
    "phone": {"width": 375, "mobile": True},
    "dark": {"width": 1280, "features": [{"name": "prefers-color-scheme", "value": "dark"}]},
    "print": {"width": 794, "media": "print"},  # A4
}
# What is wrong, as sentences. Numbers are pixels; contrast is WCAG's, of which 4.5 is asked of text.
LOOK = r"""
(() => {
  const wrong = [], page = document.documentElement;
  const visible = e => e.checkVisibility() && e.getBoundingClientRect().width > 0;
  const name = e => `<${e.tagName} class="${e.getAttribute('class')}"> ${e.textContent.trim().slice(0, 40)}`;
  if (page.scrollWidth > page.clientWidth) wrong.push(`the page is ${page.scrollWidth} wide on ${page.clientWidth}`);
  const rgb = c => { const [r, g, b, a = 1] = c.match(/[\d.]+/g).map(Number); return {c: [r, g, b], a}; };
  const light = c => { const [r, g, b] = c.map(v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b; };
  const behind = e => {
    for (; e; e = e.parentElement) { const b = rgb(getComputedStyle(e).backgroundColor); if (b.a) return b.c; }
    return [255, 255, 255]; };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode, e = node.parentElement;
    if (!node.data.trim() || !visible(e)) continue;
    const range = document.createRange(); range.selectNodeContents(node);
    const box = range.getBoundingClientRect(), style = getComputedStyle(e), svg = e.closest('svg');
    const ink = rgb(svg ? style.fill : style.color).c, [a, b] = [light(ink), light(behind(e))].sort((x, y) => y - x);
    if ((a + .05) / (b + .05) < 4.5) wrong.push(`contrast ${((a + .05) / (b + .05)).toFixed(2)}: ${name(e)}`);
    const size = parseFloat(style.fontSize) * (svg ? svg.getScreenCTM().a : 1);
    if (size < 8.5) wrong.push(`letters of ${size.toFixed(1)}: ${name(e)}`);
    for (let out = svg || e; out && out !== document.body; out = out.parentElement) {
      const frame = out.getBoundingClientRect(), scrolls = /auto|scroll/.test(getComputedStyle(out).overflowX);
      if (scrolls) break;
      if (getComputedStyle(out).display === 'inline' || out.closest('ruby')) continue;
      if (box.right > frame.right + 1.5 || box.left < frame.left - 1.5) {
        wrong.push(`outside of its <${out.tagName} class="${out.getAttribute('class')}">: ${name(e)}`); break; }
    }
    const long = /[1-9]\d*\.\d{5,}|0\.0*[1-9]\d{4,}/.exec(node.data);
    if (long && !e.closest('.settings')) wrong.push(`long number: ${long[0]}`);
  }
  return wrong;
})()
"""


class Browser:
    """Chromium, spoken to in the DevTools protocol: JSON messages, each ended by a zero byte, over two pipes."""

    def __init__(self, profile: Path):
        theirs_in, self.out = os.pipe()
        self.inn, theirs_out = os.pipe()
        # The protocol is on the descriptors 3 and 4.
        command = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$0" "$@"'
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        self.process = subprocess.Popen(
            ["bash", "-c", command, str(BROWSER), *flags, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.count, self.rest, self.session = 0, b"", ""
        self.events: list[dict[str, Any]] = []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self.session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to one command."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        os.write(self.out, json.dumps(message | ({"sessionId": self.session} if self.session else {})).encode() + b"\0")
        while (answer := self._read()).get("id") != self.count:
            self.events.append(answer)
        assert "error" not in answer, answer
        return dict(answer["result"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            more = os.read(self.inn, 1 << 20)
            assert more, "the browser has ended"
            self.rest += more
        message, self.rest = self.rest.split(b"\0", 1)
        return dict(json.loads(message))

    def open(self, page: Path, width: int, mobile: bool = False, **media: Any) -> None:
        """Show `page` on a screen of `width` pixels."""
        self("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=mobile)
        self("Emulation.setEmulatedMedia", **{"media": "screen", "features": []} | media)
        self.events.clear()
        self("Page.navigate", url=page.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait()
        os.close(self.inn)
        os.close(self.out)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if BROWSER is None:
        pytest.skip("no chromium or chrome on this machine")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.mark.parametrize("view", VIEWS)
def test_page(run: Path, browser: Browser, view: str) -> None:  # noqa: F811
    unigram = {"mono": {"sw": 7.5, "zh-Hans": 7.0}, "para": {"sw": 7.1}}
    terms = {"mlm": {"sw": 6.123456, "zh-Hans": 7.25}, "tlm": {"sw": 6.5}, "mrtd": {"sw": 0.312345, "zh-Hans": 0.2}}
    tokens = {term: dict.fromkeys(losses, 1204) for term, losses in terms.items()}
    lines = [{"step": step, "terms": terms, "tokens": tokens, "unigram": unigram} for step in (20, 40)]
    (run / "heldout_languages.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    browser.open(write_report(run), **VIEWS[view])
    browser.evaluate("document.querySelectorAll('details').forEach(fold => fold.open = true)")
    assert browser.evaluate("matchMedia('print').matches") is (view == "print")
    assert browser.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") is (view == "dark")
    assert browser.evaluate(LOOK) == []
    assert [event for event in browser.events if event["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")] == []


def test_what_is_wrong_is_found(tmp_path: Path, browser: Browser) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        "<!doctype html><meta name=viewport content='width=device-width'>"
        "<p style='width: 500px; color: #bbb'>pale</p><p style='font-size: 5px'>small</p><p>1.234567</p>"
        "<p style='width: 20px'>Donaudampfschiff</p>"
    )
    browser.open(page, **VIEWS["phone"])
    found = " ".join(browser.evaluate(LOOK))
    assert [
        word for word in ("wide on", "contrast", "letters of", "long number", "outside of") if word not in found
    ] == []
