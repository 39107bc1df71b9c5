"""An engine core as a process of its own, killed by tests and started again: several lives at one address."""

from __future__ import annotations

import signal

import msgspec

from launcher.config import EngineSettings, RankSettings, WorkerSettings, encode
from launcher.process.nursery import Child, Nursery
from launcher.process.spec import ProcessSpec
from tests.conftest import eventually


def ranks_of(rank: int, tp: int) -> RankSettings:
    return RankSettings(rank=rank, local_rank=rank, world_size=tp, tp_rank=rank, tp_size=tp)


class Lives:
    """The reference worker behind a core at `address`; `tp` 0: in the core's own process (``uni``)."""

    def __init__(self, address: str, *, tp: int = 0, max_num_seqs: int = 64, **worker_config: object) -> None:
        self.generation = 0
        self._nursery = Nursery("spawn")
        self._tp = tp
        self._worker = WorkerSettings(
            worker_config={key: str(value) for key, value in worker_config.items()},
            kv_cache_memory=64 << 20,
            max_num_seqs=max_num_seqs,
            ranks=ranks_of(0, max(tp, 1)),
        )
        self._settings = EngineSettings(
            backend="mp" if tp else "uni",
            address=address,
            worker=self._worker,
            max_num_seqs=max_num_seqs,
            ready_timeout=30,
        )
        self.start()

    def _workers(self) -> tuple[ProcessSpec, ...]:
        return tuple(
            ProcessSpec(
                title=f"Worker_DP0_PP0_TP{rank}",
                comm=f"xs:w0.d0p0t{rank}",
                role="worker",
                rank=rank,
                target="launcher.worker.main:run",
                payload=encode(msgspec.structs.replace(self._worker, ranks=ranks_of(rank, self._tp))),
            )
            for rank in range(self._tp)
        )

    @property
    def core(self) -> Child:
        return self._nursery.children[-1]

    def start(self) -> None:
        """The next life; it is not waited for."""
        self.generation += 1
        settings = msgspec.structs.replace(self._settings, generation=self.generation)
        spec = ProcessSpec(
            title="EngineCore_DP0",
            comm="xs:core0",
            role="engine_core",
            target="launcher.engine.core_process:run",
            payload=encode(settings),
            children=self._workers(),
            child_method="fork",
        )
        self._nursery.start_all([spec])

    def is_gone(self) -> bool:
        self._nursery.pump()
        return self.core.is_gone

    def kill(self) -> None:
        self.core.signal(signal.SIGKILL)
        eventually(self.is_gone, what="the core is gone")

    def revive(self) -> bool:
        """Start the next life if this one has ended; whether it had."""
        gone = self.is_gone()
        if gone:
            self.start()
        return gone

    def close(self) -> None:
        if not self.core.is_gone:
            self.core.signal(signal.SIGCONT)
        self._nursery.stop(2)
        self._nursery.close()
