"""`pynccl trace --html`: the page, opened in a browser, and the files that it is written to."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

import browser
import trace_programs as programs
from browser import Browser
from conftest import Run
from pynccl.__main__ import main
from pynccl.testing import run
from trace_dumps import PENDING, mutated, pair, reduce, sound_dumps, write


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    if browser.executable() is None:
        pytest.skip("no chromium is installed")
    with browser.browse() as found:
        yield found


def made(run_python: Run, folder: Path) -> tuple[Path, str]:
    """Return the page of a folder's dumps, and what the command printed."""
    page = folder / "page.html"
    done = run_python(args=["-m", "pynccl", "trace", "--html", str(page), str(folder)], PYNCCL_LIBRARY="cpu")
    return page, done.stdout


def data_of(page: Path) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S)
    assert found is not None
    return json.loads(found[1])


def plot(page: Browser) -> tuple[float, float, float, float]:
    """Return the place of the picture in the window: left, top, width and height."""
    left, top, width, height = page.run(
        "(({x, y, width, height}) => [x, y, width, height])"
        "(document.querySelector('#canvas').getBoundingClientRect())"
    )
    return left, top, width, height


def press(page: Browser, *keys: str) -> None:
    page.run("document.querySelector('#canvas').focus()")
    for key in keys:
        page.key(key)
    page.settle()


def pointed_at(page: Browser, share: float) -> list[tuple[str, list[int]]]:
    """Return the details of each call, and the colour there, that lies at a share of the picture's width."""
    press(page, "Escape")
    left, top, width, height = plot(page)
    found = []
    for y in range(26, min(int(height), 110), 7):
        page.mouse("mouseMoved", left + width * share, top + y)
        text = page.text("#details h2") if page.run("!!document.querySelector('#details h2')") else ""
        if text and text not in [before for before, _ in found]:
            colour = page.run(
                "[...document.querySelector('#canvas').getContext('2d')"
                f".getImageData({width * share - 9}, {y}, 1, 1).data]"
            )
            found.append((text, colour))
    return found


def test_a_communicator_without_findings_does_not_stand_out(run_python: Run, tmp_path: Path) -> None:
    run(2, programs.fine, backend="cpu", timeout=30, env={"PYNCCL_TRACE_DIR": str(tmp_path)})
    page, _ = made(run_python, tmp_path)
    paragraphs = re.findall(r'<p class="(\w+)">(.*?)</p>', page.read_text())
    assert ("subject", "nothing is outstanding: the last call is barrier #4") in paragraphs
    assert "finding" not in [kind for kind, _ in paragraphs]


@pytest.mark.slow
def test_a_hang(run_python: Run, tmp_path: Path, chromium: Browser) -> None:
    env = {"PYNCCL_TRACE_DIR": str(tmp_path), "PYNCCL_TRACE_STACKS": "1"}
    run(3, programs.missing, backend="cpu", check=False, timeout=30, env=env)
    # The creation is recorded as test_the_clocks_of_hosts_are_aligned has it.
    records = [json.loads(line) for line in next(tmp_path.glob("*.jsonl")).read_text().splitlines()]
    creation = next(record for record in records if record.get("call") == "init")
    assert (creation["seq"], creation["state"], creation.get("count")) == (0, "done", None)
    assert creation["time_ns"] < creation["end_ns"]
    page, told = made(run_python, tmp_path)
    chromium.open(page)
    assert chromium.text("#findings").split() == told.split()
    assert "rank 2 never reached #4" in chromium.text("#findings")

    # Without a key or the mouse, the first call that has not ended.
    assert chromium.text("#details h2") == "rank 0: all_reduce #4, in flight"
    calls = pointed_at(chromium, 0.5)
    assert [text for text, _ in calls] == [
        "rank 0: all_reduce #4, in flight",
        "rank 1: all_reduce #4, in flight",
        "rank 2: all_reduce #4, never called",
    ]
    paper = [255, 255, 255, 255]
    assert calls[0][1] == calls[1][1] != paper and calls[2][1] != calls[1][1]

    # By keys to an earlier call, and close to it; there the mouse finds it.
    chromium.mouse("mouseMoved", 1, 1)
    press(chromium, "n", "n")
    assert chromium.text("#details h2") == "rank 1: all_reduce #4, in flight"
    press(chromium, "ArrowLeft", "ArrowLeft", "Enter")
    assert re.search(
        r"rank 1: all_reduce #2, completed begin .* m?s took .*s count 4 bytes 16 dtype float32 op sum "
        r"algorithm local stream 0x\w+ line \S*trace_programs\.py:\d+ on \S+, process \d+",
        " ".join(chromium.text("#details").split()),
    )
    assert "rank 1: all_reduce #2, completed" in dict(pointed_at(chromium, 0.5))
    assert "rank 1: init, completed" not in dict(pointed_at(chromium, 0.1))

    # The wheel zooms out, and drags to the right go back to the begin.
    left, top, width, height = plot(chromium)
    for _ in range(18):
        chromium.mouse("mouseWheel", left + width / 2, top + height / 2, deltaX=0, deltaY=120)
    seen: list[str] = []
    # How many it takes depends on how long the calls took; the view becomes a little wider each time.
    for _ in range(100):
        chromium.mouse("mouseWheel", left + width / 2, top + height / 2, deltaX=0, deltaY=30)
        chromium.mouse("mousePressed", left + width / 4, top + height / 2, button="left", clickCount=1)
        for share in (0.5, 0.9):
            chromium.mouse("mouseMoved", left + width * share, top + height / 2, button="left", buttons=1)
        chromium.mouse("mouseReleased", left + width * 0.9, top + height / 2, button="left", clickCount=1)
        chromium.settle()
        seen = [text for text, _ in pointed_at(chromium, 0.1)]
        if "rank 1: init, completed" in seen:
            break
    assert "rank 1: init, completed" in seen
    assert chromium.errors == []


