"""The house keeps its shape: who may import whom, what comes from where, how large a room may be (design: the package's four boundaries)."""
import ast
import configparser
import json
import re
import shutil
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT/"litevllm"
NOTEBOOKS = sorted((ROOT/"nbs").glob("*.ipynb"))
MODULES = sorted(p for folder in (PACKAGE, ROOT/"kernels") for p in folder.rglob("*.py") if "__pycache__" not in p.parts)
BUILD_ONLY = {"litevllm._site"}     # runs where the site is built, with the dev extra
GENERATED = {"litevllm._modidx"}


def module_name(path: Path) -> str:
    "litevllm/core/request.py -> litevllm.core.request; kernels/x.py is litevllm.kernels.x; a package is named like its folder."
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "kernels": parts.insert(0, "litevllm")
    if parts[-1] == "__init__": parts.pop()
    return ".".join(parts)


NAMES = {module_name(p): p for p in MODULES}


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    "Every module that `path` imports, anywhere in it, in absolute form; `from a import b` counts as a.b where that is a module of ours."
    tree, name, found = ast.parse(path.read_text(encoding="utf-8")), module_name(path), set()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import): found |= {a.name for a in node.names}
        if isinstance(node, ast.ImportFrom):
            base = ".".join(package[:len(package) - node.level + 1] + ([node.module] if node.module else [])) if node.level else node.module
            ours = {f"{base}.{a.name}" for a in node.names} & set(NAMES)
            found |= ours or {base}
    return found


def tops(modules: set[str]) -> set[str]: return {m.partition(".")[0] for m in modules}


def ours(modules: set[str]) -> set[str]: return {m for m in modules if m == "litevllm" or m.startswith("litevllm.")}


def room(name: str) -> str:
    "The folder of a module below litevllm, or its own name for a module at the top."
    return name.split(".")[1] if "." in name else "litevllm"


def test_the_tests_see_the_package():
    "Guards the guards: an empty list of modules would pass everything below."
    for name in ("litevllm.core.scheduler", "litevllm.engine.core", "litevllm.worker.model_runner", "litevllm.model.attention",
                 "litevllm.kernels.paged_attention", "litevllm.llm"): assert name in NAMES
    assert "litevllm.core.output" in imports(NAMES["litevllm.worker.model_runner"])   # relative imports are resolved
    assert "torch" in imports(NAMES["litevllm.worker.model_runner"])


# --- who may import whom

def test_core_decides_and_knows_no_tensor():
    allowed = {"litevllm.messages", "litevllm.sampling_params", "litevllm.config", "litevllm.display"}
    for name, path in NAMES.items():
        if room(name) != "core": continue
        mods = imports(path)
        foreign = {m for m in ours(mods) if not m.startswith("litevllm.core")} - allowed
        assert not foreign, f"{name} imports {foreign}"
        outside = tops(mods) - {"litevllm"} - set(sys.stdlib_module_names)
        assert not outside, f"{name} imports {outside}: core/ is standard library only"


def test_the_plan_is_plain_data():
    "The plan is written in the standard library's words, and in SamplingParams, which it passes on."
    mods = imports(NAMES["litevllm.core.output"]) | imports(NAMES["litevllm.display"])
    assert tops(mods) - set(sys.stdlib_module_names) <= {"litevllm"}, tops(mods)
    assert ours(mods) <= {"litevllm.display", "litevllm.sampling_params"}, ours(mods)


def test_messages_need_msgspec_and_sampling_params_only():
    mods = imports(NAMES["litevllm.messages"])
    assert tops(mods) - set(sys.stdlib_module_names) <= {"msgspec", "litevllm"}
    assert ours(mods) <= {"litevllm.sampling_params"}


ALLOWED = {     # room -> rooms below it that it may reach; a room may always use itself
    "kernels": set(),
    "model": {"kernels"},
    "worker": {"model", "kernels", "core"},
    "core": set(),
    "engine": {"worker", "core", "model"},
}
BASE = {"config", "logger", "display", "sampling_params", "messages", "outputs", "hub", "logprobs", "inputs", "checks", "facts", "other_args", "compilation_config"}   # plain data and helpers at the top


