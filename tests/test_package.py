"""What a user installs: the wheel, its public names, and what importing them costs."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import dtensor_sample

ROOT = Path(dtensor_sample.__file__).parents[1]
MOST_NAMES = 17

# Runs in a process of its own: without Triton, and where CUDA shows no device. Times are of the
# CPU, so that neighbours on the machine do not count.
IMPORT = """
import json, sys, time
sys.modules["triton"] = None  # importing it fails, and nobody finds it
import torch
start = time.process_time()
import torch.distributed.tensor.experimental
needed = time.process_time()
import dtensor_sample
end = time.process_time()
modules = sorted(name for name in sys.modules if name.startswith("dtensor_sample"))
print(json.dumps({"file": dtensor_sample.__file__, "all_s": end - start, "own_s": end - needed,
                  "modules": modules, "greedy": dtensor_sample.SamplingParams(top_k=1).greedy}))
"""


def test_public_names_are_few_and_documented():
    names = dtensor_sample.__all__
    assert len(names) <= MOST_NAMES
    assert sorted(set(names)) == sorted(names)
    for name in names:
        public = getattr(dtensor_sample, name)
        assert public.__doc__, f"{name} has no docstring"


def test_version_is_that_of_the_changelog():
    version = dtensor_sample.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    newest = re.findall(r"^## ([^ ,]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert newest == version


def run(*command: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built as `python -m build --no-isolation --wheel` does, from a copy: no litter here."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("dtensor_sample", "tests", "examples", "docs"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    build = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    run(sys.executable, "-c", build, cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(wheel):
    assert wheel.name == f"dtensor_sample-{dtensor_sample.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (archive.read(n).decode() for n in names if n.endswith("/METADATA"))
    parts = {name.partition("/")[0] for name in names}
    assert {part for part in parts if not part.endswith(".dist-info")} == {"dtensor_sample"}
    assert "dtensor_sample/py.typed" in names
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "dtensor_sample").rglob("*.py")}
    assert sources <= set(names)
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    always = [line for line in needed if "extra ==" not in line]
    assert always == ["Requires-Dist: torch>=2.11", "Requires-Dist: numpy"]


@pytest.mark.slow
def test_wheel_imports_fast_and_without_triton(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    env = {"PYTHONPATH": str(tmp_path / "site"), "CUDA_VISIBLE_DEVICES": ""}
    found: dict[str, Any] = json.loads(run(sys.executable, "-c", IMPORT, cwd=tmp_path, **env))
    assert Path(found["file"]).is_relative_to(tmp_path)
    assert found["greedy"] is True
    assert not [name for name in found["modules"] if name.startswith("dtensor_sample.ops.kernels.")]
    assert found["own_s"] < 0.5, "DTensor apart, importing took long"
    assert found["all_s"] < 2, "torch apart, importing took long"
