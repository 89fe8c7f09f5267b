"""Frames as JSON and back. Dataclasses become objects with their field names, tuples become lists."""

from __future__ import annotations

import dataclasses
from typing import Any

from minipaged.show.frame import Frame
from minipaged.snapshot import BlockEvent, LogicalBlock, Snapshot
from minipaged.step import (
    BestCandidates,
    Draw,
    Sample,
    SamplingRules,
    SamplingWork,
    ScoredToken,
    ScorePrompt,
    SequenceWork,
    StepPlan,
    StepResult,
    TokenLogprob,
)

SAMPLING_KINDS = {"Sample": Sample, "BestCandidates": BestCandidates, "ScorePrompt": ScorePrompt}


def to_json(frame: Frame) -> dict[str, Any]:
    """What json.dumps takes."""
    plan = _fields(frame.plan)
    plan["work"] = [_fields(row) for row in frame.plan.work]
    plan["sampling"] = [{"kind": type(entry).__name__} | _fields(entry) for entry in frame.plan.sampling]
    for entry in plan["sampling"]:
        if "rules" in entry:
            entry["rules"] = _fields(entry["rules"])
    snapshot = _fields(frame.snapshot)
    snapshot["cached"] = sorted(frame.snapshot.cached)
    return {"plan": plan, "result": frame.result.entries, "snapshot": snapshot}


def from_json(data: dict[str, Any]) -> Frame:
    """The frame again. Raises KeyError, TypeError or ValueError for what `to_json` has not written."""
    plan = dict(data["plan"])
    work = tuple(SequenceWork(**_frozen(row)) for row in plan.pop("work"))
    sampling = tuple(_sampling(entry) for entry in plan.pop("sampling"))
    answers = zip(sampling, data["result"], strict=True)
    return Frame(
        StepPlan(work=work, sampling=sampling, **_frozen(plan)),
        StepResult(tuple(_answer(entry, answer) for entry, answer in answers)),
        _snapshot(dict(data["snapshot"])),
    )


def _fields(data: Any) -> dict[str, Any]:
    """One level of a dataclass; what lies within stays as it is."""
    return {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}


def _tuple(data: Any) -> Any:
    return tuple(map(_tuple, data)) if isinstance(data, list) else data


def _frozen(data: dict[str, Any]) -> dict[str, Any]:
    return {name: _tuple(value) for name, value in data.items()}


def _sampling(data: dict[str, Any]) -> SamplingWork:
    fields = _frozen(data)
    kind = SAMPLING_KINDS[fields.pop("kind")]
    if "rules" in fields:
        fields["rules"] = SamplingRules(**_frozen(fields["rules"]))
    return kind(**fields)


def _answer(entry: SamplingWork, answer: list) -> tuple:
    """What kind of answer it is, the question says."""
    if isinstance(entry, Sample):
        return tuple(Draw(token, logprob and TokenLogprob(*logprob), _best(best)) for token, logprob, best in answer)
    if isinstance(entry, BestCandidates):
        return _best(answer)
    return tuple(ScoredToken(TokenLogprob(*target), _best(best)) for target, best in answer)


def _best(tokens: list) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(*token) for token in tokens)


def _snapshot(data: dict[str, Any]) -> Snapshot:
    for name in ("tables", "host_tables"):
        tables = data.pop(name)
        data[name] = {int(seq_id): tuple(LogicalBlock(*e) for e in table) for seq_id, table in tables.items()}
    events = tuple(BlockEvent(kind, seq_id, tuple(blocks)) for kind, seq_id, blocks in data.pop("events"))
    groups = {request_id: tuple(seq_ids) for request_id, seq_ids in data.pop("groups").items()}
    cached = frozenset(data.pop("cached"))
    return Snapshot(events=events, groups=groups, cached=cached, **_frozen(data))