@pytest.mark.parametrize("below", ALLOWED)
def test_arrows_run_one_way(below):
    base = set() if below == "kernels" else BASE
    for name, path in NAMES.items():
        if room(name) != below: continue
        reached = {room(m) for m in ours(imports(path))}
        assert reached <= ALLOWED[below] | {below} | base, f"{name} reaches {reached - ALLOWED[below] - {below} - base}"


def test_worker_knows_only_the_plan_of_core():
    for name, path in NAMES.items():
        if room(name) == "worker":
            of_core = {m for m in ours(imports(path)) if m.startswith("litevllm.core")}
            assert of_core <= {"litevllm.core.output"}, f"{name} imports {of_core}"


def test_engine_reaches_the_model_through_the_worker():
    for name, path in NAMES.items():
        if room(name) == "engine": assert not {m for m in ours(imports(path)) if m.startswith(("litevllm.model", "litevllm.kernels"))}, name


def test_faces_are_imported_by_nothing():
    faces = {"litevllm.llm", "litevllm.chat", "litevllm.stream", "litevllm.demo", "litevllm._site"}
    for name, path in NAMES.items():
        # the demo is a user of llm.py, which is put together from the two
        may = {"litevllm.demo": {"litevllm.llm"}, "litevllm.llm": {"litevllm.chat", "litevllm.stream"}}.get(name, set())
        assert not imports(path) & faces - may, f"{name} imports {imports(path) & faces - may}"
        assert not {m for m in imports(path) if m.startswith("litevllm.bench")} or room(name) == "bench", f"{name} imports a benchmark"
        assert not {m for m in imports(path) if m.startswith(("litevllm.serve", "litevllm.observe"))} or room(name) in ("serve", "observe")


def test_backends_are_loaded_when_chosen():
    "triton and numba are imported by modules of kernels/ only, and no module loads those at import time."
    users = {name for name, path in NAMES.items() if tops(imports(path)) & {"triton", "numba"}}
    assert users and all(room(n) == "kernels" for n in users), users
    for name, path in NAMES.items():
        if room(name) != "kernels": assert not imports(path, top_level_only=True) & users, f"{name} loads {imports(path) & users} at import"
    for name in users: assert len(tops(imports(NAMES[name])) & {"triton", "numba"}) == 1, f"{name} mixes two backends"


def test_third_party_imports_are_declared():
    cp = configparser.ConfigParser(delimiters=["="])
    cp.read(ROOT/"settings.ini", encoding="utf-8")
    names = {re.match(r"[\w.-]+", line)[0].lower() for line in cp["DEFAULT"]["requirements"].split("\n") if line.strip()}
    declared = {{"pyzmq": "zmq"}.get(n, n) for n in names}
    used = set().union(*(tops(imports(p)) for n, p in NAMES.items() if n not in BUILD_ONLY | GENERATED))
    used -= set(sys.stdlib_module_names) | {"litevllm"}
    assert used <= declared, f"not declared in settings.ini: {used - declared}"
    assert not used & {"fastcore", "nbdev", "execnb", "kernels"}, "build tools and HF's kernels stay out of the package"
    not_imported = declared - used - {"accelerate"}   # transformers' GGUF loader asks for accelerate
    assert not not_imported, f"declared but never imported: {not_imported}"


# --- what lies where

def test_kernels_is_a_link_without_init():
    "A regular package of that name would shadow Hugging Face's `kernels` and break `import transformers`."
    assert (PACKAGE/"kernels").is_symlink() and (PACKAGE/"kernels").resolve() == ROOT/"kernels"
    assert not list((ROOT/"kernels").rglob("__init__.py"))
    assert list((ROOT/"kernels").glob("*.py"))


