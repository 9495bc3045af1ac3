"""`gare index --ray`: a run is planned here, and worked on by every machine of a Ray cluster.

    this process ── plan ──▶ shards in the library ◀── lease, commit ── a worker on each machine
         └─ watches the shards                                             ▲ started and replaced
                                                          a supervisor, somewhere on the cluster

Workers and supervisor are detached: they go on when this process ends. Machines that come get a worker,
machines that go lose theirs, and the leases of what was lost run out.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from gare.cluster.ray_link import NAMESPACE, Node, alive_nodes, end_actor, find_actor, get, unfit_nodes
from gare.cluster.run_status import RunStatus
from gare.cluster.shard_ledger import LEASE_S, Run, Shard, ShardLedger, choose_shard_size, cut_into_shards
from gare.cluster.shard_worker import OUTAGE_S, ShardWorker, options_to_plain
from gare.errors import ClusterError, GareError, LibraryError, SlowClusterError
from gare.library.index.index_report import IndexReport
from gare.library.index.index_run import IndexOptions, note_source, plan_folders
from gare.library.index.scan import is_below
from gare.library.library import Library
from gare.library.store import open_store
from gare.version import __version__

_LOOK_S = 1.0
_ANSWER_S = 5.0
_TROUBLE_S = 60.0
"""How long the cluster may be unable to use the library, before whoever watches is told."""
_MOST_STARTS = 10
"""So often the worker of a machine is started in a run; one that ends each time is left alone then."""
_STUCK_CODE = 75


@dataclass(frozen=True)
class WorkerKind:
    """What the workers of a run have in common."""

    library: str
    device: str = "auto"
    worker_type: Callable[..., ShardWorker] = ShardWorker


def index_on_cluster(
    library: Library,
    sources: Sequence[str],
    *,
    options: IndexOptions | None = None,
    on_status: Callable[[RunStatus], None] = lambda status: None,
    is_interrupted: Callable[[], bool] = lambda: False,
    detach: bool = False,
    device: str = "auto",
    files_per_shard: int | None = None,
    lease_s: float = LEASE_S,
    worker_type: Callable[..., ShardWorker] = ShardWorker,
) -> IndexReport:
    """Bring the library up to date with these sources, on the cluster that this process is connected to.

    A run with the same arguments that is under way, or was stopped, is joined; everything it has done stays.

    Args:
        sources: folders and files that every machine sees under the same name.
        on_status: called about once a second.
        is_interrupted: asked about once a second; when it says so, the run is stopped, and the report says
            `interrupted`.
        detach: when interrupted, leave the run to the cluster instead.
        files_per_shard: what a worker leases at once; default: a few shards for each machine.
        lease_s: a worker that has been silent for so long has lost its shard.

    Raises:
        ClusterError: no machine could work.
        LibraryError: another run is under way, or the library cannot be used.
    """
    if library.wanted_model is not None:
        raise LibraryError(
            "a cluster does not change the model of a library; do that on one machine first, without --ray"
        )
    started = time.monotonic()
    options = options or IndexOptions()
    ledger = ShardLedger(library.home.records())
    run = _join(ledger, sources, options)
    if run is None:
        run = _plan(library, ledger, sources, options, files_per_shard, lease_s)
    if run.state == "finished":  # nothing is new, changed or gone: no machine has to be asked
        report = RunStatus(run, (), {}).report()
        report.seconds = time.monotonic() - started
        return report
    _check_machines(ledger, run)
    kind = WorkerKind(library.home.address, device, worker_type)
    status = _watch(ledger, run, kind, on_status, is_interrupted, detach)
    report = status.report()
    report.seconds = time.monotonic() - started
    return report


def _join(ledger: ShardLedger, sources: Sequence[str], options: IndexOptions) -> Run | None:
    """The run that was asked for with the same words and is not finished."""
    run = ledger.run()
    if run is None or run.state not in ("running", "stopping"):
        return None
    if not run.is_for(sources, options_to_plain(options)):
        return None
    if run.state == "running" and find_actor(_supervisor_name(run)) is not None:
        return run
    return ledger.take_up(run)


def _plan(
    library: Library,
    ledger: ShardLedger,
    sources: Sequence[str],
    options: IndexOptions,
    files_per_shard: int | None,
    lease_s: float,
) -> Run:
    run = ledger.begin(sources, options_to_plain(options), lease_s=lease_s)
    try:
        planned = plan_folders(
            library.store, library.model, sources, options=options, skip=[library.home.uri]
        )
    except GareError as error:
        with suppress(LibraryError):
            ledger.set_state("finished", f"it could not be planned: {error}")
        raise
    plan = planned.plan
    files = plan.files
    if files_per_shard is None:
        num_machines = sum(node.num_cpus > 0 for node in alive_nodes())
        files_per_shard = choose_shard_size(len(files), num_machines)
    started = ledger.start(
        run,
        cut_into_shards(plan.new, plan.changed, files_per_shard=files_per_shard),
        plan.gone,
        [asdict(problem) for problem in plan.problems],
        segmentation=planned.segmentation,
        roots=tuple(planned.roots),
        read_roots=tuple(root for root in planned.roots if any(is_below(file.path, root) for file in files)),
        num_unchanged=plan.num_unchanged,
        num_failed_before=len(plan.failed_before),
        skipped_roots=planned.skipped_roots,
    )
    if plan.num_to_do or plan.gone:
        return started
    note_source(library.store, planned.roots, planned.segmentation)
    return ledger.set_state("finished") or started


def _check_machines(ledger: ShardLedger, run: Run) -> None:
    """Refuse a cluster with machines that cannot work on a run. One that is under way has been checked, and
    its supervisor checks the machines that join."""
    if find_actor(_supervisor_name(run)) is not None or not (unfit := unfit_nodes(alive_nodes())):
        return
    found = ", ".join(f"{name} has {version}" for name, version in sorted(unfit.items()))
    message = (
        f"every machine of the cluster needs gare {__version__}: {found}. Install it there, or take the "
        "machine out; then run the same command"
    )
    ledger.set_state("stopping", message)
    raise ClusterError(message)


def _watch(
    ledger: ShardLedger,
    run: Run,
    kind: WorkerKind,
    on_status: Callable[[RunStatus], None],
    is_interrupted: Callable[[], bool],
    detach: bool,
) -> RunStatus:
    """Look on until the run is over. Storage that is away for a while is the workers' trouble, not ours."""
    seen = well = time.monotonic()
    rest = _Rest()
    while True:
        try:
            trouble, patience_s = _ask_supervisor(run, kind)
            if is_interrupted() and not detach:
                ledger.set_state("stopping")
            status = RunStatus.read(ledger)
            seen = time.monotonic()
        except LibraryError:
            if time.monotonic() - seen > max(OUTAGE_S, run.lease_s):
                raise
            well = time.monotonic()  # the storage is away for us too: no fault of the cluster
            time.sleep(_LOOK_S)
            continue
        if status is None or status.run.run_id != run.run_id:
            raise LibraryError("another run has taken the place of this one; run the command again")
        on_status(status)
        if status.run.message:
            raise ClusterError(status.run.message)
        if status.run.state == "finished" or (is_interrupted() and detach and not trouble):
            return status  # who detaches waits for a supervisor that has begun: nobody else would start one
        if status.run.state == "stopping" and rest.has_come(status.run, status.shards):
            return status
        well = well if trouble else time.monotonic()
        if time.monotonic() - well > max(patience_s, run.lease_s):
            raise ClusterError(f"the cluster cannot work on this library: {trouble}")
        time.sleep(_LOOK_S)


