"""The include edges of the folder structure, and that the check finds each forbidden one."""
import re
import shutil
import subprocess
from pathlib import Path

import include_rules
import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_sources_keep_the_rules():
    sources = include_rules.read_sources(ROOT)
    assert {path.split("/")[0] for path in sources} == set(include_rules.FOLDERS)
    assert include_rules.problems(sources) == []


@pytest.mark.parametrize("path, text, expected", [
    ("model/spec/a.cpp", '#include "runtime/host/arena.h"', "model/ includes only"),
    ("model/spec/a.cpp", '#include "plan.h"', "from the project's root"),
    ("model/spec/a.cpp", "#include <CLI/CLI.hpp>", "model/ uses only"),
    ("model/spec/a.cpp", "#include <cuda_runtime.h>", "model/ uses only"),
    ("model/spec/a.cpp", "#include <sys/mman.h>", "model/ uses only"),
    ("model/sim/a.h", "  #  include <thread>", "no threads"),
    ("planner/a.cpp", '#include "runtime/exec/executor.h"', "planner/ includes only"),
    ("planner/a.cpp", '#include "profiler/probe.h"', "planner/ includes only"),
    ("planner/a.cpp", "#include <nccl.h>", "planner/ uses only"),
    ("planner/a.cpp", "#include <ATen/ATen.h>", "torch is used only in"),
    ("profiler/a.cpp", '#include "runtime/exec/executor.h"', "profiler/ includes only"),
    ("profiler/a.cpp", '#include "planner/search.h"', "profiler/ includes only"),
    ("profiler/a.cpp", "#include <torch/torch.h>", "torch is used only in"),
    ("runtime/exec/a.cpp", '#include "planner/search.h"', "runtime/ includes only"),
    ("runtime/exec/a.cpp", '#include "profiler/probe.h"', "runtime/ includes only"),
    ("runtime/host/a.cpp", "#include <c10/core/Device.h>", "torch is used only in"),
    ("runtime/exec/a.cpp", "#include <model/spec/plan.h>", "included with quotes"),
    ("runtime/nn/a.cu", "#include <ATen/ATen.h>", "CUDA sources see no torch"),
    ("runtime/nn/a.cu", "#include <spdlog/spdlog.h>", "CUDA sources see no torch"),
    ("runtime/nn/a.cpp", "#ifdef SLIDEDP_WITH_CUDA\n#endif", "only runtime/device/backends.cpp knows"),
    ("runtime/exec/a.cpp", "#if defined(__CUDACC__)\n#endif", "only runtime/device/backends.cpp knows"),
])
def test_forbidden_line_is_found(path, text, expected):
    found = include_rules.problems({path: text})
    assert len(found) >= 1 and any(expected in problem and problem.startswith(path) for problem in found), found


@pytest.mark.parametrize("path, text", [
    ("model/spec/a.cpp", '#include <vector>\n#include <yaml-cpp/yaml.h>\n#include "model/spec/plan.h"'),
    ("planner/a.cpp", '#include <CLI/CLI.hpp>\n#include <thread>\n#include "planner/search.h"'),
    ("profiler/a.cpp", '#include "runtime/comm/collective.h"\n#include <sys/utsname.h>'),
    ("runtime/nn/a.cpp", '#include <ATen/core/Tensor.h>\n#include "model/base/error.h"\n#if defined(__x86_64__)\n#endif'),
    ("runtime/device/backends.cpp", "#ifdef SLIDEDP_WITH_CUDA\n#endif"),
])
def test_allowed_lines_pass(path, text):
    assert include_rules.problems({path: text}) == []


def test_fmt_and_torch_are_told_apart_through_headers():
    through = {"model/base/format.h": "#include <fmt/format.h>", "runtime/nn/plain.h": '#include "model/base/format.h"'}
    mixed = {"runtime/nn/a.cpp": '#include "runtime/nn/plain.h"\n#include <ATen/core/Tensor.h>'}
    kernel = {"runtime/nn/a.cu": '#include "runtime/nn/plain.h"'}
    assert include_rules.problems(through) == []
    assert "another fmt" in include_rules.problems(through | mixed)[0]
    assert "CUDA sources see no torch" in include_rules.problems(through | kernel)[0]


def test_sources_are_formatted():
    """Only with the major version of clang-format that wrote them: versions differ."""
    tool = shutil.which("clang-format")
    version = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout if tool else ""
    if not re.search(r"version 14\.", version):
        pytest.skip("needs clang-format 14")
    files = [str(f) for folder in include_rules.FOLDERS + ("tests",) for f in sorted((ROOT / folder).rglob("*"))
             if f.suffix in include_rules.SUFFIXES]
    result = subprocess.run([tool, "--dry-run", "-Werror", *files], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[:4000]
