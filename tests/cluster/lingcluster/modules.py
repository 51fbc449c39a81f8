"""What is built: the Go modules under programs/, and the programs and manifests of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS_DIR = Path(__file__).resolve().parent.parent / "programs"


def _kubernetes_linker_flags() -> str:
    """Return flags that give the programs their own version.

    Without them the API server reports v0.0.0, and version checks of clients misbehave.
    """
    go_mod = (PROGRAMS_DIR / "k8s" / "go.mod").read_text()
    version = re.search(r"k8s\.io/kubernetes v(\d+)\.(\d+)\.\d+", go_mod)
    assert version is not None, "programs/k8s/go.mod requires no k8s.io/kubernetes"
    variables = "k8s.io/component-base/version"
    return (
        f"-s -w -X {variables}.gitVersion={version[0].split()[1]}"
        f" -X {variables}.gitMajor={version[1]} -X {variables}.gitMinor={version[2]}"
    )


@dataclass(frozen=True)
class Module:
    """One folder under programs/: a go.mod, and what is built and copied from it.

    Attributes:
      name: the folder's name.
      packages: program name -> main package.
      linker_flags: given to every program's link.
      tags: Go build tags, which leave out what nothing here uses.
      assets: module whose files are copied -> paths in it (a folder is copied whole).
    """

    name: str
    packages: Mapping[str, str]
    linker_flags: str = "-s -w"
    tags: tuple[str, ...] = ()
    assets: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])


ETCD = Module("etcd", {"etcd": "go.etcd.io/etcd/server/v3"})
KUBERNETES = Module(
    "k8s",
    {
        name: f"k8s.io/kubernetes/cmd/{name}"
        for name in (
            "kube-apiserver",
            "kube-controller-manager",
            "kube-scheduler",
            "kubectl",
            "kubelet",
        )
    },
    linker_flags=_kubernetes_linker_flags(),
)
JOBSET = Module(
    "jobset",
    {"jobset": "sigs.k8s.io/jobset"},
    assets={
        "sigs.k8s.io/jobset": (
            "config/components/crd/bases",
            "config/components/rbac/role.yaml",
            "config/components/webhook/manifests.yaml",
        )
    },
)
KUEUE = Module(
    "kueue",
    {"kueue": "sigs.k8s.io/kueue/cmd/kueue"},
    assets={
        "sigs.k8s.io/kueue": (
            "config/components/crd/bases",
            "config/components/rbac/role.yaml",
            "config/components/webhook/manifests.yaml",
        )
    },
)
HELM = Module("helm", {"helm": "helm.sh/helm/v4/cmd/helm"})
PROMETHEUS = Module(
    "prometheus",
    {name: f"github.com/prometheus/prometheus/cmd/{name}" for name in ("prometheus", "promtool")},
    tags=("remove_all_sd",),  # no service discovery but files, no web page
)
ALERTMANAGER = Module(
    "alertmanager", {"alertmanager": "github.com/prometheus/alertmanager/cmd/alertmanager"}
)
CONTAINERD = Module(
    "containerd",
    {
        name: f"github.com/containerd/containerd/v2/cmd/{name}"
        for name in ("containerd", "containerd-shim-runc-v2", "ctr")
    },
    tags=("no_btrfs", "no_devmapper", "no_zfs", "no_aufs"),
)
KWOK = Module("kwok", {"kwok": "sigs.k8s.io/kwok/cmd/kwok"})
"""For the benchmark of many runs; no test needs it."""

MODULES = (ETCD, KUBERNETES, JOBSET, KUEUE, HELM, PROMETHEUS, ALERTMANAGER, CONTAINERD)
