"""Compilers that are absent or broken, what scripts change before they load, kernels that need none; code that must
never be in the package.
"""

import ast
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from shardopt.compilers import cache, versions
from shardopt.errors import UnsupportedVersionError
from tests.support.paths import ROOT

PACKAGE = ROOT / "shardopt"

# An import hook put in front: the named library is not there, or fails as a broken build does.
HOOK = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {library!r}:
            raise {error}

sys.meta_path.insert(0, Missing())
"""
ABSENT = "ModuleNotFoundError(f'No module named {name!r}', name=name)"
# torch imports Triton for its own use when an optimizer is constructed, and forgives an ImportError alone.
BROKEN = {"numba": "AttributeError('no attribute')", "triton": "ImportError('undefined symbol')"}

STEP_IS_REFUSED = """
import torch, shardopt
param = torch.nn.Parameter(torch.ones(300))
opt = shardopt.ShardedAdamW([param], lr=0.1)
param.grad = torch.ones(300)
try:
    opt.step()
except shardopt.errors.UnsupportedVersionError as error:
    print(error)
assert bool((param == 1).all()) and not opt.state_dict()["state"], "something changed"
"""
CPU_TRAINS = """
import torch, shardopt
from shardopt.kernels.launch import backend_of
param = torch.nn.Parameter(torch.ones(300))
opt = shardopt.ShardedAdamW([param], lr=0.1)
param.grad = torch.ones(300)
opt.step()
assert bool((param < 0.95).all())
try:
    backend_of(torch.device("cuda"))
except shardopt.errors.UnsupportedVersionError as error:
    print(error)
"""
# What public training scripts do, and worse, before the first step.
AFTER_CHANGES = """
import builtins, os, tempfile, threading, warnings
import torch, shardopt

os.environ["{variable}"] = {folder!r} + "/kernels"
torch.use_deterministic_algorithms(True)
param = torch.nn.Parameter(torch.ones(300))
opt = shardopt.ShardedAdamW([param], lr=0.1)  # torch imports its compiler here and above, less robustly
param.grad = torch.ones(300)
folder = tempfile.mkdtemp(dir={folder!r})
for name in ("numba", "llvmlite", "numpy"):
    with open(os.path.join(folder, name + ".py"), "w") as file:
        file.write("raise RuntimeError('not this one')")
sys.path[:] = [folder]
for name in ("abs", "len", "max", "min", "open", "print", "range", "sorted", "sum", "zip"):
    def other(*arguments, real=getattr(builtins, name), **named):
        return real(*arguments, **named)
    other.__name__ = name
    setattr(builtins, name, other)
replaced = dict(vars(builtins))
os.chdir(tempfile.mkdtemp(dir={folder!r}))
os.rmdir(os.getcwd())
sys.excepthook = lambda *_: os._exit(3)
warnings.simplefilter("error")
torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")

def step():
    with torch.device("meta"):
        opt.step()

thread = threading.Thread(target=step)
thread.start()
thread.join()
assert {{name: vars(builtins)[name] for name in replaced}} == replaced and sys.path == [folder]
assert bool((param < 0.95).all()) and "numba" in sys.modules
from shardopt.offload.disk.checksum import compile_checksum
compile_checksum()
"""
SECOND_PROCESS = """
import os, sys, torch, shardopt
os.environ["{variable}"] = {folder!r} + "/kernels"
param = torch.nn.Parameter(torch.ones(300))
opt = shardopt.ShardedAdamW([param], lr=0.1)
param.grad = torch.ones(300)
opt.step()
from shardopt.offload.checksum import checksum
assert checksum(torch.ones(99).view(torch.uint8), 4) != checksum(torch.zeros(99).view(torch.uint8), 4)
assert bool((param < 0.95).all()) and "numba" not in sys.modules
"""
SWITCHED_OFF = """
import os
os.environ["NUMBA_DISABLE_JIT"] = "1"
"""
# How it fails changes the message alone, which needs no optimizer.
KERNEL_IS_REFUSED = """
from shardopt.compilers.native import native_kernel
from shardopt.errors import UnsupportedVersionError
try:
    native_kernel("", "", lambda: None)
except UnsupportedVersionError as error:
    print(error)
