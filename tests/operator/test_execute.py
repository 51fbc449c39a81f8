"""execute() at the level of HTTP: what is sent, in which order, after which answer."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from api_stub import CHANGED, CREATE, EVENTS, JOBSETS, KEY, RUNS, stored_run, world
from ling_operator.api import ConditionType
from ling_operator.conditions import find
from ling_operator.plan import (
    DeleteJobSet,
    Event,
    Plan,
    SetSuspend,
)
from ling_operator.reconcile import reconcile
from ling_operator.rest import ApiError


def event(scene: Any, reason: str = "Halted", **changes: Any) -> Event:
    told = Event(type="Warning", reason=reason, message="It is.", attempt=1, time=scene.now)
    return replace(told, **changes)


@pytest.mark.asyncio
async def test_the_status_is_written_first_then_the_action_then_the_events(scene: Any) -> None:
    async with world(scene) as w:
        plan = Plan(status=CHANGED, actions=(CREATE,), events=(event(scene), event(scene, "B")))
        run = scene.run().model_copy(
            update={"metadata": scene.run().metadata.model_copy(update={"resource_version": "7"})}
        )
        await w.cluster.execute(scene.observed(run), plan)
        sent = [(request.method, request.path) for request in w.api.writes]
        assert sent == [
            ("PUT", f"{RUNS}/ling2/status"),
            ("POST", JOBSETS),
            ("POST", EVENTS),
            ("POST", EVENTS),
        ]
        body = w.api.writes[0].body
        assert body["metadata"]["resourceVersion"] == "7"
        assert body["metadata"]["uid"] == run.metadata.uid
        assert body["status"]["phase"] == "Starting"
        assert "spec" not in body


@pytest.mark.asyncio
async def test_progress_of_many_runs_is_written_more_seldom_while_the_server_is_slow(
    scene: Any,
) -> None:
    async with world(scene, watching=True, runs=[stored_run(scene)]) as w:
        seen = await w.cluster.observe("team", "ling2")
        assert seen is not None
        assert seen.steady_write == timedelta(seconds=10)
        view = w.caches.runs.objects["team", "ling2"]
        w.caches.runs.each["team"]._objects.update({("team", str(i)): view for i in range(10_000)})
        w.api.delay = 0.2
        await w.cluster.execute(seen, Plan(status=CHANGED))
        slow = await w.cluster.observe("team", "ling2")
        assert slow is not None
        assert slow.steady_write > timedelta(seconds=20)


@pytest.mark.asyncio
async def test_nothing_is_done_after_a_status_write_that_was_out_of_date(scene: Any) -> None:
    async with world(scene) as w:
        w.api.refuse("PUT", f"{RUNS}/ling2/status", 409, "Conflict")
        plan = Plan(status=CHANGED, actions=(CREATE,), events=(event(scene),))
        with pytest.raises(ApiError) as caught:
            await w.cluster.execute(scene.observed(scene.run()), plan)
        assert caught.value.is_conflict
        assert len(w.api.writes) == 1


@pytest.mark.asyncio
async def test_a_status_that_did_not_change_is_written_only_before_a_create(scene: Any) -> None:
    async with world(scene) as w:
        run = scene.run()
        suspend = SetSuspend("js-1", True, "Halted")
        await w.cluster.execute(scene.observed(run), Plan(status=run.status, actions=(suspend,)))
        assert [request.method for request in w.api.writes] == ["PATCH"]
        await w.cluster.execute(scene.observed(run), Plan(status=run.status, actions=(CREATE,)))
        assert [request.method for request in w.api.writes] == ["PATCH", "PUT", "POST"]


@pytest.mark.asyncio
async def test_suspend_patches_one_field_of_the_jobset_of_that_uid_and_delete_names_it_too(
    scene: Any,
) -> None:
    async with world(scene) as w:
        run = scene.run()
        for action in (SetSuspend("js-1", True, "Halted"), DeleteJobSet("js-1", "attempt 2")):
            await w.cluster.execute(
                scene.observed(run), Plan(status=run.status, actions=(action,))
            )
        patch, delete = w.api.writes
        assert (patch.path, patch.content_type) == (
            f"{JOBSETS}/ling2",
            "application/merge-patch+json",
        )
        assert patch.body == {"metadata": {"uid": "js-1"}, "spec": {"suspend": True}}
        assert (delete.method, delete.path) == ("DELETE", f"{JOBSETS}/ling2")
        assert delete.body["preconditions"] == {"uid": "js-1"}
        assert delete.body["propagationPolicy"] == "Foreground"


@pytest.mark.asyncio
async def test_a_jobset_that_is_gone_is_no_failure_of_suspend_or_delete(scene: Any) -> None:
    async with world(scene) as w:
        run = scene.run()
        for method, action in (
            ("PATCH", SetSuspend("js-1", True, "Halted")),
            ("DELETE", DeleteJobSet("js-1", "attempt 2")),
        ):
            w.api.refuse(method, f"{JOBSETS}/ling2", 404, "NotFound")
            plan = Plan(status=run.status, actions=(action,), events=(event(scene, method),))
            await w.cluster.execute(scene.observed(run), plan)
        assert sum(request.path == EVENTS for request in w.api.writes) == 2


@pytest.mark.asyncio
async def test_an_event_is_posted_until_the_server_has_it_and_never_when_it_is_old(
    scene: Any,
) -> None:
    async with world(scene) as w:
        run = scene.run()
        long_note = "x" * 1023 + "\u00e9\u00e9"
        plan = Plan(status=run.status, events=(event(scene, message=long_note),))
        w.api.refuse("POST", EVENTS, 500, "InternalError")
        with pytest.raises(ApiError):
            await w.cluster.execute(scene.observed(run), plan)
        w.api.refuse("POST", EVENTS, 409, "AlreadyExists")
        await w.cluster.execute(scene.observed(run), plan)
        await w.cluster.execute(scene.observed(run), plan)
        assert len(w.api.writes) == 2, "the server has it; it is not posted again"
        names = {request.body["metadata"]["name"] for request in w.api.writes}
        assert names == {plan.events[0].name(run)}
        body = w.api.writes[0].body
        assert len(body["note"].encode()) <= 1024
        assert body["regarding"]["uid"] == run.metadata.uid
        assert body["eventTime"] == "2026-11-30T09:00:00.000000Z"

        for minute in range(50):  # an alert that comes and goes for days
            flap = event(scene, "Flap", time=scene.now + timedelta(minutes=minute))
            await w.cluster.execute(scene.observed(run), Plan(status=run.status, events=(flap,)))
        assert [len(told) for told in w.cluster._told.values()] == [1]
        w.api.writes.clear()

        old = event(scene, "Old", time=scene.now - timedelta(minutes=51))
        await w.cluster.execute(scene.observed(run), Plan(status=run.status, events=(old,)))
        assert w.api.writes == []


@pytest.mark.asyncio
async def test_a_refused_create_is_observed_for_its_attempt_and_forgotten_after_a_success(
    scene: Any,
) -> None:
    async with world(scene, watching=True, runs=[stored_run(scene)]) as w:
        w.api.refuse("POST", JOBSETS, 422, "Invalid", "spec.x: no")
        observed = await w.cluster.observe(*KEY)
        assert observed is not None
        plan = Plan(status=observed.run.status, actions=(CREATE,), events=(event(scene),))
        with pytest.raises(ApiError):
            await w.cluster.execute(observed, plan)
        told = sum(request.path == EVENTS for request in w.api.writes)
        assert told == 1, "what the status says is told although the action was refused"
        again = await w.cluster.observe(*KEY)
        assert again is not None
        assert again.create_error == "spec.x: no"
        w.api.refusals.clear()
        await w.cluster.execute(again, plan)
        after = await w.cluster.observe(*KEY)
        assert after is not None
        assert after.create_error is None


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("method", "path"), [("PATCH", f"{JOBSETS}/ling2"), ("POST", EVENTS)], ids=["patch", "event"]
)
async def test_a_missing_right_is_observed_until_the_server_accepts(
    method: str, path: str, scene: Any
) -> None:
    async with world(scene, watching=True, runs=[stored_run(scene)]) as w:
        said = "jobsets is forbidden: cannot patch"
        w.api.refuse(method, path, 403, "Forbidden", said)
        observed = await w.cluster.observe(*KEY)
        assert observed is not None
        assert observed.refusal is None
        plan = Plan(
            status=observed.run.status,
            actions=(SetSuspend("js-1", True, "Halted"),),
            events=(event(scene),),
        )
        with pytest.raises(ApiError):
            await w.cluster.execute(observed, plan)
        assert [request.method for request in w.api.writes] == ["PATCH", "POST"]
        again = await w.cluster.observe(*KEY)
        assert again is not None
        assert said in str(again.refusal)
        refused = find(reconcile(again).status.conditions, ConditionType.PERMITTED)
        assert refused is not None
        assert (refused.status, said in refused.message) == ("False", True)
        w.api.refusals.clear()
        await w.cluster.execute(again, plan)
        after = await w.cluster.observe(*KEY)
        assert after is not None
        assert after.refusal is None
