"""Workers of one TP group in processes of their own, driven by the test over pipes."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from launcher.worker.step import StepOutput, StepPlan
from tests.models.driver import settings, started


def _serve(pipe: Connection, model: str, tp: int, rank: int, url: str, more: dict[str, Any]) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", HF_HUB_OFFLINE="1")
    from launcher.models.worker import TransformersWorker

    try:
        worker = started(TransformersWorker(settings(model, tp=tp, rank=rank, rendezvous=url, **more)))
        pipe.send(("ready", worker.kv_cache_spec()))
        while (plan := pipe.recv()) is not None:
            pipe.send(("output", worker.execute_model(plan)))
        worker.shutdown()
    except EOFError:
        pass
    except BaseException as error:
        pipe.send(("error", f"{error}\n{traceback.format_exc()}"))


class TensorRanks:
    """``with TensorRanks(model, tp, directory) as ranks: Driver(ranks.execute)``"""

    def __init__(self, model: Path, tp: int, directory: Path, **more: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        self.specs: list[Any] = []
        for rank in range(tp):
            ours, theirs = context.Pipe()
            url = f"file://{directory}/rendezvous"
            process = context.Process(target=_serve, args=(theirs, str(model), tp, rank, url, more))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def __enter__(self) -> TensorRanks:
        try:
            self.specs = [self._answer(pipe) for pipe in self.pipes]
        except BaseException:
            self.__exit__()
            raise
        return self

    def execute(self, plan: StepPlan) -> StepOutput | None:
        for pipe in self.pipes:
            pipe.send(plan)
        answers = [self._answer(pipe) for pipe in self.pipes]
        assert all(answer is None for answer in answers[1:])
        return answers[0]  # type: ignore[no-any-return]

    def _answer(self, pipe: Connection) -> Any:
        assert wait([pipe], 90), "no answer"
        kind, value = pipe.recv()
        assert kind != "error", value
        return value

    def __exit__(self, *_: object) -> None:
        for pipe in self.pipes:
            try:
                pipe.send(None)
            except OSError:
                pass
            pipe.close()
        for process in self.processes:
            process.join(15)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
