"""The CRD has one owner: what a user gets who lets both Helm and kubectl touch it.

Each case has a CRD of its own, a copy under another group, so that it may be deleted. The messages
are those of docs/install.md.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lingcluster.client import KubeClient, Manifest, load_manifests, wait_for
from lingcluster.control_plane import ControlPlane
from lingcluster.helm import CHART, Helm, HelmError
from lingcluster.story import Story

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
GROUP = "ling.primatrix.io"
IMAGE = ("--set", "image.repository=shell")
KUBECTLS = 'conflict with "kubectl": .spec.versions'
HELMS = 'conflict with "helm": .spec.versions'


@dataclass(frozen=True)
class Mixture:
    """A copy of chart and manifest whose CRD is nobody else's.

    Attributes:
      chart: the copy of the chart, at the next version of the CRD.
      before: the same with the version before.
      manifest: the file for kubectl, at the next version.
      handbook: docs/install.md.
    """

    control_plane: ControlPlane
    helm: Helm
    namespace: str
    group: str
    chart: Path
    before: Path
    manifest: Path
    handbook: str
    story: Story

    @property
    def path(self) -> str:
        return f"{CRDS}/trainingruns.{self.group}"

    @property
    def client(self) -> KubeClient:
        return self.control_plane.client

    def crd(self) -> Manifest | None:
        """Return the CRD as it is, None when there is none."""
        return self.client.find(self.path)

    def is_next_version(self) -> bool:
        crd = self.crd()
        assert crd is not None
        return (
            "next version"
            in crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["description"]
        )

    def run(self, verb: str, chart: Path | None = None, *flags: str, release: str = "ling") -> str:
        """Run helm; say what it printed."""
        what = [chart] if chart is not None else []
        values = IMAGE if chart is not None else ()
        try:
            printed = self.helm(verb, release, *what, "-n", self.namespace, *values, *flags)
        except HelmError as error:
            self._tell(f"helm {verb} {release} {' '.join(flags)}", str(error))
            raise
        self._tell(f"helm {verb} {release} {' '.join(flags)}", printed.partition("NOTES:")[0])
        return printed

    def refused(
        self, verb: str, chart: Path, *flags: str, says: str, release: str = "ling"
    ) -> None:
        """Run helm, which must refuse with the words that docs/install.md has."""
        with pytest.raises(HelmError) as refusal:
            self.run(verb, chart, *flags, release=release)
        assert says in str(refusal.value)
        assert says in self.handbook

    def kubectl(self, *flags: str) -> str:
        """Apply the manifest."""
        try:
            printed = self.control_plane.kubectl("apply", *flags, "-f", str(self.manifest))
        except RuntimeError as error:
            self._tell(f"kubectl apply {' '.join(flags)}", str(error))
            raise
        self._tell(f"kubectl apply {' '.join(flags)}", printed)
        return printed

    def make_run(self) -> str:
        """Make an object of the kind; return its path."""
        collection = f"/apis/{self.group}/v1alpha1/namespaces/{self.namespace}/trainingruns"
        body: Manifest = {
            "apiVersion": f"{self.group}/v1alpha1",
            "kind": "TrainingRun",
            "metadata": {"name": "kept"},
            "spec": {"image": "x", "cpu": {"processes": 1}},
        }
        wait_for("the kind to be served", lambda: self.client.create(collection, body))
        return f"{collection}/kept"

    def _tell(self, command: str, printed: str) -> None:
        printed = printed.replace(self.namespace, "NAMESPACE").replace(self.group, GROUP)
        self.story.tell(f"$ {command}\n{printed}")


@pytest.fixture
def mixture(
    control_plane: ControlPlane, namespace: str, repository: Path, tmp_path: Path, story: Story
) -> Iterator[Mixture]:
    """A CRD of the test's own, not installed yet; afterwards it is gone."""
    group = f"{namespace}.example.com"
    (crd,) = load_manifests(repository / "manifests" / "crd" / "trainingruns.yaml")
    description = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["description"]
    assert description in (CHART / "templates" / "crds" / "trainingruns.yaml").read_text()

    def copy(name: str, *, description_now: str) -> Path:
        chart = tmp_path / name
        shutil.copytree(CHART, chart)
        template = chart / "templates" / "crds" / "trainingruns.yaml"
        text = template.read_text().replace(GROUP, group)
        template.write_text(text.replace(description, description_now))
        return chart

    manifest = tmp_path / "crd.yaml"
    text = (repository / "manifests" / "crd" / "trainingruns.yaml").read_text()
    text = text.replace(GROUP, group)
    manifest.write_text(text.replace(description, f"{description} The next version."))
    made = Mixture(
        control_plane,
        Helm(control_plane.programs["helm"], home=tmp_path, kubeconfig=control_plane.kubeconfig),
        namespace,
        group,
        copy("next", description_now=f"{description} The next version."),
        copy("before", description_now=description),
        manifest,
        (repository / "docs" / "install.md").read_text(),
        story,
    )
    yield made
    for release in ("ling", "other"):
        made.helm("uninstall", release, "-n", namespace, "--ignore-not-found")
    control_plane.client.delete(made.path)


