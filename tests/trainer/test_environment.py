"""What a process is told by its environment."""

from pathlib import Path

import pytest

from ling_trainer.environment import ALONE, Group, group_of, read_environment
from ling_trainer.schema import ConfigError

OURS = {"LING_COORDINATOR_ADDRESS": "run-slice-job-0-0.run:8476", "LING_NUM_PROCESSES": "6"}
JOBSET = {"LING_SLICE_INDEX": "1", "LING_HOSTS_PER_SLICE": "3", "LING_HOST_INDEX": "2"}
GKE = {
    "TPU_WORKER_ID": "1",
    "TPU_WORKER_HOSTNAMES": "a-0.svc,a-1.svc",
    "TPU_PROCESS_ADDRESSES": "a-0.svc:8471,a-1.svc:8471",
}
SLICES = {
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "a-0.svc:8081",
}


@pytest.mark.parametrize(
    ("environ", "group"),
    [
        ({}, ALONE),
        (OURS | {"LING_PROCESS_ID": "4"}, Group("run-slice-job-0-0.run:8476", 6, 4)),
        (OURS | JOBSET, Group("run-slice-job-0-0.run:8476", 6, 5)),
        (OURS | JOBSET | GKE | SLICES, Group("run-slice-job-0-0.run:8476", 6, 5)),
        (
            OURS | JOBSET | {"LING_CONTAINERS_PER_HOST": "1", "LING_CONTAINER_INDEX": "0"},
            Group("run-slice-job-0-0.run:8476", 6, 5),
        ),
        (
            OURS
            | {"LING_NUM_PROCESSES": "12", "LING_CONTAINERS_PER_HOST": "2"}
            | JOBSET
            | {"LING_CONTAINER_INDEX": "1"},
            Group("run-slice-job-0-0.run:8476", 12, 11),
        ),
        (OURS | JOBSET | {"LING_CONTAINER_INDEX": "7"}, Group("run-slice-job-0-0.run:8476", 6, 5)),
        (GKE, Group("a-0.svc:8476", 2, 1)),
        (GKE | SLICES, Group("a-0.svc:8476", 4, 3)),
        ({"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}, ALONE),
    ],
)
def test_a_process_finds_its_place(environ, group):
    assert group_of(environ) == group


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        (OURS | {"LING_PROCESS_ID": "6"}, "process 6, counted from 0, of LING_NUM_PROCESSES=6"),
        (OURS | {"LING_PROCESS_ID": "-1"}, "LING_PROCESS_ID='-1'"),
        (OURS, "LING_HOSTS_PER_SLICE=''"),
        (OURS | JOBSET | {"LING_HOST_INDEX": "3"}, "LING_HOST_INDEX=3 must be below"),
        (
            OURS | JOBSET | {"LING_CONTAINERS_PER_HOST": "2", "LING_CONTAINER_INDEX": "2"},
            "LING_CONTAINER_INDEX=2 must be below LING_CONTAINERS_PER_HOST=2",
        ),
        ({"LING_COORDINATOR_ADDRESS": "host"}, "write host:port"),
        ({"LING_COORDINATOR_ADDRESS": "host:1"}, "LING_NUM_PROCESSES=''"),
        ({"LING_ATTEMPT": "two"}, "LING_ATTEMPT='two'"),
    ],
)
def test_a_wrong_variable_is_named_with_its_value(environ, problem):
    with pytest.raises(ConfigError) as error:
        read_environment(environ)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        ({}, "127.0.0.1"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, ""),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "POD_IP": "10.1.2.3"}, "10.1.2.3"),
    ],
)
def test_metrics_are_served_on_the_pods_address_and_outside_a_cluster_on_loopback(
    environ, address
):
    assert read_environment(environ).metrics_address == address


def test_what_is_not_said_has_a_harmless_default():
    environment = read_environment({})
    assert environment.attempt == 0
    assert environment.restore_before_step is None
    assert environment.termination_log is None
    assert not environment.fault_injection_allowed
    assert read_environment({"LING_TERMINATION_LOG": "/x"}).termination_log == Path("/x")


def test_without_a_variable_the_kubelets_mounts_say_which_pod_it_is(tmp_path: Path) -> None:
    uid = "0b7c7f4e-5d3a-4b7e-9a53-0d8f1f7c2a11"
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "621 615 0:64 / /proc rw,nosuid - proc proc rw\n"
        f"640 612 8:1 /var/lib/kubelet/pods/{uid}/etc-hosts /etc/hosts rw - ext4 /dev/sda1 rw\n"
    )
    assert read_environment({}, mounts=mounts).pod_uid == uid
    assert read_environment({"POD_UID": "said"}, mounts=mounts).pod_uid == "said"
    mounts.write_text(
        "640 612 8:1 /var/lib/pods/mine/etc-hosts /etc/hosts rw - ext4 /dev/sda1 rw\n"
    )
    assert read_environment({}, mounts=mounts).pod_uid == ""
    assert read_environment({}, mounts=tmp_path / "none").pod_uid == ""
