"""A real browser, Debian's Chromium without a window: what a person would see of a page."""

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.kit.skips import NO_BROWSER

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LIMIT_SECONDS = 120
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)


def _run(*words: str, wait_ms: int) -> str:
    with tempfile.TemporaryDirectory(prefix="browser-") as profile:
        # As root it refuses its own sandbox; /dev/shm is 64 MB in a container.
        fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}"]
        waiting = [f"--virtual-time-budget={wait_ms}"] if wait_ms else []
        done = subprocess.run([str(CHROMIUM), *fixed, *waiting, *words], capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def content(url: str, wait_ms: int = 0, width: int = 1280, height: int = 900) -> str:
    """Return a page's HTML once its scripts have run."""
    return _run(f"--window-size={width},{height}", "--dump-dom", url, wait_ms=wait_ms)


def picture(url: str, target: Path, width: int = 1280, height: int = 900, wait_ms: int = 0, dark: bool = False) -> Path:
    """Write what is seen of a page as PNG."""
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    _run(*scheme, "--hide-scrollbars", f"--window-size={width},{height}", f"--screenshot={target}", url, wait_ms=wait_ms)
    return target
