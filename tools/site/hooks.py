"""MkDocs hooks: the pages that lie outside docs/, and those that are made at build time.

The files stay where readers of the repository look for them (README.md, benchmarks/results/...). The site
shows them under the paths below, and their relative links are rewritten to match.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

import c_api
import figures
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
RESULTS = "benchmarks/results"
# Each file of the repository that is a page of the site, and its path there.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/README.md": "examples.md",
    "benchmarks/README.md": "benchmarks/index.md",
    "pynccl/cpu/DESIGN.md": "cpu-design.md",
    **{f"{RESULTS}/{path.name}": f"benchmarks/{path.name}" for path in ROOT.glob(f"{RESULTS}/*.md")},
}
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[#)])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from elsewhere, the C API table and the figures."""
    for source, target in PAGES.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    header = (ROOT / "pynccl/api/nccl_api.h").read_text()
    files.append(File.generated(config, "reference/c-api.md", content=c_api.page(header)))
    files.append(File.generated(config, "reference/capi.md", content=c_api.reference(header)))
    for name, svg in drawn():
        files.append(File.generated(config, f"benchmarks/{name}.svg", content=svg))
    return files


def drawn() -> Iterator[tuple[str, str]]:
    """Yield each figure of each benchmark that has figures."""
    for benchmark, draw in figures.BENCHMARKS.items():
        results = json.loads((ROOT / RESULTS / f"{benchmark}.json").read_text())
        for name, figure in draw(results).items():
            yield f"{benchmark}-{name}", figures.svg(figure)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links between files of the repository, and put figures above the tables that they show."""
    here = page.file.src_uri
    sources = {target: source for source, target in PAGES.items()}
    source = sources.get(here, f"docs/{here}")

    def moved(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        target = PAGES.get(path, path.removeprefix("docs/"))
        return posixpath.relpath(target, posixpath.dirname(here) or ".")

    markdown = LINK.sub(moved, markdown)
    name = posixpath.basename(here).removesuffix(".md")
    if source.startswith(RESULTS) and name in figures.BENCHMARKS:
        shown = [file.src_uri for file in files if file.src_uri.startswith(f"benchmarks/{name}-")]
        images = "\n\n".join(f"![{path}]({posixpath.basename(path)})" for path in sorted(shown))
        title, _, rest = markdown.partition("\n")
        markdown = f"{title}\n\n{images}\n{rest}"
    return markdown
