"""SGLang's real scheduler in this process: only its edges, input and output, are replaced."""

from __future__ import annotations

import contextlib
import gc
import inspect
import random
import socket
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch

OPTIONS: dict[str, Any] = {
    "load_format": "auto",
    "skip_tokenizer_init": True,
    "device": "cpu",
    "attention_backend": "torch_native",
    "dtype": "float32",
    "page_size": 1,
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "max_total_tokens": 4096,
    "max_running_requests": 8,
    "mem_fraction_static": 0.3,
    "random_seed": 1,
    "context_length": 1024,
    "chunked_prefill_size": 256,
    "skip_server_warmup": True,
    "log_level": "error",
    "tp_size": 1,
    "watchdog_timeout": 3600,
}
TOO_MANY = 20_000


class Engine:
    """One scheduler, driven by its own event loop.

    Args:
        rank: Of this process among those that share a model by tensors; each on its own GPU.
        options: Server arguments over `OPTIONS`.

    Attributes:
        scheduler: SGLang's.
        iteration: Iterations of the loop so far.
        at_top: Called with the iteration at the top of each, before requests come in.
        feed: Returns the messages that arrive in an iteration.
        finished: Called each iteration: whether nothing is left to be fed.
        sent: Everything the scheduler sent out.
    """

    def __init__(self, *, rank: int = 0, **options: Any) -> None:
        from sglang.srt.server_args import ServerArgs

        threads = torch.get_num_threads()
        own_port = {"nccl_port": _free_port()}
        self.scheduler = _scheduler(ServerArgs(**OPTIONS | own_port | options), rank)
        torch.set_num_threads(threads)
        self.iteration = 0
        self.sent: list[Any] = []
        self.at_top: Callable[[int], None] = lambda iteration: None
        self.feed: Callable[[int], Sequence[Any]] = lambda iteration: ()
        self.finished: Callable[[], bool] = lambda: True
        channels = self.scheduler.ipc_channels
        for channel in (channels.send_to_tokenizer, channels.send_to_detokenizer):
            # A socket that nobody reads would block.
            channel.send_output = lambda output, *args, **kwargs: self.sent.append(output)
        self.scheduler.request_receiver = _Receiver(self.scheduler.request_receiver, self._receive)

    def run(self) -> None:
        """Run the event loop until everything is fed and nothing is left to do."""
        try:
            self.scheduler.run_event_loop()
        finally:
            self.scheduler.gracefully_exit = False

    def requests(self) -> list[Any]:
        """Return every request the scheduler has in its hands."""
        s = self.scheduler
        batches = [b for b in (s.running_batch, s.last_batch) if b is not None]
        found = [*s.waiting_queue, *(r for b in batches for r in b.reqs), s.chunked_req]
        return [r for r in found if r is not None]

    def idle(self) -> bool:
        """Say whether the scheduler has nothing to do."""
        s = self.scheduler
        busy = s.waiting_queue or s.last_batch or s.chunked_req or not s.running_batch.is_empty()
        return not busy and not len(getattr(s, "result_queue", ()))

    def close(self) -> None:
        """Take the scheduler down so that another one can be made in this process."""
        from sglang.srt.distributed import parallel_state
        from sglang.srt.eplb.expert_location import set_global_expert_location_metadata

        with contextlib.suppress(Exception):
            self.scheduler.metrics_reporter._shutdown_fpm()
        if hasattr(self.scheduler, "release_host_resources"):
            self.scheduler.release_host_resources()
        set_global_expert_location_metadata(None, allow_overwrite=True)
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
        del self.scheduler
        gc.collect()

    def _receive(self, *args: Any, **kwargs: Any) -> list[Any]:
        self.iteration += 1
        self.at_top(self.iteration)
        messages = list(self.feed(self.iteration))
        done = not messages and self.finished() and self.idle()
        if done or self.iteration > TOO_MANY:
            self.scheduler.gracefully_exit = True
        return messages


class _Receiver:
    # SGLang's is frozen, so it is wrapped.
    def __init__(self, inner: Any, receive: Callable[..., list[Any]]) -> None:
        self._inner, self.recv_requests = inner, receive

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _free_port() -> int:
    # SGLang draws one with the generator that it seeds alike in every child, so that two children
    # which start together draw the same.
    for port in random.SystemRandom().sample(range(22_000, 30_000), 64):
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("0.0.0.0", port))
            return port
    raise RuntimeError("no free port in 22000..29999")


def _scheduler(server_args: Any, rank: int) -> Any:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs

    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()
    ports = PortArgs.init_new(server_args)
    if "gpu_id" in inspect.signature(Scheduler.__init__).parameters:  # 0.5.17
        publish(server_args, role="scheduler")
        return Scheduler(server_args, ports, rank, rank, 0, 0, 0, 0, None)
    from sglang.srt.runtime_context import SpawnRanks

    ranks = SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=rank)
    publish(server_args, role="scheduler", ranks=ranks)
    return Scheduler(server_args, ports)


def generate(rid: str, tokens: Sequence[int], count: int, *, session: str | None = None) -> Any:
    """Return the message that asks for `count` greedy tokens behind `tokens`."""
    from sglang.srt.managers.io_struct import SessionParams, TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(temperature=0, max_new_tokens=count)
    sampling.normalize(None)
    fields = {
        "rid": rid,
        "input_text": None,
        "input_ids": array("q", tokens),
        "input_embeds": None,
        "mm_inputs": None,
        "token_type_ids": None,
        "sampling_params": sampling,
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "stream": False,
    }
    if session is not None:
        fields["session_params"] = SessionParams(id=session)
    known = inspect.signature(TokenizedGenerateReqInput).parameters
    return TokenizedGenerateReqInput(**{k: v for k, v in fields.items() if k in known})
