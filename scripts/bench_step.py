"""What a call through the whole executor costs: ours against vLLM's MultiprocExecutor and our own bare queue.

    scripts/bench_step [--with-peers] [--quick] [--tp 1,2,4,8] [--json] [--out FILE]

The call is ``check_health``, which does nothing on either side; once all ranks reply, once one does. Ours runs the
reference worker, theirs a Llama of a few kB. Both executors live in one process at the same time and take turns in
rounds; the workers of the one that is not measured are stopped (SIGSTOP), for theirs spin for a while after a call.
The bare queue is what `bench_queue` measures: a record of 200 bytes to as many readers, each acknowledges.

vLLM is got as in `bench_queue`, but with all that its executor needs, some GB more.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _figures
import _peers
import msgspec

from launcher.config import REFERENCE_WORKER, EngineSettings, RankSettings, WorkerSettings
from launcher.process.spec import ProcessSpec

METHOD = "check_health"
Call = Callable[[bool], Any]
"""Make the call; True: all ranks reply, False: rank 0 does."""


class Contender:
    def __init__(self, call: Call, close: Callable[[], object], pids: list[int]) -> None:
        self.call = call
        self.close = close
        self._pids = pids

    def let(self, run: bool) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGCONT if run else signal.SIGSTOP)


def ours(tp: int) -> Contender:
    from launcher.executor.multiproc import MultiprocExecutor

    def worker(rank: int) -> WorkerSettings:
        ranks = RankSettings(rank=rank, local_rank=rank, world_size=tp, tp_rank=rank, tp_size=tp)
        return WorkerSettings(worker=REFERENCE_WORKER, ranks=ranks)

    specs = [
        ProcessSpec(
            title=f"Worker_TP{rank}",
            role="worker",
            target="launcher.worker.main:run",
            rank=rank,
            payload=msgspec.msgpack.encode(worker(rank)),
        )
        for rank in range(tp)
    ]
    executor = MultiprocExecutor(EngineSettings(backend="mp", worker=worker(0)), specs=specs, method="spawn")
    executor.start()

    def call(all_reply: bool) -> Any:
        return executor.collective_rpc(METHOD, unique_reply_rank=None if all_reply else 0)

    return Contender(call, lambda: executor.shutdown(10), [child.pid for child in executor.children])


def theirs(tp: int, model: str) -> Contender:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    arguments = EngineArgs(
        model=model,
        tensor_parallel_size=tp,
        distributed_executor_backend="mp",
        enforce_eager=True,
        max_model_len=128,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
    )
    executor = MultiprocExecutor(arguments.create_engine_config())

    def call(all_reply: bool) -> Any:
        return executor.collective_rpc(METHOD, unique_reply_rank=None if all_reply else 0)

    return Contender(call, executor.shutdown, [worker.proc.pid for worker in executor.workers])


def small_llama(directory: str) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 256,
        "max_position_embeddings": 256,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    Path(directory, "config.json").write_text(json.dumps(config))


def time_calls(contender: Contender, all_reply: bool, count: int) -> list[float]:
    """µs of each."""
    call, clock = contender.call, time.perf_counter_ns
    times = []
    contender.let(run=True)
    for _ in range(count // 5):
        call(all_reply)
    for _ in range(count):
        start = clock()
        call(all_reply)
        times.append((clock() - start) / 1e3)
    contender.let(run=False)
    return times


def measure(tp: int, with_peer: bool, samples: int, rounds: int) -> dict[str, Any]:
    """In a process of its own, which has started no thread yet."""
    with tempfile.TemporaryDirectory(prefix="xs-bench-") as model:
        small_llama(model)
        contenders = {"xserve": ours(tp)}
        try:
            if with_peer:
                contenders["vllm"] = theirs(tp, model)
            gc.disable()
            return {replies: turns(contenders, replies == "all", samples, rounds) for replies in ("all", "one")}
        finally:
            for contender in contenders.values():
                contender.let(run=True)
                contender.close()


def turns(contenders: dict[str, Contender], all_reply: bool, samples: int, rounds: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    medians: dict[str, list[float]] = {name: [] for name in contenders}
    for contender in contenders.values():
        contender.let(run=False)
    names = list(contenders)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            found = time_calls(contenders[name], all_reply, samples // rounds)
            times[name] += found
            medians[name].append(_figures.percentile(found, 50))
    return {name: {**_figures.pair(times[name]), "round_medians": medians[name]} for name in names}


def bare_queue(python: str, readers: int, samples: int) -> float:
    from _queue_cell import Experiment, Task
    from bench_queue import run_cell

    cell = run_cell(python, Task(readers, ("xserve",), (Experiment("bare", 200, samples, 4),)))
    return float(cell["experiments"]["bare"]["xserve"]["round_trip_us"]["p50"])


def goals(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for tp, cell in results.items():
        for replies in ("all", "one"):
            by_name, which = cell[replies], f"TP {tp}, {replies} reply"
            if "vllm" in by_name:
                p50 = _figures.median_ratio(by_name["xserve"]["round_medians"], by_name["vllm"]["round_medians"])
                p99 = by_name["xserve"]["p99"] / by_name["vllm"]["p99"]
                found.append(_figures.goal(f"call p50 over vLLM's, {which}", p50, 0.35))
                found.append(_figures.goal(f"call p99 over vLLM's, {which}", p99, 0.45))
        above = cell["all"]["xserve"]["p50"] - cell["bare_queue_us"]
        found.append(_figures.goal(f"µs above the bare queue's round trip, TP {tp}, all reply", above, 20.0))
    return found


def show(results: dict[str, dict[str, Any]]) -> None:
    print(f"{'':4}{'replies':10}{'':10}{'p50 µs':>10}{'p99 µs':>10}{'bare queue p50':>18}")
    for tp, cell in results.items():
        for replies in ("all", "one"):
            for name, f in cell[replies].items():
                bare = f"{cell['bare_queue_us']:18.1f}" if name == "xserve" and replies == "all" else ""
                print(f"{tp:4}{replies:10}{name:10}{f['p50']:10.1f}{f['p99']:10.1f}{bare}")


def one_size(python: str, tp: int, with_peer: bool, samples: int) -> dict[str, Any]:
    command = [python, __file__, "--measure", str(tp), "--samples", str(samples)]
    command += ["--with-peers"] if with_peer else []
    done = subprocess.run(command, env=_peers.environment(), stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise SystemExit(f"bench_step: TP {tp}: exit code {done.returncode}; see above")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["bare_queue_us"] = bare_queue(python, tp, samples)
    return found


def main() -> int:
    parser = argparse.ArgumentParser("bench_step", description="A call through the executor against its peer.")
    parser.add_argument("--with-peers", action="store_true", help="get vLLM's executor and compare with it")
    parser.add_argument("--quick", action="store_true", help="TP 1 and 4, fewer samples")
    parser.add_argument("--tp", default="", help="sizes (default 1,2,4,8; quick 1,4)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--out", metavar="FILE", help="write the results as JSON")
    parser.add_argument("--samples", type=int, default=0, help="calls per measurement (default 2000; quick 800)")
    parser.add_argument("--measure", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    samples = options.samples or (800 if options.quick else 2000)
    if options.measure:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print is not for the parent
        logging.disable(logging.WARNING)
        print(json.dumps(measure(options.measure, options.with_peers, samples, 8)), file=answers, flush=True)
        os._exit(0)  # the peer's threads must not hold us up
    python, with_peer, note = sys.executable, False, "without vLLM: give --with-peers"
    if options.with_peers:
        try:
            python, with_peer, note = _peers.peer_python("executor"), True, ""
        except _peers.NoPeer as error:
            note = str(error)
    if note:
        print(f"bench_step: {note}", file=sys.stderr)
    host = _figures.facts()
    sizes = [int(word) for word in (options.tp or ("1,4" if options.quick else "1,2,4,8")).split(",")]
    results = {str(tp): one_size(python, tp, with_peer, samples) for tp in sizes}
    if not options.json:
        show(results)
    result = {"goals": goals(results), "host": host, "note": note, "results": results}
    _figures.deliver(result, options.out, options.json)
    if not options.json:
        _figures.show_goals(result["goals"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
