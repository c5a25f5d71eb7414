"""`arb serve`: a server of the OpenAI protocol for a saved model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arbcli.base.errors import ArbError, optional_module
from arbcli.base.output import LiveLine, note
from arbcli.commands import _options as opt

if TYPE_CHECKING:
    from arbcli.serve.engine import Engine

PACKAGES = ("starlette", "uvicorn")


_HOST = typer.Option(metavar="ADDRESS", help="Address to listen at; others need --api-key.")
_API_KEY = typer.Option(
    envvar="ARB_API_KEY", metavar="KEY", help="Key that clients must give. [default: none]"
)
_BATCH = typer.Option(min=1, max=64, help="Texts generated at once. [default: 64, or 4 on a CPU]")
_LENGTH = typer.Option(
    min=2,
    max=2**24,
    help="Maximum length of a text with its prompt, in bytes or tokens. [default: the"
    " model's context, at least 4096]",
)
_QUEUE = typer.Option(min=128, max=2**16, help="Maximum number of waiting texts.")
_SECONDS = typer.Option(min=1, max=86400, help="Maximum time of a request in seconds.")
_WATCH = typer.Option(metavar="FOLDER", help="Show the curves of the runs in a folder as well.")


def serve(
    run: opt.Run = None,
    checkpoint: opt.Checkpoint = None,
    host: Annotated[str, _HOST] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 chooses a free one.")] = 8000,
    api_key: Annotated[str | None, _API_KEY] = None,
    batch: Annotated[int | None, _BATCH] = None,
    length: Annotated[int | None, _LENGTH] = None,
    queue: Annotated[int, _QUEUE] = 256,
    seconds: Annotated[float, _SECONDS] = 600,
    watch: Annotated[Path | None, _WATCH] = None,
    compute: opt.ComputeOfRun = None,
    kv: opt.CacheDtype = None,
    device: opt.Device = None,
    backend: opt.Backend = None,
) -> None:
    """Serve a saved model by the OpenAI protocol: `arb serve RUN`.

    Clients are given `http://127.0.0.1:8000/v1` and the name of the run's folder. At SIGTERM or
    Ctrl-C, running texts are finished.
    """
    if api_key == "":  # of which a client can give none
        raise ArbError("`--api-key` is empty", "give a key, or leave it out")
    if api_key and not (api_key.isprintable() and api_key == api_key.strip()):
        raise ArbError("`--api-key` cannot be sent in a header", "remove spaces and line ends")
    if watch is None or run or checkpoint:
        checkpoint = opt.find_run(opt.one_path(run, checkpoint), loads=True)
    if watch is not None and not watch.is_dir():
        raise ArbError(f"`--watch {watch}` is not a folder", "name a folder of runs")
    for package in PACKAGES:
        optional_module(package, "arb serve", package, "'arb[serve]'")
    config = checkpoint and opt.config_in_header(checkpoint)
    if config and config.is_masked:
        raise ArbError(
            "this model is masked and cannot generate text from left to right",
            "fill holes: `arb generate RUN --infill TEXT`",
        )
    from arbcli.serve.server import is_loopback, listener
    from arbcli.serve.server import serve as run_server

    if not is_loopback(host) and not api_key:
        raise ArbError(
            f"`--host {host}` can be reached from other machines",
            "add `--api-key KEY`, or leave `--host` out",
        )
    sock = listener(host, port)
    from arbcli.serve.app import Limits, build_app

    engine = None
    if checkpoint is not None:
        sizes = {"texts": batch, "positions": length, "queue": queue}
        engine = _start_engine(checkpoint, compute, device, backend, kv=kv, **sizes)
    app = build_app(engine, api_key=api_key, limits=Limits(seconds=seconds), watch=watch)
    try:
        run_server(app, engine, sock, seconds=seconds)
    finally:
        if engine is not None:
            engine.close()
    note("stopped")


def _start_engine(
    checkpoint: Path, compute: str | None, device: str | None, backend: str | None, **options: Any
) -> "Engine":
    """Load a model, and start its engine; further arguments are those of `Engine`."""
    with LiveLine("loading"):
        from arbcli.serve.engine import Engine

        model, name, _, backend = opt.open_model(checkpoint, device, backend, compute)
        engine = Engine(model, Path(name), backend=backend, **options)
        engine.start()
    return engine
