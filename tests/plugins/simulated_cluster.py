"""A small cluster that obeys the operator's plans while everything else goes wrong.

The cluster's rules are the real ones, in short: a JobSet makes pods unless it is suspended, a
suspended or deleted one's pods leave in their own time, a foreground deletion ends after the last
pod. The operator sees it late or not at all, its actions may fail, and people interfere. Every
pass is checked for what must hold in every history.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from ling_operator.api import Phase, TrainingRun, TrainingRunStatus, dump
from ling_operator.crd import build_crd
from ling_operator.plan import (
    Action,
    CreateJobSet,
    DeleteJobSet,
    Observed,
    Plan,
    SetSuspend,
    SetWorkloadActive,
)
from ling_operator.reconcile import reconcile
from ling_operator.verdict import HealthSample
from ling_operator.views import JobSetView, PodView, Termination

SCHEMA = build_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
STOPPED = {Phase.HALTED, Phase.FAILED, Phase.COMPLETE, Phase.CANCELLED}


@dataclass
class Cluster:
    """The API server's objects, and the operator's last write."""

    scene: Any
    run: TrainingRun
    seconds: float = 0.0
    jobset: JobSetView | None = None
    pods: list[PodView] = field(default_factory=list)
    sample: HealthSample | None = None
    made: int = 0
    step: int = 0
    bad_pages: int = 0
    history: list[Plan] = field(default_factory=list)

    def start(self) -> None:
        """Get the pods to run: what goes wrong before is less than what goes wrong after."""
        for _ in range(2):
            self.run_pass(self.observe())
            self.advance()
        self.run_pass(self.observe())

    def spec(self, **changes: Any) -> None:
        spec = self.run.spec.model_copy(update=changes)
        self.run = self.run.model_copy(update={"spec": spec})

    def observe(self) -> Observed:
        return Observed(
            run=self.run,
            jobset=self.jobset,
            pods=tuple(self.pods),
            sample=self.sample,
            now=self.scene.at(self.seconds),
        )

    def run_pass(self, observed: Observed, *, act: bool = True) -> None:
        """Do what the operator's worker does, on an observation that may be old."""
        plan = reconcile(observed)
        self.check(observed, plan)
        if observed.run.status != self.run.status:
            return  # the API server answers 409: its copy is newer
        self.run = self.run.model_copy(update={"status": plan.status})
        self.history.append(plan)
        if act:
            for action in plan.actions:
                self.execute(action)

    def execute(self, action: Action) -> None:
        if isinstance(action, CreateJobSet):
            if self.jobset is not None:
                return  # 409
            self.made += 1
            attempt = int(action.manifest["metadata"]["labels"]["ling.primatrix.io/attempt"])
            self.jobset = self.scene.jobset(uid=f"js-{self.made}", attempt=attempt)
        elif isinstance(action, SetWorkloadActive):
            raise AssertionError("nothing is queued here")
        elif self.jobset is not None and self.jobset.uid == action.uid:
            if isinstance(action, DeleteJobSet):
                self.jobset = replace(self.jobset, deleting=True)
            else:
                self.jobset = replace(self.jobset, suspended=action.suspend)

    def advance(self) -> None:
        """Let the JobSet controller, the kubelets and the trainers do a little."""
        self.seconds += 3
        jobset = self.jobset
        none = jobset is None or jobset.suspended or jobset.deleting or jobset.terminal
        keeps = None if none or jobset is None else jobset.uid
        self.pods = [
            p if p.job_set_uid == keeps and not p.deleting else self._leave(p) for p in self.pods
        ]
        if jobset is not None and jobset.deleting and not any(p.live for p in self.pods):
            self.jobset, self.pods = None, []
        elif jobset is not None and not (jobset.suspended or jobset.terminal or jobset.deleting):
            self._make_pods(jobset)
        self.step += 1

    def _leave(self, pod: PodView) -> PodView:
        if not pod.live:
            return pod
        if not pod.deleting:
            return replace(pod, deleting=True)
        return replace(pod, gone=True, exit_code=143, phase="Failed", ready=False)

    def _make_pods(self, jobset: JobSetView) -> None:
        if any(p.live for p in self.pods):
            return
        failed = [p for p in self.pods if p.job_set_uid == jobset.uid and p.phase == "Failed"]
        restarts = jobset.restarts + int(bool(failed))
        self.jobset = replace(jobset, restarts=restarts)
        kept = [replace(p, gone=True) for p in self.pods]
        new = {"job_set_uid": jobset.uid, "attempt": jobset.attempt, "restart_attempt": restarts}
        new |= {"created": self.scene.at(self.seconds)}
        of = f"{self.made}-{restarts}-{self.seconds:g}"
        fresh = [self.scene.pod(i, uid=f"pod-{i}-{of}", **new) for i in range(2)]
        self.pods = kept + fresh

    def page(self, kind: str) -> None:
        zero = [p for p in self.pods if p.live and p.completion_index == 0]
        if not zero:
            return
        self.bad_pages += kind != "good"
        self.seconds += 0.1  # no two pages are of one moment, or of one step
        self.step += 1
        make = self.scene.nan_sample if kind == "nan" else self.scene.sample
        uid, time = zero[-1].uid, self.scene.at(self.seconds)
        series = {"lm_loss": 0.0} if kind == "zero loss" else {}
        series |= {"pod_uid": uid, "page_pod_uid": uid, "last_step_time": time}
        self.sample = make(self.step + 1, self.seconds, **series)

    def exit(self, index: int, code: int) -> None:
        words = Termination(reason="NonFiniteLoss", step=self.step) if code == 90 else None
        for i, pod in enumerate(self.pods):
            if pod.live and pod.completion_index == index:
                phase = "Failed" if code else "Succeeded"
                ended = {"phase": phase, "ready": False, "exit_code": code, "termination": words}
                self.pods[i] = replace(pod, **ended)

    def check(self, observed: Observed, plan: Plan) -> None:
        before, after = observed.run.status, plan.status
        live = {pod.attempt for pod in self.pods if pod.live}
        assert len(live) <= 1, "two attempts' pods live at once"
        assert len(plan.actions) <= 1
        again = reconcile(replace(observed, run=observed.run.model_copy(update={"status": after})))
        assert again.status == after, "a second pass changes the status again"
        raised = observed.run.spec.attempt > before.attempt
        if before.phase in STOPPED and not raised:
            assert after.phase in STOPPED, f"{before.phase} became {after.phase}"
            assert not any(isinstance(a, CreateJobSet) for a in plan.actions)
            fails = observed.run.spec.health.halt_mode == "Fail"
            if before.phase != Phase.HALTED or not fails:
                assert not any(isinstance(a, DeleteJobSet) for a in plan.actions)
            assert not any(isinstance(a, SetSuspend) and not a.suspend for a in plan.actions)
        if before.phase == Phase.HALTED and not raised:
            assert after.phase == Phase.HALTED
            assert after.halt == before.halt
        if any(isinstance(a, CreateJobSet) for a in plan.actions):
            assert observed.jobset is None
            assert not any(pod.live for pod in observed.pods)
        if after.phase == Phase.HALTED and before.phase != Phase.HALTED:
            said = any(pod.exit_code == 90 for pod in observed.pods)
            assert said or self.bad_pages, "a halt without evidence"
        assert after.attempt >= before.attempt
        stored = dump(after)
        assert TrainingRunStatus.model_validate(stored) == after
        fits(SCHEMA["properties"]["status"], stored, "status")