def test_a_narrow_window_shows_all_details(run_python: Run, tmp_path: Path, chromium: Browser) -> None:
    env = {"PYNCCL_TRACE_DIR": str(tmp_path), "PYNCCL_TRACE_STACKS": "1"}
    run(3, programs.missing, backend="cpu", check=False, timeout=30, env=env)
    with chromium.sized(400, 700):
        chromium.open(made(run_python, tmp_path)[0])
        shown, whole, below = chromium.run(
            "(() => { const box = document.querySelector('#details');"
            "const last = box.querySelector('dl div:last-child');"
            "return [box.clientHeight, box.scrollHeight,"
            " last.getBoundingClientRect().bottom - box.getBoundingClientRect().bottom]; })()"
        )
        assert chromium.text("#details h2") == "rank 0: all_reduce #4, in flight"
        assert shown == whole and below <= 0
        # Nothing is wider than the window.
        assert chromium.run("document.documentElement.scrollWidth") == 400


def test_a_failed_call_is_easy_to_point_at(run_python: Run, tmp_path: Path, chromium: Browser) -> None:
    """The dump does not tell when it ended."""
    failed = reduce(2, time_ns=400_000_000, state="failed", result=5, end_ns=None)
    write(tmp_path, 0, 1, [reduce(1, time_ns=0, end_ns=1000), failed])
    chromium.open(made(run_python, tmp_path)[0])
    assert re.search(r"end unknown .* result ncclInvalidUsage", " ".join(chromium.text("#details").split()))
    press(chromium, "Escape")
    left, top, width, _ = plot(chromium)
    found = Counter[str]()
    for x in range(int(width * 0.38), int(width * 0.48), 2):
        chromium.mouse("mouseMoved", left + x, top + 35)
        found[chromium.text("#details").split("\n")[0]] += 1
    assert set(found) == {"", "rank 0: all_reduce #2, failed"}
    assert found["rank 0: all_reduce #2, failed"] >= 4
    assert chromium.errors == []


def test_keys_lead_from_a_send_to_its_receive(run_python: Run, tmp_path: Path, chromium: Browser) -> None:
    write(tmp_path, 0, 3, [pair("send", 1, 1), pair("send", 2, 1, **PENDING)])
    write(tmp_path, 1, 3, [pair("recv", 2, 1), pair("recv", 0, 1)])
    write(tmp_path, 2, 3, [pair("send", 1, 1), reduce(2), pair("recv", 0, 1), reduce(3)])
    chromium.open(made(run_python, tmp_path)[0])

    def shown() -> str:
        return " ".join(chromium.text("#details").split())

    assert re.match(r"rank 0: send #1, in flight .* peer 2 ", shown())
    press(chromium, "ArrowLeft")
    assert re.match(r"rank 0: send #1, completed .* peer 1 ", shown())
    press(chromium, "ArrowDown")
    assert re.match(r"rank 1: recv #1, completed .* peer 0 ", shown())
    # Rank 2 has no part in it; its last call before.
    press(chromium, "ArrowDown")
    assert re.match(r"rank 2: all_reduce #2, completed", shown())
    assert chromium.errors == []


