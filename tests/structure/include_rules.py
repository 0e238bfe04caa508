"""Who may include whom: the rules of the folder structure, checked on the text of #include and #if lines."""
import re
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("model", "planner", "profiler", "runtime")
SUFFIXES = (".h", ".cpp", ".cu", ".cuh")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^">]+)[">]')
CONDITION = re.compile(r"^\s*#\s*(?:if|ifdef|ifndef|elif)\b(.*)")

# Project folders that each folder may include.
PROJECT_EDGES = {
    "model": ("model/",),
    "planner": ("model/", "planner/"),
    "profiler": ("model/", "profiler/", "runtime/host/", "runtime/device/", "runtime/comm/", "runtime/nn/"),
    "runtime": ("model/", "runtime/"),
}
# Libraries outside the C++ standard that the model and the planner may use; the others may use any but torch.
MODEL_LIBRARIES = ("yaml-cpp/", "nlohmann/", "SQLiteCpp/", "ceres/", "fmt/")
LIBRARY_EDGES = {"model": MODEL_LIBRARIES, "planner": MODEL_LIBRARIES + ("CLI/",)}
# Creating a file that appears whole or not at all needs these; a process has no other business with the system here.
FILE_HEADERS = ("fcntl.h", "unistd.h")
THREADS = ("atomic", "barrier", "condition_variable", "future", "latch", "mutex", "semaphore", "shared_mutex", "stop_token",
           "thread", "pthread.h", "omp.h")
TORCH = ("torch/", "ATen/", "c10/", "caffe2/")
TORCH_FOLDERS = ("runtime/nn/", "runtime/device/")
FMT = ("fmt/", "spdlog/")
BACKEND = re.compile(r"SLIDEDP_WITH|CUDA|NCCL|HIP\b|TORCH|__has_include")
REGISTRY = "runtime/device/backends.cpp"


@dataclass(frozen=True)
class Include:
    line: int
    name: str
    quoted: bool


def parse(text):
    return [Include(number, match[2], match[1] == '"') for number, line in enumerate(text.splitlines(), 1)
            if (match := INCLUDE.match(line))]


def is_standard(name):
    return "/" not in name and "." not in name


def read_sources(root):
    """{path from the root: text} of all C++ and CUDA sources."""
    files = (f for folder in FOLDERS for f in sorted((Path(root) / folder).rglob("*")))
    return {f.relative_to(root).as_posix(): f.read_text(encoding="utf-8") for f in files if f.suffix in SUFFIXES}


def reachable(path, includes):
    """Names of everything that `path` includes, through project headers too."""
    seen, todo = set(), [path]
    while todo:
        for include in includes.get(todo.pop(), ()):
            if include.name not in seen:
                seen.add(include.name)
                todo.append(include.name)
    return seen


def starts(names, prefixes):
    return sorted(n for n in names if n.startswith(prefixes))


def direct_problems(path, includes):
    folder = path.split("/")[0]
    for include in includes:
        name, place = include.name, f"{path}:{include.line}: includes {include.name}, but "
        if include.quoted:
            if not name.startswith(PROJECT_EDGES[folder]):
                yield place + f"{folder}/ includes only {', '.join(PROJECT_EDGES[folder])} (from the project's root)"
            continue
        if name.startswith(tuple(f + "/" for f in FOLDERS)):
            yield place + "the project's headers are included with quotes"
        if name.startswith(TORCH) and not path.startswith(TORCH_FOLDERS):
            yield place + f"torch is used only in {', '.join(TORCH_FOLDERS)}"
        if folder in LIBRARY_EDGES and not is_standard(name) and name not in FILE_HEADERS + THREADS:
            if not name.startswith(LIBRARY_EDGES[folder]):
                yield place + f"{folder}/ uses only {', '.join(LIBRARY_EDGES[folder])} and the standard library"
        if folder == "model" and name in THREADS:
            yield place + "the model has no threads"


def transitive_problems(path, names):
    torch, fmt = starts(names, TORCH), starts(names, FMT)
    if torch and fmt and not path.endswith((".cu", ".cuh")):
        yield f"{path}: sees {torch[0]} and {fmt[0]}, but torch carries another fmt"
    if path.endswith((".cu", ".cuh")):
        for name in torch + fmt:
            yield f"{path}: sees {name}, but CUDA sources see no torch, fmt or spdlog"


def condition_problems(path, text):
    if path == REGISTRY:
        return
    for number, line in enumerate(text.splitlines(), 1):
        match = CONDITION.match(line)
        if match and BACKEND.search(match[1]):
            yield f"{path}:{number}: asks which backends exist, but only {REGISTRY} knows: {line.strip()}"


def problems(sources):
    """All violations in {path: text}, one sentence each."""
    includes = {path: parse(text) for path, text in sources.items()}
    found = []
    for path, text in sources.items():
        found += direct_problems(path, includes[path])
        found += transitive_problems(path, reachable(path, includes))
        found += condition_problems(path, text)
    return found