"""
BACKEND_IS_REFUSED = """
import torch
from shardopt.errors import UnsupportedVersionError
from shardopt.kernels.launch import backend_of
try:
    backend_of(torch.device("cuda"))
except UnsupportedVersionError as error:
    print(error)
"""
WHAT_IS_LOADED = """
import sys, torch
before = set(sys.modules)
import shardopt, shardopt.optim, shardopt.kernels.launch
print(sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""


def without(library: str, error: str, program: str) -> str:
    return HOOK.format(library=library, error=error) + program


PROGRAMS = {
    "loads": WHAT_IS_LOADED,
    "no numba, absent": without("numba", ABSENT, STEP_IS_REFUSED),
    "no numba, broken": without("numba", BROKEN["numba"], KERNEL_IS_REFUSED),
    "numba, switched off": SWITCHED_OFF + KERNEL_IS_REFUSED,
    "after changes": "import sys\n" + AFTER_CHANGES,
    "second process": SECOND_PROCESS,
    "no triton, absent": without("triton", ABSENT, CPU_TRAINS),
    "no triton, broken": without("triton", BROKEN["triton"], BACKEND_IS_REFUSED),
}

# Each program runs in a child of an interpreter that has imported torch, and neither of the two compilers.
RUN_EACH = """
import json, os, sys, traceback
import torch

assert not {"numba", "triton", "shardopt"} & set(sys.modules)
folder, programs = sys.argv[1], json.loads(sys.argv[2])
for name, program in programs.items():
    child = os.fork()
    if not child:
        code = 1
        try:
            file = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(file, 1), os.dup2(file, 2)
            exec(program, {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if status:
        sys.exit(f"{name}: {status}\\n" + open(os.path.join(folder, name)).read())
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By program, what it prints."""
    folder = tmp_path_factory.mktemp("programs")
    own = {"variable": cache.VARIABLE, "folder": str(tmp_path_factory.mktemp("kernels"))}
    programs = dict(PROGRAMS)
    for name in ("after changes", "second process"):
        programs[name] = programs[name].format(**own)
    command = [sys.executable, "-W", "error", "-c", RUN_EACH, str(folder), json.dumps(programs)]
    environment = {**os.environ, cache.VARIABLE: "0"}  # a kernel that is found there needs no Numba
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=PACKAGE.parent, timeout=300)
    assert done.returncode == 0, done.stderr
    return {name: (folder / name).read_text().strip() for name in PROGRAMS}


@pytest.mark.parametrize("how", ["absent", "broken"])
def test_no_numba(how: str, printed: dict[str, str]) -> None:
    message = printed[f"no numba, {how}"]
    assert "numba cannot be imported" in message and "no step can be taken" in message
    assert "pip install" in message
    assert (ABSENT if how == "absent" else BROKEN["numba"]).partition("(")[0] in message


def test_after_a_script_has_changed_what_compilers_need(printed: dict[str, str]) -> None:
    """All at once: the import, the compilation and the step work, and the script finds its changes again."""
    assert printed["after changes"] == ""


def test_a_second_process_needs_no_numba(printed: dict[str, str]) -> None:
    """It finds the kernels that the one before kept."""
    assert printed["second process"] == ""


def test_numba_is_switched_off(printed: dict[str, str]) -> None:
    assert printed["numba, switched off"].startswith("unset NUMBA_DISABLE_JIT")


@pytest.mark.parametrize("how", ["absent", "broken"])
def test_no_triton(how: str, printed: dict[str, str]) -> None:
    """The CPU trains without it; for a GPU tensor the backend says what is missing."""
    found = printed[f"no triton, {how}"]
    assert "triton cannot be imported" in found and "cuda" in found and "pip install" in found


