"""What `helm test` runs, in the operator's image and with its rights: can it do its work?

Arguments: NAMESPACE/NAME of the Lease, and the namespaces watched; none for all.
"""

import asyncio
import sys
from datetime import UTC, datetime

from ling_operator.connection import discover
from ling_operator.rest import ApiError, RestClient

RUNS = "/apis/ling.primatrix.io/v1alpha1"
LEASES = "/apis/coordination.k8s.io/v1"
PATIENCE_SECONDS = 60
FRESH_SECONDS = 30


async def check(lease: str, *namespaces: str) -> None:
    """List TrainingRuns; wait for a leader that renews its Lease."""
    namespace, name = lease.split("/")
    async with RestClient(discover(None)) as client:
        for each in namespaces or [""]:
            scope = f"/namespaces/{each}" if each else ""
            runs = await client.get(f"{RUNS}{scope}/trainingruns", limit="1")
            count = len(runs["items"]) + runs["metadata"].get("remainingItemCount", 0)
            print(f"TrainingRuns are served: {count} in {each or 'all namespaces'}")
        seen = "no Lease"
        for _ in range(PATIENCE_SECONDS):
            try:
                spec = (await client.get(f"{LEASES}/namespaces/{namespace}/leases/{name}"))["spec"]
            except ApiError as error:
                if not error.is_not_found:
                    raise
            else:
                holder, renewed = spec.get("holderIdentity"), spec.get("renewTime")
                seen = f"held by {holder or 'nobody'}, renewed {renewed}"
                if holder and renewed and _age(renewed) < FRESH_SECONDS:
                    print(f"Lease {lease}: {seen}")
                    return
            await asyncio.sleep(1)
    sys.exit(f"no leader after {PATIENCE_SECONDS} s: Lease {lease}: {seen}")


def _age(renewed: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(renewed)).total_seconds()


asyncio.run(check(*sys.argv[1:]))
