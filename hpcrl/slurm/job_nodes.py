"""Nodes of a run's job with spare ones (``job.spare_nodes``): which roles use, which are spare, and which are lost.

The job asks for more nodes than roles need, and keeps the others when one goes down (``--no-kill``). Roles use the
first healthy nodes of each component. A node that was lost once is not used again in the job, even if it comes back:
Slurm has removed it from the job.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping

from hpcrl.config.plan import Plan
from hpcrl.errors import HpcrlError
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.errors import SlurmError
from hpcrl.slurm.hostlist import expand_hostlist
from hpcrl.slurm.launch_arguments import Allocation, hosts_from_env

_log = logging.getLogger(__name__)

REMOVED = "Slurm removed the node from the job"
WENT_DOWN = "the node went down"
DID_NOT_ANSWER = "no step could be started on the node"


class TooFewNodesError(HpcrlError):
    """A component has fewer healthy nodes than its roles need."""


class JobNodes:
    """Nodes of the supervisor's job, over all attempts in it.

    Parameters
    ----------
    plan:
        A plan with spare nodes.
    environ:
        Environment of the batch process, which has the nodes with which the job began.
    client:
        Client that is asked which nodes the job still has.

    Attributes
    ----------
    lost:
        Nodes that are not used any more, with the reason of each.
    own_pids:
        Processes of the supervisor that hold steps in the job and are no roles.
    """

    def __init__(self, plan: Plan, environ: Mapping[str, str], client: SlurmClient) -> None:
        self._plan, self._client = plan, client
        self._job_id = environ.get("SLURM_JOB_ID", "")
        self._hosts = hosts_from_env(plan, environ)
        self._lock = threading.Lock()
        self._news: dict[str, str] = {}
        self.lost: dict[str, str] = {}
        self.own_pids: set[int] = set()

    def allocations(self) -> dict[tuple[int, int], Allocation]:
        """Return the nodes that roles use: of each component the first ones that are not lost.

        Raises
        ------
        TooFewNodesError
            A component has too few.
        """
        found = {}
        for index, hosts in self._healthy().items():
            needed = self._plan.layout.components[index].nodes
            if len(hosts) < needed:
                gone = ", ".join(sorted(set(self._hosts[index]) & set(self.lost)))
                raise TooFewNodesError(
                    f"{len(hosts)} nodes are left of component {index}, which needs {needed}; lost are {gone}"
                )
            # in Slurm's order, in which it numbers the tasks of a step
            found[index, 0] = Allocation(hosts[:needed])
        return found

    def idle(self) -> list[str]:
        """Return the spare nodes that are left, in the order of their use."""
        components = self._plan.layout.components
        return [host for index, hosts in self._healthy().items() for host in hosts[components[index].nodes :]]

    def enough_without(self, nodes: Collection[str]) -> bool:
        """Return whether spare nodes can replace ``nodes``."""
        components = self._plan.layout.components
        left = {index: set(hosts) - set(nodes) for index, hosts in self._healthy().items()}
        return all(len(hosts) >= components[index].nodes for index, hosts in left.items())

    def lose(self, reasons: Mapping[str, str]) -> dict[str, str]:
        """Use these nodes no more; return those that are news, with the reason of each.

        Nodes of other jobs are left out.
        """
        mine = {host for hosts in self._hosts.values() for host in hosts}
        with self._lock:
            news = {node: why for node, why in reasons.items() if node in mine and node not in self.lost}
            self.lost |= news
            self._news |= news
        return news

    def take_news(self) -> dict[str, str]:
        """Return the lost nodes that no earlier call has returned, with the reason of each."""
        with self._lock:
            news, self._news = self._news, {}
        return news

    def look(self) -> dict[str, str]:
        """Ask Slurm which nodes the job has lost, and use these no more; return those that are news.

        Without an answer nothing changes.
        """
        try:
            records = self._client.details(int(self._job_id))
            has = {node for record in records for node in expand_hostlist(record.get("NodeList", ""))}
            down = {node.name for node in self._client.nodes(has) if node.down}
        except (SlurmError, ValueError) as error:
            _log.warning("Slurm does not say which nodes the job still has: %s", error)
            return {}
        if not has:
            return {}
        gone = {host for hosts in self._healthy().values() for host in hosts if host not in has}
        return self.lose({**dict.fromkeys(gone, REMOVED), **dict.fromkeys(down, WENT_DOWN)})

    @property
    def steps_overlap(self) -> bool:
        """Return whether new steps must be allowed to overlap with those that Slurm believes to run.

        Slurm ends a step of a lost node only when it declares the node down, minutes later. And when a step ends that
        began before the job lost a node, Slurm 22.05 does not count its GPUs as free ("dealloc count underflow").
        A new step would wait in both cases.
        """
        return bool(self.lost)

    def other_than(self, node: str) -> tuple[int, str] | None:
        """Return component and name of another healthy node, a spare one where there is one; None without any."""
        found = [(index, host) for index, hosts in self._healthy().items() for host in hosts if host != node]
        spare = set(self.idle())
        return next((entry for entry in found if entry[1] in spare), found[-1] if found else None)

    def _healthy(self) -> dict[int, tuple[str, ...]]:
        with self._lock:
            return {
                index: tuple(host for host in hosts if host not in self.lost) for index, hosts in self._hosts.items()
            }
