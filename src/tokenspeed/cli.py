# SPDX-License-Identifier: Apache-2.0
"""The command line: serve, generate, chat, models, doctor. Flags become configuration; every user error is one line.

Knows flags and terminals; all work is done by the rooms below.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from tokenspeed import __version__
from tokenspeed.checkpoints import list_models, open_model
from tokenspeed.core.config import (
    DEFAULT_MODEL,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    LaunchedRank,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    ServerConfig,
    launched_rank,
)
from tokenspeed.core.errors import ConfigError, RequestError, TokenSpeedError
from tokenspeed.core.request import SamplingParams
from tokenspeed.observability.logging import set_up_logging
from tokenspeed.observability.progress import ProgressReporter

INTERRUPTED = 130
BROKEN_PIPE = 141


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag and the configuration field that it sets; type and default come from the field."""

    names: tuple[str, ...]
    struct: type[msgspec.Struct]
    field: str
    help: str
    metavar: str | None = None


MODEL_FLAGS = (
    Flag(("--revision",), ModelConfig, "revision", "branch, tag or commit of a hub model"),
    Flag(("--load-format",), ModelConfig, "load_format", "how the model is stored"),
    Flag(("--dtype",), ModelConfig, "dtype", "what is computed in; auto chooses by device"),
    Flag(("--max-model-len",), ModelConfig, "max_model_len", "context window in tokens (the model's own)", "TOKENS"),
    Flag(("--chat-template",), ModelConfig, "chat_template", "jinja file in place of the model's own", "FILE"),
    Flag(("--device",), DeviceConfig, "device", "where it runs"),
    Flag(("--threads",), DeviceConfig, "num_threads", "CPU threads (the physical cores allowed to us)", "N"),
    Flag(("--block-size",), CacheConfig, "block_size", "tokens in a KV block", "TOKENS"),
    Flag(("--kv-tokens",), CacheConfig, "kv_tokens", "KV pool in tokens (a share of free memory)", "TOKENS"),
    Flag(("--memory-fraction",), CacheConfig, "memory_fraction", "that share", "F"),
    Flag(("--host-kv-tokens",), CacheConfig, "host_tokens", "host memory for evicted blocks; 0 is off", "TOKENS"),
    Flag(("--host-store",), CacheConfig, "host_store", "copy blocks there when full, or when memory runs short"),
    Flag(("--prefix-caching",), CacheConfig, "prefix_caching", "reuse the K/V of a prompt's known beginning"),
    Flag(("--max-num-seqs",), SchedulerConfig, "max_num_seqs", "requests that run at once", "N"),
    Flag(
        ("--max-num-batched-tokens",),
        SchedulerConfig,
        "max_num_batched_tokens",
        "tokens of a step (by speed)",
        "N",
    ),
    Flag(("--max-num-waiting",), SchedulerConfig, "max_num_waiting", "requests that may wait; more get 429", "N"),
    Flag(("--overlap-depth",), SchedulerConfig, "overlap_depth", "steps planned ahead, 0 or 1", "N"),
    Flag(("--ageing-steps",), SchedulerConfig, "ageing_steps", "steps of waiting that lift a request", "N"),
    Flag(("--tp",), ParallelConfig, "tp", "ranks that split the attention heads", "N"),
    Flag(("--dp-attention",), ParallelConfig, "dp_attention", "partitions of the requests, of --tp ranks each", "N"),
    Flag(("--ep",), ParallelConfig, "ep", "ways the experts are spread over the ranks", "N"),
    Flag(("--moe-tp",), ParallelConfig, "moe_tp", "ranks that split one expert (those that --ep leaves)", "N"),
    Flag(("--rank-timeout",), ParallelConfig, "rank_timeout_s", "a rank that takes longer for a step ends all", "S"),
)
PLAN_FLAGS = tuple(
    flag for flag in MODEL_FLAGS if flag.field in ("revision", "dtype", "tp", "dp_attention", "ep", "moe_tp")
)
SERVED_NAME = Flag(("--served-name", "--served-model-name"), ModelConfig, "served_name", "name on the wire", "NAME")
SERVER_FLAGS = (
    Flag(("--host",), ServerConfig, "host", "address to listen on"),
    Flag(("--port",), ServerConfig, "port", "port to listen on; 0 takes a free one"),
    Flag(("--api-key",), ServerConfig, "api_key", "ask clients for this key"),
    Flag(("--body-bytes-max",), ServerConfig, "body_bytes_max", "largest request body", "BYTES"),
    Flag(("--tool-call-parser",), ServerConfig, "tool_call_parser", "what reads calls in replies", "NAME"),
    Flag(("--strict-model-name",), ServerConfig, "strict_model_name", "refuse requests for other model names"),
)
SAMPLING_FLAGS = (
    Flag(("--max-tokens",), SamplingParams, "max_tokens", "generate at most so many (until the model stops)", "N"),
    Flag(("--temperature",), SamplingParams, "temperature", "0 is greedy (the model's own)", "T"),
    Flag(("--top-p",), SamplingParams, "top_p", "nucleus sampling", "P"),
    Flag(("--top-k",), SamplingParams, "top_k", "only the k most likely; 0 is off", "K"),
    Flag(("--seed",), SamplingParams, "seed", "makes sampling repeatable", "N"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit code."""
    options = _parser().parse_args(arguments)
    set_up_logging(debug=options.debug)
    try:
        launched = launched_rank() if options.builds_model else None
        if launched is not None and launched.rank > 0:
            return _follow(options, launched)
        return int(options.run(options))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:  # noqa: BLE001 - a user gets one line, a developer passes --debug
        return _say_error(error, options.debug)


def _say_error(error: Exception, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    if isinstance(error, TokenSpeedError):
        text = str(error)
    elif isinstance(error, MemoryError):
        text = "out of memory; use a smaller model, or lower --memory-fraction or --kv-tokens"
    else:
        text = f"internal error: {type(error).__name__}: {error}" + ("" if debug else "; --debug shows where")
    print(f"error: {' '.join(text.split())}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tokenspeed", description="An LLM inference engine for coding agents.")
    parser.add_argument("--version", action="version", version=f"tokenspeed {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = _command(commands, "serve", _serve, "serve a model over HTTP")
    _add_model(serve)
    _add_flags(serve, (SERVED_NAME, *SERVER_FLAGS))
    serve.add_argument("--cors-origin", action="append", default=[], metavar="ORIGIN", help="allow this web origin")

    generate = _command(commands, "generate", _generate, "continue prompts given as arguments or on stdin")
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to continue; none reads stdin")
    _add_model(generate, positional=False)
    _add_flags(generate, SAMPLING_FLAGS)
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text")

    chat = _command(commands, "chat", _chat, "talk with a model in the terminal")
    _add_model(chat)
    _add_flags(chat, SAMPLING_FLAGS)
    chat.add_argument("--system", metavar="TEXT", help="system message")
    chat.add_argument("--prompt", metavar="TEXT", help="answer this one message and end")

    _command(commands, "models", _models, "list the models known by a short name")
    doctor = _command(commands, "doctor", _doctor, "say what this machine offers and which kernels it would use")
    doctor.add_argument("model", nargs="?", help="also say what this model is")
    text = "say instead what each rank of this model would hold and exchange, by its configuration alone"
    doctor.add_argument("--plan", nargs="?", const=True, metavar="MODEL", help=text)
    _add_flags(doctor, PLAN_FLAGS)
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.add_argument("--debug", action="store_true", help="verbose log, and a traceback for every error")
    parser.set_defaults(run=run, builds_model=False)
    return parser


def _add_model(parser: argparse.ArgumentParser, *, positional: bool = True) -> None:
    text = f"alias (see `tokenspeed models`), folder, GGUF file or hub id (default: {DEFAULT_MODEL})"
    if positional:
        parser.add_argument("positional_model", nargs="?", metavar="MODEL", help=text)
    parser.add_argument("--model", help=text)
    parser.set_defaults(builds_model=True)
    _add_flags(parser, MODEL_FLAGS)
    parser.add_argument(
        "--kernel", action="append", default=[], metavar="OP=SOLUTION", help="use this solution for this op"
    )


def _add_flags(parser: argparse.ArgumentParser, flags: Iterable[Flag]) -> None:
    for flag in flags:
        info = next(known for known in msgspec.structs.fields(flag.struct) if known.name == flag.field)
        default = "" if info.default in (None, msgspec.NODEFAULT) else f" (default: {info.default})"
        settings: dict[str, Any] = {"dest": flag.field, "default": None, "help": flag.help + default}
        kind, choices = _kind(info.type)
        if kind is bool:
            settings["action"] = argparse.BooleanOptionalAction
        else:
            settings.update(type=kind, choices=choices, metavar=flag.metavar)
        parser.add_argument(*flag.names, **settings)


def _kind(annotation: Any) -> tuple[type, tuple[str, ...] | None]:
    """The type that a field's value is read as, and the choices of a Literal."""
    options = [option for option in get_args(annotation) if option is not type(None)]
    if options and all(isinstance(option, str) for option in options):
        return str, tuple(options)
    return (options[0] if options else annotation), None


def _given(options: argparse.Namespace, flags: Iterable[Flag]) -> dict[str, Any]:
    """Fields of flags that were given."""
    named = {flag.field: getattr(options, flag.field, None) for flag in flags}
    return {name: value for name, value in named.items() if value is not None}


def _engine_config(options: argparse.Namespace) -> EngineConfig:
    positional = getattr(options, "positional_model", None)
    if positional and options.model and positional != options.model:
        raise ConfigError(f"two models are given, {positional} and --model {options.model}; give one")
    overrides = tuple(_override(text) for text in options.kernel)
    model = {"model": positional or options.model or DEFAULT_MODEL, **_given(options, (SERVED_NAME,))}
    parts: dict[type[msgspec.Struct], dict[str, Any]] = {
        ModelConfig: model,
        CacheConfig: {},
        SchedulerConfig: {},
        DeviceConfig: {"kernel_overrides": overrides},
        ParallelConfig: {},
    }
    for flag in MODEL_FLAGS:
        parts[flag.struct] |= _given(options, (flag,))
    return EngineConfig(
        model=ModelConfig(**parts[ModelConfig]),
        cache=CacheConfig(**parts[CacheConfig]),
        scheduler=SchedulerConfig(**parts[SchedulerConfig]),
        device=DeviceConfig(**parts[DeviceConfig]),
        parallel=ParallelConfig(**parts[ParallelConfig]),
        debug=options.debug,
    ).validate()


def _follow(options: argparse.Namespace, launched: LaunchedRank) -> int:
    """Every rank that a launcher starts has the same command line; the first runs it, the others follow that one."""
    from tokenspeed.engine.follower import follow_launched

    return follow_launched(launched, _engine_config(options).device)


def _override(text: str) -> tuple[str, str]:
    op, equals, solution = text.partition("=")
    if not (op and equals and solution):
        raise ConfigError(f"--kernel {text}: write OP=SOLUTION; `tokenspeed doctor` lists both")
    return op, solution


@contextlib.contextmanager
def _progress() -> Generator[ProgressReporter, None, None]:
    reporter = ProgressReporter()
    try:
        yield reporter
    finally:
        reporter.close()


def _serve(options: argparse.Namespace) -> int:
    from tokenspeed.server.serve import Serving, serve

    server = ServerConfig(**_given(options, SERVER_FLAGS), cors_origins=tuple(options.cors_origin))
    with _progress() as progress:

        def announce(text: str) -> None:
            progress.close()
            print(text, flush=True)

        return serve(Serving(_engine_config(options), server, progress, announce))


def _generate(options: argparse.Namespace) -> int:
    from tokenspeed.llm.input_processor import TextPrompt
    from tokenspeed.server.terminal import StreamingLLM

    prompts = options.prompts or [sys.stdin.read()]
    if not all(prompts):
        raise ConfigError("the prompt is empty: give it as an argument or on stdin")
    with _progress() as progress, StreamingLLM(_engine_config(options), progress) as model:
        progress.close()
        params = _sampling(options, model.llm.default_params, stop=tuple(options.stop))
        for prompt in prompts:
            for _ in _print_stream(model.stream(TextPrompt(prompt), params)):
                pass
    return 0


def _sampling(options: argparse.Namespace, defaults: SamplingParams, **more: Any) -> SamplingParams:
    return msgspec.structs.replace(defaults, **_given(options, SAMPLING_FLAGS), **more)


def _print_stream(outputs: Generator[Any, None, None]) -> Generator[str, None, None]:
    """Print text as it comes, and pass it on."""
    try:
        for output in outputs:
            for completion in output.outputs:
                print(completion.text, end="", flush=True)
                yield completion.text
    finally:
        outputs.close()
        print(flush=True)


def _chat(options: argparse.Namespace) -> int:
    from tokenspeed.server.terminal import StreamingLLM

    with _progress() as progress, StreamingLLM(_engine_config(options), progress) as model:
        progress.close()
        talk = _Talk(model.stream, _sampling(options, model.llm.default_params), options.system)
        if options.prompt is not None:
            talk.answer(options.prompt)
            return 0
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # line editing and history for input()
        print("Ctrl-C stops an answer, /clear forgets the conversation, /exit or Ctrl-D ends.")
        while talk.turn():
            pass
    return 0


class _Talk:
    """A conversation in the terminal."""

    def __init__(self, stream: Callable[..., Generator[Any, None, None]], params: SamplingParams, system: str | None):
        self._stream, self._params = stream, params
        self._opening: list[Mapping[str, object]] = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._opening)

    def turn(self) -> bool:
        """One line of the user and its answer; False ends the conversation."""
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return False
        except KeyboardInterrupt:
            print()
            return True
        if line in ("/exit", "/quit"):
            return False
        if line == "/clear":
            self.messages = list(self._opening)
        elif line.startswith("/"):
            print("Commands: /clear /exit")
        elif line:
            self._answer_gently(line)
        return True

    def answer(self, text: str) -> None:
        """Answer one message, and remember both, however far the answer came."""
        from tokenspeed.llm.input_processor import ChatPrompt

        messages = [*self.messages, {"role": "user", "content": text}]
        reply = ""
        try:
            for piece in _print_stream(self._stream(ChatPrompt(messages), self._params)):
                reply += piece
        finally:
            if reply:
                self.messages = [*messages, {"role": "assistant", "content": reply}]

    def _answer_gently(self, line: str) -> None:
        """An interrupt or a refused message ends this answer, not the conversation."""
        try:
            self.answer(line)
        except KeyboardInterrupt:
            print("[stopped]")
        except RequestError as error:
            print(f"error: {error}")


def _models(_: argparse.Namespace) -> int:
    rows = [("MODEL", "SIZE", "CACHED", "WHAT", "LICENCE")]
    rows += [
        (
            model.name,
            f"{model.num_bytes / 2**20:,.0f} MiB",
            "yes" if model.is_cached else "no",
            model.description,
            model.licence,
        )
        for model in list_models()
    ]
    _print_table(rows)
    return 0


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def _doctor(options: argparse.Namespace) -> int:
    if options.plan is not None:
        return _print_plan(options)
    if _given(options, PLAN_FLAGS):
        raise ConfigError("doctor reads flags of ranks only to print a plan: give --plan MODEL too")
    from tokenspeed.observability.machine import describe_machine

    machine = describe_machine()
    torch = importlib.import_module("torch")
    platform = importlib.import_module("tokenspeed.kernels.platform").describe()
    cuda = ", ".join(platform.cuda_devices) or "none"
    built = {name: _is_built(f"tokenspeed.{name}") for name in ("control._control", "kernels._cpu")}
    _print_table(
        [
            ("tokenspeed", f"{__version__}, {machine.system}"),
            ("cpu", f"{machine.cpu}, {machine.num_cores_allowed} of {machine.num_cores} cores allowed"),
            ("cpu kernels", platform.cpu_isa or "not built; `make setup` builds them"),
            ("memory", f"{_gib(machine.memory_available)} available of {_gib(machine.memory_total)}"),
            ("torch", str(torch.__version__)),
            ("cuda devices", cuda),
            *((f"module {name}", "built" if there else "missing") for name, there in built.items()),
        ]
    )
    _print_kernels(torch, "cuda" if platform.cuda_devices else "cpu")
    if options.model:
        _print_model(options.model)
    return 0 if all(built.values()) else 1


def _print_plan(options: argparse.Namespace) -> int:
    from tokenspeed.execution.sharding_report import sharding_report

    named = [name for name in (options.model, options.plan) if isinstance(name, str)]
    if len(named) != 1:
        raise ConfigError("doctor --plan takes one model, as in `tokenspeed doctor --plan MODEL --tp 2`")
    parts: dict[type[msgspec.Struct], dict[str, Any]] = {ModelConfig: {}, ParallelConfig: {}}
    for flag in PLAN_FLAGS:
        parts[flag.struct] |= _given(options, (flag,))
    # Dummy weights need no files of weights.
    model = ModelConfig(model=named[0], load_format="dummy", **parts[ModelConfig])
    parallel = EngineConfig(parallel=ParallelConfig(**parts[ParallelConfig])).validate().parallel
    with _progress() as progress:
        source = open_model(model, progress)
    print(sharding_report(named[0], source.config, model.dtype, parallel), end="")
    return 0


def _print_kernels(torch: Any, device: str) -> None:
    registry = importlib.import_module("tokenspeed.kernels.registry")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    print(f"\nkernels on {device} in {str(dtype).removeprefix('torch.')}")
    for bound in registry.bindings_table(registry.KernelContext(device, dtype)):
        print(f"  {bound.op}: {bound.solution}")
        for name, reason in bound.passed_over:
            print(f"    not {name}: {reason}")


def _print_model(name: str) -> None:
    with _progress() as progress:
        source = open_model(ModelConfig(model=name), progress)
    print(f"\nmodel {name}")
    rows = [("path", str(source.path)), ("type", str(source.config.get("model_type")))]
    rows += [("tokenizer", "none" if source.tokenizer is None else type(source.tokenizer).__name__)]
    rows += [("chat template", "none" if source.chat_template is None else "yes")]
    rows += [("context", str(source.config.get("max_position_embeddings")))]
    _print_table([(f"  {label}", text) for label, text in rows])


def _is_built(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _gib(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**30:.1f} GiB"


if __name__ == "__main__":
    sys.exit(main())
