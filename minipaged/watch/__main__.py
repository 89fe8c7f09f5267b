"""`python -m minipaged.watch`: a request at work, one step after the other.

python -m minipaged.watch --list                  the scenes
python -m minipaged.watch parallel                one of them, on the default model
python -m minipaged.watch --prompt "Once upon"    a prompt of yours; again for more of them
python -m minipaged.watch beams --record b.jsonl  keep the steps; --replay b.jsonl shows them without a model
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console

from minipaged.beam_search_params import BeamSearchParams
from minipaged.errors import MinipagedError
from minipaged.sampling_params import SamplingParams
from minipaged.show import Recorder, Trace, output_path
from minipaged.watch.keys import ReadCommand, from_clock, from_keys, from_lines
from minipaged.watch.player import Player
from minipaged.watch.run import Run
from minipaged.watch.scenes import SCENES, Arrival, Scene


def main(arguments: list[str] | None = None) -> int:
    """Run the step view; returns the exit status."""
    args = parse_arguments(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    console = Console()
    if args.list:
        for scene in SCENES.values():
            console.print(f"  {scene.name:<12}{scene.title}", highlight=False)
        return 0
    try:
        if args.replay:
            _play(Recorder.load(args.replay), lambda: False, console, args)
        else:
            _run(_own_scene(args) if args.prompt else SCENES[args.scene], console, args)
    except MinipagedError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the pictures has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """What to watch, and how. Values are checked where they are used, so that the message is the same everywhere."""
    parser = argparse.ArgumentParser(
        prog="python -m minipaged.watch", description="See requests at work, one step after the other."
    )
    what = parser.add_argument_group("what to watch")
    what.add_argument("scene", nargs="?", choices=SCENES, metavar="SCENE", help="one of --list (default: growing)")
    what.add_argument("--list", action="store_true", help="the scenes")
    what.add_argument("--prompt", action="append", help="a prompt of your own instead; again for several at once")
    what.add_argument("--replay", metavar="FILE", help="a recording instead; no model is needed")
    own = parser.add_argument_group("with --prompt")
    own.add_argument("--max-tokens", type=int, help="default: 8")
    own.add_argument("--n", type=int, help="samples of each prompt")
    own.add_argument("--beam-width", type=int, help="beam search with so many beams")
    own.add_argument("--temperature", type=float, help="default: 0, or 1 with --n")
    own.add_argument("--seed", type=int, help="default: 0")
    own.add_argument("--block-size", type=int, help="default: 4")
    own.add_argument("--num-blocks", type=int, help="size of the pool (default: 32)")
    own.add_argument("--enable-prefix-caching", action="store_const", const=True)
    how = parser.add_argument_group("how")
    how.add_argument("--model", help="directory, hub id or GGUF file (default: SmolLM2-135M-Instruct)")
    how.add_argument("--auto", type=float, metavar="SECONDS", help="show a step every so often, and wait for no key")
    how.add_argument("--record", metavar="FILE", type=output_path, help="keep the steps, for --replay")
    how.add_argument("--trace", metavar="FILE", type=output_path, help="write what was seen as a page for a browser")
    args = parser.parse_args(arguments)
    _check_together(parser, args)
    args.scene = args.scene or "growing"
    return args


def _check_together(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse what would be ignored."""

    def given(names: str) -> list[str]:
        return [f"--{name.replace('_', '-')}" for name in names.split() if getattr(args, name) is not None]

    if len(given("scene prompt replay")) > 1:
        parser.error("a scene, --prompt and --replay exclude each other")
    own = "max_tokens n beam_width temperature seed block_size num_blocks enable_prefix_caching"
    if not args.prompt and given(own):
        parser.error(f"{given(own)[0]} is for --prompt; a scene has its own")
    if args.beam_width is not None and given("n temperature seed"):
        parser.error(f"{given('n temperature seed')[0]} means nothing with --beam-width")
    if args.replay and args.model is not None:
        parser.error("--replay needs no --model")
    if args.auto is not None and not args.auto >= 0:
        parser.error("--auto must be at least 0 seconds")


def _own_scene(args: argparse.Namespace) -> Scene:
    """The user's prompts as a scene."""

    def chosen(name: str, default: Any) -> Any:
        value = getattr(args, name)
        return default if value is None else value

    max_tokens, n = chosen("max_tokens", 8), chosen("n", 1)
    if args.beam_width is not None:
        params = BeamSearchParams(beam_width=args.beam_width, max_tokens=max_tokens)
    else:
        temperature = chosen("temperature", 1.0 if n > 1 else 0.0)
        params = SamplingParams(n=n, temperature=temperature, seed=chosen("seed", 0), max_tokens=max_tokens)
    arrivals = tuple(Arrival(0, f"prompt-{i}", prompt, params) for i, prompt in enumerate(args.prompt, 1))
    return Scene(
        "own",
        "your prompts",
        "",
        arrivals,
        num_blocks=chosen("num_blocks", 32),
        block_size=chosen("block_size", 4),
        args={"enable_prefix_caching": chosen("enable_prefix_caching", False)},
    )


def _run(scene: Scene, console: Console, args: argparse.Namespace) -> None:
    from minipaged.engine.llm import LLM  # torch takes seconds: not before it is needed

    recorder = Recorder(title=f"{scene.title}\n{scene.look}".strip())
    llm = LLM(args.model, on_step=recorder, free_order=scene.free_order, **scene.engine_args)
    recorder.token_text = llm.llm_engine.tokenizer.token_text
    for arrival in scene.arrivals:
        llm.llm_engine.validate(arrival.prompt, arrival.params)
    _play(recorder, Run(llm.llm_engine, scene.arrivals).advance, console, args)


def _play(recorder: Recorder, advance: Callable[[], bool], console: Console, args: argparse.Namespace) -> None:
    """Show it, and keep what was seen, however the viewer leaves."""
    is_live = args.auto is None and sys.stdin.isatty() and console.is_terminal
    clears = console.is_terminal and (is_live or args.auto is not None)
    try:
        Player(recorder, advance, console, _reader(args, is_live), recorder.title, is_live, clears).play()
    finally:
        if args.record:
            recorder.save(args.record)
        if args.trace:
            trace = Trace(recorder.title.partition("\n")[0], recorder.words.get)
            for frame in recorder.frames:
                trace(*frame)
            trace.save(args.trace)
        for path in filter(None, (args.record, args.trace)):
            print(f"{path}: the {len(recorder.frames)} steps that were run", file=sys.stderr)


def _reader(args: argparse.Namespace, is_live: bool) -> ReadCommand:
    if args.auto is not None:
        return from_clock(args.auto)
    return from_keys() if is_live else from_lines(sys.stdin)


if __name__ == "__main__":
    sys.exit(main())
