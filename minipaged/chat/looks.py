"""Commands that look at the engine: the pool, the last answer's speed, and what its blocks have been through."""

from __future__ import annotations

from dataclasses import asdict

from minipaged.chat.session import ChatSession
from minipaged.errors import InvalidParameter
from minipaged.show import draw_pool


def show_stats(session: ChatSession, _: str) -> None:
    """speed of the last answer, and the KV blocks that it used"""
    output, snapshot = session.last, session.fullest
    if output is None or snapshot is None:
        session.say("(nothing has been answered yet)")
        return
    metrics, num_tokens = output.metrics, sum(len(answer.token_ids) for answer in output.outputs)
    cached = f"of which {output.num_cached_tokens} came from the prefix cache"
    session.say(f"  prompt {len(output.prompt_token_ids)} tokens, {cached}; answer {num_tokens} tokens")
    if metrics.time_to_first_token is not None and metrics.finished_time is not None:
        session.say(f"  time to first token {metrics.time_to_first_token:.2f} s")
        if num_tokens > len(output.outputs):
            session.say(f"  then {(num_tokens - len(output.outputs)) / metrics.decode_time:.1f} tokens/s")
    slots = max(1, snapshot.num_used_blocks * snapshot.block_size)  # an answer that was stopped at once used none
    session.say(
        f"  KV blocks in use {snapshot.num_used_blocks} of {len(snapshot.ref_counts)}; "
        f"filled {snapshot.num_filled} of {slots} slots ({snapshot.num_filled / slots:.0%})"
    )


def show_why(session: ChatSession, _: str) -> None:
    """what the last answer reused, copied, and whether it was preempted"""
    output = session.last
    if output is None or session.counts_before is None:
        session.say("(nothing has been answered yet)")
        return
    before, after = asdict(session.counts_before), asdict(session.engine.get_metrics().counts)
    grown = {name: after[name] - before[name] for name in after}
    block_size = session.engine.blocks.block_size
    num_prompt, num_cached = len(output.prompt_token_ids), output.num_cached_tokens
    if num_cached:
        session.say(
            f"  reused: {num_cached} of {num_prompt} prompt tokens, in {num_cached // block_size} full blocks "
            f"that earlier turns had filled; {num_prompt - num_cached} were computed"
        )
    else:
        session.say(f"  reused: nothing of {num_prompt} prompt tokens; no full block of their beginning was cached")
    copied = grown["num_blocks_copied"]
    reason = "a shared block was written" if copied else "no block was shared when it was written"
    session.say(f"  copied: {copied} block{'s' * (copied != 1)}; {reason}")
    swaps, recomputes = grown["num_preemptions_by_swap"], grown["num_preemptions_by_recompute"]
    if swaps or recomputes:
        session.say(
            f"  preempted: {swaps} times by swap, {recomputes} times by recompute "
            f"({grown['num_recomputed_tokens']} tokens computed again)"
        )
    else:
        session.say("  preempted: never; the pool had room for it")
    session.say(f"  evicted for it: {session.num_evicted} cached blocks")


def show_blocks(session: ChatSession, _: str) -> None:
    """the KV pool now: what is free, and what is kept for the next turn"""
    session.notes.print(draw_pool(session.engine.snapshot()))


def set_watch(session: ChatSession, text: str) -> None:
    """on|off  draw the pool under each answer while it is made; without on or off, show which"""
    if text not in ("", "on", "off"):
        raise InvalidParameter("watch", text, "must be on or off")
    if text == "on" and not session.out.is_terminal:
        raise InvalidParameter("watch", text, "needs a terminal: answers go to a file or a pipe")
    if text:
        session.watches = text == "on"
    session.say(f"(watching is {'on' if session.watches else 'off'})")
