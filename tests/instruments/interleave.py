"""Run the programs of one interpreted launch interleaved: one thread each, one at a time.

The interpreter calls the kernel once per program. `collector` returns a stand-in for the kernel that only
keeps the arguments; at the last program of the grid it runs them all, and at every memory access a seeded
choice says which program goes on.
"""

from __future__ import annotations

import random
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

from triton.runtime.interpreter import interpreter_builder


class _Abandoned(BaseException):
    """Unwinds a waiting program after another one has failed."""


class _Program:
    def __init__(self, index: Any) -> None:
        self.index = index
        self.may_run = threading.Semaphore(0)
        self.done = False


class Interleaver:
    """A schedule of programs, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.scheduler = threading.Semaphore(0)
        self.local = threading.local()
        self.abandoned = False
        self.error: BaseException | None = None

    def switch(self) -> None:
        """Give the turn back; returns when this program is chosen again. Called at each access."""
        program = getattr(self.local, "program", None)
        if program is not None:
            self.scheduler.release()
            program.may_run.acquire()
            if self.abandoned:
                raise _Abandoned

    def collector(self, kernel: Any, arg_names: Sequence[str]) -> Callable[..., None]:
        """Return a function with the kernel's parameters that runs all programs at the last one."""
        waiting: list[tuple[Any, tuple[Any, ...]]] = []

        def collect(args: tuple[Any, ...]) -> None:
            waiting.append((interpreter_builder.grid_idx, args))
            nx, ny, nz = interpreter_builder.grid_dim
            if len(waiting) == nx * ny * nz:
                programs, waiting[:] = waiting[:], []
                self._run(kernel, programs)

        # the interpreter binds arguments by name, so the stand-in needs the kernel's own signature
        names = ", ".join(arg_names)
        namespace: dict[str, Any] = {}
        exec(f"def {kernel.__name__}({names}): collect__(({names},))", namespace)
        code = namespace[kernel.__name__].__code__
        function = types.FunctionType(
            code, {**kernel.__globals__, "collect__": collect}, kernel.__name__, kernel.__defaults__
        )
        function.__annotations__ = dict(kernel.__annotations__)
        return function

    def _run(self, kernel: Any, calls: list[tuple[Any, tuple[Any, ...]]]) -> None:
        self.abandoned, self.error = False, None
        programs = [_Program(index) for index, _ in calls]
        threads = [
            threading.Thread(target=self._body, args=(program, kernel, args), daemon=True)
            for program, (_, args) in zip(programs, calls, strict=True)
        ]
        for thread in threads:
            thread.start()
        try:
            while self.error is None and not all(program.done for program in programs):
                self._turn(self.rng.choice([p for p in programs if not p.done]))
        finally:
            self.abandoned = True
            for program, thread in zip(programs, threads, strict=True):
                while not program.done:
                    self._turn(program)
                thread.join()
        if self.error is not None:
            raise self.error

    def _turn(self, program: _Program) -> None:
        interpreter_builder.grid_idx = program.index
        program.may_run.release()
        self.scheduler.acquire()

    def _body(self, program: _Program, kernel: Any, args: tuple[Any, ...]) -> None:
        self.local.program = program
        program.may_run.acquire()
        try:
            if not self.abandoned:
                kernel(*args)
        except _Abandoned:
            pass
        except BaseException as error:
            self.error = error
        finally:
            program.done = True
            self.scheduler.release()
