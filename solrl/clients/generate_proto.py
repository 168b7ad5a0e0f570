"""`python -m solrl.clients.generate_proto`: Python code from proto/, written to `_proto/`.

The contract's folder is mapped onto the package's path, so that the generated modules import each
other by names that exist. Needs grpcio-tools (extra `dev`); the generated code is committed.
"""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGE = "solrl/clients/_proto"
ROOT = Path(__file__).resolve().parents[2]


def generate(root: Path, out: Path) -> int:
    """Write explorer_pb2.py, .pyi and explorer_pb2_grpc.py under `out`/solrl/clients/_proto."""
    from grpc_tools import protoc  # type: ignore[import-untyped]

    return int(
        protoc.main(
            [
                "protoc",
                f"--proto_path={PACKAGE}={root / 'proto' / 'solrl' / 'v1'}",
                f"--python_out={out}",
                f"--pyi_out={out}",
                f"--grpc_python_out={out}",
                f"{PACKAGE}/explorer.proto",
            ]
        )
    )


if __name__ == "__main__":
    sys.exit(generate(ROOT, ROOT))