def test_kubectl_first_then_helm(mixture: Mixture) -> None:
    mixture.kubectl("--server-side")
    mixture.refused(
        "install",
        mixture.chart,
        says="exists and cannot be imported into the current release: invalid ownership metadata",
    )
    mixture.run("install", mixture.chart, "--set", "crds.enabled=false")  # kubectl stays the owner
    mixture.run("uninstall")
    assert mixture.crd() is not None
    # Helm is from now on: at the same version of the CRD one flag is enough.
    mixture.run("install", mixture.chart, "--take-ownership")
    mixture.run("uninstall")


def test_kubectl_first_then_helm_with_another_version(mixture: Mixture) -> None:
    mixture.kubectl("--server-side")
    mixture.refused("install", mixture.before, "--take-ownership", says=KUBECTLS)
    mixture.run("upgrade", mixture.before, "--install", "--take-ownership", "--force-conflicts")
    assert not mixture.is_next_version()
    mixture.run("upgrade", mixture.chart)  # and from now on no flag is needed
    assert mixture.is_next_version()


def test_helm_first_then_kubectl_on_the_server_side(mixture: Mixture) -> None:
    mixture.run("install", mixture.before)
    with pytest.raises(RuntimeError) as refusal:
        mixture.kubectl("--server-side")
    assert HELMS in str(refusal.value)
    assert HELMS in mixture.handbook
    assert not mixture.is_next_version()
    mixture.kubectl("--server-side", "--force-conflicts")
    assert mixture.is_next_version()
    mixture.refused("upgrade", mixture.before, says=KUBECTLS)
    mixture.run("upgrade", mixture.chart, "--force-conflicts")
    assert mixture.is_next_version()


def test_helm_first_then_kubectl_on_the_client_side(mixture: Mixture) -> None:
    mixture.run("install", mixture.before)
    mixture.kubectl()
    assert mixture.is_next_version()
    mixture.refused("upgrade", mixture.before, says='conflict with "kubectl-client-side-apply"')
    mixture.run("upgrade", mixture.chart, "--force-conflicts")


def test_from_helm_to_kubectl(mixture: Mixture) -> None:
    mixture.run("install", mixture.before)
    run = mixture.make_run()
    mixture.run("upgrade", mixture.before, "--set", "crds.enabled=false")
    assert mixture.client.find(run) is not None
    mixture.kubectl("--server-side", "--force-conflicts")
    mixture.run("upgrade", mixture.chart, "--set", "crds.enabled=false")
    assert mixture.is_next_version()
    mixture.run("uninstall")
    assert mixture.client.find(run) is not None


def test_an_uninstall_keeps_the_runs_and_the_same_release_takes_them_up_again(
    mixture: Mixture,
) -> None:
    mixture.run("install", mixture.before)
    run = mixture.make_run()
    uid = mixture.client.get(run)["metadata"]["uid"]
    printed = mixture.run("uninstall")
    kept = "These resources were kept due to the resource policy:\n"
    assert f"{kept}[CustomResourceDefinition] trainingruns.{mixture.group}" in printed
    mixture.refused(
        "install",
        mixture.chart,
        release="other",
        says='annotation validation error: key "meta.helm.sh/release-name" must equal',
    )
    mixture.run("install", mixture.chart)
    assert mixture.is_next_version()
    assert mixture.client.get(run)["metadata"]["uid"] == uid


def test_who_accepts_the_deletion_gets_it(mixture: Mixture) -> None:
    mixture.run(
        "install", mixture.chart, "--set", "crds.keep=false", "--set", "crds.iAcceptDeletion=true"
    )
    run = mixture.make_run()
    mixture.run("uninstall")
    wait_for("the CRD to be gone", lambda: mixture.crd() is None)
    assert mixture.client.find(run) is None