@pytest.mark.parametrize("library", ["numba", "triton"])
def test_too_old(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (major, minor), _newest = versions.TESTED[library]
    old = ModuleType(library)
    monkeypatch.setitem(sys.modules, library, old)
    for number, refused in ((f"{major}.{minor}.0", False), (f"{major}.{minor - 1}.9", True), ("99.0.dev1", False)):
        old.__version__ = number  # type: ignore[attr-defined]
        if refused:
            with pytest.raises(UnsupportedVersionError, match=rf"pip install.*{library} {number} is older"):
                versions.require(library, "cpu tensors")
        else:
            versions.require(library, "cpu tensors")


def test_import_loads_no_compiler(printed: dict[str, str]) -> None:
    """Seconds of start-up, and a reason to fail, for a program that may never take a step."""
    names = set(ast.literal_eval(printed["loads"]))
    assert "shardopt" in names and not names & {"numba", "llvmlite", "triton", "scipy"}


# -- what the package must not do --------------------------------------------------------------------------------------

# The one file that reads pickles, restricted, and what alone may import it: the command that imports checkpoints.
RESTRICTED = "checkpoint/foreign/unpickle.py"
READERS = [f"checkpoint/foreign/{name}.py" for name in ("from_dcp", "from_deepspeed", "from_torch")]

# Calls that run, or can run, what a file or a peer sends.
FORBIDDEN_CALLS = {"eval", "exec", "__import__", "import_module", "load_module", "literal_eval"}
FORBIDDEN_ATTRIBUTES = {
    ("torch", "load"),
    ("np", "load"),
    ("numpy", "load"),
    *(("*", name) for name in ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")),
    *(("*", name) for name in ("send_object_list", "recv_object_list", "reduce_object", "allow_pickle")),
}
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def offences(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
            for name in [*modules, *(alias.name for alias in node.names)]:
                if name.partition(".")[0] in FORBIDDEN_MODULES or ("*", name) in FORBIDDEN_ATTRIBUTES:
                    yield f"{line}: imports {name}"
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else "?"
            runs_code = node.attr in FORBIDDEN_CALLS and owner in ("builtins", "importlib", "ast", "__builtins__")
            if runs_code or {(owner, node.attr), ("*", node.attr)} & FORBIDDEN_ATTRIBUTES:
                yield f"{line}: {owner}.{node.attr}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            yield f"{line}: calls {node.func.id}"
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "weights_only"):
            yield f"{line}: {node.arg}="


def test_no_code_from_data() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 25
    found = [f"{file.relative_to(PACKAGE)}:{offence}" for file in files for offence in offences(file.read_text())]
    restricted = [offence for offence in found if offence.startswith(f"{RESTRICTED}:")]
    assert {offence.rpartition(": ")[2] for offence in restricted} == {"imports pickle", "torch.load", "weights_only="}
    found = [offence for offence in found if offence not in restricted]
    # The compilers are loaded by name, and the names are these two.
    assert [offence.partition(":")[0] + offence.rpartition(":")[2] for offence in found] == [
        "compilers/versions.py importlib.import_module"
    ]
    assert set(versions.TESTED) == {"numba", "triton"}


@functools.cache
def imports() -> list[tuple[str, str]]:
    """Every file that imports from a module, and the module's last name."""
    return [
        (str(file.relative_to(PACKAGE)), (node.module or "").rpartition(".")[2])
        for file in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom)
    ]


def importers(module: str) -> list[str]:
    return [file for file, found in imports() if found == module]


def test_the_import_command_alone_reads_pickles() -> None:
    assert importers("unpickle") == READERS
    assert {each for name in ("from_dcp", "from_deepspeed") for each in importers(name)} == {"tools/import_command.py"}
    assert set(importers("from_torch")) == {READERS[0], "tools/import_command.py"}
    assert importers("import_command") == ["tools/cli.py"]
    assert importers("checkpoint_commands") == ["tools/cli.py"]
    source = (PACKAGE / RESTRICTED).read_text()
    assert "weights_only=True" in source and "pickle.load" not in source and source.count("find_class") == 1


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import torch.distributed as d; d.all_gather_object([], 1)",
        "from torch.distributed import broadcast_object_list",
        "torch.load('x')",
        "eval('1')",
        "exec('1')",
        "import builtins; builtins.exec('1')",
        "np.load(f, allow_pickle=True)",
        "__import__(name)",
        "importlib.import_module(name)",
    ],
)
def test_the_scan_sees(line: str) -> None:
    assert list(offences(line))


def test_compiling_stays_in_one_place() -> None:
    """``compile`` is called once, on text that is ours: translate.py."""
    calls = [
        file.name
        for file in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "compile"
    ]
    assert calls == ["translate.py"]
