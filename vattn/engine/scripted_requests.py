"""Rebuilds the requests of an event log. The log decides when they end and what a beam search chose."""

from __future__ import annotations

from collections.abc import Sequence

from vattn.engine.groups import BeamGroup, Branching, ParallelGroup
from vattn.engine.live_requests import leader_of
from vattn.engine.replay_script import Event, Script
from vattn.engine.request import Request
from vattn.engine.service import Service
from vattn.outputs import RequestMetrics
from vattn.params import BeamSearchParams, SamplingParams
from vattn.sampling.beam import BeamSearch, Candidate
from vattn.sampling.detokenize import Finish, IncrementalDetokenizer, StopChecker

_PARAMS = SamplingParams(ignore_eos=True, detokenize=False)


class ScriptedStop(StopChecker):
    """Ends an output where the log ends it."""

    def __init__(self, script: Script, request_id: str, max_tokens: int) -> None:
        super().__init__(_PARAMS, IncrementalDetokenizer(None, _PARAMS), max_tokens=max_tokens)
        self._script = script
        self._request_id = request_id

    def push(self, token_id: int) -> Finish | None:
        end = self._script.end_of(self._request_id)
        if end is None:
            return None
        if end["reason"] == "error":
            raise RuntimeError(end["error"])  # the same error as in the log's engine
        return Finish(end["reason"])


class ScriptedSampling:
    """The part of a request's sampling state that the engine reads."""

    def __init__(self, script: Script) -> None:
        self.pending = 0
        self._script = script

    @property
    def edited(self) -> bool:
        """True if the next step must wait for this request's tokens. It did if the log enters them next."""
        return self._script.settles_now()


class ScriptedBeams(BeamGroup):
    """A beam search that makes the choices recorded in the log."""

    def __init__(self, leader: Request, requests: RequestMaker) -> None:
        super().__init__(BeamSearch(BeamSearchParams(beam_width=1), leader.max_tokens, frozenset()), leader)
        self._requests = requests
        self._script = requests.script

    @property
    def members(self) -> list[Request]:
        order = self._script.end_order()
        return sorted(super().members, key=lambda beam: order.get(beam.request_id, len(order)))

    def deliver(self, beam: Request, candidates: Sequence[Candidate], engine: Branching) -> None:
        self._delivered[beam] = candidates
        if any(b not in self._delivered for b in self.beams):
            return
        self._delivered.clear()
        while (event := self._script.peek()) is not None and self._script.divergence is None:
            beams = {b.request_id: b for b in self.beams}
            kind, one = event["event"], beams.get(str(event.get("parent", event.get("id"))))
            if one is None:
                return
            if kind == "drop":
                self.beams.remove(one)
                engine.drop(one)
            elif kind == "fork":
                child = self._requests.heir(event, one)
                self.beams.append(child)
                engine.fork(one, child, event["asked"])
            elif kind == "extend":
                engine.extend(one, event["token"])
            else:
                if kind == "finish" and event["reason"] == "error":
                    raise RuntimeError(event["error"])
                self.search.done = kind == "finish"
                return


class RequestMaker:
    """Makes requests from events and keeps them by id."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._made: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._made)

    def leader(self, request_id: str) -> Request:
        """The leader of the request's group. Raises KeyError if the id is unknown."""
        return leader_of(self._made[request_id])

    def arrive(self, event: Event) -> list[Request]:
        """Make the request of an `arrive` event and its branches."""
        service = Service(event["priority"], event["tenant"], event["timeout_s"])
        name, prompt, salt = event["id"], event["prompt"], event["salt"]
        names = [name, *(f"{name}#{k}" for k in range(1, event["branches"]))]
        members = [
            self._make(one, event["max_tokens"], prompt, [], service, event["arrival"] + k, salt)
            for k, one in enumerate(names)
        ]
        if event["beams"]:
            members[0].group = ScriptedBeams(members[0], self)
        elif len(members) > 1:
            group = ParallelGroup(members)
            for member in members:
                member.group = group
        return members

    def heir(self, event: Event, parent: Request) -> Request:
        """Make a beam that is forked from its parent."""
        tokens, length, (first, arrival) = event["token_ids"], event["prompt_len"], event["rank"]
        child = self._make(
            event["id"],
            event["max_tokens"],
            tokens[:length],
            tokens[length:],
            parent.service,
            arrival,
            parent.salt,
        )
        child.rank, child.group = (first, arrival), parent.group
        return child

    def _make(
        self,
        request_id: str,
        max_tokens: int,
        prompt: list[int],
        outputs: list[int],
        service: Service,
        arrival: int,
        salt: str | None,
    ) -> Request:
        request = self._made[request_id] = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            output_token_ids=outputs,
            params=_PARAMS,
            sampling=ScriptedSampling(self.script),  # type: ignore[arg-type]
            stop=ScriptedStop(self.script, request_id, max_tokens),
            arrival=arrival,
            max_tokens=max_tokens,
            metrics=RequestMetrics(0.0),
            service=service,
            salt=salt,
        )
        return request
