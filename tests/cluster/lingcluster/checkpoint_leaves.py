"""Program: restore every checkpoint of a folder, and print the leaves that are not finite.

Prints one JSON object, step -> {"leaves": count, "nonfinite": [names]}. A program of its own,
since Orbax and JAX are no part of the test process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def inspect_checkpoints(directory: Path) -> dict[int, dict[str, Any]]:
    """Run this program on a run's checkpoints folder.

    Raises:
      subprocess.CalledProcessError: one cannot be restored.
    """
    done = subprocess.run(
        [sys.executable, __file__, str(directory)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return {int(step): found for step, found in json.loads(done.stdout).items()}


def _nonfinite_leaves(state: Path) -> dict[str, Any]:
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    reader = ocp.PyTreeCheckpointer()
    metadata: Any = reader.metadata(state).item_metadata
    tree = metadata.tree
    as_arrays = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    restored = reader.restore(state, restore_args=as_arrays)
    leaves = jax.tree_util.tree_leaves_with_path(restored)
    bad = [jax.tree_util.keystr(p) for p, leaf in leaves if not np.isfinite(leaf).all()]
    return {"leaves": len(leaves), "nonfinite": bad}


def _main(directory: Path) -> None:
    steps = sorted(int(entry.name) for entry in directory.iterdir() if entry.name.isdecimal())
    found = {step: _nonfinite_leaves(directory / str(step) / "state") for step in steps}
    print(json.dumps(found))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
