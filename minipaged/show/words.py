"""One step in words: what has happened to blocks since the step before, what the plan asks for, and what came back.

copies block 1 → 3: A and B share it, and A writes
decodes A: 1 token at position 7, into block 3, slot 3
decodes B: 1 token at position 7, into block 1, slot 3
A samples " fathers"
B samples " brothers"
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from minipaged.show.contents import Words, spell
from minipaged.show.frame import Frame, holders
from minipaged.show.labels import label, listed, ranges
from minipaged.snapshot import BlockEvent, Snapshot
from minipaged.step import BestCandidates, Sample, ScorePrompt, SequenceWork, StepPlan

DETAILED = 8  # sequences that a screen has room for


def explain(frame: Frame, words: Words | None = None, detailed: int = DETAILED) -> list[str]:
    """Sentences, in the order in which things happen. `words` are token texts, where a tokenizer was there to ask.

    Up to `detailed` sequences are told one by one; of more, the decodes are told together.
    """
    work, answers = _work(frame, words, detailed), _answers(frame, words, detailed)
    return [*_events(frame.snapshot, detailed), *_moves(frame), *work, *answers]


# ---------------------------------------------------------------- what happened to blocks


def _events(snapshot: Snapshot, detailed: int) -> Iterator[str]:
    """A preemption is told where its blocks go, evictions in a row together; copies and swaps come with the plan."""
    tell = {"free": _free, "fork": _fork, "hit": _hit, "allocate": _allocate}
    victims = {seq_id: name for name in snapshot.preempted for seq_id in snapshot.groups.get(name, ())}
    told = set()
    for kind, events in groupby(snapshot.events, key=lambda event: event.kind):
        events = list(events)
        if kind == "evict" or (kind == "allocate" and len(events) > detailed):
            yield _together(kind, events)
            continue
        for event in events:
            victim = victims.get(event.seq_id)
            if victim is not None and victim not in told and kind in ("free", "swap_out"):
                told.add(victim)
                yield _preempt(victim, snapshot)
            if kind in tell:
                yield tell[kind](event, snapshot)
    yield from (_preempt(name, snapshot) for name in snapshot.preempted if name not in told)


def _preempt(request_id: str, snapshot: Snapshot) -> str:
    who = listed(map(label, snapshot.groups.get(request_id, ())))
    what = "its blocks move to the host pool" if request_id in snapshot.swapped else "its tokens will be computed again"
    return f"preempts {request_id} ({who}): too few blocks are free; {what}"


def _free(event: BlockEvent, snapshot: Snapshot) -> str:
    later = snapshot.events[snapshot.events.index(event) :]
    revived = {block for other in later if other.kind in ("hit", "evict") for block in other.blocks}
    kept = tuple(block for block in event.blocks if block in snapshot.cached or block in revived)
    cached = f" ({ranges(kept)} kept in the prefix cache)" if kept else ""
    if event.seq_id is None:
        return f"{_blocks(event.blocks)} no longer pinned{cached}"
    who = label(event.seq_id)
    if not event.blocks:
        return f"{who} lets go of its blocks; others still hold them all"
    return f"{who} lets go of its blocks: {_blocks(event.blocks)} free again{cached}"


def _fork(event: BlockEvent, _: Snapshot) -> str:
    return f"{label(event.seq_id)} begins as a fork: it shares {_blocks(event.blocks)}, and nothing is copied"


def _hit(event: BlockEvent, snapshot: Snapshot) -> str:
    num_tokens = len(event.blocks) * snapshot.block_size
    return (
        f"{label(event.seq_id)} finds its first {num_tokens} tokens in the prefix cache: "
        f"it begins with {_blocks(event.blocks)}"
    )


def _allocate(event: BlockEvent, _: Snapshot) -> str:
    return f"{label(event.seq_id)} takes {_blocks(event.blocks)}"


def _together(kind: str, events: list[BlockEvent]) -> str:
    blocks = _blocks(tuple(block for event in events for block in event.blocks))
    return (
        f"evicts cached {blocks}: nothing else is free" if kind == "evict" else f"{len(events)} sequences take {blocks}"
    )


def _blocks(blocks: tuple[int, ...]) -> str:
    return f"block{'s' if len(blocks) != 1 else ''} {ranges(blocks)}"


# ---------------------------------------------------------------- what the plan asks for


def _moves(frame: Frame) -> Iterator[str]:
    plan = frame.plan
    for verb, pairs, route in (
        ("swaps out", plan.swap_out, "device → host"),
        ("swaps in", plan.swap_in, "host → device"),
    ):
        if pairs:
            yield f"{verb} {len(pairs)} block{'s' if len(pairs) > 1 else ''}, {route}: {_pairs(pairs)}"
    yield from _copies(plan, frame.snapshot)


def _copies(plan: StepPlan, snapshot: Snapshot) -> Iterator[str]:
    """Who shared the source when the copy was made: those who hold it still, and those whose copies come after."""
    if not plan.copies:
        return
    readers = holders(snapshot.tables)
    writers = [readers.get(destination, (None,))[0] for _, destination in plan.copies]
    for i, (source, destination) in enumerate(plan.copies):
        later = [writers[j] for j in range(i, len(writers)) if plan.copies[j][0] == source]
        sharers = sorted({*later, *readers.get(source, ())} - {None})
        if writers[i] is None:
            yield f"copies block {source} → {destination}"
        else:
            yield (
                f"copies block {source} → {destination}: {listed(map(label, sharers))} share it, "
                f"and {label(writers[i])} writes"
            )


def _pairs(pairs: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"{source} → {destination}" for source, destination in pairs)


def _work(frame: Frame, words: Words | None, detailed: int) -> Iterator[str]:
    plan, size = frame.plan, frame.snapshot.block_size
    speaks = {entry.row for entry in plan.sampling if not isinstance(entry, ScorePrompt)}
    is_decode = [len(row.token_ids) == 1 and i in speaks and row.start > 0 for i, row in enumerate(plan.work)]
    together = len(plan.work) > detailed and sum(is_decode) > 1
    for i, row in enumerate(plan.work):
        if not is_decode[i]:
            yield _prefill(row, i in speaks, size)
        elif not together:
            yield _decode(row, words, size)
    if together:
        names = [label(row.seq_id) for row, alone in zip(plan.work, is_decode, strict=True) if alone]
        yield f"decodes {_many(names)}: 1 token each"
    if not plan.work:
        yield "there is nothing to compute"


def _decode(row: SequenceWork, words: Words | None, block_size: int) -> str:
    [token_id] = row.token_ids
    logical, slot = divmod(row.start, block_size)
    token = _quote(token_id, words) if words and token_id in words else "1 token"
    where = f"at position {row.start}, into block {row.block_table[logical]}, slot {slot}"
    return f"decodes {label(row.seq_id)}: {token} {where}"


def _prefill(row: SequenceWork, is_last: bool, block_size: int) -> str:
    num_tokens = len(row.token_ids)
    first, last = row.start, row.start + num_tokens - 1
    blocks = row.block_table[first // block_size : last // block_size + 1]
    count = f"{num_tokens} token{'s' if num_tokens > 1 else ''}"
    where = f"at position{f's {first}–{last}' if num_tokens > 1 else f' {first}'}, into {_blocks(blocks)}"
    verb = "prefills" if first == 0 and is_last else "computes the rest of" if is_last else "computes a chunk of"
    return f"{verb} {label(row.seq_id)}: {count} {where}" + ("" if is_last else "; the rest follows")


def _many(names: list[str]) -> str:
    return listed(names) if len(names) <= 3 * DETAILED else f"{len(names)} sequences, {names[0]} to {names[-1]}"


# ---------------------------------------------------------------- what came back


def _answers(frame: Frame, words: Words | None, detailed: int) -> Iterator[str]:
    pairs = list(zip(frame.plan.sampling, frame.result.entries, strict=False))
    samples = [(entry, drawn) for entry, drawn in pairs if isinstance(entry, Sample)]
    if len(samples) > detailed:
        yield f"{len(samples)} sequences sample a token each"
        pairs = [(entry, answer) for entry, answer in pairs if not isinstance(entry, Sample)]
    for entry, answer in pairs:
        who = label(frame.plan.work[entry.row].seq_id)
        if isinstance(entry, Sample):
            tokens = listed(_quote(draw.token_id, words) for draw in answer)
            several = f"{len(answer)} tokens, one for each sample to be: " if len(answer) > 1 else ""
            yield f"{who} samples {several}{tokens}"
        elif isinstance(entry, BestCandidates):
            best = _quote(answer[0].token_id, words)
            yield f"the {len(answer)} best continuations of {who} are compared; the best is {best}"
        else:
            yield f"scores {len(answer)} prompt tokens of {who}"


def _quote(token_id: int, words: Words | None) -> str:
    text = spell(token_id, words)
    return f"“{text}”" if words is not None and token_id in words else text
