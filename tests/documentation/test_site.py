"""The documentation's site, in a browser: each page opens without an error, and shows its pictures."""

from __future__ import annotations

import functools
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from browser import browse, executable
from conftest import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(executable() is None, reason="no chromium is installed"),
]
BROKEN = "[...document.images].filter((i) => !i.complete || !i.naturalWidth).map((i) => i.src)"
# Tables and code scroll by themselves; a page that is wider than the window hides its text.
WIDER = "document.documentElement.scrollWidth - innerWidth"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve a folder; yield its address."""
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_every_page_opens(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, timeout=200)
    pages = sorted(path.relative_to(tmp_path).parent.as_posix() for path in tmp_path.rglob("index.html"))
    assert {".", "tutorial", "reference/communicator", "benchmarks/collectives"} <= set(pages)
    with served(tmp_path) as address, browse() as browser:
        for page in pages:
            browser.open(f"{address}{page}/")
            elsewhere = [url for url in browser.requests if not url.startswith((address, "data:"))]
            found = browser.errors, elsewhere, browser.run(BROKEN), browser.run(WIDER)
            assert found == ([], [], [], 0), page
        browser.open(f"{address}tutorial/")
        browser.run("document.querySelector('.md-search__input').focus()")
        for letter in "shrink":
            browser.key(letter)
        found_by_search = "document.querySelectorAll('.md-search-result__item').length"
        assert browser.run(
            "new Promise((done) => { const look = () => { const found = "
            f"{found_by_search}; found ? done(found) : setTimeout(look, 50); }}; look(); }})"
        )
