"""How long a run's name may be: a pod is called <name>-slice-job-<slice>-<host>-<5 random ones>.

Once as a function, and once in CEL, which the API server asks at `kubectl apply`.
"""

REPLICATED_JOB = "slice-job"

_TPU = "self.spec.tpu"
_TOPOLOGY = (
    f"has({_TPU}.topology) ? {_TPU}.topology : "
    f"{_TPU}.accelerator.matches('^[a-z0-9]+-[0-9]{{1,4}}(x[0-9]{{1,4}}){{1,2}}$') ? "
    f"{_TPU}.accelerator.split('-')[1] : ''"
)
_CHIPS_OF_TYPE = (
    f"{_TPU}.accelerator.matches('^(v4|v5p|tpu7x)-[0-9]{{1,6}}$') ? "
    f"int({_TPU}.accelerator.split('-')[1]) / 2 : "
    f"{_TPU}.accelerator.matches('^(v5e|v5litepod|v6e)-[0-9]{{1,6}}$') ? "
    f"int({_TPU}.accelerator.split('-')[1]) : 0"
)
# CEL has no variables: a list of one value, mapped, is one. A host has four chips, or one.
_CHIPS = (
    f"[{_TOPOLOGY}].map(t, t == '' ? ({_CHIPS_OF_TYPE}) : "
    "[t.split('x').map(axis, int(axis))]"
    ".map(axes, axes[0] * axes[1] * (axes.size() == 3 ? axes[2] : 1))[0])"
)
_LAST_HOST = (
    f"(has({_TPU}) ? {_CHIPS}.map(chips, chips < 8 ? 0 : chips / 4 - 1)[0] : "
    "has(self.spec.cpu) ? self.spec.cpu.processes - 1 : 0)"
)
NAME_BUDGET_RULE = (
    "size(self.metadata.name) <= 45"
    f" - size(string(has({_TPU}) ? {_TPU}.slices - 1 : 0))"
    f" - size(string({_LAST_HOST}))"
)
"""CEL at the object's root; where it cannot tell the hosts, ten are assumed."""


def name_budget(*, slices: int, hosts: int) -> int:
    """Return the longest name whose pods' names fit 63 characters: 43 for up to 10 x 10."""
    fixed = len(f"-{REPLICATED_JOB}-{slices - 1}-{hosts - 1}-xxxxx")
    return 63 - fixed
