"""Write what the chart has from elsewhere: the CRD's template, and README's table of values.

`make manifests` runs it; a test compares the files with what it says.
"""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
CHART = ROOT / "charts" / "ling-operator"
CRD = ROOT / "manifests" / "crd" / "trainingruns.yaml"
CRD_TEMPLATE = CHART / "templates" / "crds" / "trainingruns.yaml"
README = CHART / "README.md"
_KEY = re.compile(r"( *)([A-Za-z]\w*):")
_METADATA = re.compile(r"^metadata:\n  name: .*\n", flags=re.M)


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table.

    Attributes:
      path: dotted name.
      default: as values.yaml has it.
      text: what is said above it.
    """

    path: str
    default: Any
    text: str


def crd_template(crd: str) -> str:
    """Return the CRD as a template: behind a switch, with the chart's labels and annotations.

    Raises:
      ValueError: the manifest cannot be wrapped.
    """
    if "{{" in crd:
        raise ValueError(f"{CRD} holds '{{{{', which Helm takes for its own; reword that text")
    head = _METADATA.search(crd)
    if head is None:
        raise ValueError(f"{CRD}: no metadata with a name first; see crd.py")
    metadata = head[0] + '  {{- include "ling-operator.crdMetadata" . | nindent 2 }}\n'
    body = crd[: head.start()] + metadata + crd[head.end() :]
    return "{{- if .Values.crds.enabled }}\n" + body + "{{- end }}\n"


def settings(values: str) -> list[Setting]:
    """Return the rows of values.yaml's text: each key that has a line beginning with `# --`.

    Raises:
      ValueError: a key has neither such a line nor one above or below it.
    """
    tree = yaml.safe_load(values)
    rows: list[Setting] = []
    path: list[tuple[int, str]] = []
    text: list[str] = []
    for line in values.splitlines():
        comment = line.strip()
        if comment.startswith("# --"):
            text = [comment[4:].strip()]
        elif comment.startswith("#") and text:
            text.append(comment[1:].strip())
        elif found := _KEY.match(line):
            depth = len(found[1])
            path = [*((d, name) for d, name in path if d < depth), (depth, found[2])]
            names = [name for _, name in path]
            dotted = ".".join(names)
            if text:
                rows.append(Setting(dotted, _at(tree, names), " ".join(text)))
            text = []
        else:
            text = []
    _refuse_undocumented(tree, {row.path for row in rows})
    return rows


def readme(values: str, template: str) -> str:
    """Return the README: the template with the table in it."""
    rows = [
        f"| `{row.path}` | `{json.dumps(row.default)}` | {row.text.replace('|', '\\|')} |"
        for row in settings(values)
    ]
    table = "\n".join(["| value | default | |", "|---|---|---|", *rows])
    note = "<!-- Written by `make manifests` from README.md.in and values.yaml; do not edit. -->\n"
    return note + template.replace("<!-- values -->", table)


def contents() -> dict[Path, str]:
    """Return each file and what it must hold."""
    values = (CHART / "values.yaml").read_text()
    return {
        CRD_TEMPLATE: crd_template(CRD.read_text(encoding="ascii")),
        README: readme(values, (CHART / "README.md.in").read_text()),
    }


def main() -> None:
    """Write the files."""
    try:
        for path, text in contents().items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    except ValueError as error:
        sys.exit(f"error: {error}")


def _at(tree: Any, names: list[str]) -> Any:
    for name in names:
        tree = tree[name]
    return tree


def _refuse_undocumented(node: Any, documented: set[str], path: str = "") -> None:
    """Raise for a key that no row tells of, itself or a key above it."""
    for name, child in node.items():
        here = f"{path}.{name}" if path else name
        if here in documented:
            continue
        if not isinstance(child, dict) or not child:
            raise ValueError(f"values.yaml: {here} has no description; write `# -- ...` above it")
        _refuse_undocumented(child, documented, here)


if __name__ == "__main__":
    main()
