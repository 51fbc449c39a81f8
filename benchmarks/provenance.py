"""What every result says of where it comes from."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def provenance(*packages: str) -> dict[str, Any]:
    """Return the commit, the machine, and the versions of some packages."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    here = Path(__file__).parent
    done = subprocess.run(git, cwd=here, capture_output=True, text=True, check=True)
    return {
        "commit": done.stdout.strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }
