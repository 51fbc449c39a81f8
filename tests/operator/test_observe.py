"""observe(): what the caches, our own writes and the pods that are gone make of a run."""

from typing import Any

import pytest

from api_stub import (
    CHANGED,
    CREATE,
    JOBSETS,
    KEY,
    PODS,
    RUNS,
    WORKLOADS,
    World,
    ended,
    pod,
    stored_run,
    stored_workload,
    world,
)
from ling_operator.api import Phase
from ling_operator.jobset import build_jobset
from ling_operator.plan import (
    Plan,
    SetSuspend,
    SetWorkloadActive,
)
from ling_operator.verdict import Heartbeat
from waiting import until


@pytest.mark.asyncio
async def test_a_workload_is_found_by_its_jobsets_uid_and_patched_in_the_preferred_version(
    scene: Any,
) -> None:
    jobset = build_jobset(scene.run(), attempt=1, restore_before_step=None)
    jobset["metadata"] |= {"uid": "js-2", "resourceVersion": "8"}
    lists = {
        "runs": [stored_run(scene)],
        "jobsets": [jobset],
        "workloads": [stored_workload("old", "js-1"), stored_workload("new", "js-2", active=True)],
    }
    async with world(scene, watching=True, **lists) as w:
        observed = await w.cluster.observe("team", "ling2")
        assert observed is not None
        assert observed.workload is not None
        assert (observed.workload.name, observed.workload.active) == ("new", True)
        w.woken.clear()
        w.api.send(WORKLOADS, "MODIFIED", stored_workload("new", "js-2", active=False))
        await until(lambda: ("team", "ling2") in w.woken)
        action = SetWorkloadActive("new", "uid-new", False, "Halted")
        plan = Plan(status=observed.run.status, actions=(action,))
        await w.cluster.execute(observed, plan)
        (patch,) = w.api.writes
        assert (patch.method, patch.path) == ("PATCH", f"{WORKLOADS}/new")
        assert patch.body == {"metadata": {"uid": "uid-new"}, "spec": {"active": False}}
        w.api.send(WORKLOADS, "DELETED", stored_workload("new", "js-2"))
        await until(lambda: w.caches.workload(("team", "ling2"), "js-2") is None)


@pytest.mark.asyncio
async def test_what_we_wrote_is_observed_before_the_watch_brings_it(scene: Any) -> None:
    async with world(scene, watching=True, runs=[stored_run(scene)]) as w:
        observed = await w.cluster.observe(*KEY)
        assert observed is not None
        assert observed.jobset is None
        await w.cluster.execute(observed, Plan(status=CHANGED, actions=(CREATE,)))
        after = await w.cluster.observe(*KEY)
        assert after is not None
        assert after.run.status.phase is Phase.STARTING
        assert after.run.metadata.resource_version == "101"
        assert after.jobset is not None
        assert after.jobset.name == "ling2"

        # A newer version from the watch replaces our own, even one that says less.
        newer = stored_run(scene, phase="Pending")
        newer["metadata"]["resourceVersion"] = "200"
        w.api.send(RUNS, "MODIFIED", newer)
        await until(lambda: w.caches.run(KEY).run.metadata.resource_version == "200")  # type: ignore[union-attr]
        latest = await w.cluster.observe(*KEY)
        assert latest is not None
        assert latest.run.status.phase is Phase.PENDING


@pytest.mark.asyncio
async def test_what_we_changed_is_observed_before_the_watch_brings_it(scene: Any) -> None:
    """A pause that is taken back at once would else be left to whoever suspended the JobSet."""
    jobset = {"metadata": {**pod("ling2")["metadata"], "uid": "js-1"}, "spec": {"suspend": False}}
    workload = stored_workload("wl", "js-1", active=True)
    lists = {"runs": [stored_run(scene)], "jobsets": [jobset], "workloads": [workload]}

    async def shown(w: World) -> tuple[bool, bool]:
        observed = await w.cluster.observe(*KEY)
        assert observed is not None
        assert observed.jobset is not None
        assert observed.workload is not None
        return observed.jobset.suspended, observed.workload.active

    async with world(scene, watching=True, **lists) as w:
        observed = await w.cluster.observe(*KEY)
        assert observed is not None
        for action in (
            SetSuspend("js-1", True, "SuspendRequested"),
            SetWorkloadActive("wl", "uid-wl", False, "SuspendRequested"),
        ):
            await w.cluster.execute(observed, Plan(status=observed.run.status, actions=(action,)))
        assert await shown(w) == (True, False)
        older = {**jobset, "metadata": {**jobset["metadata"], "resourceVersion": "100"}}
        w.api.send(JOBSETS, "MODIFIED", older)
        await until(lambda: w.caches.jobsets.objects[KEY].version == "100")
        assert await shown(w) == (True, False), "it was sent before our change"
        undone = {**jobset, "metadata": {**jobset["metadata"], "resourceVersion": "200"}}
        w.api.send(JOBSETS, "MODIFIED", undone)
        await until(lambda: w.caches.jobsets.objects[KEY].version == "200")
        assert await shown(w) == (False, False), "somebody has undone it"


@pytest.mark.asyncio
async def test_while_the_watch_is_silent_each_status_write_follows_the_last_one(
    scene: Any,
) -> None:
    async with world(scene, watching=True, runs=[stored_run(scene)]) as w:
        first = await w.cluster.observe(*KEY)
        assert first is not None
        versions = [first.run.metadata.resource_version]
        for restarts in range(1, 41):
            observed = await w.cluster.observe(*KEY)
            assert observed is not None
            status = observed.run.status.model_copy(update={"restarts": restarts})
            await w.cluster.execute(observed, Plan(status=status))
            after = await w.cluster.observe(*KEY)
            assert after is not None
            assert after.run.status.restarts == restarts
            versions.append(after.run.metadata.resource_version)
        sent = [request.body["metadata"]["resourceVersion"] for request in w.api.writes]
        assert sent == versions[:-1]
        late = stored_run(scene)
        late["metadata"]["resourceVersion"] = "999"
        w.api.send(RUNS, "MODIFIED", late)
        await until(lambda: w.caches.runs.objects[KEY].version == "999")
        newest = await w.cluster.observe(*KEY)
        assert newest is not None
        assert newest.run.metadata.resource_version == "999", "somebody else has written"


@pytest.mark.asyncio
async def test_a_deleted_pod_is_remembered_if_its_end_is_evidence(scene: Any) -> None:
    pods = [pod("diverged"), pod("paused"), pod("taken"), pod("running", phase="Running")]
    taken = {"conditions": [{"type": "DisruptionTarget", "status": "True"}]}
    async with world(scene, watching=True, runs=[stored_run(scene)], pods=pods) as w:
        w.api.send(PODS, "DELETED", pod("diverged", phase="Failed", **ended(90)))
        w.api.send(PODS, "DELETED", pod("paused", phase="Failed", **ended(143)))
        w.api.send(PODS, "DELETED", pod("taken", phase="Failed", **ended(143), **taken))
        await until(lambda: len(w.caches.pods.objects) == 1)
        observed = await w.cluster.observe(*KEY)
        assert observed is not None
        seen = {p.name: (p.gone, p.exit_code, p.live) for p in observed.pods}
        assert seen == {
            "running": (False, None, True),
            "diverged": (True, 90, False),
            "taken": (True, 143, False),
        }


@pytest.mark.asyncio
async def test_memory_of_gone_pods_is_bounded_and_keeps_the_diverged_one(scene: Any) -> None:
    async with world(scene, watching=True, runs=[stored_run(scene)]) as w:
        w.api.send(PODS, "DELETED", pod("diverged", phase="Failed", **ended(90)))
        for i in range(200):
            w.api.send(PODS, "DELETED", pod(f"crashed-{i}", phase="Failed", **ended(1)))
        w.api.send(PODS, "ADDED", pod("last", phase="Running"))
        await until(lambda: len(w.caches.pods.objects) == 1)
        observed = await w.cluster.observe(*KEY)
        assert observed is not None
        assert len(observed.pods) <= 65
        assert "diverged" in {p.name for p in observed.pods}


def watching_run(name: str, **status: Any) -> dict[str, Any]:
    metadata = {"namespace": "team", "name": name, "uid": f"uid-{name}", "resourceVersion": "7"}
    return {"metadata": metadata, "spec": {"watch": {"jobSet": "ling2"}}, "status": status}


@pytest.mark.asyncio
async def test_what_belongs_to_a_watched_jobset_is_seen_by_the_runs_that_watch_it(
    scene: Any,
) -> None:
    jobset = build_jobset(scene.run(), attempt=1, restore_before_step=None)
    jobset["metadata"] |= {"uid": "js-1", "resourceVersion": "8"}
    lists = {
        "runs": [watching_run("b"), watching_run("a")],
        "jobsets": [jobset],
        "workloads": [stored_workload("wl", "js-1", active=True)],
        "pods": [pod("p", phase="Running")],
    }
    async with world(scene, watching=True, **lists) as w:
        first, second = [await w.cluster.observe("team", name) for name in "ab"]
        assert first is not None
        assert second is not None
        for observed in (first, second):
            assert observed.jobset is not None
            assert observed.jobset.uid == "js-1"
            assert observed.workload is not None
            assert [p.name for p in observed.pods] == ["p"]
        assert (first.other_watcher, second.other_watcher) == (None, "a")
        w.woken.clear()
        w.api.send(PODS, "DELETED", pod("p", phase="Failed", **ended(90)))
        await until(lambda: w.woken == [("team", "a"), ("team", "b")])
        # Who has watched this very JobSet before keeps it, whatever its name is.
        kept = {"attempt": 1, "jobSetUID": "js-1", "attempts": [
            {"attempt": 1, "jobSetUID": "js-1", "startTime": "2026-11-30T09:00:00Z"},
        ]}  # fmt: skip
        w.api.send(RUNS, "MODIFIED", watching_run("b", **kept))
        await until(lambda: len(w.woken) == 3)
        first, second = [await w.cluster.observe("team", name) for name in "ab"]
        assert first is not None
        assert second is not None
        assert (first.other_watcher, second.other_watcher) == ("b", None)
        assert [p.exit_code for p in second.pods] == [90]
        w.api.send(RUNS, "DELETED", watching_run("b"))
        await until(lambda: w.caches.run(("team", "b")) is None)
        first = await w.cluster.observe("team", "a")
        assert first is not None
        assert first.other_watcher is None
        await w.cluster.execute(
            first, Plan(status=first.run.status, actions=(SetSuspend("js-1", True, "x"),))
        )
        assert w.api.writes[-1].path == f"{JOBSETS}/ling2"
        w.api.send(RUNS, "DELETED", watching_run("a"))
        await until(lambda: w.caches.run(("team", "a")) is None)
        w.woken.clear()
        w.api.send(PODS, "ADDED", pod("q", phase="Running"))
        await until(lambda: len(w.caches.pods.objects) == 1)
        assert w.woken == []
        assert w.caches.pods_of(KEY) == w.caches.pods_of(("team", "ling2"))


@pytest.mark.asyncio
async def test_a_deleted_run_is_observed_as_none_and_everything_about_it_is_dropped(
    scene: Any,
) -> None:
    async with world(scene, watching=True, runs=[stored_run(scene)]) as w:
        w.cluster.record(KEY, scene.sample(3))
        observed = await w.cluster.observe(*KEY)
        assert observed is not None
        assert observed.sample is not None
        w.api.send(PODS, "DELETED", pod("diverged", phase="Failed", **ended(90)))
        w.api.send(RUNS, "DELETED", stored_run(scene))
        await until(lambda: w.caches.run(KEY) is None)
        assert await w.cluster.observe(*KEY) is None
        late = Heartbeat(host="n", pod_uid="p", read_time=scene.now, time=scene.now)
        w.cluster.record_heartbeat(KEY, late)  # its page was being read
        assert w.cluster._heartbeats == {}
        w.api.send(RUNS, "ADDED", stored_run(scene))
        await until(lambda: w.caches.run(KEY) is not None)
        anew = await w.cluster.observe(*KEY)
        assert anew is not None
        assert anew.sample is None
        assert anew.pods == ()


@pytest.mark.asyncio
async def test_a_spec_that_cannot_be_read_is_observed_with_what_is_wrong(scene: Any) -> None:
    run = stored_run(scene, phase="Halted")
    run["spec"]["future"] = True
    async with world(scene, watching=True, runs=[run]) as w:
        observed = await w.cluster.observe(*KEY)
        assert observed is not None
        assert observed.spec_error is not None
        assert "spec.future" in observed.spec_error
        assert observed.run.status.phase is Phase.HALTED, "what was decided is still known"


@pytest.mark.asyncio
async def test_any_change_of_what_belongs_to_a_run_wakes_the_run(scene: Any) -> None:
    async with world(scene, watching=True, runs=[stored_run(scene)]) as w:
        assert w.woken == [KEY]
        w.api.send(PODS, "ADDED", pod("p", phase="Running"))
        w.api.send(JOBSETS, "ADDED", {"metadata": {**pod("ling2")["metadata"]}})
        job = {"metadata": {**pod("ling2-slice-job-0")["metadata"]}}
        w.api.send("/apis/batch/v1/namespaces/team/jobs", "ADDED", job)
        await until(lambda: len(w.woken) == 4)
        assert set(w.woken) == {KEY}
        observed = await w.cluster.observe(*KEY)
        assert observed is not None
        assert observed.jobs == ("ling2-slice-job-0",)
        assert observed.jobset is not None


@pytest.mark.asyncio
async def test_of_a_spec_that_cannot_be_read_suspend_and_health_still_count(scene: Any) -> None:
    run = stored_run(scene, attempt=3)
    health = {"zeroLoss": {"action": "Ignore"}}
    run["spec"] |= {"elastic": True, "attempt": 4, "suspend": True, "health": health}
    async with world(scene, watching=True, runs=[run]) as w:
        observed = await w.cluster.observe(*KEY)
        assert observed is not None
        spec = observed.run.spec
        assert (spec.attempt, spec.suspend) == (3, True)
        assert spec.health.zero_loss.action == "Ignore"
