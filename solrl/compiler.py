"""Whether torch can compile models for this CPU: that needs a C++ compiler and Python's headers.

`python -m solrl.compiler` prints why not, and exits with 1, or nothing and 0.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path


def compiler_problem() -> str | None:
    """Why models run uncompiled here (same pictures to rounding, slower); None when they do not."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"no C++ compiler {compiler!r} is found; install g++"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        return f"{header} is missing; install python3-dev"
    return None


if __name__ == "__main__":
    problem = compiler_problem()
    sys.exit(f"models will run uncompiled, and so more slowly: {problem}" if problem else 0)
