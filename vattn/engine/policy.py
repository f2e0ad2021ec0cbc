"""Policies decide which request goes first. A policy gives every request a rank once, when it arrives.

A smaller rank is more urgent. Ranks never change and no two are equal, so the most urgent request stays the
most urgent one until it ends. It is never preempted for another request, so it finishes. Then the same holds
for the next one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from vattn.config import PolicyName
from vattn.engine.request import Rank, Request


class Policy(ABC):
    """Gives requests their ranks."""

    @abstractmethod
    def rank(self, request: Request, clock: int) -> Rank:
        """The rank of a request that arrives now; `clock` counts the tokens scheduled so far."""


class FirstComeFirstServed(Policy):
    """Ranks requests by order of arrival."""

    def rank(self, request: Request, clock: int) -> Rank:
        return (0, request.arrival)


class Priority(Policy):
    """Ranks requests by `priority`, smaller first, and by age, so that a low priority never waits forever.

    A waiting request gains one unit of priority per `ageing_tokens` tokens that the engine schedules. All
    requests gain at the same rate, so the order of two requests never changes and can be decided on arrival:

        urgency at time c   priority - (c - arrived) / ageing  <  other - (c - other_arrived) / ageing
        the same for all c  priority x ageing + arrived        <  other x ageing + other_arrived

    This gives a bound: a request of priority p is never overtaken by a request of priority q that arrives
    more than (p - q) x ageing_tokens scheduled tokens later.
    """

    def __init__(self, ageing_tokens: int) -> None:
        self.ageing_tokens = ageing_tokens

    def rank(self, request: Request, clock: int) -> Rank:
        return (request.service.priority * self.ageing_tokens + clock, request.arrival)


def create_policy(name: PolicyName, ageing_tokens: int) -> Policy:
    """Create the policy with this name. Only `priority` uses `ageing_tokens`."""
    return Priority(ageing_tokens) if name == "priority" else FirstComeFirstServed()
