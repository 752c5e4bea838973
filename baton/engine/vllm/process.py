"""Engine process of a vLLM worker: it starts ``vllm serve`` and ends it.

    python -m baton.engine.vllm.process CONTROL_FD POOL_FD SETTINGS_JSON

    worker's shell == messages.Stop, Ready, Fatal ==> this process -- starts, ends --> vllm serve
    worker's shell -- HTTP, KV events (Unix sockets), see translator.py --------------> vllm serve

The arguments are those of ``baton.engine.process.step_loop``. With ``hand_off: baton`` vLLM opens
the pool, to copy KV from it and into it. This process leads a process group, to which vLLM belongs.
It ends after ``Stop``, when the shell is gone, or with a ``Fatal`` report when vLLM is gone. If it
is killed, the shell kills the group, and so does a program that waits for the end of a pipe, and
then removes the folder of vLLM's sockets.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from baton.engine import block_names
from baton.engine.process import messages
from baton.engine.settings import EngineSettings, ExternalEngine
from baton.engine.vllm import server
from baton.engine.vllm.control import log
from baton.engine.vllm.selftest import prove_exact
from baton.engine.vllm.translator import RunningVllm, event_prefixes
from baton.engine.vllm.untested import check_untested
from baton.engine.vllm.versions import untested
from baton.model.artifact import resolve_model
from baton.model.locate import locate
from baton.telemetry.tasks import BackgroundTasks
from baton.types.errors import InternalError

_EXIT_S = 2.0  # for vLLM to end after SIGTERM; the shell waits little longer


class VllmProcess:
    """Life of one vLLM, from its start to its end.

    Attributes:
        ended: Set to "" after ``Stop`` or without a shell, else to the failure.
        orphaned: Whether the shell is gone.
    """

    def __init__(
        self,
        settings: EngineSettings,
        external: ExternalEngine,
        writer: asyncio.StreamWriter,
        folder: str,
        pool_fd: int,
    ) -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.orphaned = False
        self._settings = settings
        self._external = external
        self._writer = writer
        self._folder = folder
        self._pool_fd = pool_fd

    async def listen(self, reader: asyncio.StreamReader) -> None:
        """Wait for ``Stop``, or until the shell is gone."""
        commands = messages.command_reader()
        with suppress(ConnectionError):
            while data := await reader.read(1 << 20):
                if any(isinstance(one, messages.StopEngine) for one in commands.feed(data)):
                    self.end("")
                    return
        self.orphaned = True
        self.end("")

    async def drive(self) -> None:
        """Start vLLM, report ``Ready``, and raise when vLLM ends.

        Raises:
            InternalError: vLLM did not start, or has ended.
            ModelError: The model cannot be found or described.
        """
        began_s = time.monotonic()
        settings = self._settings
        path, _ = locate(settings.model)
        if not path.is_dir():
            raise InternalError(
                f"vLLM workers load a Hugging Face directory, and `model` is {settings.model}"
            )
        loop = asyncio.get_running_loop()
        describing = loop.run_in_executor(
            None, partial(resolve_model, settings.model, allow_unsupported=True)
        )
        pool = f"/proc/{os.getpid()}/fd/{self._pool_fd}"
        arguments = server.command(self._external, settings, path, Path(self._folder), pool)
        vllm = await server.start(arguments, settings.threads, self._external)
        try:
            origin = server.origin_in(self._folder)
            await server.until_healthy(vllm, origin, self._progress)
            facts = await server.read_facts(self._folder, self._external.hand_off)
            artifact = await describing
            geometry = facts.geometry(artifact)
            config = artifact.config
            if settings.numerics == "exact":
                self._progress("checking that vLLM's numerics are exact")
                proof = await prove_exact(origin, facts, config.vocab_size)
                facts = msgspec.structs.replace(facts, exact=proof)
            if self._external.hand_off == "baton":
                self._check_pool(geometry.pool_bytes)
            if warning := untested(facts.version):
                self._progress(warning)
                log(warning)
                events = partial(event_prefixes, self._folder, facts)
                await check_untested(origin, facts, events, self._folder, config.vocab_size)
            await asyncio.to_thread(block_names.load)  # compiled before the shell needs it
            self._send(
                messages.Ready(
                    pid=vllm.pid,
                    geometry=geometry,
                    numerics_id=facts.numerics_id,
                    weights_digest=artifact.weights_digest,
                    eos_token_ids=config.eos_token_ids,
                    max_context_tokens=facts.max_context_tokens,
                    threads=settings.threads,
                    load_s=time.monotonic() - began_s,
                    hand_off=facts.hand_off,
                    running=msgspec.msgpack.encode(RunningVllm(self._folder, facts, config)),
                )
            )
            code = await vllm.wait()
            raise InternalError(f"`vllm serve` exited with code {code}; see the engine log")
        finally:
            await _terminate(vllm)

    def end(self, why: str) -> None:
        """End this process, because of ``why`` if that is not empty."""
        if not self.ended.done():
            self.ended.set_result(why)

    def fail(self, error: Exception) -> None:
        """End this process because of an error."""
        self.end(f"{type(error).__name__}: {error}")

    def _check_pool(self, size: int) -> None:
        """Check that vLLM has given the pool the size that this worker's transports expect."""
        size_bytes = os.fstat(self._pool_fd).st_size
        if size_bytes != size:
            raise InternalError(
                f"hand_off: baton does not support this model: vLLM's KV has {size_bytes} bytes, "
                f"and the shape of the model needs {size}"
            )

    def _progress(self, what: str) -> None:
        self._send(messages.LoadProgress(what))

    def _send(self, report: messages.Report) -> None:
        if not self._writer.is_closing():
            self._writer.write(messages.frame([report]))


