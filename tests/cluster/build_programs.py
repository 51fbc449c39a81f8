"""Build the control plane's programs before the first test does. The standard library is enough.

python tests/cluster/build_programs.py          build what is missing, print where it lies
python tests/cluster/build_programs.py --list   print what would be used, build nothing
"""

from __future__ import annotations

import argparse
import sys
import time

from lingcluster.build import Builder, BuildError, ProgramsUnavailableError
from lingcluster.modules import MODULES


def main() -> int:
    """Build (or list) the programs; return the process's exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the folders, build nothing")
    arguments = parser.parse_args()
    start = time.monotonic()

    def report(line: str) -> None:
        print(f"[{time.monotonic() - start:6.1f} s] {line}", flush=True)

    try:
        builder = Builder(report=report)
        if arguments.list:
            for module in MODULES:
                folder = builder.folder(module)
                print(f"{folder}  {'built' if folder.exists() else 'missing'}")
            return 0
        programs = builder.ensure()
    except (ProgramsUnavailableError, BuildError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report(f"control plane programs ready in {builder.root}: {', '.join(programs.paths)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
