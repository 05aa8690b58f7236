"""What a user installs: the wheel and the sdist hold every module as a real file, import from there, and import lightly."""
import configparser
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "transformers", "triton", "numba", "numpy", "tokenizers", "safetensors", "huggingface_hub")


def expected_modules() -> set[str]:
    "litevllm/... of every module in the tree, kernels/ under its name in the package."
    files = [p.relative_to(ROOT).as_posix() for p in (ROOT/"litevllm").rglob("*.py")]
    files += [f"litevllm/{p.relative_to(ROOT).as_posix()}" for p in (ROOT/"kernels").rglob("*.py")]
    return {f for f in files if "__pycache__" not in f}


@pytest.fixture(scope="module")
def wheel(working_copy, tmp_path_factory) -> Path:
    "The wheel that pip builds from a clean copy of the tree."
    out = tmp_path_factory.mktemp("wheel")
    done = subprocess.run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", str(out), "."],
                          cwd=working_copy, capture_output=True, text=True, timeout=150, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    found = list(out.glob("*.whl"))
    assert len(found) == 1, found
    return found[0]


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    "A folder with the wheel installed in it, and nothing else."
    target = tmp_path_factory.mktemp("installed")
    done = subprocess.run([sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "-q", "--target", str(target), str(wheel)],
                          capture_output=True, text=True, timeout=150, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_wheel_holds_every_module_once(wheel):
    names = [n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n]
    assert len(names) == len(set(names))
    assert set(names) == expected_modules()
    assert "litevllm/kernels/paged_attention.py" in names and "litevllm/kernels/__init__.py" not in names


def test_wheel_holds_real_files(wheel):
    archive = zipfile.ZipFile(wheel)
    for name in expected_modules():
        info = archive.getinfo(name)
        assert (info.external_attr >> 16) & 0o170000 in (0, 0o100000), f"{name} is not a plain file"
        source = ROOT/name if "/kernels/" not in name else ROOT/name.removeprefix("litevllm/")
        assert archive.read(name) == source.read_bytes(), name


def test_wheel_says_what_it_is_and_needs(wheel):
    archive = zipfile.ZipFile(wheel)
    text = archive.read(next(n for n in archive.namelist() if n.endswith("/METADATA"))).decode()
    head = text.split("\n\n")[0]
    needs = re.findall(r"^Requires-Dist: (.*)$", head, re.M)
    runtime = [n for n in needs if "extra ==" not in n]
    for start in ("torch>=2.11", "transformers>=5.17", "triton>=3.6", "pyzmq", "msgspec"): assert any(n.startswith(start) for n in runtime), start
    assert next(n for n in runtime if n.startswith("triton")).replace("'", '"').endswith('; platform_system == "Linux"')
    assert not [n for n in runtime if re.match(r"(nbdev|execnb|fastcore|ghapi|fastgit|matplotlib|pytest)", n)], runtime
    assert any(n.startswith("nbdev==2.4.14") and "extra ==" in n for n in needs)
    cp = configparser.ConfigParser(delimiters=["="])
    cp.read(ROOT/"settings.ini", encoding="utf-8")
    assert f"Version: {cp['DEFAULT']['version']}\n" in text and "Author: litevllm developers" in text and "Author-email" not in text
    assert re.search(r"^Requires-Python: >=3.11$", text, re.M) and re.search(r"^License(-Expression)?: Apache-2.0$", text, re.M)
    assert any(n.endswith("LICENSE") for n in archive.namelist())


def test_sdist_builds_the_same_wheel(working_copy, wheel, tmp_path):
    code = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=working_copy, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    archive = next(tmp_path.glob("*.tar.gz"))
    with tarfile.open(archive) as tar:
        members = {m.name.partition("/")[2]: m for m in tar.getmembers()}
        for name in expected_modules() | {"LICENSE", "README.md", "settings.ini", "setup.py", "pyproject.toml"}: assert members[name].isfile(), name
        tar.extractall(tmp_path/"unpacked", filter="data")
    tree = next((tmp_path/"unpacked").iterdir())
    done = subprocess.run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", str(tmp_path), "."],
                          cwd=tree, capture_output=True, text=True, timeout=150, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    again = zipfile.ZipFile(next(tmp_path.glob("*.whl")))
    assert sorted(again.namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def test_installed_wheel_works_without_the_tree(installed, run_python, tmp_path):
    """Every module imports from where pip put it; triton's and numba's only when asked for; Hugging Face's `kernels` is not shadowed.

    Without compiling: a new place has no compiled numba code yet, and making it takes half a minute (test_cpu_attention.py looks at that)."""
    code = """
import importlib, pathlib, sys
import litevllm
here = pathlib.Path(sys.argv[1]).resolve()
assert pathlib.Path(litevllm.__file__).resolve().is_relative_to(here), litevllm.__file__
names = sorted(p.relative_to(here).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__") for p in (here/"litevllm").rglob("*.py"))
for name in names:
    module = importlib.import_module(name)
    assert pathlib.Path(module.__file__).resolve().is_relative_to(here), (name, module.__file__)
import transformers.utils
assert "kernels" not in sys.modules or "litevllm" not in str(sys.modules["kernels"].__file__)
print(len(names))
"""
    done = run_python(["-c", code, installed], cwd=tmp_path, PYTHONPATH=str(installed), IN_TEST="1", NUMBA_DISABLE_JIT="1")
    assert int(done.stdout) == len(expected_modules())


@pytest.mark.parametrize("statement", ["import litevllm", "from litevllm import LLM, SamplingParams"])
def test_import_is_light(installed, run_python, tmp_path, statement):
    "Under half a second of CPU time, best of three, and none of the heavy packages: an LLM that is never made costs nothing."
    code = f"""
import sys, time
t = time.process_time()
{statement}
print(time.process_time() - t)
heavy = sorted(set({HEAVY!r}) & set(sys.modules))
assert not heavy, heavy
"""
    best = min(float(run_python(code, cwd=tmp_path, PYTHONPATH=str(installed)).stdout) for _ in range(3))
    assert best < 0.5, f"{statement} takes {best:.2f} s"


def test_editable_install_is_the_tree(run_python, tmp_path):
    "What `make` installs: the package is the working tree, kernels/ included."
    done = run_python("import litevllm, litevllm.kernels.reference as r; print(litevllm.__file__, r.__file__)", cwd=tmp_path)
    package, kernel = map(os.path.realpath, done.stdout.split())
    assert package == str(ROOT/"litevllm"/"__init__.py") and kernel == str(ROOT/"kernels"/"reference.py")


def test_ci_runs_what_developers_run():
    "One command, whoever calls it: .ci/run and the public runner end in `make test`; the docs job renders with the filter's environment."
    script = ROOT/".ci"/"run"
    assert os.access(script, os.X_OK) and "exec make test </dev/null" in script.read_text(encoding="utf-8")
    jobs = {p.stem: yaml.safe_load(p.read_text(encoding="utf-8"))["jobs"] for p in (ROOT/".github"/"workflows").glob("*.yml")}
    steps = {name: [s.get("run", "") for job in js.values() for s in job["steps"]] for name, js in jobs.items()}
    assert steps["ci"] == ["", "", "", ".ci/run"]
    assert any(s.endswith("quarto render") for s in steps["docs"]) and any("check_links.py _docs" in s for s in steps["docs"])
    done = subprocess.run(["make", "-n", "--no-print-directory", "test"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    plan = done.stdout.splitlines()
    assert plan[-1].endswith("python tests/run_all.py"), plan      # its last line is pytest's closing line (test_notebooks.py)
