"""Every page of the site, made without Quarto: nbdev's processing as the site does it, sidebar, links, pictures; and the checkers themselves."""
import ast
import base64
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml

from check_links import broken_links

ROOT = Path(__file__).resolve().parent.parent
NBS = ROOT/"nbs"
SITE = yaml.safe_load((ROOT/"_quarto.yml").read_text(encoding="utf-8"))
PROCESS = "from nbdev.serve import proc_nbs; proc_nbs(n_workers=0, force=True)"   # 0: in this process, where an exception is an exit code
FILTER = """
import json, multiprocessing, sys, traceback
from pathlib import Path
from litevllm._site import quarto_filter

def make(name):
    "The page of one notebook, or what went wrong with it."
    try: return name, quarto_filter(Path(name).read_text(encoding="utf-8"), Path()), None
    except Exception: return name, None, traceback.format_exc()[-1500:]

if __name__ == "__main__":
    ctx = multiprocessing.get_context("forkserver")     # a process for each page, as on the site, without the price of importing torch each time
    ctx.set_forkserver_preload(["torch", "torch._dynamo", "transformers", "transformers.models.auto.tokenization_auto", "tokenizers", "matplotlib.pyplot",
                                "nbdev.processors", "ipywidgets", "numba", "triton.language", "zmq", "msgspec", "psutil"])
    with ctx.Pool(2, maxtasksperchild=1) as pool: made = pool.map(make, sorted(p.name for p in Path().glob("*.ipynb")), chunksize=1)
    Path(sys.argv[1]).write_text(json.dumps(made), encoding="utf-8")
"""


@pytest.fixture(scope="module")
def site(working_copy, run_python, tmp_path_factory) -> tuple[dict[str, dict], dict[str, str]]:
    "Notebook name -> the notebook as Quarto gets it, through the very filter that _quarto.yml names; and name -> error."
    out = tmp_path_factory.mktemp("site")
    (out/"make_pages.py").write_text(FILTER, encoding="utf-8")
    run_python([out/"make_pages.py", out/"made.json"], cwd=working_copy/"nbs", timeout=170)
    made = json.loads((out/"made.json").read_text(encoding="utf-8"))
    return {n: json.loads(page) for n, page, error in made if page}, {n: error for n, page, error in made if error}


@pytest.fixture(scope="module")
def pages(site) -> dict[str, dict]: return site[0]


def texts(page: dict) -> list[str]:
    "All Markdown of a page: its text and the Markdown outputs of its code."
    found = ["".join(c["source"]) for c in page["cells"] if c["cell_type"] == "markdown"]
    for c in page["cells"]:
        found += ["".join(o["data"]["text/markdown"]) for o in c.get("outputs", []) if "text/markdown" in o.get("data", {})]
    return found


def prose(text: str) -> str:
    "Markdown without code, in which nothing is a link."
    return re.sub(r"`[^`\n]*`", "", re.sub(r"```.*?```", "", text, flags=re.S))


def sidebar(contents) -> list[str]:
    found = []
    for entry in contents: found += [entry] if isinstance(entry, str) else sidebar(entry["contents"])
    return found


def test_every_notebook_becomes_a_page(site):
    pages, errors = site
    assert not errors, "\n\n".join(errors.values())
    assert set(pages) == {p.name for p in NBS.glob("*.ipynb")} and len(pages) >= 30
    for name, page in pages.items():
        front = page["cells"][0]
        assert front["cell_type"] == "raw", f"{name} has no front matter: does it start with a title?"
        meta = yaml.safe_load("".join(front["source"]).strip().strip("-"))
        assert meta["title"] and meta["description"] and meta["output-file"].endswith(".html"), name


def test_pages_have_names_of_their_own(pages):
    names = [yaml.safe_load("".join(p["cells"][0]["source"]).strip().strip("-"))["output-file"] for p in pages.values()]
    assert len(set(names)) == len(names), sorted(names)


def test_nothing_of_nbdev_is_left_on_a_page(pages):
    for name, page in pages.items():
        for cell in page["cells"]:
            source = "".join(cell["source"])
            left = re.findall(r"^#\|\s*(?:exports?|default_exp|hide)\b.*", source, re.M) if cell["cell_type"] == "code" else []
            assert not left, f"{name}: {left}"