def test_every_module_comes_from_a_notebook():
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        if module_name(path) in GENERATED or (path.name == "__init__.py" and path.parent != PACKAGE):
            assert path.name != "__init__.py" or not text.strip(), f"{path} should be empty"
            continue
        made_by = re.search(r"File to edit: (\S+\.ipynb)", text)
        assert made_by, f"{path} was not exported from a notebook"
        assert (path.resolve().parent/made_by[1]).resolve() in NOTEBOOKS or (ROOT/"nbs"/Path(made_by[1]).name) in NOTEBOOKS, f"{path}: {made_by[1]}"


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_a_module_fits_in_a_reader(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    if module_name(path) in GENERATED: return
    assert len(lines) <= 400, f"{path} has {len(lines)} lines"
    too_long = [f"{path.name}:{i}: {len(s)} columns" for i, s in enumerate(lines, 1) if len(s) > 160]
    assert not too_long, too_long


def test_public_names_have_docstrings():
    missing = []
    for path in MODULES:
        if module_name(path) in GENERATED: continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_") and not ast.get_docstring(node):
                missing.append(f"{module_name(path)}.{node.name}")
    assert not missing, missing


# --- notebooks

@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_is_valid_and_clean(path):
    nb = json.loads(path.read_text(encoding="utf-8"))
    nbformat.validate(nb)
    assert "widgets" not in nb["metadata"], "widget state breaks GitHub's view and the docs build"
    for cell in nb["cells"]:
        for out in cell.get("outputs", []):
            assert out["output_type"] != "error", "".join(out.get("traceback", []))[:500]
            assert "application/vnd.jupyter.widget-view+json" not in out.get("data", {})
    first = "".join(nb["cells"][0]["source"])
    assert nb["cells"][0]["cell_type"] == "markdown" and re.match(r"# .+\n\n> .+", first), f"{path.name} starts with {first[:60]!r}"
    assert len(nb["cells"]) <= 80, f"{len(nb['cells'])} cells"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_imports_have_cells_of_their_own(path):
    "The docs build runs every cell that holds an import; nothing else may run with it."
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code" or re.search(r"^\s*[%!]", source, re.M): continue
        kinds = [isinstance(n, (ast.Import, ast.ImportFrom)) for n in ast.parse(source).body]
        assert not any(kinds) or all(kinds), f"{path.name} mixes imports and other code:\n{source[:300]}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_has_saved_outputs(path):
    cells = [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
    shown = [c for c in cells if not re.search(r"^#\|\s*(export|exports|default_exp|hide)", "".join(c["source"]), re.M)]
    assert not shown or any(c["outputs"] for c in cells), f"{path.name} shows nothing"
    for cell in cells:
        for out in cell["outputs"]: assert str(ROOT) not in json.dumps(out), f"{path.name}: an output names {ROOT}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_figure_lies_under_the_code_that_drew_it(path):
    "A cell whose source was changed, and not run, keeps its old figure."
    for i, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        if any("image/png" in out.get("data", {}) for out in cell.get("outputs", [])):
            names = {n.id for n in ast.walk(ast.parse("".join(cell["source"]))) if isinstance(n, ast.Name)}
            assert names & {"plt", "fig", "ax", "axes"}, f"{path.name}: cell {i} shows a figure and draws none"


def test_each_chapter_exports_one_module():
    homes = {}
    for path in NOTEBOOKS:
        cells = ["".join(c["source"]) for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
        exported = {m for s in cells for m in re.findall(r"^#\|\s*default_exp\s+(\S+)", s, re.M)}
        assert len(exported) <= 1, f"{path.name} exports {exported}"
        for module in exported:
            assert module not in homes, f"{module} is exported by {homes[module]} and {path.name}"
            homes[module] = path.name
    assert len(homes) >= 30


def test_no_notebook_defines_the_child():
    "`%%` magics would be run by nobody else, and code that starts processes must come from the package."
    for path in NOTEBOOKS:
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            assert not (cell["cell_type"] == "code" and "".join(cell["source"]).startswith("%%")), path.name


def test_readme_is_made_from_the_index():
    from litevllm._site import readme
    assert (ROOT/"README.md").read_text(encoding="utf-8") == readme(ROOT/"nbs"/"index.ipynb"), "run: python -m litevllm._site readme"


def test_export_is_in_sync(working_copy, run_python, tmp_path):
    "nbdev_export and nbdev_clean change no byte of a copy of the tree and add no file to it; that holds for files git has not seen, too."
    copy = shutil.copytree(working_copy, tmp_path/"copy", symlinks=True)
    def tree():
        return {p.relative_to(copy).as_posix(): p.read_bytes() for folder in ("nbs", "litevllm", "kernels")
                for p in sorted((copy/folder).rglob("*")) if p.is_file() and "__pycache__" not in p.parts}
    before = tree()
    run_python("from nbdev.doclinks import nbdev_export; from nbdev.clean import nbdev_clean; nbdev_export(); nbdev_clean()",
               cwd=copy, timeout=170, IN_TEST="")
    after = tree()
    changed = sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))
    assert not changed, f"run `make export`; these differ: {changed}"
