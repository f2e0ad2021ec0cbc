"""Keeps an engine's requests by the user's ids, and collects what is new about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vattn.engine.deltas import BranchDelta, RequestDelta
from vattn.engine.groups import BeamGroup
from vattn.engine.request import Request
from vattn.outputs import RequestMetrics


def leader_of(request: Request) -> Request:
    """The leader of the request's group; a request without a group is its own leader."""
    return request if request.group is None else request.group.leader


def runs(leader: Request) -> bool:
    """True if the request, or another one of its group, has not ended."""
    return not (leader.finished if leader.group is None else leader.group.finished)


def tell(request: Request, error: str) -> None:
    """Note why a request failed, of a beam search with its group. The first reason counts."""
    if isinstance(request.group, BeamGroup):
        request.group.failed = request.group.failed or error
    else:
        request.error = request.error or error


class LiveRequests:
    """Leaders by request id. A request is kept until its last report has been taken."""

    def __init__(self) -> None:
        self._leaders: dict[str, Request] = {}
        self._news: dict[Request, None] = {}
        """Leaders of requests with something to report."""

    def add(self, leader: Request) -> None:
        self._leaders[leader.request_id] = leader

    def get(self, request_id: str) -> Request | None:
        """The leader of a request that has not ended; None if it has ended or the id is unknown."""
        leader = self._leaders.get(request_id)
        return leader if leader is not None and runs(leader) else None

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._leaders

    def ids(self) -> list[str]:
        return list(self._leaders)

    def members(self) -> list[Request]:
        """All requests that have not ended. Each branch and each beam is listed, held ones included."""
        found: list[Request] = []
        for leader in self._leaders.values():
            members: Sequence[Request] = [leader] if leader.group is None else leader.group.members
            found += [request for request in members if not request.finished]
        return found

    # ------------------------------------------------------------------ reports
    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def touch(self, request: Request) -> None:
        """Note that there is something new about a request."""
        self._news[leader_of(request)] = None

    def take_deltas(self) -> list[RequestDelta]:
        """What is new since the last call. Requests that have ended are then forgotten."""
        news, self._news = self._news, {}
        return [self._delta(leader) for leader in news]

    def _delta(self, leader: Request) -> RequestDelta:
        group, finished = leader.group, not runs(leader)
        if finished:
            del self._leaders[leader.request_id]
        if isinstance(group, BeamGroup):
            return RequestDelta(
                leader.request_id, (), finished, group.metrics, beams=group.results(), error=group.failed
            )
        branches = [leader] if group is None else group.branches
        deltas: list[BranchDelta] = []
        for index, branch in enumerate(branches):
            delta = branch.take_delta(index)
            if delta is not None:
                deltas.append(delta)
        errors = [branch.error for branch in branches if branch.error]
        metrics: RequestMetrics = replace(leader.metrics) if group is None else group.metrics
        return RequestDelta(
            leader.request_id,
            deltas,
            finished,
            metrics,
            prompt_logprobs=leader.take_prompt_logprobs(),
            error=errors[0] if errors else None,
        )
