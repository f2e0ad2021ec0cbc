"""Who goes first: a policy gives every request a rank, once, when it arrives.

A smaller rank is more urgent. Ranks never change and no two are equal, so that at any moment the same
request is the most urgent one: it is never preempted for another, and finishes. Then the next one does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from vattn.config import PolicyName
from vattn.engine.request import Rank, Request


class Policy(ABC):
    """Ranks requests."""

    @abstractmethod
    def rank(self, request: Request, clock: int) -> Rank:
        """The rank of a request that arrives now; `clock` counts the tokens scheduled so far."""


class FirstComeFirstServed(Policy):
    """By order of arrival."""

    def rank(self, request: Request, clock: int) -> Rank:
        return (0, request.arrival)


class Priority(Policy):
    """By `priority`, smaller first, and ageing: waiting makes up for it.

    A waiting request gains one unit of priority per `ageing_tokens` tokens that the engine schedules.
    All gain at the same rate, so who of two goes first never changes and can be decided on arrival:

        urgency at time c   priority - (c - arrived) / ageing  <  other - (c - other_arrived) / ageing
        the same for all c  priority x ageing + arrived        <  other x ageing + other_arrived

    Hence the bound: a request of priority p is never overtaken by one of priority q that arrives more
    than (p - q) x ageing_tokens scheduled tokens after it.
    """

    def __init__(self, ageing_tokens: int) -> None:
        self.ageing_tokens = ageing_tokens

    def rank(self, request: Request, clock: int) -> Rank:
        return (request.service.priority * self.ageing_tokens + clock, request.arrival)


def create_policy(name: PolicyName, ageing_tokens: int) -> Policy:
    """The policy of that name; `ageing_tokens` is of `priority` alone."""
    return Priority(ageing_tokens) if name == "priority" else FirstComeFirstServed()
