"""`kvcache replay`: replay a trace or a named workload, and report what the cache did."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcache.replay.config import EngineConfig
    from kvcache.replay.counters import ReplayResult, Timeline
    from kvcache.replay.trace import Trace

# what the workloads run with unless told otherwise: small enough a pool to make a difference
_WORKLOAD_DEFAULTS: dict[str, dict[str, int]] = {
    # each request is one chunk, as in SGLang's release note
    "shared-prompt": {"running": 8, "swa_tokens": 15_360, "cut_chunks": False},
    "multi-turn": {"running": 16, "swa_tokens": 20_480},
    "forest": {"running": 16},
    "uniform": {"running": 16, "full_tokens": 1 << 20, "swa_tokens": 10_485},
    "templates": {"running": 16, "full_tokens": 1 << 20, "swa_tokens": 10_485},
    "scan": {"running": 16, "full_tokens": 1 << 20, "swa_tokens": 10_485},
    "round-robin": {
        "running": 16,
        "window": 1024,
        "full_tokens": 1 << 20,
        "swa_tokens": 104_857,
    },
}
_WORKLOAD_OPTIONS = {
    "requests": "requests",
    "system-len": "tokens of the system prompt; forest: mean length of an edge",
    "question-len": "unique tokens of a request",
    "output-len": "generated tokens of a request; multi-turn: their mean",
    "conversations": "conversations, or sessions in round robin",
    "turns": "requests of a conversation",
    "message-len": "tokens of a message; multi-turn: their mean; templates: of the second level",
    "trees": "forest: number of trees; templates: of system prompts",
    "depth": "forest: edges from a root to a leaf",
    "fanout": "forest: forks of an edge; templates: second levels of a system prompt",
    "documents": "uniform: number of documents",
    "document-len": "tokens of a document; scan: of a prompt that is seen once",
}
# those that not all workloads use
_USED_BY = {
    "requests": ("shared-prompt", "forest", "uniform", "templates", "scan"),
    "system-len": ("shared-prompt", "multi-turn", "forest", "templates"),
    "question-len": ("shared-prompt", "forest", "uniform", "templates", "round-robin"),
    "conversations": ("multi-turn", "scan", "round-robin"),
    "turns": ("multi-turn", "round-robin"),
    "message-len": ("multi-turn", "templates", "scan"),
    "trees": ("forest", "templates"),
    "depth": ("forest",),
    "fanout": ("forest", "templates"),
    "documents": ("uniform",),
    "document-len": ("uniform", "scan", "round-robin"),
}

# a tty is told how far a run is if it has at least so many requests
_LONG_RUN = 1000


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "replay",
        description="Replay a request trace (Mooncake or agentic JSONL, plain or gzip) or a named "
        "workload through the manager with a simulated engine, and report hit rates and costs.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("trace", nargs="?", metavar="TRACE", type=Path, help="trace file")
    parser.add_argument(
        "--workload",
        choices=sorted(_WORKLOAD_DEFAULTS),
        help="generate the requests instead; docs/replay.md has what each is, and its defaults",
    )
    _add_cache_options(parser.add_argument_group("cache"))
    _add_engine_options(parser.add_argument_group("engine"))
    _add_report_options(parser.add_argument_group("report"))
    group = parser.add_argument_group("workloads")
    group.add_argument("--seed", type=int, default=argparse.SUPPRESS, metavar="N", help="default 0")
    for option, text in _WORKLOAD_OPTIONS.items():
        group.add_argument(f"--{option}", type=int, metavar="N", help=text)


def _add_cache_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--page-size", type=int, default=64, metavar="N", help="tokens; default 64")
    group.add_argument(
        "--window",
        type=_int_or("none"),
        default=argparse.SUPPRESS,
        metavar="N|none",
        help="tokens; default 128",
    )
    for pool in ("full", "swa"):
        group.add_argument(
            f"--{pool}-tokens",
            type=_int_or("unlimited"),
            default=argparse.SUPPRESS,
            metavar="N|unlimited",
            help=f"size of the {pool.upper() if pool == 'swa' else 'Full'} pool; default unlimited",
        )
    group.add_argument(
        "--checkpoints",
        metavar="POLICY",
        help="none, or a list of branch, chunks, hints, ladder, every=N; default branch,ladder; lru: branch",
    )
    group.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, ...")


def _add_engine_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--chunk",
        type=int,
        default=8192,
        metavar="N",
        help="prompt tokens of a step, shared by its prefills; 0: whole prompts; default 8192",
    )
    group.add_argument(
        "--no-cut",
        dest="cut_chunks",
        action="store_false",
        default=argparse.SUPPRESS,
        help="let a step take more than an eighth of the SWA pool (and more than 2,048 tokens)",
    )
    group.add_argument(
        "--retention",
        metavar="POLICY",
        help="what goes first: value (whole windows, by what they are worth; the default), or lru",
    )
    group.add_argument(
        "--running",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help="requests that run at a time; default 64",
    )
    group.add_argument(
        "--no-decode",
        dest="decode",
        action="store_false",
        help="a request ends when its prompt is computed",
    )
    group.add_argument(
        "--no-hold-back",
        dest="hold_back",
        action="store_false",
        help="admit a request although a running one computes a prefix that it could then reuse",
    )
    group.add_argument(
        "--abort-every", type=int, default=0, metavar="N", help="cancel every N-th request halfway"
    )
    group.add_argument("--limit", type=int, metavar="N", help="only the first N requests")
    group.add_argument(
        "--max-output", type=int, metavar="N", help="generate at most N tokens a request"
    )
    group.add_argument(
        "--arrivals",
        action="store_true",
        help="requests come at the times of the trace; default: as soon as there is room",
    )
    group.add_argument(
        "--speed",
        type=float,
        default=argparse.SUPPRESS,
        metavar="X",
        help="arrivals X times as fast; default 1",
    )
    group.add_argument(
        "--step-seconds",
        type=float,
        default=argparse.SUPPRESS,
        metavar="X",
        help="arrivals: simulated time of a step; default 0.02",
    )
    group.add_argument(
        "--prefill-rate",
        type=float,
        default=argparse.SUPPRESS,
        metavar="X",
        help="arrivals: simulated prompt tokens a second; default 40000",
    )
    group.add_argument(
        "--block-size",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help="tokens that a hash_id of a Mooncake trace stands for; default 512",
    )


def _add_report_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--compare",
        action="store_true",
        help="run checkpoints none and branch (and those given) and the bound, side by side",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write all counts there")
    group.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the run (matplotlib)")
    group.add_argument(
        "--progress",
        action="store_true",
        help="show progress; default: on a terminal, on long runs",
    )


def _int_or(word: str) -> Callable[[str], int | None]:
    def parse(text: str) -> int | None:
        return None if text == word else int(text)

    parse.__name__ = f"int or {word}"  # argparse: "invalid int or none value: 'x'"
    return parse


def run(args: argparse.Namespace) -> int:
    """Carry out `kvcache replay`; returns the exit status: 1 if every request was refused.

    Raises:
        InvalidInputError: Bad input; nothing was written.
    """
    # nothing that needs torch or numba is imported before a replay is asked for
    from kvcache.errors import InvalidInputError
    from kvcache.output import check_plot, check_writable, write_json
    from kvcache.replay import plot, report

    if (args.trace is None) == (args.workload is None):
        raise InvalidInputError("give a TRACE or a --workload, one of them")
    _refuse_idle_options(args)
    if args.json is not None:
        check_writable("--json", args.json)
    if args.plot is not None:
        check_writable("--plot", args.plot)
        check_plot("--plot", args.plot)
    config = _config(args)
    configs = _policies(args, config)
    trace = _trace(args)
    for each in configs.values():
        each.cache_config(trace)
    runs = _replay_all(args, trace, configs)
    results = [result for result, _ in runs]
    if args.json is not None:
        options = _options(args, config)
        write_json(args.json, report.as_json(trace.name, options, results, compare=args.compare))
    if args.plot is not None:
        plot.write_plot(args.plot, _title(trace, config), runs)

    print(_title(trace, config))
    print(report.table(results))
    if args.compare:
        print("\n" + report.comparison(results))
    else:
        print("\n" + report.calls_table(results[0]))
    for line in report.refusals(results[0]):
        print(line)
    if len(trace) and results[0].refused == len(trace):
        print("no request could run: the figures mean nothing", file=sys.stderr)
        return 1
    return 0


def _refuse_idle_options(args: argparse.Namespace) -> None:
    """Raise InvalidInputError for an option that would change nothing in this run."""
    from kvcache.errors import InvalidInputError

    given = {name.replace("_", "-") for name, value in vars(args).items() if value is not None}
    reasons: dict[str, str] = {}
    if args.workload is None:
        reasons = dict.fromkeys(
            ("seed", *_WORKLOAD_OPTIONS), "is for a --workload, not for a trace"
        )
    else:
        reasons["block-size"] = "is for a trace, not for a --workload"
        for option, users in _USED_BY.items():
            if args.workload not in users:
                reasons[option] = f"is for {', '.join(users)}, not for {args.workload}"
    if not args.arrivals:
        for option in ("speed", "step-seconds", "prefill-rate"):
            reasons[option] = "does nothing without --arrivals"
    for option, reason in reasons.items():
        if option in given:
            raise InvalidInputError(f"--{option}: {reason}")


def _policies(args: argparse.Namespace, config: EngineConfig) -> dict[str, EngineConfig]:
    """The configurations to run, by the name of their policies in reports."""
    from kvcache.policies.checkpoints import parse_checkpoints
    from kvcache.policies.retention import Lru, Value, parse_retention

    retention = parse_retention(args.retention or "value")
    by_value = isinstance(retention, Value)
    usual = "branch,ladder" if by_value else "branch"
    given = args.checkpoints.replace(" ", "") if args.checkpoints is not None else usual
    names = ["none", "branch"] if args.compare else []
    runs = {
        name: replace(config, checkpoints=parse_checkpoints(name), retention=Lru())
        for name in names
    }
    name = f"{given}, value" if by_value else given
    runs[name] = replace(config, checkpoints=parse_checkpoints(given), retention=retention)
    return runs


def _config(args: argparse.Namespace) -> EngineConfig:
    from kvcache.replay.config import EngineConfig

    given = vars(args)
    defaults = _WORKLOAD_DEFAULTS.get(args.workload, {})
    if given.get("window", 0) is None:
        defaults = {name: value for name, value in defaults.items() if name != "swa_tokens"}
    chosen = {**defaults, **given}
    names = {f.name for f in fields(EngineConfig)} - {"checkpoints", "retention"}
    return EngineConfig(**{name: chosen[name] for name in names if name in chosen})


def _trace(args: argparse.Namespace) -> Trace:
    from kvcache.checks import check_int
    from kvcache.replay.readers import MOONCAKE_BLOCK, read_trace
    from kvcache.replay.workloads import default_sizes, make_workload

    sizes = {
        option.replace("-", "_"): getattr(args, option.replace("-", "_"))
        for option in _WORKLOAD_OPTIONS
        if getattr(args, option.replace("-", "_")) is not None
    }
    if args.workload is not None:
        seed = check_int("seed", _seed(args), low=0)
        made_of = replace(default_sizes(args.workload), **sizes)
        trace = make_workload(args.workload, made_of, seed=seed)
    else:
        block_size = getattr(args, "block_size", MOONCAKE_BLOCK)
        check_int("block size", block_size, low=1, high=2**20)
        trace = read_trace(args.trace, mooncake_block_size=block_size)
    if args.max_output is not None:
        trace = trace.cut_outputs(args.max_output)
    return trace if args.limit is None else trace.limit(args.limit)


def _seed(args: argparse.Namespace) -> int:
    return getattr(args, "seed", 0)


def _replay_all(
    args: argparse.Namespace, trace: Trace, configs: dict[str, EngineConfig]
) -> list[tuple[ReplayResult, Timeline]]:
    """Run every policy, and the bound if asked for; return (result, timeline) of each."""
    from kvcache.replay.bound import BOUND, replay_bound
    from kvcache.replay.engine import Engine
    from kvcache.replay.warmup import warm_up

    runs: list[tuple[ReplayResult, Timeline]] = []
    config = next(iter(configs.values()))
    with _progress(args, "compiling, which only the first run has to", None):
        warm_up(config.cache_config(trace))
    for policy, each in configs.items():
        with _progress(args, policy, len(trace)) as on_end:
            engine = Engine(trace, each, policy=policy, on_end=on_end)
            result = engine.run()
            runs.append((result, engine.timeline))
            engine.close()
    if args.compare:
        with _progress(args, BOUND, len(trace)) as on_end:
            runs.append(
                replay_bound(trace, page_size=config.page_size, decode=config.decode, on_end=on_end)
            )
    return runs


@contextmanager
def _progress(
    args: argparse.Namespace, name: str, total: int | None
) -> Iterator[Callable[[int], object] | None]:
    """Show on stderr what goes on, if that is wanted; yields what to call with requests done."""
    long_run = total is None or total >= _LONG_RUN
    if not args.progress and not (long_run and sys.stderr.isatty()):
        yield None
        return
    from tqdm import tqdm

    form = "{desc}" if total is None else None
    with tqdm(
        total=total, desc=name, unit="req", file=sys.stderr, leave=False, bar_format=form
    ) as bar:
        yield bar.update


def _title(trace: Trace, config: EngineConfig) -> str:
    from kvcache.replay.trace import MAX_REQUEST_TOKENS

    pools = ", ".join(
        f"{name} {'unlimited' if tokens is None else f'{tokens:,} tokens'}"
        for name, tokens in (("Full", config.full_tokens), ("SWA", config.swa_tokens))
        if name == "Full" or config.window is not None
    )
    window = "full attention" if config.window is None else f"window {config.window}"
    chunk = f"chunk {config.chunk:,}" if config.chunk else "whole prompts"
    if config.chunk_tokens < (config.chunk or config.running * MAX_REQUEST_TOKENS):
        chunk += f" cut to {config.chunk_tokens:,}"
    decode = "" if config.decode else ", no decode"
    return (
        f"{trace.name}: page {config.page_size}, {window}, {pools}\n"
        f"{chunk}, {config.running} running{decode}"
    )


def _options(args: argparse.Namespace, config: EngineConfig) -> dict[str, Any]:
    """What the run was made with, for the JSON."""
    names = [f.name for f in fields(config) if f.name not in ("checkpoints", "retention")]
    options = {name: getattr(config, name) for name in names}
    options.update(limit=args.limit, max_output=args.max_output, workload=args.workload)
    if args.workload is not None:
        options["seed"] = _seed(args)
    return options
