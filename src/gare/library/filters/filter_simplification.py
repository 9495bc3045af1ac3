"""Makes a filter flat before a store reads it, and refuses one that is still too deep.

Lance's SQL parser has a limit of about 23 levels. Past it, each further level of `NOT (NOT (…` takes 2.6
times as long: 38 take 15 seconds, and 49 hold a thread for good. So a store translates `simplify(where)`.
On two cores, Lance reads ten levels in 2 ms and a thousand conditions in half a second.
"""

from __future__ import annotations

from gare.errors import QueryError
from gare.library.filters.filter_tree import And, Filter, Not, Or

MOST_LEVELS = 10
"""Levels of `and` in `or` in `and` … that a store has to read."""
MOST_CONDITIONS = 1000
"""Conditions in one filter; the ids of an `IdIn` count as one."""


def simplify(where: Filter) -> Filter:
    """The same filter with `Not` at conditions only, no group of one, and no group in a group of its kind.

    >>> from gare.library.filters.filter_tree import HasTag
    >>> simplify(Not(Or((HasTag("a"), Not(And((HasTag("b"),)))))))
    And(filters=(Not(filter=HasTag(tag='a')), HasTag(tag='b')))

    Raises:
        QueryError: it is deeper than `MOST_LEVELS` or has more than `MOST_CONDITIONS`, even so.
    """
    return _Simplifier().read(where, negated=False, level=1)


class _Simplifier:
    """Only a group within a group of the other kind is a call deeper: no tree exhausts Python's stack."""

    def __init__(self) -> None:
        self._num_conditions = 0

    def read(self, where: Filter, *, negated: bool, level: int) -> Filter:
        where, negated = _unwrap(where, negated)
        if not isinstance(where, And | Or):
            self._count_condition()
            return Not(where) if negated else where
        if level > MOST_LEVELS:
            raise QueryError(
                f"this filter has and in or in and … more than {MOST_LEVELS} levels deep; write it with "
                "fewer brackets, such as (a b) or (a c), or search several times"
            )
        kind = _kind(where, negated)
        parts: list[Filter] = []
        pending = [(part, negated) for part in reversed(where.filters)]
        while pending:
            part, part_negated = _unwrap(*pending.pop())
            if isinstance(part, And | Or) and _kind(part, part_negated) is kind:
                pending += [(inner, part_negated) for inner in reversed(part.filters)]
                continue
            simple = self.read(part, negated=part_negated, level=level + 1)
            parts += simple.filters if isinstance(simple, kind) else (simple,)
        return parts[0] if len(parts) == 1 else kind(tuple(parts))

    def _count_condition(self) -> None:
        self._num_conditions += 1
        if self._num_conditions > MOST_CONDITIONS:
            raise QueryError(
                f"this filter has more than {MOST_CONDITIONS} conditions; search several times, or name "
                "items by id:a,b,c, which is one condition"
            )


def _unwrap(where: Filter, negated: bool) -> tuple[Filter, bool]:
    """The filter within `Not`s and groups of one, and whether it is negated."""
    while True:
        match where:
            case Not(inner):
                where, negated = inner, not negated
            case And((only,)) | Or((only,)):
                where = only
            case _:
                return where, negated


def _kind(group: And | Or, negated: bool) -> type[And] | type[Or]:
    """By De Morgan: a negated `And` is an `Or` of negated parts."""
    return And if isinstance(group, And) != negated else Or
