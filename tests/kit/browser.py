"""A real browser, Debian's Chromium without a window: what a person would see of a page."""

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.kit.skips import NO_BROWSER

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LIMIT_SECONDS = 120
# A page whose server was too slow for it says so, and does not ask again.
RELOAD_SECONDS, GIVE_UP_SECONDS, ANSWER_SECONDS = 40, 300, 120
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)


@contextmanager
def _words() -> Iterator[list[str]]:
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        # As root it refuses its own sandbox; /dev/shm is 64 MB in a container.
        yield [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}"]


class Page:
    """A page that stays open, over Chromium's DevTools protocol: JSON messages that end in a zero byte, on file descriptors 3 and 4."""

    def __init__(self, send: int, receive: int, size: dict[str, int]):
        self._send, self._receive, self._rest, self._ids = send, receive, b"", count(1)
        self._session: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank", newWindow=True, **size)["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return what the browser answers, be it an error."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": parameters} | self._session
        with suppress(BrokenPipeError):
            os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            *found, self._rest = self._rest.split(b"\0")
            for answer in map(json.loads, found):
                if answer.get("id") == number:
                    return answer.get("result", answer)
            answers, _, _ = select.select([self._receive], [], [], ANSWER_SECONDS)
            if not answers or not (more := os.read(self._receive, 1 << 20)):
                raise EOFError(f"the browser {'ended before it answered' if answers else 'does not answer'} {method}")
            self._rest += more

    def evaluate(self, script: str) -> str:
        """Return a text; an empty one where the page is just being replaced."""
        return self.call("Runtime.evaluate", expression=script).get("result", {}).get("value", "")


@contextmanager
def _page(width: int, height: int) -> Iterator[Page]:
    (to_read, send), (receive, to_write) = os.pipe(), os.pipe()
    with _words() as words, tempfile.TemporaryFile() as log:
        # Only a shell gives a child descriptors by number.
        shell = ["bash", "-c", f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}', *words, "--remote-debugging-pipe"]
        browser = subprocess.Popen(shell, pass_fds=(to_read, to_write), stdout=log, stderr=log)
        os.close(to_read)
        os.close(to_write)
        try:
            yield Page(send, receive, {"width": width, "height": height})
        except EOFError as error:
            log.seek(0)
            raise AssertionError(f"{error}; it says {log.read()[-2000:].decode(errors='replace')}") from None
        finally:
            os.close(send)
            os.close(receive)
            browser.kill()
            browser.wait()


def content(url: str, *words: str, width: int = 1280, height: int = 900) -> str:
    """Return a page's HTML once it holds all these words, each as often as it is given."""
    with _page(width, height) as page:
        page.call("Page.navigate", url=url)
        started = loaded = time.monotonic()
        patience = RELOAD_SECONDS
        while (now := time.monotonic()) < started + GIVE_UP_SECONDS:
            found = page.evaluate("document.documentElement.outerHTML")
            missing = [word for word in words if found.count(word) < words.count(word)]
            if not missing:
                return found
            if now > loaded + patience:
                page.call("Page.reload")
                loaded, patience = now, 2 * patience
            time.sleep(0.2)
        raise AssertionError(f"{url}: without {missing}; it says {page.evaluate('document.body.innerText')!r}")


def picture(url: str, target: Path, width: int = 1280, height: int = 900, wait_ms: int = 0, dark: bool = False) -> Path:
    """Write what is seen of a page as PNG."""
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    waiting = [f"--virtual-time-budget={wait_ms}"] if wait_ms else []
    with _words() as words:
        size = [f"--window-size={width},{height}", "--hide-scrollbars", f"--screenshot={target}"]
        done = subprocess.run([*words, *scheme, *waiting, *size, url], capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
    return target
