"""Which requests are to be sent to an engine core that dies and comes back: a table without I/O.

The client feeds it what happens and carries out the actions it answers with. A request that it knows is *kept* (not at
the core) or *sent*. The core is *away*, *up*, or *leaving*: it still talks, but nothing can be sent to it any more.

================  ===================  =====================================  =========================================
event             away                 up                                     leaving
================  ===================  =====================================  =========================================
`add`             kept                 sent; kept while there are suspects    kept
`up`, same life   → up: send           (no change)                            → up: what was sent is sent again
`up`, new life    → up: judge, send    as `down`, then → up                   as `down`, then → up
`leave`           (no change)          → leaving                              orderly once, orderly for good
`down`            (no change)          → away: what was sent is kept and      the same, but for an orderly end nothing
                                       counts as *present*                    was present
`tokens`          may clear            may clear: then the next is sent       may clear
`forget`          forgotten            forgotten: then the next is sent       forgotten
================  ===================  =====================================  =========================================

**Judging** at the start of a new life: every request that was present at the end of the one before has a death more.
From `SUSPECT_AFTER` deaths on it is a *suspect*. While there is one, suspects are sent one at a time, and nothing else:
those with the most deaths first, then those that had got the fewest tokens in between, then the oldest. So one whose
core dies during its trial is tried again at once, and when the core dies then, too, it is *convicted* (`Fail`): after
`CONVICTED_AFTER` deaths that it had to itself. Of the deaths that a convict was present at, at most one is still held
against anybody else: the others go on together, and should there be another poison among them, it shows with the next
deaths.

*Why two.* A blow from outside looks like poison: the kernel's out-of-memory kill is a SIGKILL like anybody's. When
processes are killed in quick succession, one lonely death is bad luck. To be convicted, an innocent request must be hit
by four blows in a row, the last two within the few steps that each of its trials takes. Poison in company shows itself
by the same four deaths, which is one restart fewer than the default `--max-restarts` allows. With less (or with another
poison at the same time) the tree may end before the verdict, and every request with it.

*Why not ask how far it got.* Less than what clears (below) proves nothing: a core is ahead of what its client has
heard, so poison, too, gets a few tokens further with each life, up to the place that kills. Nor does a death without
any token prove guilt: a long prompt takes time, in which blows fall.

**Clearing.** A request is free of all its deaths when it ends, and when it has got `CLEARED_AFTER` tokens since the
last of them: what had to be computed when the core died, and what had been computed but not yet heard of, has been
computed again since, without harm. So a long request holds the others up for that many steps at most; one that makes
no progress at all is the watchdog's. A suspect that is cleared while others wait for their trial is taken back from the
core (`Park`), to be sent again when all are through: the next one must be alone, too.

A life that ends in good order (the core said so) is no death, nor is a connection that falls and comes back to the same
life.

A core with several API servers: each holds trials of its own and knows nothing of the others' requests, so *alone*
means among its own, and the poison of one may cost an innocent suspect of another. `xserve launch` starts one.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

SUSPECT_AFTER = 2
"""Deaths of the core."""
CONVICTED_AFTER = 2
"""Deaths of the core while the suspect was alone."""
CLEARED_AFTER = 16
"""Tokens. More than a core can be ahead of what its client has read, unless the client is far behind."""


class Send(NamedTuple):
    """Send it, with the output it has so far."""

    request_id: str


class Park(NamedTuple):
    """Abort it in the core and keep it: it will be sent again."""

    request_id: str


class Fail(NamedTuple):
    """It is forgotten here; tell whoever waits for it."""

    request_id: str
    deaths: int
    """How often the core has died with it."""


Action = Send | Park | Fail


class _Entry:
    __slots__ = ("alone", "before", "deaths", "number", "sent", "tokens")

    def __init__(self, number: int) -> None:
        self.number = number
        """Order of admission."""
        self.sent = False
        self.deaths: set[int] = set()
        """Numbers of the deaths that it was present at."""
        self.tokens = 0
        """Since the last of them."""
        self.before = 0
        """Tokens between the last two of them."""
        self.alone = 0
        """In how many of them it was on trial."""

    def clear(self) -> None:
        self.deaths.clear()
        self.alone = 0


class Replay:
    """See the module. One thread; every call answers the actions to carry out, in order."""

    def __init__(self) -> None:
        self.core: Literal["away", "up", "leaving"] = "away"
        self.deaths = 0
        """Of the core."""
        self.watched: set[str] = set()
        """Requests with a death: only theirs are the `tokens` that matter."""
        self._entries: dict[str, _Entry] = {}
        self._present: set[str] = set()
        """What was at the core when it went."""
        self._trying = False
        """There are suspects: most of what is kept is kept because of them."""
        self._trial: str | None = None
        """The suspect that is at the core, or was when it went."""
        self._orderly = False
        self._numbers = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def is_sent(self, request_id: str) -> bool:
        return self._entries[request_id].sent

    @property
    def suspects(self) -> list[str]:
        """Who is to be tried, the next one first."""
        found = [name for name in self.watched if len(self._entries[name].deaths) >= SUSPECT_AFTER]
        return sorted(found, key=self._rank)

    def _rank(self, name: str) -> tuple[int, int, int]:
        entry = self._entries[name]
        return -len(entry.deaths), entry.before, entry.number

    # --- requests ----------------------------------------------------------------------------------------------------

    def add(self, request_id: str) -> list[Action]:
        """A new request; its id is not in here."""
        self._numbers += 1
        entry = self._entries[request_id] = _Entry(self._numbers)
        if self.core != "up" or self._trying:
            return []
        entry.sent = True
        return [Send(request_id)]

    def forget(self, request_id: str) -> list[Action]:
        """It has ended, or nobody waits for it any more. Unknown ones are no error."""
        if self._entries.pop(request_id, None) is None:
            return []
        return self._free(request_id)

    def tokens(self, request_id: str, count: int) -> list[Action]:
        """It has got `count` tokens. To be called for those that are `watched`."""
        entry = self._entries.get(request_id)
        if entry is None or not entry.deaths:
            return []
        entry.tokens += count
        return self._free(request_id) if entry.tokens >= CLEARED_AFTER else []

    def _free(self, request_id: str) -> list[Action]:
        """No death counts against it any more; it may be gone already."""
        if request_id not in self.watched:
            return []
        self.watched.discard(request_id)
        entry = self._entries.get(request_id)
        if entry is not None:
            entry.clear()
        if not self._trying:
            return []
        actions: list[Action] = []
        if request_id == self._trial:
            self._trial = None
            if entry is not None and self.core == "up" and self.suspects:
                entry.sent = False
                actions.append(Park(request_id))
        return actions + self._next()

    def _next(self) -> list[Action]:
        """Whoever may be sent now."""
        if self.core != "up" or self._trial is not None:
            return []
        suspects = self.suspects
        self._trying = bool(suspects)
        if suspects:
            self._trial = suspects[0]
            self._entries[self._trial].sent = True
            return [Send(self._trial)]
        kept = [name for name, entry in self._entries.items() if not entry.sent]
        for name in kept:
            self._entries[name].sent = True
        return [Send(name) for name in kept]

    # --- the core ----------------------------------------------------------------------------------------------------

    def up(self, *, new_life: bool) -> list[Action]:
        """The core answers. `new_life`: it is not the life that was up before (the first one is none either)."""
        if self.core == "up" and not new_life:
            return []
        self.down()
        self.core = "up"
        present, self._present = self._present, set()
        trial, self._trial = self._trial, None
        failed = self._judge(present, trial) if new_life and present else []
        return failed + self._next()

    def leave(self, *, orderly: bool = False) -> None:
        """Nothing can be sent any more. `orderly`: the core said itself that it ends."""
        if self.core != "away":
            self.core = "leaving"
            self._orderly = self._orderly or orderly

    def down(self) -> None:
        """The core is gone, with all that it was to do."""
        if self.core == "away":
            return
        self.core = "away"
        sent = {name for name, entry in self._entries.items() if entry.sent}
        for name in sent:
            self._entries[name].sent = False
        self._present = set() if self._orderly else sent
        self._orderly = False

    def _judge(self, present: set[str], trial: str | None) -> list[Action]:
        """Count the death of the core; what is given up for it."""
        self.deaths += 1
        convict: str | None = None
        for name in present & self._entries.keys():
            entry = self._entries[name]
            if name == trial:
                entry.alone += 1
                convict = name if entry.alone >= CONVICTED_AFTER else None
            entry.deaths.add(self.deaths)
            entry.before, entry.tokens = entry.tokens, 0
            self.watched.add(name)
        if convict is None:
            return []
        explained = self._entries.pop(convict).deaths
        self.watched.discard(convict)
        for name in self.watched:
            deaths = self._entries[name].deaths
            deaths -= set(sorted(deaths & explained)[:-1])
        return [Fail(convict, len(explained))]
