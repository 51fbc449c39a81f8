"""Observed state to plan. The centre of the operator; pure, and total. Start reading here."""

from ling_operator.plan import Observed, Plan


def reconcile(observed: Observed) -> Plan:
    """Decide. Same input, same plan; applying a plan twice is applying it once."""
    raise NotImplementedError
