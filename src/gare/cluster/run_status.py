"""Where an indexing run stands, as one line, as a page and as the report of its end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from gare.cluster.shard_ledger import Run, Shard, ShardLedger, count_done
from gare.cluster.shard_worker import add_reports
from gare.library.index.index_report import FileFailure, IndexReport

_STILL_S = 120.0
"""A shard that has stood still for so long is named."""
_START_S = 120.0
"""So long machines may start before that is called unusual."""


@dataclass(frozen=True)
class RunStatus:
    """A run and its shards, at one moment."""

    run: Run
    shards: tuple[Shard, ...]
    troubles: Mapping[str, str]
    """Why workers ended, by machine."""

    @classmethod
    def read(cls, ledger: ShardLedger) -> Self | None:
        """What the library says; None where there has been no run."""
        run = ledger.run()
        if run is None:
            return None
        shards = tuple(ledger.shards(run)) if run.started else ()  # it is planned, or could not be
        return cls(run, shards, ledger.troubles())

    @property
    def num_done(self) -> int:
        """Files that are done, those that failed included."""
        return sum(count_done(self.shards).values())

    @property
    def num_failed(self) -> int:
        """Files that failed."""
        return sum(len(shard.report["failures"]) if shard.report else shard.failed for shard in self.shards)

    @property
    def num_leased(self) -> int:
        """Shards that are worked on."""
        return sum(shard.state == "leased" for shard in self.shards)

    @property
    def seconds(self) -> float:
        """How long it goes on since it was last taken up, by the clock of this machine; or went on."""
        return max((self.run.ended or time.time()) - self.run.started, 1e-3)

    def rates(self) -> dict[str, float]:
        """Files a second since it was last taken up, by machine."""
        before, now = self.run.done_before, count_done(self.shards)
        return {
            node: max(0, count - before.get(node, 0)) / self.seconds
            for node, count in sorted(now.items())
            if node
        }

    def stuck(self) -> list[Shard]:
        """Shards where nothing has become ready for long."""
        return [shard for shard in self.shards if shard.state == "leased" and shard.still_s > _STILL_S]

    def line(self) -> str:
        """One line for a terminal."""
        parts = [shard for shard in self.shards if shard.num_files]
        over = sum(shard.is_over for shard in parts)
        rate = (self.num_done - sum(self.run.done_before.values())) / self.seconds
        words = [
            f"{self.num_done:,} of {self.run.num_files:,} files",
            f"{over:,} of {len(parts):,} shards",
            f"{self.num_failed:,} failed",
        ]
        if self.run.state == "running" and not over and not self.num_leased:
            words.append(self._what_is_waited_for())
        if self.run.state == "running" and rate > 0:
            minutes = (self.run.num_files - self.num_done) / rate / 60
            nodes = ", ".join(f"{node} {speed:.1f}" for node, speed in self.rates().items())
            words += [f"{rate:.1f} files/s ({nodes})", f"{minutes:.0f} min to go"]
        words += [
            f"shard {shard.number} on {shard.node} stands still for {shard.still_s:.0f} s at {shard.path}"
            for shard in self.stuck()
        ]
        return ", ".join(words)

    def _what_is_waited_for(self) -> str:
        if self.troubles:
            return "; ".join(f"{node}: {trouble}" for node, trouble in sorted(self.troubles.items()))
        if self.seconds < _START_S:
            return "the machines start"
        return (
            f"no machine has begun for {self.seconds:.0f} s: is none there, or are their processors in use?"
        )

    def to_json(self) -> dict[str, Any]:
        """The same for a program."""
        return {
            "state": self.run.state,
            "sources": list(self.run.sources),
            "num_files": self.run.num_files,
            "num_done": self.num_done,
            "num_failed": self.num_failed,
            "seconds": self.seconds,
            "files_per_second": self.rates(),
            "message": self.run.message,
            "troubles": dict(self.troubles),
            "shards": [
                {
                    "number": shard.number,
                    "state": shard.state,
                    "num_files": shard.num_files,
                    "done": shard.num_done,
                    "node": shard.node,
                    "attempt": shard.attempt,
                    "path": shard.path,
                    "still_s": shard.still_s,
                    "seconds": shard.seconds,
                    "error": shard.error,
                }
                for shard in self.shards
            ],
        }

    def report(self) -> IndexReport:
        """What the run did so far."""
        total = add_reports(*(_parse_report(shard.report) for shard in self.shards if shard.report))
        total.unchanged += self.run.num_unchanged
        total.failed_before += self.run.num_failed_before
        total.deleted = max(0, total.deleted - total.moved)  # a moved file is gone from where it was
        total.skipped_roots = dict(self.run.skipped_roots)
        total.interrupted = self.run.state != "finished"
        for shard in self.shards:
            if shard.state == "failed":
                message = f"its {shard.num_files:,} files were given up: {shard.error}"
                total.failures.append(FileFailure(f"shard {shard.number}", "shard", message, is_folder=True))
        return total


def _parse_report(plain: Mapping[str, Any]) -> IndexReport:
    values = {name: value for name, value in plain.items() if name not in ("failed", "failure_kinds")}
    return IndexReport(**{**values, "failures": [FileFailure(**each) for each in plain["failures"]]})
