"""`python -m minipaged.chat`: a prompt, an answer, and so on.

Every line is a message, or a command if it begins with a slash. Input and output may be pipes: answers go to standard
output, everything else to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import threading
import time

from rich.console import Console

from minipaged.chat.commands import Quit, run_command
from minipaged.chat.session import ChatSession
from minipaged.errors import EngineDead, InvalidInput, MinipagedError
from minipaged.sampling_params import SamplingParams
from minipaged.show import Trace, each, output_path
from minipaged.text.chat_template import encode_chat

with contextlib.suppress(ImportError):  # Windows has none; with it, the prompt has line editing and a history
    import readline  # noqa: F401


def main(arguments: list[str] | None = None) -> int:
    """Run the chat; returns the exit status."""
    args = parse_arguments(arguments)
    for stream in (sys.stdin, sys.stdout):  # what is no text in the terminal's encoding shall not end the chat
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    out, notes = Console(), Console(stderr=True)
    begin = time.perf_counter()
    try:
        # Imported here, where Ctrl-C is expected: torch takes seconds.
        from minipaged.engine.llm import LLM

        params = SamplingParams(
            temperature=args.temperature, top_p=args.top_p, max_tokens=args.max_tokens, seed=args.seed
        )
        llm = LLM(
            args.model,
            dtype=args.dtype,
            device=args.device,
            block_size=args.block_size,
            max_model_len=args.max_model_len,
            kv_cache_memory_bytes=args.kv_cache_memory_bytes,
            attention_backend=args.attention_backend,
            tensor_parallel_size=args.tensor_parallel_size,
            enforce_eager=not args.compile,
            enable_prefix_caching=True,  # the next turn begins with what the last one computed
        )
        session = ChatSession(llm.llm_engine, params, args.system, out, notes)
        trace = Trace(llm.describe(), llm.llm_engine.tokenizer.token_text) if args.trace else None
        if trace is not None:
            llm.llm_engine.on_step = each(llm.llm_engine.on_step, trace)
    except MinipagedError as error:
        notes.print(str(error), style="red", markup=False, highlight=False)
        return 2
    except KeyboardInterrupt:
        return 130
    session.say(f"{llm.describe()}; ready after {time.perf_counter() - begin:.1f} s. /help lists the commands.")
    # The first rendering of a chat template imports transformers, a second or more: do it while the user types.
    threading.Thread(target=encode_chat, args=(llm.llm_engine.tokenizer, [{"role": "user", "content": "Hi"}])).start()
    try:
        converse(session)
    except EngineDead as error:
        notes.print(f"the chat is over: {error}", style="red", markup=False, highlight=False)
        return 1
    except BrokenPipeError:  # whoever read the answers has left; what is still unwritten has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        if trace is not None:
            trace.save(args.trace)
    return 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The options. Their values are checked where they are used, so that the message is the same everywhere."""
    parser = argparse.ArgumentParser(prog="python -m minipaged.chat", description="Talk to a model from paged KV.")
    parser.add_argument("--model", help="directory, hub id or GGUF file (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--dtype", default="auto", help="auto, float16, bfloat16, float32, float64")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 always takes the most probable token")
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, help="makes answers repeatable at a temperature above 0")
    parser.add_argument("--max-tokens", type=int, default=512, help="longest answer")
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--max-model-len", type=int, help="context in tokens (default: the model's)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a KV block")
    parser.add_argument("--kv-cache-memory-bytes", type=int, help="size of the KV pool")
    parser.add_argument("--attention-backend", default="auto", help="auto, gather, reference, compiled, triton")
    parser.add_argument("--compile", action="store_true", help="compile the model: half a minute the first time")
    parser.add_argument("--tensor-parallel-size", type=int, help="ranks (default: torchrun's number of them, or 1)")
    parser.add_argument("--trace", metavar="FILE", type=output_path, help="write all steps as a page for a browser")
    return parser.parse_args(arguments)


def converse(session: ChatSession) -> None:
    """Read lines until there are no more, or until /quit. A mistake of the user is said, and nothing ends."""
    while True:
        try:
            line = read_line(session)
        except KeyboardInterrupt:
            session.say("\n(Ctrl-D or /quit ends the chat)")
            continue
        except EOFError:
            return
        try:
            if line.startswith("/"):
                run_command(session, line)
            elif line:
                session.answer(line)
        except Quit:
            return
        except InvalidInput as error:
            session.say(str(error))
        except KeyboardInterrupt:  # a second Ctrl-C, in the middle of a step
            session.say("\n(stopped in the middle of a step: this answer is lost)")


def read_line(session: ChatSession) -> str:
    """One line of input; a prompt is shown only to a person."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return input("\n> ").strip()
    if sys.stdin.isatty():  # answers go elsewhere, and the prompt must not
        session.notes.print("\n> ", end="")
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.strip()


if __name__ == "__main__":
    sys.exit(main())