def test_exported_names_are_documented(pages):
    "Each exported function and class has an entry on its notebook's page: the processors' look-ups did not fail unseen."
    entries = 0
    for name, page in pages.items():
        shown = "\n".join(texts(page))
        for cell in json.loads((NBS/name).read_text(encoding="utf-8"))["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] != "code" or not re.search(r"^#\|\s*exports?\s*$", source, re.M): continue
            for node in ast.parse(source).body:
                if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"): continue
                assert re.search(rf"^### {node.name}$", shown, re.M), f"{name}: nothing on {node.name}"
                entries += 1
    assert entries > 100


def test_sidebar_names_every_notebook_once():
    entries = sidebar(SITE["website"]["sidebar"]["contents"])
    assert sorted(entries) == sorted(f"nbs/{p.name}" for p in NBS.glob("*.ipynb"))
    assert entries[0] == "nbs/index.ipynb"
    for entry in SITE["website"]["navbar"]["left"]: assert (ROOT/entry["href"]).is_file()


def test_site_settings_are_the_live_ones():
    assert (NBS/"_quarto.yml").is_symlink() and (NBS/"_quarto.yml").resolve() == ROOT/"_quarto.yml"
    assert SITE["ipynb-filters"] == ["python -m litevllm._site filter"]
    assert SITE["execute"] == {"enabled": False}, "the pages show the outputs that the notebooks saved"
    authors = (ROOT/"settings.ini").read_text(encoding="utf-8")
    assert re.search(r"^author = litevllm developers$", authors, re.M) and re.search(r"^user = litevllm$", authors, re.M)
    assert "author_email" not in authors


def test_links_between_pages_hold(pages):
    "Links in text and in what nbdev made of backticked names: the notebook is there, and so is the heading after the #."
    checked = 0
    for name, page in pages.items():
        for text in texts(page):
            for link in re.findall(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)", prose(text)):
                if re.match(r"[a-z]+:", link):
                    assert not link.startswith("https://litevllm.github.io"), f"{name}: {link} is a page of ours that relink() missed"
                    continue
                checked += 1
                target, _, anchor = unquote(link).partition("#")
                assert not target or (NBS/target).exists(), f"{name}: {link} leads nowhere"
                if anchor and (not target or target.endswith(".ipynb")):
                    found = anchors(pages[target or name])
                    assert anchor.lower() in found, f"{name}: {link}: no such heading, only {sorted(found)}"
    assert checked > 50, f"only {checked} links found: are names still linked?"


def anchors(page: dict) -> set[str]:
    "The anchors Quarto gives a page: one per heading, lower case with dashes, and those written out as {#name}."
    found = set()
    for text in texts(page):
        for heading in re.findall(r"^#{1,6}\s+(.+)$", text, re.M):
            explicit = re.search(r"\{#([\w.-]+)", heading)
            plain = re.sub(r"\{[^}]*\}|[`*]", "", heading).strip().lower()
            found.add(explicit[1].lower() if explicit else re.sub(r"[^\w.-]", "", plain.replace(" ", "-")))
    return found


def test_pictures_are_there(pages):
    "Each picture in a saved output is one; each picture file that text names exists."
    drawn = 0
    for name, page in pages.items():
        for cell in page["cells"]:
            for out in cell.get("outputs", []):
                data = out.get("data", {}).get("image/png")
                if data is None: continue
                raw = base64.b64decode("".join(data))
                assert raw.startswith(b"\x89PNG") and raw.endswith(b"IEND\xaeB`\x82") and len(raw) > 2000, f"{name}: a picture is no PNG or empty"
                drawn += 1
        for text in texts(page):
            for image in re.findall(r"!\[[^\]]*\]\(([^)\s]+)", prose(text)):
                assert image.startswith(("http", "attachment:")) or (NBS/image).is_file(), f"{name}: no picture {image}"
    assert drawn >= 5, f"only {drawn} pictures on the whole site"


def test_an_error_in_a_page_is_an_error_of_the_build(working_copy, run_python, tmp_path):
    "Both ways of processing fail when an exported cell raises: otherwise every test above could pass on broken pages."
    copy = tmp_path/"site"
    (copy/"nbs").mkdir(parents=True)
    for name in ("settings.ini", "_quarto.yml"): shutil.copy(working_copy/name, copy/name)
    shutil.copytree(working_copy/"litevllm", copy/"litevllm", symlinks=True)
    broken = json.loads((NBS/"00i_site.ipynb").read_text(encoding="utf-8"))
    cell = next(c for c in broken["cells"] if "".join(c["source"]).startswith("#| exports"))
    cell["source"] = ["#| exports\n", "raise ZeroDivisionError('on purpose')\n", "def f(): 'shown'"]
    (copy/"nbs"/"broken.ipynb").write_text(json.dumps(broken), encoding="utf-8")
    done = run_python(PROCESS, cwd=copy, check=False)
    assert done.returncode and "on purpose" in done.stderr
    done = run_python(["-m", "litevllm._site", "filter"], cwd=copy/"nbs", check=False)
    assert done.returncode      # nothing on stdin is no notebook
    with (copy/"nbs"/"broken.ipynb").open() as text:
        done = subprocess.run([sys.executable, "-m", "litevllm._site", "filter"], cwd=copy/"nbs", stdin=text, capture_output=True, text=True,
                              timeout=120)
    assert done.returncode and "on purpose" in done.stderr and not done.stdout


def test_a_page_is_not_processed_twice(pages, run_python, tmp_path):
    "nbdev_preview hands Quarto pages that nbdev processed before."
    (tmp_path/"page.ipynb").write_text(json.dumps(pages["00i_site.ipynb"]), encoding="utf-8")
    with (tmp_path/"page.ipynb").open() as text:
        done = subprocess.run([sys.executable, "-m", "litevllm._site", "filter"], cwd=NBS, stdin=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and json.loads(done.stdout) == pages["00i_site.ipynb"]


def test_an_entry_that_got_lost_is_an_error():
    "IPython swallows what goes wrong in a look-up; the filter counts."
    from types import SimpleNamespace as Cell
    from litevllm._site import without_entry
    good = Cell(source="show_doc(f)", has_sd=True, get=lambda k, d: [{"data": {"text/markdown": "### f"}}])
    lost = Cell(source="show_doc(g)", has_sd=True, get=lambda k, d: [{"data": {"text/plain": "g"}}])
    other = Cell(source="1 + 1", get=lambda k, d: [])
    assert without_entry(Cell(cells=[good, lost, other])) == ["show_doc(g)"]


def test_a_broken_link_is_found(tmp_path):
    (tmp_path/"a.html").write_text('<h2 id="here">A</h2><a href="b.html#there">x</a><a href="https://elsewhere.org/">y</a>', encoding="utf-8")
    (tmp_path/"b.html").write_text('<p id="there"></p><a href="a.html#here">x</a>', encoding="utf-8")
    assert broken_links(tmp_path) == (2, [])
    (tmp_path/"b.html").write_text('<a href="a.html#gone">x</a><img src="no.png">', encoding="utf-8")
    looked, bad = broken_links(tmp_path)
    assert looked == 3 and len(bad) == 3, bad