class _Rest:
    """Tells when a run that was stopped, by whomever, has come to rest."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stopped: float | None = None

    def has_come(self, run: Run, shards: Iterable[Shard]) -> bool:
        """Whether the workers of a run that is stopped have given back their shards, or are silent."""
        self._stopped = self._clock() if self._stopped is None else self._stopped
        is_worked_on = any(shard.state == "leased" for shard in shards)
        return not is_worked_on or self._clock() - self._stopped > 2 * run.lease_s


# --- on the cluster -----------------------------------------------------------------------------------------


def _ask_supervisor(run: Run, kind: WorkerKind) -> tuple[str, float]:
    """What keeps the supervisor of a run from working, if anything, and how many seconds that may last.

    One that is not there is started; Ray starts it again when its machine dies.
    """
    import ray

    name = _supervisor_name(run)
    supervisor = find_actor(name)
    if supervisor is None:
        actor = ray.remote(num_cpus=0, max_restarts=-1)(Supervisor)
        options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
        actor.options(**options).remote(run.run_id, kind)
        return "its supervisor does not start", _TROUBLE_S  # unless the next look finds it
    try:
        word = get(supervisor.trouble.remote(), "a word of the supervisor", seconds=_ANSWER_S)
        return str(word), _TROUBLE_S
    except SlowClusterError as error:  # on a busy machine it takes minutes to start
        return str(error), OUTAGE_S
    except ClusterError as error:  # it is just being started again, or has ended with the run
        return str(error), _TROUBLE_S


def _supervisor_name(run: Run) -> str:
    return f"index-supervisor-{run.run_id}"


class Supervisor:
    """Keeps one worker alive on each machine until the run is over. It has nothing to remember."""

    def __init__(self, run_id: str, kind: WorkerKind) -> None:
        self._run_id, self._kind = run_id, kind
        self._starts: dict[str, int] = {}
        self._worked = time.monotonic()
        self._trouble = ""
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self._thread.start()

    def trouble(self) -> str:
        """Why its last look failed; nothing if it did not."""
        return self._trouble

    def _look_on(self) -> None:
        ledger: ShardLedger | None = None
        rest = _Rest()
        while True:
            try:
                ledger = ledger or ShardLedger(open_store(self._kind.library).records())
                run = ledger.run()
                if run is None or run.run_id != self._run_id or run.state == "finished":
                    break
                if run.state == "stopping":
                    if rest.has_come(run, ledger.shards(run)):
                        break
                else:
                    rest = _Rest()  # it may have been stopped and taken up again
                    self._look_after_all(ledger)
                self._trouble = ""
            except Exception as error:  # storage or a machine that is away; the next look is soon
                self._trouble = f"{type(error).__name__}: {error}"
            time.sleep(_LOOK_S)
        for node_id in self._starts:
            if (worker := find_actor(self._worker_name(node_id))) is not None:
                end_actor(worker)
        _end_myself()

    def _look_after_all(self, ledger: ShardLedger) -> None:
        """Start workers that are not there, and end the run where no machine can work.

        Where there is none, one is waited for: those of Kubernetes start after the head.
        """
        nodes = [node for node in alive_nodes() if node.num_cpus]
        self._refuse_unfit(nodes, ledger)
        if any([self._look_after(node) for node in nodes]):
            self._worked = time.monotonic()
        elif nodes or time.monotonic() - self._worked > OUTAGE_S:
            self._give_up(ledger)

    def _refuse_unfit(self, nodes: Sequence[Node], ledger: ShardLedger) -> None:
        """Give no work to machines that have another version. All that are new are asked at once."""
        new = [node for node in nodes if node.node_id not in self._starts]
        unfit = unfit_nodes(new) if new else {}
        for node in new:
            self._starts[node.node_id] = _MOST_STARTS if node.name in unfit else 0
            if node.name in unfit:
                needed = f"has {unfit[node.name]}, and the run needs gare {__version__}"
                ledger.note_trouble(node.name, needed)

    def _look_after(self, node: Node) -> bool:
        """Start the worker of a machine where it is not there; whether the machine can work at all."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        name = self._worker_name(node.node_id)
        if self._starts[node.node_id] and find_actor(name) is not None:
            return True
        if self._starts[node.node_id] >= _MOST_STARTS:
            return False
        self._starts[node.node_id] += 1
        actor = ray.remote(num_cpus=node.num_cpus, num_gpus=min(node.num_gpus, 1), max_restarts=0)(
            WorkerActor
        )
        actor.options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
        ).remote(self._kind, node)
        return True

    def _worker_name(self, node_id: str) -> str:
        return f"index-worker-{self._run_id}-{node_id}"

    def _give_up(self, ledger: ShardLedger) -> None:
        troubles = [f"{node}: {error}" for node, error in sorted(ledger.troubles().items())]
        reason = "; ".join(troubles) or "no machine of the cluster has a processor to spare"
        ledger.set_state("finished", f"no machine can work. {reason}. The same command plans what is left")


class WorkerActor:
    """A worker in an actor of its own. Its thread begins with it: nobody has to call it."""

    def __init__(self, kind: WorkerKind, node: Node) -> None:
        self._kind, self._node = kind, node
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        import torch

        try:
            torch.set_num_threads(self._node.num_cpus)
            worker = self._kind.worker_type(
                self._kind.library,
                node=self._node.name,
                device=_choose_device(self._kind.device),
                num_processes=self._node.num_cpus,
                on_stuck=lambda: os._exit(_STUCK_CODE),
            )
            worker.run()
            worker.close()
        except Exception as error:
            with suppress(LibraryError):
                ledger = ShardLedger(open_store(self._kind.library).records())
                kind = "" if isinstance(error, ClusterError) else f"{type(error).__name__}: "
                ledger.note_trouble(self._node.name, f"{kind}{error}")
        _end_myself()


def _choose_device(wanted: str) -> str:
    import torch

    if wanted != "auto":
        return wanted
    return "cuda" if torch.cuda.is_available() else "cpu"


def _end_myself() -> None:
    import ray

    end_actor(ray.get_runtime_context().current_actor)