async def _terminate(vllm: asyncio.subprocess.Process) -> None:
    """End the group of vLLM's processes; this process ignores the signal."""
    os.killpg(os.getpgrp(), signal.SIGTERM)
    with suppress(TimeoutError):
        async with asyncio.timeout(_EXIT_S):
            await vllm.wait()


def _clean_up_at_exit(folder: str) -> None:
    """Start a program that kills this process's group and removes a folder once it is gone.

    It is neither of the group nor a descendant: a fleet kills both.
    """
    reading, _writing = os.pipe()  # only this process holds the other end, until it exits
    script = 'exec 3<&0; { read _; kill -9 "-$0"; rm -rf -- "$1"; } <&3 &'
    command = ["/bin/sh", "-c", script, str(os.getpgrp()), folder]
    quiet = subprocess.DEVNULL  # the group may have ended
    subprocess.run(
        command, stdin=reading, stdout=quiet, stderr=quiet, start_new_session=True, check=True
    )
    os.close(reading)


async def serve(control: socket.socket, pool_fd: int, settings: EngineSettings) -> None:
    """Run one vLLM until ``Stop``. After a failure, or without a shell, kill the whole group."""
    external = settings.external
    if external is None:
        raise InternalError("the settings have no external engine")
    reader, writer = await asyncio.open_connection(sock=control)
    tasks = BackgroundTasks("vllm process")
    with tempfile.TemporaryDirectory(prefix="baton-vllm-") as folder:
        _clean_up_at_exit(folder)
        process = VllmProcess(settings, external, writer, folder, pool_fd)
        tasks.vital(process.listen(reader), "listen", process.fail)
        tasks.vital(process.drive(), "drive", process.fail)
        why = await process.ended
        if why:
            writer.write(messages.frame([messages.Fatal(why)]))
            with suppress(ConnectionError):
                await writer.drain()
        elif not process.orphaned:
            await tasks.close()
    if why or process.orphaned:
        os.killpg(os.getpgrp(), signal.SIGKILL)
    writer.close()


def main() -> None:
    """Run ``python -m baton.engine.vllm.process``."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # sent to the group that this process leads
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C: the shell decides
    control = socket.socket(fileno=int(sys.argv[1]))
    settings = msgspec.json.decode(sys.argv[3], type=EngineSettings)
    asyncio.run(serve(control, int(sys.argv[2]), settings))


if __name__ == "__main__":
    main()