EVIL = (
    "</script><img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
    " <!-- <script> ${script} $data ]]> &lt; &amp; ' \u2028 \ud800 \x00 \x1b[31m {0} %s \\u003c"
)


def test_nothing_in_a_dump_becomes_part_of_the_page(
    run_python: Run, tmp_path: Path, chromium: Browser
) -> None:
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    folder.mkdir()
    call = reduce(1, dtype=EVIL, op=EVIL, at=EVIL, **PENDING)
    reasons = [{"kind": "timeout", "text": EVIL}]
    for comm in ("abc", EVIL):
        path = write(folder, 0, 3, [call], comm=comm, name=EVIL, origin=EVIL, also=EVIL, reasons=reasons)
        head = json.loads(path.read_text().splitlines()[0]) | {"host": EVIL}
        rest = path.read_text().partition("\n")[2]
        path.rename(folder / f"<b onclick=1>{comm[:3].strip('</')}.jsonl").write_text(
            f"{json.dumps(head)}\n{rest}damage\n"
        )
    page, _ = made(run_python, folder)
    chromium.open(page)
    assert chromium.run("document.title") == "pynccl trace"
    # The page is all that the browser has asked for.
    assert chromium.requests == [page.as_uri()]
    assert chromium.run("document.querySelectorAll('img, b, script').length") == 2
    assert chromium.run("document.body.lastElementChild.tagName") == "SCRIPT"
    assert "<img src=x" in chromium.text("#findings")
    chromium.run("document.querySelector('#next').click()")
    assert EVIL[:60] in chromium.text("#details")
    assert chromium.errors == []


# What a page does that some other text has got into.
TAKEN = {
    "script-src-elem": "make('script', {textContent: 'document.title = 1'})",
    "script-src-attr": "const p = make('p', {}); p.setAttribute('onclick', 'document.title = 1'); p.click()",
    "style-src-elem": "make('style', {textContent: 'body { color: red }'})",
    "img-src": "make('img', {src: 'http://127.0.0.1:9/image'})",
    "connect-src": "fetch('http://127.0.0.1:9/data').catch(() => 0)",
    "frame-src": "make('iframe', {src: 'http://127.0.0.1:9/page'})",
}
TAKES = """
const make = (name, values) => document.body.appendChild(Object.assign(document.createElement(name), values));
new Promise((done) => {
  document.addEventListener("securitypolicyviolation", (event) => done(event.effectiveDirective));
  setTimeout(() => done("nothing was refused"), 5000);
  WHAT;
})
"""


@pytest.mark.parametrize("directive", TAKEN)
def test_the_page_lets_nothing_else_run_or_load(
    run_python: Run, tmp_path: Path, chromium: Browser, directive: str
) -> None:
    write(tmp_path, 0, 2, [reduce(1)])
    page, _ = made(run_python, tmp_path)
    chromium.open(page)
    refused = chromium.run(f"{{{TAKES.replace('WHAT', TAKEN[directive])}}}")
    title = chromium.run("document.title")
    # The browser reports what it refuses; other tests use it, too.
    chromium.settle()
    chromium.errors.clear()
    assert (refused, title) == (directive, "pynccl trace")


