"""Exact search over shards: every shard proves the best of its own items, and the proofs together are one.

A shard's proof says that none of its items beyond its list scores more than its bound. The last hit of the
merged list scores at least as much as the last of every shard's list, so that all bounds lie below it.

A shard that does not answer in time, or is dead, is named in the answer and not waited for again until it is
back: Ray starts it anew, and it opens its cards from the cache of its machine or makes them again.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from gare.cluster.card_shard import CardShard, IdRange, ShardAnswer
from gare.errors import ClusterError, TimeLimitError
from gare.library.filters import Filter
from gare.library.library import Library
from gare.library.search.bound_table import Progress
from gare.library.search.query_vectors import EncodedQuery
from gare.library.search.ranked_items import Ranking
from gare.library.search.search_hit import Certificate
from gare.library.search.searcher import Searcher

DEFAULT_SECONDS = 20.0
"""How long a search waits for its shards."""
_MARGIN_S = 2.0  # of which a shard has less, so that it can say itself that its time was up
_log = logging.getLogger("gare.library")


@dataclass
class _Shard:
    ids: IdRange
    actor: Any
    model: Any
    """Where Ray keeps the model; held here, so that a shard which is started anew finds it."""
    sign_of_life: Any = None
    """The call that opens a shard; until it is answered, the shard is not asked."""

    @property
    def is_lost(self) -> bool:
        """Whether it did not answer and has not come back. It costs no time to ask."""
        if self.sign_of_life is None:
            return False
        import ray

        if not ray.wait([self.sign_of_life], timeout=0)[0]:
            return True
        try:
            ray.get(self.sign_of_life, timeout=0)
        except Exception:  # dead again, or still
            self.lose()
            return True
        self.sign_of_life = None
        _log.info("shard %s is open", self.ids)
        return False

    def lose(self) -> None:
        """Do not ask it until it is open, again or for the first time."""
        self.sign_of_life = self.actor.open.remote(self.model)


class ShardedSearch:
    """Finds the best items for certain, with the cards in other processes. Used as `ProvenSearch` is."""

    def __init__(self, searcher: Searcher, shards: list[_Shard], seconds: float) -> None:
        self.searcher, self.shards, self.seconds = searcher, shards, seconds
        self.on_progress: Progress = lambda done, total: None
        """Never called: shards make their cards by themselves."""
        self._mutex = threading.Lock()

    @torch.no_grad()
    def find(self, query: EncodedQuery, wanted: int, where: Filter | None) -> Ranking:
        """The best items of all shards that answered; `missing` names the ranges of the others."""
        import ray

        with self._mutex:
            asked = [shard for shard in self.shards if not shard.is_lost]
        sent = ray.put((query.to("cpu"), wanted, where))
        calls = [shard.actor.find.remote(sent, self.seconds - _MARGIN_S) for shard in asked]
        done = set(ray.wait(calls, num_returns=len(calls), timeout=self.seconds)[0]) if calls else set()
        answers: list[ShardAnswer] = []
        missing = [shard for shard in self.shards if shard not in asked]
        for shard, call in zip(asked, calls, strict=True):
            if call not in done:
                self._lose(shard, "it did not answer in time")
            answer = self._take(shard, call) if call in done else None
            if answer is None:
                missing.append(shard)
            else:
                answers.append(answer)
        for answer in answers:
            self.searcher.damaged.note(answer.damaged)
        ranking = merge([answer.ranking for answer in answers], wanted, self.searcher.model.device)
        if missing:
            names = tuple(sorted(str(shard.ids) for shard in missing))
            return replace(ranking, certificate=None, missing=names)
        return ranking

    def can_certify(self) -> bool:
        """No: the cards are elsewhere."""
        return False

    def certify(
        self, query: EncodedQuery, ranking: Ranking, wanted: int, where: Filter | None
    ) -> Certificate | None:
        """None: the cards are elsewhere, so that no proof comes at no cost."""
        return None

    def warm_up(self) -> None:
        """Nothing: a shard warms up when it is opened."""

    def prepare(self) -> None:
        """Nothing: shards make their cards when they are first asked."""

    def _take(self, shard: _Shard, call: Any) -> ShardAnswer | None:
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            answer: ShardAnswer = ray.get(call, timeout=self.seconds)
        except RayTaskError as error:
            cause = error.as_instanceof_cause()
            if isinstance(cause, TimeLimitError):  # it lives, and goes on with its cards at the next search
                return None
            if isinstance(cause, ClusterError):
                self._lose(shard, "it was started anew")
                return None
            raise cause from None
        except RayError as error:
            self._lose(shard, f"{type(error).__name__}; it is started anew")
            return None
        return answer

    def _lose(self, shard: _Shard, why: str) -> None:
        _log.warning("shard %s is lost: %s", shard.ids, why)
        with self._mutex:
            shard.lose()


def merge(rankings: Sequence[Ranking], wanted: int, device: torch.device) -> Ranking:
    """The best `wanted` of all, with one proof where each has one."""
    best = Ranking.nothing()
    for ranking in rankings:
        best = best.merged(ranking, wanted) if len(ranking) else best
    best = replace(best, frames=best.frames.to(device))
    proofs = [ranking.certificate for ranking in rankings]
    if not proofs or any(proof is None for proof in proofs):
        return best
    found = [proof for proof in proofs if proof is not None]
    bounds = [proof.next_bound for proof in found if proof.next_bound is not None]
    certificate = Certificate(
        sum(proof.num_items for proof in found),
        sum(proof.num_scored for proof in found),
        best.scores[-1] if bounds else None,
        max(bounds, default=None),
        sum(proof.num_refined for proof in found),
    )
    return replace(best, certificate=certificate)


@contextmanager
def sharded(
    library: Library, num_shards: int, *, seconds: float = DEFAULT_SECONDS, on_gpu: bool | None = None
) -> Iterator[None]:
    """Exact searches of this library go to shards on the cluster that the process is connected to.

    Args:
        num_shards: in how many ranges the items are held.
        seconds: how long a search waits for all of them.
        on_gpu: each has a GPU; default: where the cluster has as many.

    Raises:
        ClusterError: the numbers cannot be.
    """
    import ray

    if num_shards < 1 or seconds <= _MARGIN_S:
        raise ClusterError(f"give at least one shard, and more than {_MARGIN_S:g} seconds to answer")
    if on_gpu is None:
        on_gpu = ray.cluster_resources().get("GPU", 0) >= num_shards
    made: list[Any] = []

    def make(searcher: Searcher) -> ShardedSearch:
        model = ray.put(copy.deepcopy(searcher.model).to("cpu"))
        kind = ray.remote(CardShard).options(
            num_cpus=0 if on_gpu else 1,
            num_gpus=int(on_gpu),
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=2,
        )
        shards = [
            _Shard(ids, kind.remote(library.home.address, ids, on_gpu), model)
            for ids in IdRange.split(num_shards)
        ]
        made.extend(shard.actor for shard in shards)
        for shard in shards:
            shard.lose()
        opened = [shard.sign_of_life for shard in shards]
        ray.wait(opened, num_returns=len(opened), timeout=seconds)
        return ShardedSearch(searcher, shards, seconds)

    library.search_exactly_with(make)
    try:
        yield
    finally:
        library.search_exactly_with(None)
        for actor in made:
            ray.kill(actor)