def fits(schema: dict[str, Any], value: Any, path: str) -> None:
    """Check a value against a structural schema as the API server would: pruning is an error."""
    types: dict[str, type | tuple[type, ...]] = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
    }
    assert isinstance(value, types[schema["type"]]), path
    assert "enum" not in schema or value in schema["enum"], path
    if isinstance(value, dict):
        assert set(schema.get("required", ())) <= value.keys(), path
        for key, child in value.items():
            assert key in schema["properties"], f"{path}.{key} would be pruned"
            fits(schema["properties"][key], child, f"{path}.{key}")
    if isinstance(value, list):
        for i, child in enumerate(value):
            fits(schema["items"], child, f"{path}[{i}]")


class WatchedCluster(Cluster):
    """A cluster where others launch the JobSet: the operator may only stop it and let it go on."""

    def check(self, observed: Observed, plan: Plan) -> None:
        super().check(observed, plan)
        assert not any(isinstance(a, CreateJobSet | DeleteJobSet) for a in plan.actions)
        ours = observed.jobset is not None and plan.status.job_set_uid in {
            observed.jobset.uid,
            None,  # a raised attempt brings the last one's JobSet to rest first
        }
        assert ours or not plan.actions, "another JobSet of the name was touched"

    def advance(self) -> None:
        """Restart all once one has failed: nobody else does it here."""
        uid = self.jobset.uid if self.jobset is not None else ""
        own = [p for p in self.pods if p.job_set_uid == uid and not p.gone]
        if any(p.phase == "Failed" for p in own):
            self.pods = [self._leave(p) if p in own else p for p in self.pods]
        super().advance()

    def launch(self) -> None:
        if self.jobset is None:
            self.made += 1
            launched = {"uid": f"js-{self.made}", "owner": None, "attempt": 0, "hosts": 2}
            self.jobset = self.scene.jobset(**launched)

    def relaunch(self) -> None:
        """Let another JobSet take the place of one that has ended, is going, or was not watched.

        What the last of these has shown so far rightly halts the attempt that comes upon it.
        """
        jobset, watched = self.jobset, {a.job_set_uid for a in self.run.status.attempts}
        ended = jobset is None or jobset.terminal or jobset.deleting
        if jobset is None or ended or jobset.uid not in watched:
            self.jobset, self.pods = None, []
            self.launch()
