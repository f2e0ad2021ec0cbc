"""Fair turns: deficit round robin over tokens (Shreedhar and Varghese, SIGCOMM 1996).

Time is divided into rounds. In each round, every tenant may use up to its quantum of tokens. If it uses
more, it owes the difference to the next round. A round ends when every tenant that has prompts to run has
used its quantum. A tenant with nothing to run is not waited for, and its unused credit is lost. So an idle
machine never waits, and on a busy one each tenant gets its share, however much the others send.

    quantum   a |=======|           a has credit left: it goes on in the next step
    of 512    b |===|. . .|         b has nothing more to run: its credit is lost
              c |=========|==>      c decoded past its quantum: it owes the difference

The caller chooses the order within a round. The order does not affect shares, but it affects waiting times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class FairTurns:
    """The credits of tenants, in tokens, each in [-quantum, quantum].

    `weights` are the tenants' relative shares; a tenant that is not listed has weight 1. `quantum` is the
    number of tokens that a tenant of weight 1 gets in a round. Credits are whole numbers, so the same calls
    always give the same turns.
    """

    def __init__(self, weights: Mapping[str, float], quantum: int) -> None:
        self.weights = dict(weights)
        self._quantum = quantum
        self._used: dict[str, int] = {}
        """Tokens of this round's quantum that each tenant has used, including debts. Zeros are left out."""

    def weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)

    def quantum(self, tenant: str) -> int:
        return max(1, round(self._quantum * self.weight(tenant)))

    def credit(self, tenant: str) -> int:
        """Tokens that the tenant may still use in this round; negative if it owes tokens."""
        return self.quantum(tenant) - self._used.get(tenant, 0)

    def charge(self, tenant: str, tokens: int) -> None:
        """Charge tokens that the tenant was given. A negative number returns tokens to its credit."""
        used = self._used.get(tenant, 0) + tokens
        # A debt is at most one quantum: long decodes on an idle machine took nothing from other tenants.
        self._set(tenant, min(max(used, 0), 2 * self.quantum(tenant)))

    def turn(self, ready: Sequence[str]) -> str:
        """The tenant whose turn it is: the first one in `ready` with credit left. `ready` must not be empty.

        The caller may choose any order, because each tenant gets its turn within the round.
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