@pytest.mark.slow
def test_damaged_dumps_draw_without_errors(
    tmp_path: Path, chromium: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs, opened = sound_dumps(tmp_path), 0
    for seed in range(20):
        random = Random(seed)
        paths = []
        for rank, dump in enumerate(random.choice(jobs)):
            paths.append(tmp_path / f"rank{rank}.jsonl")
            paths[-1].write_bytes(mutated(random, dump))
        page = tmp_path / f"{seed}.html"
        if main(["trace", "--html", str(page), *map(str, paths)]) == 0:
            chromium.open(page)
            for key in ("n", "ArrowUp", "ArrowRight", "Enter", "+", "d"):
                chromium.run(
                    "document.querySelector('#canvas').dispatchEvent("
                    f"new KeyboardEvent('keydown', {{key: {json.dumps(key)}}}))"
                )
            chromium.settle()
            opened += 1
        assert chromium.errors == [], seed
    capsys.readouterr()
    assert opened > 15


def test_the_clocks_of_hosts_are_aligned(run_python: Run, tmp_path: Path) -> None:
    """The second host's clock is 5 s ahead; a call takes 10 µs and begins at most 2 µs apart."""
    five = 5 * 10**9
    for rank, (host, ahead, late) in enumerate([("a", 0, 0), ("b", five, 2000), ("b", five, 1000)]):
        calls = [
            reduce(seq, time_ns=at + ahead + late, end_ns=at + ahead + 10_000)
            for seq, at in ((1, 100_000), (2, 200_000))
        ]
        # No rank waits for the others in an empty call, nor in a broadcast from its own root.
        own = ahead + 300_000 * (rank + 1)
        calls.append(reduce(3, 0, time_ns=own, end_ns=own + 1))
        calls.append({"call": "broadcast", "seq": 4, "time_ns": own + 10, "end_ns": own + 11, "root": 0})
        path = write(tmp_path, rank, 3, calls)
        head, rest = path.read_text().split("\n", 1)
        path.write_text(json.dumps(json.loads(head) | {"host": host}) + "\n" + rest)
    page, _ = made(run_python, tmp_path)
    text = page.read_text()
    assert (
        "The clocks of 2 hosts are aligned by calls that all ranks completed: they differed by up to 5 s"
        in text
    )
    # Of each rank, the begin of its first call.
    begins = [lane["begins"][0] for lane in data_of(page)["worlds"][0]["lanes"]]
    assert max(begins) - min(begins) <= 10_000
    # The creation, in which all ranks take part, is such a call; without one nothing is known.
    (tmp_path / "rank2.jsonl").unlink()
    for created, words in (
        (
            True,
            "The clocks of 2 hosts are aligned by calls that all ranks completed: they differed by up to 5 s",
        ),
        (False, "The hosts&#x27; clocks are not aligned"),
    ):
        for rank, (host, ahead) in enumerate((("a", 0), ("b", five))):
            creation = {"call": "init", "seq": 0, "state": "done"}
            creation |= {"time_ns": 100_000 + ahead, "end_ns": 110_000 + ahead}
            calls = [*([creation] if created else []), reduce(1, time_ns=200_000 + ahead, **PENDING)]
            path = write(tmp_path, rank, 2, calls)
            path.write_text(path.read_text().replace('"host": "h"', f'"host": "{host}"'))
        page, _ = made(run_python, tmp_path)
        assert words in page.read_text()


@pytest.mark.parametrize("option", ["--html", "--chrome"])
def test_what_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    dump = write(tmp_path, 0, 2, [reduce(seq) for seq in range(1, 200)])
    out = tmp_path / "out"
    out.mkdir()
    (out / "link").symlink_to(dump)
    for name, why in (
        ("", "Is a directory"),
        ("none/page", "No such file or directory"),
        ("link", "this is a symbolic link"),
        ("rank0.jsonl", "has the name of a dump"),
    ):
        target = f"{out}/{name}".rstrip("/")
        assert main(["trace", option, target, str(dump)]) == 1
        printed, error = capsys.readouterr()
        assert printed == "" and error.count("\n") == 1
        assert error.startswith(f"pynccl trace: {option}: {target!r} ") and why in error
    assert [path.name for path in out.iterdir()] == ["link"]


def test_half_a_page_is_no_page(run_python: Run, tmp_path: Path) -> None:
    """The disk is full in the middle: an earlier page stays as it is."""
    folder, page = tmp_path / "out", tmp_path / "out" / "page.html"
    folder.mkdir()
    page.write_text("an earlier page")
    dump = write(tmp_path, 0, 2, [reduce(1)])
    code = (
        "import resource, sys; from pynccl.__main__ import main\n"
        f"size = int(sys.argv[1]); resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))\n"
        f"sys.exit(main(['trace', '--html', {str(page)!r}, {str(dump)!r}]))"
    )
    # -B: Python would cut off the bytecode that it writes, too, and does not notice it.
    done = run_python(args=["-B", "-c", code, "4096"], fails=True)
    assert done.stderr == f"pynccl trace: --html: {str(page)!r} cannot be written: File too large\n"
    assert page.read_text() == "an earlier page" and list(folder.iterdir()) == [page]
    run_python(args=["-c", code, str(1 << 20)])
    assert page.read_text().endswith("</html>\n") and list(folder.iterdir()) == [page]
    assert page.stat().st_mode & 0o777 == 0o600
