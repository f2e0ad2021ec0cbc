"""Fair turns: deficit round robin over tokens (Shreedhar and Varghese, SIGCOMM 1996).

Time goes in rounds. In each, every tenant may use up to its quantum of tokens; what it overdraws it
owes to the next. A round ends when every tenant that has prompts to run has used its quantum up: who
has nothing to run is not waited for, and saves nothing up. So an idle machine is never held back, and
of a busy one each tenant gets its share, however much the others send.

    quantum   a |=======|           credit left: a goes on in the next step
    of 512    b |===|. . .|         has nothing more to run: its credit is not carried over
              c |=========|==>      decoded past its quantum: owes that

Within a round the caller says who goes first: it makes no difference to shares, much to waiting times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class FairTurns:
    """Credits of tenants in tokens, each in [-quantum, quantum].

    `weights`: share of a tenant relative to the others; 1 for who is not in it. `quantum`: tokens that
    a tenant of weight 1 gets in a round. Credits are whole numbers: the same calls, the same turns.
    """

    def __init__(self, weights: Mapping[str, float], quantum: int) -> None:
        self.weights = dict(weights)
        self._quantum = quantum
        self._used: dict[str, int] = {}
        """What each tenant has used of this round's quantum, debts included; 0 is left out."""

    def weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)

    def quantum(self, tenant: str) -> int:
        return max(1, round(self._quantum * self.weight(tenant)))

    def credit(self, tenant: str) -> int:
        """Tokens it may still use in this round; negative: a debt."""
        return self.quantum(tenant) - self._used.get(tenant, 0)

    def charge(self, tenant: str, tokens: int) -> None:
        """The tenant was given tokens, or (negative) they were taken back."""
        used = self._used.get(tenant, 0) + tokens
        # More than one quantum nobody owes: long decodes on an idle machine have harmed no one.
        self._set(tenant, min(max(used, 0), 2 * self.quantum(tenant)))

    def turn(self, ready: Sequence[str]) -> str:
        """Whose turn it is: the first of those with something to run (not empty) that has credit left.

        The order is free within a round: everybody gets a turn in it.
        """
        while True:
            for tenant in ready:
                if self.credit(tenant) > 0:
                    return tenant
            self._next_round()

    def _next_round(self) -> None:
        for tenant, used in list(self._used.items()):
            self._set(tenant, max(0, used - self.quantum(tenant)))

    def _set(self, tenant: str, used: int) -> None:
        if used:
            self._used[tenant] = used
        else:
            self._used.pop(tenant, None)

    def check(self) -> None:
        """Raise AssertionError unless every credit is within its bounds."""
        for tenant, used in self._used.items():
            assert 0 < used <= 2 * self.quantum(tenant), f"{tenant} has used {used}"
