"""Several processes of one run, as `torchrun` starts them, but quickly."""

import os
import socket
import time
from collections.abc import Callable
from unittest import mock

import torch
from torch import multiprocessing

from arbcli.training.parallel.group import joined


def run_processes(size: int, work: Callable, *args, device: str = "cpu", join: bool = True) -> list:
    """Call work(group, *args) in so many processes; return what each of them returned, by rank.

    With `join=False` it is work(rank, *args), and joins the others itself.
    """
    # a process that has used CUDA cannot be forked
    start = "spawn" if torch.cuda.is_available() else "fork"
    context = multiprocessing.get_context(start)
    results = context.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    call = (size, port, device, join, results, work, args)
    options = {"nprocs": size, "start_method": start, "join": False}
    processes = multiprocessing.start_processes(_process, args=call, **options)
    outputs, over = {}, False
    while not over:
        over = processes.join(timeout=0.02)  # raises what a process raised
        while not results.empty():  # a pipe holds only so much
            rank, result = results.get()
            outputs[rank] = result
    return [outputs[rank] for rank in range(size)]


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for a condition that another process or thread meets; fail if it never holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Make the environment that `torchrun` gives a process."""
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    return {name: str(value) for name, value in values.items()} | {"MASTER_ADDR": "127.0.0.1"}


def _process(rank, size, port, device, join, results, work, args) -> None:
    torch.set_num_threads(1)
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    with mock.patch.dict(os.environ, environment(rank, size, port)):
        if not join:
            results.put((rank, work(rank, *args)))
            return
        with joined(place, "test") as group:
            results.put((rank, work(group, *args)))
            group.agree(0)
