"""The metrics page of a trainer, and the target whose page it is."""

from ling_operator.scrape import (
    ScrapeTarget,
)

RUN = 'run="r",run_namespace="ns"'
PAGE = f"""\
# HELP ling_step Last finished step; the first is 1.
# TYPE ling_step gauge
ling_step{{{RUN}}} 12.0
ling_target_steps{{{RUN}}} 200.0
ling_learning_loss{{{RUN}}} 3.25
ling_learning_lm_loss{{{RUN}}} 3.0
ling_learning_is_nan{{{RUN}}} 0.0
ling_learning_raw_grad_norm{{{RUN}}} 1.5
ling_learning_num_zeros{{{RUN}}} 7.0
ling_perf_tokens_per_second{{{RUN}}} 2048.5
ling_last_finite_step{{{RUN}}} 12.0
ling_last_nonfinite_step{{{RUN}}} 3.0
ling_last_finite_checkpoint_step{{{RUN}}} 10.0
ling_last_step_timestamp_seconds{{{RUN}}} 1.7672256e+09
ling_nonfinite_steps_consecutive_max{{{RUN}}} 1.0
# TYPE ling_nonfinite_steps_total counter
ling_nonfinite_steps_total{{{RUN},kind="nan",signal="NonFiniteLoss"}} 1.0
ling_nonfinite_steps_total{{{RUN},kind="inf",signal="NonFiniteGradient"}} 0.0
# TYPE ling_run_info gauge
ling_run_info{{{RUN},pod_uid="u1",process="0"}} 1.0
python_gc_objects_collected_total{{generation="0"}} 325.0
"""


def target(port: int = 1, *, host_network: bool = False) -> ScrapeTarget:
    return ScrapeTarget(ip="127.0.0.1", port=port, pod_uid="u1", host_network=host_network)
