"""The JobSet of a scene's run, and its parts that tests look at."""

from typing import Any

from ling_operator.jobset import build_jobset


def build(scene: Any, attempt: int = 1, restore: int | None = None, **spec: Any) -> dict[str, Any]:
    return build_jobset(scene.run(**spec), attempt=attempt, restore_before_step=restore)


def job(jobset: dict[str, Any]) -> dict[str, Any]:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]


def pod(jobset: dict[str, Any]) -> dict[str, Any]:
    return job(jobset)["template"]["spec"]


def trainers(jobset: dict[str, Any]) -> list[dict[str, Any]]:
    return [c for c in pod(jobset)["containers"] if c["name"].startswith("jax-tpu")]


def trainer(jobset: dict[str, Any]) -> dict[str, Any]:
    return trainers(jobset)[0]


def environment(jobset: dict[str, Any], container: int = 0) -> dict[str, Any]:
    variables = trainers(jobset)[container]["env"]
    return {v["name"]: v.get("value", v.get("valueFrom")) for v in variables}
